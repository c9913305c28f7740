"""Parts of the experiment: cases, each with a row, and the time that each part has."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.lib.errors import shortened
from experiments.lib.run import Run

__all__ = ["PARTS", "Done", "Outcome", "Part", "measured", "rows_in"]

# Part -> share of the minutes by whose end its last case begins, at the latest. Where all parts are done earlier, the
# cases that were left out follow, in the same order.
PARTS = {"parity": 0.3, "laws": 0.5, "times": 0.68, "steps": 0.9, "exchanges": 0.95, "op-by-op": 0.0}
LATE = "no time was left, which --minutes and --only give them"


class Part(NamedTuple):
    """Cases by their names, a row for each, and what stands above and below their table."""

    cases: Sequence[str]
    measure: Callable[[str], dict[str, Any]]
    title: str
    notes: str


class Outcome:
    """Of a part: rows by their cases, why others failed, and why the rest was not tried."""

    def __init__(self, part: Part):
        self.part, self.untried = part, LATE
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.found[case] for case in self.part.cases if case in self.found]

    @property
    def left(self) -> list[str]:
        """Cases that were not tried."""
        return [case for case in self.part.cases if case not in self.found and case not in self.failed]

    @property
    def notes(self) -> str:
        """What stands below the table: that of the part, and which cases have no row, and why."""
        why = {reason: [case for case in self.failed if self.failed[case] == reason] for reason in self.failed.values()}
        why |= {self.untried: self.left} if self.left else {}
        return self.part.notes + "".join(f"\n\nLeft out: {', '.join(cases)}; {each}." for each, cases in why.items())

    def measure(self, case: str, end: float) -> None:
        """Unless it is later than `end`."""
        if time.monotonic() > end:
            return
        try:
            self.found[case] = self.part.measure(case)
        except Exception as error:  # a device that has no memory left, or cannot compile one of many
            self.failed[case] = shortened(error)


Done = dict[str, Outcome]


def rows_in(done: Done, part: str) -> list[dict[str, Any]]:
    return done[part].rows if part in done else []


def measured(run: Run, parts: dict[str, Part]) -> Done:
    """What came out of each part, kept after each; Ctrl-C ends the last one and keeps the rows so far.

    Raises:
        KeyboardInterrupt: there are none so far.
    """
    begun, seconds = time.monotonic(), 60 * run.options.minutes
    done = {name: Outcome(part) for name, part in parts.items()}

    def pursue(name: str, end: float) -> None:
        outcome = done[name]
        if time.monotonic() < end and outcome.left:
            label = lambda case: f"{name}: {case}" + ", for which no time is left" * (time.monotonic() > end)
            run.rows_of(outcome.left, label, lambda case: outcome.measure(case, end))
            run.keep({name: each.rows for name, each in done.items() if each.found})

    try:
        for share_of in (PARTS.__getitem__, lambda _: 1.0):
            for name in parts:
                pursue(name, begun + seconds * share_of(name))
    except KeyboardInterrupt:
        run.interrupted = True
        if not any(outcome.found for outcome in done.values()):
            raise
        for outcome in done.values():
            outcome.untried = "the run was interrupted"
    return {name: each for name, each in done.items() if each.found or each.failed or not run.interrupted}
