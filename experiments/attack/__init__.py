"""Attacks the library for some minutes, and says what was tried and what fell.

messages: valid messages of all payloads in all codes, changed at random, under correct checksums: `jc.wire.decode`
refuses them with `WireError` or returns a payload that encodes, within bounds of time and memory.
combinations: random compressors, algorithms, routes and placements: every route gives what gathering gives, bit for bit
where nothing is added on the way. statistics: bias, omega and alpha of random compressors at awkward vectors.

Each case has a seed of its own: what fell is tried again alone by --only ATTACK --first NUMBER --cases 1.
Writes to runs/NAME: config.json, table.md.
"""

import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import at_least, one_thread, positive
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main", "verdict_of"]

# Each is a module: drawn(rng) -> the case in words, and a function that tries it, which raises an error where it falls;
# it may return "refused". worst() -> what came nearest to a bound, in words, where that is noted.
ATTACKS = ["messages", "combinations", "statistics"]
COLUMNS: Columns = {"attack": "{attack}"} | {name: f"{{{name}:,}}" for name in ("tried", "held", "refused", "fell")}


def main(arguments: Sequence[str]) -> int:
    one_thread()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    p = parser_of("attack", __doc__)
    p.add_argument("--minutes", type=positive, default=10.0, help="time for all attacks together")
    p.add_argument("--only", choices=ATTACKS, nargs="+", default=ATTACKS, help="of these")
    p.add_argument("--messages", type=at_least(1), default=None, help="so many messages, however long they take")
    p.add_argument("--seed", type=at_least(0), default=0, help="of all draws")
    p.add_argument("--first", type=at_least(0), default=0, help="number of the first case of each attack")
    p.add_argument("--cases", type=at_least(1), default=None, help="cases of each attack, if time allows")
    run = Run(p, arguments, "attack")
    o = run.options

    if "combinations" in o.only:
        from experiments.lib.training import find_devices

        find_devices(4, asked="attack combinations", instead="--only messages statistics")
    rows = run.rows_of(o.only, str, lambda name: pursued(name, o, run.say))
    fell = sum(row["fell"] for row in rows)
    worst = "".join(row["worst"] + "\n" for row in rows if row["worst"])
    notes = f"refused: by an error of the library that names what is wrong.\n{worst}Fell: {fell or 'nothing'}."
    run.table(f"{run.folder.name}: {o.minutes:g} minutes, seed {o.seed}", COLUMNS, rows, notes)
    return int(fell > 0) or run.status


def pursued(name: str, o: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """One case after another until the time of this attack is over, or so many were tried. say: what fell."""
    module = importlib.import_module(f"{__name__}.{name}")
    counted = name == "messages" and o.messages
    end = math.inf if counted else time.monotonic() + 60 * o.minutes / len(o.only)
    row: dict[str, Any] = {"attack": name, "tried": 0, "held": 0, "refused": 0, "fell": 0}
    for number in itertools.count(o.first):
        if row["tried"] == (counted or o.cases) or time.monotonic() > end:
            break
        case, attempt = module.drawn(np.random.default_rng([o.seed, ATTACKS.index(name), number]))
        verdict = verdict_of(attempt)
        if verdict not in row:
            say(f"{name}, case {number} ({case}): {verdict}")
            verdict = "fell"
        row[verdict] += 1
        row["tried"] += 1
    return row | {"worst": module.worst() if hasattr(module, "worst") else ""}


def verdict_of(attempt: Callable[[], Any]) -> str:
    """Held, refused by a ValueError or TypeError of the library itself, not of what it is built on, or what fell."""
    try:
        return "refused" if attempt() == "refused" else "held"
    except Exception as error:
        trace: Any = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        module = trace.tb_frame.f_globals.get("__name__", "")
        if isinstance(error, ValueError | TypeError) and module.startswith("jaxcomp") and str(error):
            return "refused"
        return f"{type(error).__name__} of {module}: {' '.join(str(error).split())[:300]}"
