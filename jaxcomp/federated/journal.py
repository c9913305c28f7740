"""A log of what a server was told, from which its run can be repeated to the bit.

Everything that moves the point comes in by a few calls: who is there (`open`), what arrived (`receive`), who is given
up (`lost`, `behind`), who is new (`admit`), and when a round ends (`close`). A `Journal` writes each of them down
before it is made, and `replay` makes them again: times do not matter then, and the point has the same bits.

The file is a row of messages, each behind its length, u32 little-endian. One that was cut off in the end is left out.
"""

import contextlib
import os
import struct
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxcomp.federated.messages import Answer, Task
from jaxcomp.federated.packets import answer_of, packed_answer
from jaxcomp.federated.roster import RoundResult
from jaxcomp.federated.server import Server
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

__all__ = ["Journal", "replay"]

LENGTH = struct.Struct("<I")


class Journal:
    """A `Server` whose calls are written down. It is used in the server's place.

    A file that is there is gone on with, after `federated.load`: what it holds of a round that the server has not
    closed is cut off.

    Args:
        server: whose members are named by strings or integers.
        file: of the log.

    Raises:
        ValueError: the file does not hold the rounds that the server has closed.

    >>> import tempfile, numpy as np
    >>> from jaxcomp import federated
    >>> start = lambda: federated.Server(np.zeros(2), {"a": 1}, 1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     server, member = federated.Journal(start(), f"{folder}/log"), federated.Member()
    ...     task = server.open(["a"])["a"]
    ...     refused = server.receive("a", member.answer(task, member.take(task) + np.float32([1, 2])))
    ...     again, result = start(), server.close()
    ...     server.finish()
    ...     print([replayed == result for replayed in federated.replay(f"{folder}/log", again)], again.point)
    [True] [1. 2.]
    """

    def __init__(self, server: Server, file: Path | str):
        self.server, self.file = server, Path(file)
        closed = end = 0
        if self.file.is_file():
            for fields, _, after in _read(self.file):
                closed += fields["call"] == "close"
                if closed >= max(server.number, 1):
                    end = after
                    break
        if closed != server.number:
            raise ValueError(f"federated: {file} holds {closed} closed rounds; the server has closed {server.number}")
        self._out = self.file.open("r+b" if self.file.is_file() else "wb")
        self._out.truncate(end)
        self._out.seek(end)
        if end:
            self._write({"call": "resumed"})
            for member, volume in server.volumes().items():  # some may have come after the last round that is kept
                self._write({"call": "admit", "member": member, "volume": volume})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def __contains__(self, member: Any) -> bool:
        return member in self.server

    def _write(self, fields: dict[str, Any], blobs: Iterable[bytes] = ()) -> None:
        data = packed(fields, list(blobs))
        self._out.write(LENGTH.pack(len(data)) + data)
        self._out.flush()

    def admit(self, member: Hashable, volume: int) -> None:
        """Puts a member on the roster (`Server.admit`)."""
        self.server.admit(member, volume)
        self._write({"call": "admit", "member": member, "volume": int(volume)})

    def open(self, here: Iterable[Hashable]) -> dict[Any, Task]:
        """Begins a round (`Server.open`)."""
        here = list(here)
        self._write({"call": "open", "here": here})
        return self.server.open(here)

    def receive(self, member: Hashable, answer: Answer | None) -> str:
        """Takes an answer in (`Server.receive`)."""
        message = []
        with contextlib.suppress(
            TypeError, ValueError, RecursionError
        ):  # fields of other types, which no server takes: as none
            if isinstance(answer, Answer) and isinstance(answer.data, bytes):
                message = [packed_answer(answer)]
        self._write({"call": "receive", "member": member}, message)
        return self.server.receive(member, answer)  # pyright: ignore[reportArgumentType]

    def lost(self, member: Hashable) -> None:
        """Gives a member up (`Server.lost`)."""
        self._write({"call": "lost", "member": member})
        self.server.lost(member)

    def behind(self, member: Hashable) -> None:
        """Has a member sent the whole point (`Server.behind`)."""
        self._write({"call": "behind", "member": member})
        self.server.behind(member)

    def close(self) -> RoundResult:
        """Ends the round (`Server.close`); the log is on the disk before."""
        self._write({"call": "close"})
        os.fsync(self._out.fileno())
        return self.server.close()

    def finish(self) -> None:
        """Closes the file. The server can be used further, without being logged."""
        self._out.close()


def replay(file: Path | str, server: Server) -> Iterator[RoundResult]:
    """The rounds of a log, made again by a server that has not begun; it ends where the logged one was.

    Args:
        file: of a `Journal`.
        server: with the options and the roster of the one that was logged.

    Returns:
        The rounds, one after the other, as they are closed.

    Raises:
        WireError: the file is not a log, or a message of it was changed. Where a length was, the log ends.
        ValueError: the server has begun.

    See `Journal` for an example.
    """
    if server.number:
        raise ValueError(f"federated: replay with a server that has not begun; this one is at round {server.number}")
    return _replayed(Path(file), server)


def _replayed(file: Path, server: Server) -> Iterator[RoundResult]:
    for fields, blobs, _ in _read(file):
        call, member = fields["call"], fields.get("member")
        if call == "open":
            server.open(fields["here"])
        elif call == "receive":
            server.receive(member, answer_of(*unpacked(blobs[0])) if blobs else None)  # pyright: ignore
        elif call == "close":
            yield server.close()
        elif call == "admit":
            if member not in server:
                server.admit(member, fields["volume"])
        elif call == "resumed":  # as `federated.load` does
            for each in server.missing():
                server.lost(each)
        else:
            (server.lost if call == "lost" else server.behind)(member)


CALLS = ("admit", "behind", "close", "lost", "open", "receive", "resumed")


def _read(file: Path) -> Iterator[tuple[dict[str, Any], list[bytes], int]]:
    """The calls of a log, and where each of them ends."""
    data, at = file.read_bytes(), 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        after = at + LENGTH.size + length
        if after > len(data):
            return  # cut off when the server was killed
        fields, blobs = unpacked(data[at + LENGTH.size : after])
        if fields.get("call") not in CALLS or (fields["call"] == "open" and not isinstance(fields.get("here"), list)):
            raise WireError("call in a log", fields.get("call"), f"one of {', '.join(CALLS)}")
        yield fields, blobs, after
        at = after
