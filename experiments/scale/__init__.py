"""Routes among thousands of workers: bytes, memory and seconds by the formulas of `jaxcomp.plan.scale`.

For each number of workers: what a worker sends and holds, and what the links take, for dense messages (f32 and 16 bits)
and for sparse ones by every route. Writes to runs/NAME: config.json, results.json, table.md, scale.png. Nothing is
measured; the formulas are those whose latency and bandwidth `python -m experiments plan` fits.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.lib.cli import Parser, at_least, fraction, one_or_more, positive
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main"]


def parser() -> Parser:
    p = parser_of("scale", __doc__)
    counts = [8, 64, 512, 4096, 16384]
    p.add_argument("--workers", type=at_least(2), nargs="+", default=counts, metavar="N", help="numbers of devices")
    p.add_argument("--entries", type=positive, nargs="+", default=[1e9, 1e11], metavar="D", help="of the gradient")
    p.add_argument("--ratio", type=fraction, default=0.001, help="share of entries in a sparse message, 8 bytes each")
    p.add_argument("--latency", type=positive, default=2e-5, help="seconds of a message")
    p.add_argument("--gbit", type=positive, default=100.0, help="Gbit/s of a worker's link")
    p.add_argument("--inner-gbit", type=positive, default=800.0, help="Gbit/s within a group, for hierarchies")
    p.add_argument("--group", type=at_least(1), default=8, help="workers at one switch")
    p.add_argument("--oversubscription", type=one_or_more, default=2.0, help="of a switch's way out")
    p.add_argument("--memory-gb", type=positive, default=80.0, help="of a worker; more is marked")
    return p


def fabric_of(o: Any) -> Any:
    from jaxcomp.plan.scale import Fabric

    return Fabric(o.latency, o.gbit * 1e9 / 8, o.group, o.oversubscription, o.inner_gbit * 1e9 / 8)


def rows_of(o: Any) -> list[dict[str, Any]]:
    """A row for each number of entries and of workers, message and route.

    Where a model does not fit, it is cut into shards over other mesh axes, and each device exchanges its own shard with
    the n / shards devices that have the same one.
    """
    from jaxcomp.plan.scale import costs_at

    fabric, rows = fabric_of(o), []
    for entries in o.entries:
        shards = shards_of(entries, 1e9 * o.memory_gb)
        own = entries / shards
        messages = {
            "f32": (4 * own, ("sum",)),
            "16 bit": (2 * own, ("two_shot",)),
            f"sparse {o.ratio:g}": (8 * o.ratio * own, ("gather", "ring", "concat", "two_shot", "hierarchy")),
        }
        for n in o.workers:
            if n < 2 * shards:  # no two devices have the same shard
                continue
            for message, (size, routes) in messages.items():
                found = costs_at(n // shards, own, size, fabric)
                for route in routes:
                    rows.append({"entries": entries, "workers": n, "message": message, "route": route})
                    rows[-1] |= {"shards": shards, "bytes": size, **found[route]._asdict()}
    return rows


def shards_of(entries: float, memory: float) -> int:
    """The least power of two with which parameters, gradient and two moments, 16 bytes an entry, fill half a device.

    >>> shards_of(1e9, 80e9), shards_of(1e11, 80e9)
    (1, 64)
    """
    shards = 1
    while 16 * entries / shards > memory / 2:
        shards *= 2
    return shards


def replacement(rows: list[dict[str, Any]], row: dict[str, Any], memory: float) -> str:
    """What to take in its place: where it does not fit, or is more than twice as slow as the fastest that fits."""
    same = lambda x: (x["entries"], x["workers"]) == (row["entries"], row["workers"])
    fits = [x for x in rows if same(x) and x["held_bytes"] <= memory and x["message"].startswith("sparse")]
    if not fits or not row["message"].startswith("sparse"):
        return "" if row["held_bytes"] <= memory else "does not fit"
    best = min(fits, key=lambda x: x["seconds"])
    if row["held_bytes"] > memory:
        return f"does not fit: {best['route']}"
    return f"slow: {best['route']}" if row["seconds"] > 2 * best["seconds"] else ""


def _size(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if value >= s), (1e3, "kB"))
    return f"{value / scale:.3g} {unit}"


COLUMNS: Columns = {
    "entries / shards": "{entries:.0e} / {shards}",
    "exchanging": lambda row: f"{row['workers'] // row['shards']:,} of {row['workers']:,}",
    "message": "{message}",
    "route": "{route}",
    "sent": lambda row: _size(row["sent_bytes"]),
    "held": lambda row: _size(row["held_bytes"]),
    "seconds": "{seconds:.4g}",
    "schedule": "{schedule}",
}


def main(arguments: Sequence[str]) -> int:
    from jaxcomp.plan.scale import crossover

    run = Run(parser(), arguments, "scale")
    o, rows = run.options, rows_of(run.options)
    memory = 1e9 * o.memory_gb / 4
    run.keep(rows)
    own = [(d / shards_of(d, 4 * memory)) for d in o.entries]
    turns = [(each, crossover(each, 8 * o.ratio * each, fabric_of(o))) for each in own]
    said = ", ".join(f"n = {n:,} (d = {d:.0e})" if n else f"no n below 10^6 (d = {d:.0e})" for d, n in turns)
    notes = f"""\
Held: beside the gradient and the memory of error feedback. A worker has {o.memory_gb:g} GB, and models that do not fit
are cut into shards: n / shards devices exchange the same one. A route that needs more than a quarter of the memory, or
takes more than twice as long as the fastest that fits, is marked with the one that replaces it.

Gathering messages of ratio {o.ratio:g} is slower than a dense f32 sum from {said} on. Links of {o.gbit:g} Gbit/s,
{1e6 * o.latency:g} us, groups of {o.group}, whose way out is {o.oversubscription:g} times narrower; within a group
{o.inner_gbit:g} Gbit/s."""
    columns = {**COLUMNS, "replaced by": lambda row: replacement(rows, row, memory)}
    run.table(f"{run.folder.name}: an exchange by formula", columns, rows, notes)
    draw(run, rows, memory)
    return 0


KEYS = {"seconds": "seconds on the links", "held_bytes": "bytes held"}


def draw(run: Run, rows: list[dict[str, Any]], memory: float) -> None:
    """Seconds on the links and bytes held, for each number of entries, against devices."""
    panels: dict[str, dict[str, Any]] = {}
    for entries, (key, what) in itertools.product(run.options.entries, KEYS.items()):
        mine = [row for row in rows if row["entries"] == entries]
        panel = panels.setdefault(f"{entries / 1e9:g} G entries: {what}", {})
        for name in dict.fromkeys((row["message"], row["route"]) for row in mine):
            of_name = [row for row in mine if (row["message"], row["route"]) == name]
            panel[": ".join(name)] = ([row["workers"] for row in of_name], [row[key] for row in of_name])
        if key == "held_bytes":
            workers = sorted({row["workers"] for row in mine})
            panel[f"a quarter of the memory, {memory / 1e9:g} GB"] = (workers, [memory] * len(workers))
    run.plot("scale.png", panels, xscale="log", yscale="log", xlabel="devices")
