"""The protocol of a transport, and the gather of `jc.local_process` over any of them."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from jaxcomp.checks import is_number
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

__all__ = ["Gathering", "Missing", "Transport", "check_name", "check_positive"]

GATHER, GOODBYE = "gather", "goodbye"


class Missing(TimeoutError):
    """A message did not come within its time limit. names: of those whose message is missing."""

    def __init__(self, why: str, names: Sequence[str]):
        super().__init__(why)
        self.names = tuple(names)


class Transport(Protocol):
    """Messages between processes that have names. Whoever writes one of his own provides these four.

    A message arrives once or not at all, whole or not at all. Those of one sender with one tag arrive in the order in
    which they were sent. Where a receiver does not take them, a transport may drop all but the last two of one sender
    with one tag, so that what lies on the way is bounded.

    name: of this process, a string without "/".
    """

    name: str

    def send(self, to: Sequence[str], tag: str, data: bytes) -> None:
        """Sends a message to each of these processes; they need not be there yet.

        Args:
            to: names of the receivers.
            tag: a word that the receivers ask for, without "/".
            data: of any length.

        Raises:
            ConnectionError: the transport is gone.
        """
        ...

    def receive(self, tag: str, seconds: float) -> list[tuple[str, bytes]]:
        """The messages for this process with this tag that have arrived: names of senders, and bytes.

        Args:
            tag: as in `send`.
            seconds: to wait for the first one, if there is none; 0: not at all.

        Returns:
            A list, empty if none came.

        Raises:
            ConnectionError: the transport is gone.
            WireError: a message arrived damaged. It is gone then.
        """
        ...

    def close(self) -> None:
        """Frees what this process holds; what it sent and nobody has read may be lost."""
        ...


class Gathering:
    """A `gather` for `jc.local_process` over a transport: bytes of this worker -> those of all, in their order.

    A worker sends message t only after it has those numbered t - 1 of all, so that everybody has read t - 2: a
    transport never holds more than two messages of a worker.

    Args:
        transport: whose name is one of `names`.
        names: of the workers, in their order, equal on all.
        seconds: until a message that has not come is an error.
        tag: another one for each gathering over one transport.

    Raises:
        ValueError: the name of the transport is not among the names.

    >>> import threading
    >>> from jaxcomp import transports
    >>> room = transports.mailboxes()
    >>> a, b = (transports.Gathering(room.link(name), ["a", "b"]) for name in "ab")
    >>> other = threading.Thread(target=b, args=[b"from b"])
    >>> other.start()
    >>> a(b"from a")
    [b'from a', b'from b']
    >>> other.join()
    """

    def __init__(self, transport: Transport, names: Sequence[str], *, seconds: float = 60.0, tag: str = GATHER):
        self.names = tuple(names)
        if transport.name not in self.names:
            raise ValueError(f"transports: names must contain {transport.name!r}, this process; got {self.names}")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"transports: names must differ from each other; got {self.names}")
        self.transport, self.tag = transport, check_name("tag", tag)
        self.seconds = check_positive("seconds", seconds)
        self.index, self.size = self.names.index(transport.name), len(self.names)
        self.others = tuple(name for name in self.names if name != transport.name)
        self._count = 0
        self._early: dict[tuple[str, int], bytes] = {}  # (sender, number of the exchange) -> message

    def __call__(self, message: bytes) -> list[bytes]:
        """The messages of all workers in this exchange.

        Raises:
            Missing: some did not come in time; it names them.
            ValueError: a worker is at an earlier exchange: it was started anew, or called `gather` less often.
            WireError: a message was damaged.
        """
        number, self._count = self._count, self._count + 1
        if self.others:
            self.transport.send(self.others, self.tag, packed({"number": number}, [bytes(message)]))
        arrived = {name: self._early.pop((name, number)) for name in self.others if (name, number) in self._early}
        end = time.monotonic() + self.seconds
        while len(arrived) < len(self.others):
            left = end - time.monotonic()
            if left <= 0:
                self._raise_missing(number, arrived)
            for name, data in self.transport.receive(self.tag, left):
                if name not in self.others:
                    continue
                theirs, body = _numbered(name, data)
                if theirs < number:
                    raise ValueError(
                        f"transports: gather is at exchange {number}, and worker {name} sent one of exchange {theirs}: "
                        "it was started anew. Start all workers together, each from its checkpoint"
                    )
                if theirs == number:
                    arrived[name] = body
                else:  # of a worker that already has all of this exchange
                    self._early[name, theirs] = body
        return [bytes(message) if name == self.transport.name else arrived[name] for name in self.names]

    def _raise_missing(self, number: int, arrived: dict[str, bytes]) -> None:
        missing = [name for name in self.others if name not in arrived]
        there = f"; {', '.join(arrived)} have sent theirs" if arrived else ""
        raise Missing(
            f"transports: no message of worker {', '.join(missing)} within {self.seconds:g} s in exchange {number}"
            f"{there}. It has ended, hangs, or needs a larger `seconds`",
            missing,
        )

    def close(self, seconds: float = 10.0) -> None:
        """Waits until all have read the last messages, at most so many seconds."""
        words = f"{self.tag}-{GOODBYE}"
        with contextlib.suppress(ConnectionError, WireError):
            if self.others:
                self.transport.send(self.others, words, b"")
            left, end = set(self.others), time.monotonic() + seconds
            while left and (rest := end - time.monotonic()) > 0:
                left -= {name for name, _ in self.transport.receive(words, rest)}


def _numbered(name: str, data: bytes) -> tuple[int, bytes]:
    fields, blobs = unpacked(data)
    number = fields.get("number")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0 or len(blobs) != 1:
        raise WireError(f"exchange of the message of worker {name}", number, "a number of at least 0 with one message")
    return number, blobs[0]


def check_name(what: str, name: Any) -> str:
    """A name or tag; ValueError unless it is a string of 1 to 200 visible ASCII characters without "/"."""
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not all("!" <= c <= "~" and c != "/" for c in name):
        raise ValueError(
            f'transports: {what} must be a string of 1 to 200 visible ASCII characters without "/"; got {name!r}'
        )
    return name


def check_positive(what: str, value: Any) -> float:
    """A number above 0, in seconds; ValueError if it is none."""
    if not is_number(value) or not 0 < value < float("inf"):
        raise ValueError(f"transports: {what} must be a number above 0; got {value!r}")
    return float(value)
