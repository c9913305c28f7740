"""The server: who is asked, what is let in, and what comes of a round with whoever answered."""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import optax

from jaxcomp.allocate import counts, ratios
from jaxcomp.allocate.workers import Rule
from jaxcomp.federated.messages import (
    Answer,
    Refused,
    Task,
    applied,
    content_of,
    largest,
    norm_of,
    opened,
    options_here,
    parted,
    point_checksum,
    share_within,
    well_formed,
)
from jaxcomp.federated.options import check_compress, check_outer, integer_of, number_in, rule_of
from jaxcomp.federated.roster import ArrivedAnswer, Entry, RoundResult
from jaxcomp.payloads import Dense, Sparse
from jaxcomp.wire import encode

__all__ = ["Server"]

Array = np.ndarray
MOST_SAMPLES = 2**53  # whole numbers up to here are exact in float64
PATIENCE = 1  # rounds that a late answer is waited for, where nothing else is asked for
REMEMBERED = 100_000  # digests of messages, for repetitions
HEAD_BYTES = 64  # of a message, at most, besides values and indices of four bytes each


class Server:
    """The rounds of one training run. Not thread-safe; `messages.opened`, which decodes, may run anywhere.

    Args:
        point: theta, f32[d].
        volumes: samples of each member that may take part; fixed, whatever members say.
        mean_ratio: of the entries that members of a round may send together, split by `allocate.ratios`.
        rule: of `allocate.ratios`.
        outer: optimizer whose gradient is the mean difference; None: the point moves by it.
        down: share of the entries that differ which an update carries down, in (0, 1].
        late: "use": an answer that comes after its round was closed is used in the next one, and its member is not
            asked meanwhile; "drop": it is refused, and stays with its member.
        bound: an answer is clipped to the median norm, and refused beyond `bound` times the median, at least 1;
            each task contains the bound, and a member sends a longer difference in several rounds.
        max_norm: an answer of a larger norm is refused, whatever the others say: for the first round, in which a
            single answer would be its own median.
        weights: of answers in the mean. "volumes": the volumes of the roster; "tokens": what each answer says that it
            was trained on, at most the member's volume, also where it comes late.
        patience: rounds that a late answer is waited for; one that comes later stays with its member.
        history: updates kept for members that have been away. Who has missed more gets the whole point.
        compress: as for `Member`, of the updates.

    Raises:
        ValueError: arguments out of range.

    See `Member` for an example.
    """

    def __init__(
        self,
        point: Any,
        volumes: Mapping[Hashable, int],
        mean_ratio: float,
        *,
        rule: Rule = "sqrt",
        outer: optax.GradientTransformation | None = None,
        down: float = 1.0,
        late: str = "use",
        bound: float = 10.0,
        max_norm: float = float("inf"),
        weights: str = "volumes",
        patience: int = PATIENCE,
        history: int = 16,
        compress: Callable[[Array, int], Any] = largest,
    ):
        self.point = np.array(point, np.float32)
        if self.point.ndim != 1 or not np.all(np.isfinite(self.point)):
            raise ValueError(f"federated: point must be a finite vector; got shape {self.point.shape}")
        if late not in ("use", "drop"):
            raise ValueError(f"federated: late must be 'use' or 'drop'; got {late!r}")
        if weights not in ("volumes", "tokens"):
            raise ValueError(f"federated: weights must be 'volumes' or 'tokens'; got {weights!r}")
        check_outer(outer)
        check_compress(compress)
        self.weights, self.patience = weights, integer_of("patience", patience, 1)
        self.mean_ratio, self.down = number_in("mean_ratio", mean_ratio, 0, 1), number_in("down", down, 0, 1)
        self.bound = number_in("bound", bound, 1, np.inf, low_counts=True)
        self.max_norm = number_in("max_norm", max_norm, 0, np.inf)
        self.rule, self.late, self.compress = rule_of(rule), late, compress
        self._outer, self._outer_state = outer, None if outer is None else outer.init(self.point)
        self.shown, self.version, self.number = self.point.copy(), 0, 0
        self.counts: dict[Any, Counter[str]] = {}  # what became of each member's answers, refusals by their kind
        self.waited: dict[Any, float | None] = {}  # seconds until each answered the last task; None: it has not
        self._opened = 0.0
        self._entries: dict[Any, Entry] = {}
        self._updates: deque[bytes] = deque(maxlen=integer_of("history", history, 0))
        self._digests: dict[bytes, None] = {}
        self._held: list[tuple[Any, Array]] = []
        self._open = False
        self._clear()
        for member, volume in volumes.items():
            self.admit(member, volume)

    def _clear(self) -> None:
        self._asked: list[Any] = []
        self._arrived: list[ArrivedAnswer] = []
        self._refused: list[tuple[Any, str]] = []
        self._joined, self._returned, self._left = [], [], []
        self._said: dict[Any, int] = {}  # tokens of the answers of this round
        self._up = self._down = 0

    def admit(self, member: Hashable, volume: int) -> None:
        """Puts a member on the roster. It takes part from the next round on for which it is there.

        Raises:
            ValueError: it is on it already, or the volume is not a number of samples.
        """
        if member in self._entries:
            raise ValueError(f"federated: {member!r} is on the roster; its volume stays {self._entries[member].volume}")
        if isinstance(volume, bool) or not isinstance(volume, (int, np.integer)) or not 1 <= volume < MOST_SAMPLES:
            raise ValueError(
                f"federated: volume of {member!r} must be an integer in [1, {MOST_SAMPLES}); got {volume!r}"
            )
        self._entries[member] = Entry(int(volume))
        self.counts[member] = Counter()

    # A round

    def open(self, here: Iterable[Hashable]) -> dict[Any, Task]:
        """Begins the next round with those of the roster who are there; returns the task of each that is asked.

        Members whose last answer is still awaited, or came after its round was closed and goes into this one
        (late="use"), are not asked. A round may be of nobody.
        """
        if self._open:
            raise ValueError(f"federated: round {self.number} is open; close it first")
        here = {member for member in here if member in self._entries}
        self.number, self._open = self.number + 1, True
        for member, entry in self._entries.items():
            if member in here and not entry.here:
                (self._returned if entry.seen else self._joined).append(member)
                entry.seen = True
            entry.here = member in here
            if entry.round and self.number - entry.round > self.patience:
                self.lost(member)
        busy = self.undecided() | self.missing()
        self._asked = [member for member, entry in self._entries.items() if entry.here and member not in busy]
        limits = self.entries_of(self._asked)
        self._opened = time.monotonic()
        self.waited = dict.fromkeys(self._asked)
        return {member: self._task(member, limits[member]) for member in self._asked}

    def entries_of(self, asked: Iterable[Hashable]) -> dict[Any, int]:
        """Entries that each of these members may send in a round of theirs."""
        asked = list(asked)
        if not asked:
            return {}
        shares = ratios([self._entries[member].volume for member in asked], self.mean_ratio, rule=self.rule)
        return dict(zip(asked, map(int, counts(shares, self.point.size)), strict=True))

    def _task(self, member: Any, limit: int) -> Task:
        entry = self._entries[member]
        behind = self.version - entry.version
        updates, since = list(self._updates)[len(self._updates) - behind :] if behind else [], entry.version
        whole = 4 * self.point.size + 64
        if entry.version < 0 or behind > len(self._updates) or sum(map(len, updates)) > whole:
            updates, since = [encode(Dense(self.shown))], -1
        self._down += sum(map(len, updates))
        entry.round, entry.offered, entry.limit = self.number, self.version, limit
        rounds = sorted(entry.fates)
        shares = [entry.fates[number] for number in rounds]
        entry.told = norm = min(self.max_norm, self.bound * self._limit([]))
        check, options = point_checksum(self.shown), json.dumps(options_here())
        return Task(self.number, limit, norm, since, self.version, check, updates, rounds, shares, options)

    def receive(self, member: Hashable, answer: Answer) -> str:
        """Takes an answer in. Call it with the member that the transport has made sure of.

        A message that was used before is refused, whoever sends it and in whatever code: an honest member that happens
        to make it again keeps its difference and sends it with the next one. Who leaves hands over more than others
        may send, so that takes an answer that was used, and nothing left of an earlier leave.

        Returns:
            Why it is refused, which is counted in `counts` and named in what `close` returns; "" if it is not.
        """
        data = getattr(answer, "data", None)
        self._up += len(data) if isinstance(data, bytes) else 0
        entry = self._entries.get(member)
        try:
            if entry is None:
                raise Refused("unknown", "not on the roster")
            well_formed(answer)
            number = answer.round
            if number != entry.round or not number:
                kind = "late" if number in entry.fates and number > entry.last else "replay"
                raise Refused(kind, f"round {number} of this member is decided")
            # Who answers a task has kept what it told: the point, and the fates of earlier answers.
            entry.round, entry.last, entry.version, entry.fates = 0, number, entry.offered, {number: 0.0}
            if self._open and number == self.number:
                self.waited[member] = time.monotonic() - self._opened
            self._arrived.append(self._checked(member, entry, answer))
        except Refused as why:
            self._refuse(member, why)
            return str(why)
        return ""

    def _checked(self, member: Any, entry: Entry, answer: Answer) -> ArrivedAnswer:
        _, data, share, leaves, tokens = answer
        size = self.point.size
        if leaves and not entry.used:
            raise Refused("leaves", "no answer of this member was used since it joined or last left")
        if leaves and any(who == member for who, _ in self._held):
            raise Refused("leaves", "what this member handed over when it last left is not used up yet")
        if self.weights == "tokens" and not leaves and not 1 <= tokens <= entry.volume:
            raise Refused("tokens", f"{tokens} tokens; this member may have 1 to {entry.volume} in a round")
        entries = size if leaves else entry.limit
        room = HEAD_BYTES + (4 * size if leaves else 8 * entries)  # before anything is decoded
        if len(data) > room:
            raise Refused("bytes", f"{len(data)} bytes; {entries} entries take at most {room}")
        message = opened(data, size, entries)
        digest = content_of(message)
        if digest in self._digests and np.any(message.values):
            raise Refused("replay", "a message that was used before")
        norm = share * norm_of(message.values)
        most = self.max_norm * (entry.reach(size) if leaves else 1)
        if norm > most * (1 + 1e-9):
            raise Refused("norm", f"{norm:.2e}; at most {most:.2e} is allowed")
        return ArrivedAnswer(member, answer, message, digest, norm)

    def _refuse(self, member: Any, why: Refused) -> None:
        self.counts.setdefault(member, Counter())[why.kind] += 1
        self._refused.append((member, str(why)))

    def lost(self, member: Hashable) -> None:
        """No answer will come: the member's process died. What it may still send is refused, and stays with it."""
        entry = self._entries.get(member)
        if entry is not None and entry.round:
            entry.fates[entry.round] = 0.0
            entry.round = 0
            self.counts[member]["lost"] += 1

    def behind(self, member: Hashable) -> None:
        """The member has not the point that its task starts from (`OutOfStep`): the next task brings the whole."""
        entry = self._entries.get(member)
        if entry is not None:
            self.lost(member)
            entry.version = -1
            self.counts[member]["out of step"] += 1

    def metrics(self) -> dict[str, float]:
        """The waiting of the last round in plain numbers: members that were asked and have answered, and seconds.

        waited_mean, waited_longest: until an answer came, over those that came in time. `waited` has each member's.
        """
        seconds = [each for each in self.waited.values() if each is not None]
        numbers = {"rounds": self.number, "asked": len(self.waited), "answered": len(seconds)}
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        return numbers | {"waited_mean": mean, "waited_longest": max(seconds, default=0.0)}

    def volumes(self) -> dict[Any, int]:
        """The roster: each member's volume."""
        return {member: entry.volume for member, entry in self._entries.items()}

    def __contains__(self, member: Any) -> bool:
        """Whether a member is on the roster."""
        return member in self._entries

    def missing(self) -> set[Any]:
        """Members whose answer is awaited."""
        return {member for member, entry in self._entries.items() if entry.round}

    def undecided(self) -> set[Any]:
        """Members whose answer has arrived and is not decided on yet: a task would say that it was not used."""
        return {arrived.member for arrived in self._arrived}

    # What comes of it

    def close(self) -> RoundResult:
        """Ends the round with what has arrived, and moves the point. In which order it has arrived changes nothing."""
        if not self._open:
            raise ValueError("federated: no round is open")
        self._open = False
        place = {member: number for number, member in enumerate(self._entries)}
        self._arrived.sort(key=lambda arrived: place[arrived.member])
        self._refused.sort(key=lambda refused: place.get(refused[0], len(place)))
        used, clipped = self._chosen()
        skipped = 0
        if used or self._held:
            skipped = self._move(used, self._limit(used))
        late = sum(arrived.answer.round < self.number for arrived in used)
        members = {arrived.member for arrived in used}
        missing = sum(1 for member in self._asked if self._entries[member].round == self.number)
        for member in self.missing() if self.late == "drop" else ():
            self.lost(member)  # from now on its answer is late, also before the next round opens
        for member in members if not skipped else ():
            self.counts[member]["used"] += 1
        sizes = self._up, 0 if skipped else sum(len(arrived.answer.data) for arrived in used), self._down
        held = float(np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for _, x in self._held)))
        happened = self._joined, self._returned, self._left
        result = RoundResult(
            self.number,
            len(self._asked),
            0 if skipped else len(members),
            late,
            missing,
            self._refused,
            clipped,
            *happened,
            held,
            skipped,
            *sizes,
        )
        self._clear()
        return result

    def _limit(self, used: list[ArrivedAnswer]) -> float:
        """The median norm: of those who have just answered, and of the last answers of the others."""
        norms = {member: entry.norm for member, entry in self._entries.items() if entry.norm > 0}
        norms |= {each.member: each.norm for each in used if not each.answer.leaves and each.norm > 0}
        ordered = sorted(norms.values())
        return ordered[(len(ordered) - 1) // 2] if ordered else np.inf

    def _chosen(self) -> tuple[list[ArrivedAnswer], list[tuple[Any, str]]]:
        """Answers that are used, and those of them that are clipped."""
        limit = self._limit(self._arrived)
        used, clipped = [], []
        for arrived in self._arrived:
            entry = self._entries[arrived.member]
            most = max(self.bound * limit, entry.told * (1 + 1e-9) if np.isfinite(entry.told) else 0)
            if arrived.answer.leaves:
                most *= entry.reach(self.point.size)
            why = f"{arrived.norm:.2e}; the median is {limit:.2e}"
            if arrived.norm > most:
                self._refuse(arrived.member, Refused("norm", why))
                continue
            used.append(arrived)
            if not arrived.answer.leaves and arrived.norm > self._room(arrived.member, limit, used):
                clipped.append((arrived.member, f"norm {why}"))
                self.counts[arrived.member]["clipped"] += 1
        return used, clipped

    def _move(self, used: list[ArrivedAnswer], limit: float) -> int:
        """Moves the point. Returns 1, with everything as it was, if it would not be finite."""
        parts: list[tuple[Any, Sparse]] = []
        shares, held, handed_over = [], [], list(self._held)
        for member, answer, message, _, norm in used:
            if answer.leaves:
                shares.append(1.0)
                handed_over.append((member, _vector(message, self.point.size)))
                continue
            room = self._room(member, limit, used)
            share = share_within(message.values, answer.share * (min(1.0, room / norm) if norm else 1.0), room)
            shares.append(share)
            parts.append((member, message._replace(values=parted(message.values, share)[0])))
        for member, vector in handed_over:
            norm = norm_of(vector)
            room = self._room(member, limit, used)
            share = share_within(vector, min(1.0, room / norm) if norm else 1.0, room)
            now, rest = parted(vector, share)
            parts.append((member, Sparse(now, np.arange(vector.size))))
            held.append((member, rest))
        self._said = {each.member: each.answer.tokens for each in used if not each.answer.leaves}
        point, state = self._moved(parts)
        with np.errstate(over="ignore"):
            finite = np.all(np.isfinite(point)) and np.all(np.isfinite(point - self.shown))
        if not finite:
            return 1
        self.point, self._outer_state = point, state
        self._held = [(member, vector) for member, vector in held if np.any(vector)]
        for arrived, share in zip(used, shares, strict=True):
            entry, answer = self._entries[arrived.member], arrived.answer
            entry.fates[answer.round] = share
            entry.used = not answer.leaves
            if answer.leaves:
                self._left.append(arrived.member)
            else:
                entry.norm, entry.tokens = arrived.norm, answer.tokens
            self._digests[arrived.digest] = None
        while len(self._digests) > REMEMBERED:
            del self._digests[next(iter(self._digests))]
        self._show()
        return 0

    def _room(self, member: Any, limit: float, used: list[ArrivedAnswer]) -> float:
        """Norm that a part of this member may have: its answer and what it handed over share the limit."""
        held = any(who == member for who, _ in self._held)
        return limit / 2 if held and any(arrived.member == member for arrived in used) else limit

    def _moved(self, parts: list[tuple[Any, Sparse]]) -> tuple[Array, Any]:
        """theta after the outer step with the mean, weighted by the volumes or tokens of those who are in it."""
        volumes = {member: self._weight(member) for member, _ in parts}
        total = sum(volumes.values())
        mean = np.zeros(self.point.size, np.float64)
        for member, message in parts:
            mean[message.indices] += volumes[member] / max(total, 1) * message.values.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._outer is None:
                return (self.point - mean).astype(np.float32), None
            steps, state = self._outer.update(mean.astype(np.float32), self._outer_state, self.point)  # pyright: ignore
            return np.array(optax.apply_updates(self.point, steps), np.float32), state  # pyright: ignore

    def _weight(self, member: Any) -> int:
        """Weight of a member; one that has left weighs like with its last answer."""
        entry = self._entries[member]
        return entry.volume if self.weights == "volumes" else self._said.get(member, entry.tokens)

    def _show(self) -> None:
        """One update for all: the largest entries of what members do not know yet."""
        difference = self.point - self.shown
        payload = self.compress(difference, max(1, round(self.down * difference.size)))
        data = encode(payload, code="best")
        self.shown = applied(self.shown, opened(data, difference.size, difference.size))
        self._updates.append(data)
        self.version += 1


def _vector(message: Sparse, size: int) -> Array:
    vector = np.zeros(size, np.float32)
    vector[message.indices] = message.values
    return vector
