"""Mailboxes in the memory of one process: what the hub of gRPC keeps, and a transport among threads."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from jaxcomp.transports.base import check_name

__all__ = ["Mailboxes", "mailboxes"]

ROOM = 2  # messages of one sender with one tag that are kept for a receiver who does not take them


class Mailboxes:
    """Messages by receiver and tag, in order of arrival. Safe among threads."""

    def __init__(self):
        self._boxes: dict[tuple[str, str], deque[tuple[str, bytes]]] = {}
        self._changed = threading.Condition()
        self.closed = False

    def post(self, source: str, to: Sequence[str], tag: str, data: bytes) -> None:
        """Puts a message into the box of each receiver, in place of the last but one of this sender that lies there."""
        with self._changed:
            for name in to:
                box = self._boxes.setdefault((name, tag), deque())
                unread = [place for place, (who, _) in enumerate(box) if who == source]
                if len(unread) >= ROOM:
                    del box[unread[0]]
                box.append((source, data))
            self._changed.notify_all()

    def take(self, name: str, tag: str, seconds: float, most_bytes: float = math.inf) -> list[tuple[str, bytes]]:
        """Takes messages for this receiver with this tag, in their order: all, or at least one and as many as have
        `most_bytes` together. Waits so many seconds for the first.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while not self.closed:
                box = self._boxes.pop((name, tag), deque())
                left = end - time.monotonic()
                if box or left <= 0:
                    taken, total = [], 0
                    while box and (not taken or total + len(box[0][1]) <= most_bytes):
                        taken.append(box.popleft())
                        total += len(taken[-1][1])
                    if box:
                        self._boxes[name, tag] = box
                    return taken
                self._changed.wait(left)
        return []

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """Length of all messages that nobody has taken."""
        with self._changed:
            return sum(len(data) for box in self._boxes.values() for _, data in box)

    def link(self, name: str) -> "Local":
        """The transport of one name."""
        return Local(self, check_name("name", name))


class Local:
    """A `Transport` over mailboxes of this process."""

    def __init__(self, boxes: Mailboxes, name: str):
        self.boxes, self.name = boxes, name

    def send(self, to: Sequence[str], tag: str, data: bytes) -> None:
        self._check_open()
        self.boxes.post(self.name, to, check_name("tag", tag), bytes(data))

    def receive(self, tag: str, seconds: float) -> list[tuple[str, bytes]]:
        self._check_open()
        return self.boxes.take(self.name, tag, seconds)

    def _check_open(self) -> None:
        if self.boxes.closed:
            raise ConnectionError(f"transports: the mailboxes of {self.name} are closed")

    def close(self) -> None:
        pass


def mailboxes() -> Mailboxes:
    """Mailboxes for the threads of one process; `link(name)` is the transport of each.

    >>> room = mailboxes()
    >>> a, b = room.link("a"), room.link("b")
    >>> a.send(["b"], "greeting", b"hello")
    >>> b.receive("greeting", 0), b.receive("greeting", 0)
    ([('a', b'hello')], [])
    """
    return Mailboxes()
