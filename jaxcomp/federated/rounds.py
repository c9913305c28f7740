"""Rounds over a transport, which end when all answered, or after a quorum and a grace time.

`Rounds` drives a `Server` and `Participant` a `Member`, over anything that has `send` and `receive` as `jc.transports`
describes them. Round t, opened at time o, with A members asked and n(s) of them heard of until time s:

    it ends at the first s with   n(s) = A,   or   n(s) >= quorum and s >= q + grace,   or   s >= o + deadline

where q is the time at which the quorum was reached. Who is heard of later is late: its answer is used in the next
round with its own weight, or is refused and stays in the memory of its member, as `late` and `patience` of the server
say. So nothing is lost and nothing is counted twice, whenever a round ends.

A model may be cut into fragments, each with a `Server` and a `Rounds` of its own, under another tag: their rounds end
when they do, without lockstep. `step` waits for nobody unless it is told to, so one thread drives all of them.
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from jaxcomp.exchange.agreement import Differs, check_equal, greeting, greeting_of
from jaxcomp.federated.member import Member, OutOfStep
from jaxcomp.federated.messages import Answer, Task, options_here
from jaxcomp.federated.options import integer_of, number_in
from jaxcomp.federated.packets import answer_of, packed_answer, packed_task, task_of
from jaxcomp.federated.roster import RoundResult
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

__all__ = ["Participant", "Rounds"]

Array = np.ndarray
SERVER = "server"  # the name of the server among the processes of a transport


class Rounds:
    """The rounds of a `Server`, over a transport.

    Args:
        server: a `Server`, or a `Journal` around one.
        transport: of the process of the server.
        members: name of a process -> its member on the roster; None: members are named by the names of their processes.
        quorum: answers after which the grace time begins: a whole number of them, or as a share of those asked a
            float in (0, 1]. 1.0: all.
        grace: seconds that others still have then, at least 0.
        deadline: seconds after which a round ends in any case; no member has to
            answer then.
            Members whose answer a round did not wait for are asked again once they are heard of.
        least: members without whom a round does not begin, as long as the deadline.
        tag: a word for the messages, another one for each `Rounds` over one transport.
        clock: seconds from any beginning, as `time.monotonic`.

    Raises:
        ValueError: an argument out of range.

    >>> from jaxcomp import federated, transports
    >>> room = transports.mailboxes()
    >>> server = federated.Server(np.zeros(2), {"a": 1, "b": 1}, 1.0)
    >>> rounds = federated.Rounds(server, room.link("server"), quorum=1, grace=0.0, least=2)
    >>> a, b = (federated.Participant(federated.Member(), room.link(name)) for name in "ab")
    >>> a.hello(), b.hello(), rounds.step()
    (None, None, None)
    >>> task, point = a.task()
    >>> a.answer(task, point + 1)
    >>> result = rounds.step()
    >>> result.used, result.missing, server.point
    (1, 1, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        server: Any,
        transport: Any,
        members: Mapping[str, Hashable] | None = None,
        *,
        quorum: int | float = 1.0,
        grace: float = 0.0,
        deadline: float = 600.0,
        least: int = 1,
        tag: str = "round",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.server, self.transport, self.tag, self.clock = server, transport, tag, clock
        self._members = None if members is None else dict(members)
        self._names = {} if members is None else {member: name for name, member in members.items()}
        if isinstance(quorum, bool) or not (
            (isinstance(quorum, int) and quorum >= 1) or (isinstance(quorum, float) and 0 < quorum <= 1)
        ):
            raise ValueError(
                f"federated: quorum must be an integer of at least 1, or a float in (0, 1]; got {quorum!r}"
            )
        self.quorum, self.least = quorum, integer_of("least", least, 1)
        self.grace = number_in("grace", grace, 0, np.inf, low_counts=True)
        self.deadline = number_in("deadline", deadline, 0, np.inf)
        self.turned_away: dict[str, str] = {}  # name of a process -> why it may not take part
        self._here: set[Any] = set()
        self._asked: set[Any] = set()
        self._sent: dict[Any, bytes] = {}  # tasks of this round, for members that were started anew
        self._sent_at: dict[Any, float] = {}
        self._open = False
        self._since, self._reached = clock(), None

    @property
    def here(self) -> set[Any]:
        """Members that are there, so far as is known."""
        return set(self._here)

    def step(self, seconds: float = 0.0) -> RoundResult | None:
        """Takes in what has arrived, opens a round if none is open, and ends it if it is time.

        Save the server after each round that this returns, before the next call.

        Args:
            seconds: to wait at most for a message; a round that ends meanwhile ends in time.

        Returns:
            The round that ended, or None.

        Raises:
            ConnectionError: the transport is gone.
        """
        self._take_in(min(seconds, self._left()))
        if not self._open:
            if self._may_open():
                self._begin()
            return None
        if self._left() > 0:
            return None
        self._open, self._since, self._reached = False, self.clock(), None
        self._here -= self._asked & self.server.missing()  # until they are heard of again
        return self.server.close()

    def _left(self) -> float:
        """Seconds until something happens without a message."""
        now = self.clock()
        if not self._open:
            return np.inf if not self._here else max(0.0, self._since + self.deadline - now)
        heard = len(self._asked - self.server.missing())
        if heard >= len(self._asked):
            return 0.0
        wanted = self.quorum if isinstance(self.quorum, int) else max(1, int(np.ceil(self.quorum * len(self._asked))))
        if self._reached is None and heard >= wanted:
            self._reached = now
        ends = [self._since + self.deadline] + ([] if self._reached is None else [self._reached + self.grace])
        return max(0.0, min(ends) - now)

    def _may_open(self) -> bool:
        busy = self.server.missing() | self.server.undecided()
        free, undecided = self._here - busy, self.server.undecided()
        waited = self.clock() - self._since >= self.deadline
        return len(free) >= self.least or (waited and bool(self._here)) or bool(undecided and not free)

    def _begin(self) -> None:
        tasks = self.server.open(self._here)
        self._open, self._since, self._asked = True, self.clock(), set(tasks)
        self._sent = {member: packed_task(task) for member, task in tasks.items()}
        for member in tasks:
            self._send(member)

    def _send(self, member: Any) -> None:
        self._sent_at[member] = self.clock()
        self.transport.send([self._names.get(member, member)], f"{self.tag}-task", self._sent[member])

    def _take_in(self, seconds: float) -> None:
        try:
            arrived = self.transport.receive(f"{self.tag}-answer", max(0.0, min(seconds, 3600.0)))
        except WireError:  # damaged on the way: whose it was is not known, and it was not sent
            return
        for name, data in arrived:
            member = name if self._members is None else self._members.get(name)
            if member is None or member not in self.server:  # a stranger; one that is admitted says hello again
                continue
            self._names.setdefault(member, name)
            try:
                fields, blobs = unpacked(data)
                kind = fields.get("kind")
                if kind == "hello":
                    self._greeted(member, name, fields, blobs)
                elif kind == "behind":
                    self.server.behind(member)
                    self._here.add(member)
                else:
                    answer = answer_of(fields, blobs)
                    self.server.receive(member, answer)
                    (self._here.discard if answer.leaves is True else self._here.add)(member)
            except WireError:
                self.server.receive(member, None)  # counted as garbage

    def _greeted(self, member: Any, name: str, fields: Mapping[str, Any], blobs: list[bytes]) -> None:
        """A member says that it is there and has nothing to do: it was started, or its task or answer was lost."""
        idle = fields.get("idle")
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 <= idle < np.inf or len(blobs) != 1:
            raise WireError("hello", fields, "the seconds that a member was idle, and its options")
        try:
            ours, theirs = options_here(), greeting_of("federated", 0, blobs[0])
            theirs = {key: theirs[key] for key in ours if key in theirs}  # of others there may be any number
            check_equal("federated", [ours, theirs], ["the server", f"member {name}"])
        except Differs as why:
            self.turned_away[name] = str(why)
            self.transport.send([name], f"{self.tag}-task", packed({"kind": "turned away", "why": str(why)}))
            return
        self.turned_away.pop(name, None)
        self._here.add(member)
        waits = member in self.server.missing()
        if not waits or (idle and self.clock() - self._sent_at.get(member, -np.inf) < 2 * idle):
            return  # nothing is due, or its task may still be on the way
        if self._open and member in self._asked:
            self._send(member)  # it answers with the same bytes, if it did already
        else:
            self.server.lost(member)


class Participant:
    """A `Member`, over a transport.

    Args:
        member: whose memory is on disk.
        transport: of this process.
        server: the name of the server's process.
        tag: as of the server's `Rounds`.
        idle: seconds without a task after which the member says again that it is there.

    See `Rounds` for an example.
    """

    def __init__(self, member: Member, transport: Any, *, server: str = SERVER, tag: str = "round", idle: float = 5.0):
        self.member, self.transport, self.server, self.tag = member, transport, server, tag
        self.idle = number_in("idle", idle, 0, np.inf)

    def hello(self, idle: float = 0.0) -> None:
        """Says that this member is there. idle: seconds since it last had something to do; 0: it was just started."""
        fields = {"kind": "hello", "idle": float(idle)}
        self.transport.send([self.server], f"{self.tag}-answer", packed(fields, [greeting(options_here())]))

    def task(self, seconds: float = 0.0) -> tuple[Task, Array] | None:
        """The newest task and the shared point f32[d] to train from; None if none came in so many seconds.

        Raises:
            ValueError: the server turns this member away, since versions differ; the message names them.
            ConnectionError: the transport is gone.
        """
        newest = None
        try:
            arrived = self.transport.receive(f"{self.tag}-task", seconds)
        except WireError:
            return None
        for name, data in arrived:
            if name != self.server:
                continue
            try:
                fields, blobs = unpacked(data)
                if fields.get("kind") == "turned away":
                    raise ValueError(str(fields.get("why")))
                task = task_of(fields, blobs)
            except WireError:
                continue
            newest = task if newest is None or task.round >= newest.round else newest
        if newest is None:
            return None
        try:
            return newest, self.member.take(newest)
        except OutOfStep:
            self.transport.send([self.server], f"{self.tag}-answer", packed({"kind": "behind"}))
            return None

    def answer(self, task: Task, after: Array, tokens: int = 0) -> None:
        """Sends the answer of a member that its own steps led to `after`; it is on disk before."""
        self._sent(self.member.answer(task, after, tokens))

    def leave(self, task: Task) -> bool:
        """Sends all that the member remembers, in place of an answer.

        Returns:
            Whether it leaves; False where this task was answered before: leave with the next one.
        """
        answer = self.member.leave(task)
        self._sent(answer)
        return answer.leaves

    def _sent(self, answer: Answer) -> None:
        self.transport.send([self.server], f"{self.tag}-answer", packed_answer(answer))

    def serve(
        self,
        train: Callable[[Array, Task], tuple[Array, int]],
        until: Callable[[], bool] = lambda: False,
        *,
        patience: float = 600.0,
    ) -> None:
        """Answers tasks until it is told to end: says hello, waits for a task, trains, answers.

        Args:
            train: shared point f32[d], task -> point after the member's own steps, and tokens that these took.
            until: whether to end; asked between tasks.
            patience: seconds without the server after which it gives up; a server that is started again in between
                finds its members.

        Raises:
            ValueError: the server turns this member away.
            ConnectionError: the transport has been gone for longer than `patience`.
        """
        greets, heard = 0.0, time.monotonic()
        while not until():
            try:
                if greets is not None:
                    self.hello(greets)
                given = self.task(self.idle)
            except ConnectionError:
                if time.monotonic() - heard > patience:
                    raise
                greets = 0.0
                time.sleep(min(1.0, self.idle))
                continue
            greets, heard = self.idle if given is None else None, time.monotonic()
            if given is not None:
                task, point = given
                after, tokens = train(point, task)
                with contextlib.suppress(ConnectionError):  # the server asks again once it is there
                    self.answer(task, after, tokens)
