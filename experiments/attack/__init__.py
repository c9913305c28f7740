"""Attacks the library for some minutes, and says what was tried and what fell.

messages: valid messages of all payloads in all codes, changed at random, under correct checksums: `jc.wire.decode` must
refuse them with `WireError` or return a payload that encodes, in the time and memory that `jaxcomp.wire.limits` allows.
combinations: random compressors, algorithms, routes and placements: every route gives what gathering gives, bit for bit
where nothing is added on the way. statistics: bias, omega and alpha of random compressors at awkward vectors.

Each case has a seed of its own: what fell is named so that it can be tried again alone.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import Parser, at_least, one_thread, positive
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["Outcome", "main"]

PARTS = {"messages": 0.3, "combinations": 0.45, "statistics": 0.25}  # shares of the time
HEAD = ["attack", "tried", "held", "refused", "fell", "worst"]


class Outcome(NamedTuple):
    """held, refused: numbers of cases.  fell: a line for each of those that did.  worst: what came nearest to it."""

    held: int = 0
    refused: int = 0
    fell: tuple[str, ...] = ()
    worst: str = ""

    @property
    def tried(self) -> int:
        return self.held + self.refused + len(self.fell)


def parser() -> Parser:
    p = Parser(prog="python -m experiments attack", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--minutes", type=positive, default=10.0, help="time for all attacks together")
    p.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="ATTACK", help=", ".join(PARTS))
    p.add_argument("--messages", type=at_least(1), default=None, help="so many messages, however long they take")
    p.add_argument("--seed", type=at_least(0), default=0, help="of all draws")
    p.add_argument("--first", type=at_least(0), default=0, help="number of the first case of each attack")
    p.add_argument("--cases", type=at_least(1), default=None, help="cases of each attack, if time allows")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    o = parser().parse_args(arguments)

    import jax

    from experiments.attack import combinations, messages, statistics

    jax.config.update("jax_num_cpu_devices", 4)
    console = new_console()
    console.print(f"up to {o.minutes:g} minutes, seed {o.seed}", highlight=False)
    whole = sum(PARTS[name] for name in o.only)
    found: dict[str, Outcome] = {}
    modules = {"messages": messages, "combinations": combinations, "statistics": statistics}
    with progress_bar(console, "") as bar:
        for name in o.only:
            seconds = 60 * o.minutes * PARTS[name] / whole
            number = o.messages if name == "messages" and o.messages else o.cases
            task = bar.add_task(name, total=1.0, now="getting ready")
            clock = Clock(None if name == "messages" and o.messages else seconds, number, bar, task)
            found[name] = modules[name].attack(o.seed, o.first, clock)
            bar.update(task, completed=1.0, now=f"{found[name].tried:,} tried, {len(found[name].fell)} fell")
    rows = [
        [name, *(f"{x:,}" for x in (f.tried, f.held, f.refused, len(f.fell))), f.worst] for name, f in found.items()
    ]
    fell = [f"{name}: {line}" for name, f in found.items() for line in f.fell]
    notes = "refused: by an error that names what is wrong. " + (f"Fell: {len(fell)}." if fell else "Fell: nothing.")
    show(console, f"{o.minutes:g} minutes, seed {o.seed}", HEAD, rows, notes, o.markdown)
    for line in fell:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return int(bool(fell))


class Clock:
    """When an attack is over: after its seconds, or its number of cases; shown as it goes on."""

    def __init__(self, seconds: float | None, cases: int | None, bar: Any, task: Any):
        self.seconds, self.cases, self.done = seconds, cases, 0
        self.start, self.shown = time.monotonic(), 0.0
        self.bar, self.task = bar, task

    def goes_on(self, now: str) -> bool:
        """Counts a case; whether there is time for it."""
        spent = time.monotonic() - self.start
        if time.monotonic() - self.shown > 0.2:
            self.shown = time.monotonic()
            share = max(spent / self.seconds if self.seconds else 0.0, self.done / self.cases if self.cases else 0.0)
            self.bar.update(self.task, completed=min(share, 1.0), now=now)
        over = (self.seconds is not None and spent > self.seconds) or (
            self.cases is not None and self.done >= self.cases
        )
        self.done += not over
        return not over
