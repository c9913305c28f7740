"""Routes among thousands of workers: bytes, memory and seconds by the formulas of `scale.formulas`.

For each number of workers: what a worker sends and holds, and what the links take, for dense messages (f32 and 16 bits)
and for sparse ones by every route. Writes to runs/NAME: config.json, results.json, table.md, scale.png. Nothing is
measured; the formulas are those whose latency and bandwidth `python -m experiments plan` fits. Other links than those
of `FABRIC`: `formulas.costs_at`.
"""

import math
from collections.abc import Sequence
from typing import Any

from experiments.lib.cli import at_least, fraction, positive
from experiments.lib.run import Columns, Run, parser_of
from experiments.scale.formulas import Fabric, costs_at, crossover, straggling

__all__ = ["main", "replacement", "rows_of"]

FABRIC = Fabric(latency=2e-5, bandwidth=12.5e9, group=8, oversubscription=2.0, inner=1e11, deviation=0.001)
MEMORY = 80e9  # bytes of a worker
ROOM = MEMORY / 4  # of it, for an exchange
COLUMNS: Columns = {
    "entries / shards": "{entries:.0e} / {shards}",
    "exchanging": "{exchanging:,} of {workers:,}",
    "message": "{message}",
    "route": "{route}",
    "sent": lambda row: in_units(row["sent_bytes"]),
    "held": lambda row: in_units(row["held_bytes"]),
    "seconds": "{seconds:.3g}",
    "waits": "{waits:.3g}",
    "schedule": "{schedule}",
    "replaced by": "{replaced}",
}
NOTES = """\
Held: beside the gradient and the memory of error feedback. A worker has {memory:g} GB, and models that do not fit are
cut into shards: n / shards devices exchange the same one. A route that needs more than a quarter of the memory, or
takes more than twice as long as the fastest that fits, is marked with the one that replaces it.

Waits: seconds, at most, until the slowest of n is there, where the times of a step have a standard deviation of
{deviation:g} s: sigma sqrt(2 ln n), the same by every route. They are not in the seconds.

Gathering messages of ratio {ratio:g} is slower than a dense f32 sum from {turns} on. Links: {fabric}."""


def rows_of(counts: Sequence[int], numbers: Sequence[float], ratio: float) -> list[dict[str, Any]]:
    """A row for each number of entries and of workers, message and route.

    Where a model does not fit, it is cut into shards over other mesh axes, and each device exchanges its own shard with
    the n / shards devices that have the same one.
    """
    rows = []
    for entries in numbers:
        shards = shards_of(entries)
        own = entries / shards
        messages = {
            "f32": (4 * own, ("sum",)),
            "16 bit": (2 * own, ("two_shot",)),
            f"sparse {ratio:g}": (8 * ratio * own, ("gather", "ring", "concat", "two_shot", "hierarchy")),
        }
        for n in (n for n in counts if n >= 2 * shards):  # else no two devices have the same shard
            about = {"entries": entries, "workers": n, "shards": shards, "exchanging": n // shards}
            about["waits"] = straggling(n // shards, FABRIC.deviation)
            for message, (size, routes) in messages.items():
                found = costs_at(n // shards, own, size, FABRIC)
                rows += [{**about, "message": message, "route": name, **found[name]._asdict()} for name in routes]
    return [row | {"replaced": replacement(rows, row)} for row in rows]


def shards_of(entries: float) -> int:
    """The least power of two with which parameters, gradient and two moments, 16 bytes an entry, fill half a device.

    >>> shards_of(1e9), shards_of(1e11)
    (1, 64)
    """
    return 2 ** max(0, math.ceil(math.log2(16 * entries / (MEMORY / 2))))


def replacement(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """What to take in its place: where it does not fit, or is more than twice as slow as the fastest that fits."""
    same = lambda x: (x["entries"], x["workers"]) == (row["entries"], row["workers"])
    fits = [x for x in rows if same(x) and x["held_bytes"] <= ROOM and x["message"].startswith("sparse")]
    if not fits or not row["message"].startswith("sparse"):
        return "" if row["held_bytes"] <= ROOM else "does not fit"
    best = min(fits, key=lambda x: x["seconds"])
    if row["held_bytes"] > ROOM:
        return f"does not fit: {best['route']}"
    return f"slow: {best['route']}" if row["seconds"] > 2 * best["seconds"] else ""


def in_units(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if value >= s), (1e3, "kB"))
    return f"{value / scale:.3g} {unit}"


def turn(entries: float, ratio: float) -> str:
    """From how many workers on gathering is slower than a dense sum."""
    own = entries / shards_of(entries)
    n = crossover(own, 8 * ratio * own, FABRIC)
    return f"n = {n:,} (d = {own:.0e})" if n else f"no n below 10^6 (d = {own:.0e})"


def main(arguments: Sequence[str]) -> int:
    p = parser_of("scale", __doc__)
    counts = [8, 64, 512, 4096, 16384]
    p.add_argument("--workers", type=at_least(2), nargs="+", default=counts, metavar="N", help="numbers of devices")
    p.add_argument("--entries", type=positive, nargs="+", default=[1e9, 1e11], metavar="D", help="of the gradient")
    p.add_argument("--ratio", type=fraction, default=0.001, help="share of entries in a sparse message, 8 bytes each")
    run = Run(p, arguments, "scale")
    o = run.options
    rows = rows_of(o.workers, o.entries, o.ratio)
    run.keep(rows)
    fabric = ", ".join(f"{name} {value:g}" for name, value in FABRIC._asdict().items())
    turns = ", ".join(turn(entries, o.ratio) for entries in o.entries)
    notes = NOTES.format(memory=MEMORY / 1e9, deviation=FABRIC.deviation, ratio=o.ratio, turns=turns, fabric=fabric)
    run.table(f"{run.folder.name}: an exchange by formula", COLUMNS, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['entries'] / 1e9:g} G entries", {})
        x, y = panel.setdefault(f"{row['message']}: {row['route']}", ([], []))
        x.append(row["workers"])
        y.append(row["seconds"])
    run.plot("scale.png", panels, xscale="log", yscale="log", xlabel="devices", ylabel="seconds on the links")
    return 0
