"""Attacks the library for some minutes, and says what was tried and what fell.

messages: valid messages of all payloads in all codes, changed at random, under correct checksums: `jc.wire.decode` must
refuse them with `WireError` or return a payload that encodes, in the time and memory that `jaxcomp.wire.limits` allows.
combinations: random compressors, algorithms, routes and placements: every route gives what gathering gives, bit for bit
where nothing is added on the way. statistics: bias, omega and alpha of random compressors at awkward vectors.

Each case has a seed of its own: what fell is named so that it can be tried again alone.
"""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.lib.cli import at_least, one_thread, positive
from experiments.lib.report import new_console, progress_bar, show
from experiments.lib.run import parser_of

__all__ = ["HELD", "REFUSED", "Attack", "main"]

PARTS = {"messages": 0.3, "combinations": 0.45, "statistics": 0.25}  # shares of the time; each is a module with `ready`
HELD, REFUSED = "held", "refused"


class Attack(NamedTuple):
    """attempt(number of a case) -> HELD, REFUSED (by an error that names what is wrong), or what fell in words;
    worst() -> what came nearest to it."""

    attempt: Callable[[int], str]
    worst: Callable[[], str]


COLUMNS = {
    "attack": "{name}",
    "tried": "{tried:,}",
    "held": "{held:,}",
    "refused": "{refused:,}",
    "fell": lambda row: f"{len(row['fell']):,}",
    "worst": "{worst}",
}


def main(arguments: Sequence[str]) -> int:
    one_thread()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    p = parser_of("attack", __doc__)
    p.add_argument("--minutes", type=positive, default=10.0, help="time for all attacks together")
    p.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="ATTACK", help=", ".join(PARTS))
    p.add_argument("--messages", type=at_least(1), default=None, help="so many messages, however long they take")
    p.add_argument("--seed", type=at_least(0), default=0, help="of all draws")
    p.add_argument("--first", type=at_least(0), default=0, help="number of the first case of each attack")
    p.add_argument("--cases", type=at_least(1), default=None, help="cases of each attack, if time allows")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    o = p.parse_args(arguments)

    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    console = new_console()
    console.print(f"up to {o.minutes:g} minutes, seed {o.seed}", highlight=False)
    rows = []
    with progress_bar(console, "") as bar:
        for name in o.only:
            seconds: float | None = 60 * o.minutes * PARTS[name] / sum(PARTS[each] for each in o.only)
            number = o.cases
            if name == "messages" and o.messages:
                seconds, number = None, o.messages
            task = bar.add_task(name, total=1.0, now="getting ready")
            show_share = lambda share, now, task=task: bar.update(task, completed=share, now=now)
            rows.append({"name": name, **pursued(name, o.seed, o.first, seconds, number, show_share)})
    fell = [f"{row['name']}: {line}" for row in rows for line in row["fell"]]
    notes = "refused: by an error that names what is wrong. " + (f"Fell: {len(fell)}." if fell else "Fell: nothing.")
    title = f"{o.minutes:g} minutes, seed {o.seed}"
    show(console, title, COLUMNS, rows, notes, o.markdown)
    for line in fell:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return int(bool(fell))


def pursued(
    name: str, seed: int, first: int, seconds: float | None, cases: int | None, show: Callable[[float, str], None]
) -> dict:
    """One case after another until the time is over, or so many were tried. show: takes the share that is done."""
    start, number, counts, fell = time.monotonic(), first, {HELD: 0, REFUSED: 0}, []
    attack: Attack = importlib.import_module(f"{__name__}.{name}").ready(seed)
    done = 0.0
    while done < 1:
        verdict = attack.attempt(number)
        if verdict in counts:
            counts[verdict] += 1
        else:
            fell.append(f"case {number} {verdict}")
        number += 1
        of_cases = (number - first) / cases if cases else 0.0
        of_time = (time.monotonic() - start) / seconds if seconds else 0.0
        done = min(max(of_cases, of_time), 1.0)
        show(done, f"{number - first:,} tried, {len(fell)} fell")
    return {"tried": number - first, **counts, "fell": fell, "worst": attack.worst()}
