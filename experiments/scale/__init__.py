"""Routes among thousands of workers: bytes, memory and seconds by the formulas of `scale.formulas`.

For each number of workers: what a worker sends and holds, what the links take, and what encoding and decoding take, for
dense messages (f32 and 16 bits) and for sparse ones by every route. Writes to runs/NAME: config.json, results.json,
table.md, scale.png. Nothing is measured: the formulas are those of `jc.recommend` and of the routes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jaxcomp as jc
from experiments.lib.cli import at_least, fraction, positive
from experiments.lib.run import Columns, Run, parser_of
from experiments.scale.formulas import LINKS, costs_at, crossover, straggling
from jaxcomp.plan.advise import rate
from jaxcomp.plan.command import FORM, link_of
from jaxcomp.plan.links import Collective

__all__ = ["main", "replacement", "rows_of"]

MACHINE, DEVIATION = "h100", 0.001  # seconds: of the times of a step
COLUMNS: Columns = {
    "entries / shards": "{entries:.0e} / {shards}",
    "exchanging": "{exchanging:,} of {workers:,}",
    "message": "{message}",
    "route": "`{route}`",
    "sent": lambda row: in_units(row["sent_bytes"]),
    "held": lambda row: in_units(row["held_bytes"]),
    "s on links, computed": "{links:.3g}",
    "s of work": "{work:.3g}, {known}",
    "s in all": "{seconds:.3g}",
    "selects": "{selects}",
    "waits": "{waits:.3g}",
    "schedule": "{schedule}",
    "replaced by": "{replaced}",
}
NOTES = """\
Seconds: on the links, and of work, to encode and decode on {machine}.
Held: beside the gradient and the memory of error feedback. A worker has {memory:g} GB, and models that do not fit are
cut into shards: n / shards devices exchange the same one. A route that needs more than a quarter of the memory, or
takes more than twice as long as the fastest that fits, is marked with the one that replaces it.

Waits: seconds, at most, until the slowest of n is there, where the times of a step have a standard deviation of
{deviation:g} s: sigma sqrt(2 ln n), the same by every route. They are not in the seconds.

Gathering messages of ratio {ratio:g} is slower than a dense f32 sum from {turns} on. Links: {links}."""


def rows_of(
    counts: Sequence[int],
    numbers: Sequence[float],
    ratio: float,
    links: Mapping[str, jc.Link] = LINKS,
    machine: jc.Machine | None = None,
) -> list[dict[str, Any]]:
    """A row for each number of entries and of workers, message and route.

    Where a model does not fit, it is cut into shards over other mesh axes, and each device exchanges its own shard with
    the n / shards devices that have the same one.
    """
    rows, machine = [], jc.Machine.of(MACHINE) if machine is None else machine
    for entries in numbers:
        shards = shards_of(entries, machine.memory)
        own = entries / shards
        messages = {
            "f32": (jc.direct(jc.identity()), 4 * own, ("sum",)),
            "16 bit": (jc.direct(jc.cast("bfloat16")), 2 * own, ("two_shot",)),
            f"sparse {ratio:g}": (
                jc.error_feedback(jc.sidco(ratio)),
                8 * ratio * own,
                ("gather", "concat", "two_shot", "hierarchy"),
            ),
        }
        for n in (n for n in counts if n >= 2 * shards):  # else no two devices have the same shard
            about = {"entries": entries, "workers": n, "shards": shards, "exchanging": n // shards}
            about["waits"] = straggling(n // shards, DEVIATION)
            for message, (algorithm, size, routes) in messages.items():
                found = costs_at(n // shards, own, size, links)
                for name in routes:
                    at = found[name]._asdict()
                    sent = [Collective(kind, size, "all") for kind in at.pop("kinds")]
                    work = machine.work(jc.Candidate(message, algorithm), sent, {"all": n // shards})
                    both = {"links": at.pop("seconds"), "work": 0.0 if work is None else work.all.seconds(own)}
                    twice = message.startswith("sparse") and name in ("two_shot", "hierarchy")
                    about["known"] = "measured" if machine.source.startswith("measured") else "computed"
                    row = {**about, "message": message, "route": name, **at, **both, "seconds": sum(both.values())}
                    rows.append(row | {"selects": "twice, loss not counted" if twice else ""})
    return [row | {"replaced": replacement(rows, row, machine.memory / 4)} for row in rows]


def shards_of(entries: float, memory: float) -> int:
    """The least power of two with which parameters, gradient and two moments, 16 bytes an entry, fill half a device.

    >>> shards_of(1e9, 80e9), shards_of(1e11, 80e9)
    (1, 64)
    """
    return 2 ** max(0, math.ceil(math.log2(16 * entries / (memory / 2))))


def replacement(rows: list[dict[str, Any]], row: dict[str, Any], room: float) -> str:
    """What to take in its place: where it does not fit, or is more than twice as slow as the fastest that fits."""
    same = lambda x: (x["entries"], x["workers"]) == (row["entries"], row["workers"])
    fits = [x for x in rows if same(x) and x["held_bytes"] <= room and x["message"].startswith("sparse")]
    if not fits or not row["message"].startswith("sparse"):
        return "" if row["held_bytes"] <= room else "does not fit"
    best = min(fits, key=lambda x: x["seconds"])
    if row["held_bytes"] > room:
        return f"does not fit: {best['route']}"
    return f"slow: {best['route']}" if row["seconds"] > 2 * best["seconds"] else ""


def in_units(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if value >= s), (1e3, "kB"))
    return f"{value / scale:.3g} {unit}"


def turn(entries: float, ratio: float, links: Mapping[str, jc.Link], memory: float) -> str:
    """From how many workers on gathering is slower than a dense sum."""
    own = entries / shards_of(entries, memory)
    n = crossover(own, 8 * ratio * own, links)
    return f"n = {n:,} (d = {own:.0e})" if n else f"no n below 10^6 (d = {own:.0e})"


def main(arguments: Sequence[str]) -> int:
    p = parser_of("scale", __doc__)
    counts = [8, 64, 512, 4096, 16384]
    p.add_argument("--workers", type=at_least(2), nargs="+", default=counts, metavar="N", help="numbers of devices")
    p.add_argument("--entries", type=positive, nargs="+", default=[1e9, 1e11], metavar="D", help="of the gradient")
    p.add_argument("--ratio", type=fraction, default=0.001, help="share of entries in a sparse message, 8 bytes each")
    what = "levels of links, innermost first; the last one without a width"
    p.add_argument("--link", type=link_of, action="append", default=None, metavar="LINK", help=f"{FORM}: {what}")
    p.add_argument("--machine", default=MACHINE, help=f"{', '.join(jc.Machine.names())}, or a file")
    run = Run(p, arguments, "scale")
    o = run.options
    links, machine = dict(o.link or LINKS), jc.Machine.of(o.machine)
    rows = rows_of(o.workers, o.entries, o.ratio, links, machine)
    run.keep(rows)
    notes = NOTES.format(
        memory=machine.memory / 1e9,
        machine=machine.words,
        deviation=DEVIATION,
        ratio=o.ratio,
        turns=", ".join(turn(entries, o.ratio, links, machine.memory) for entries in o.entries),
        links=", ".join(f"{name} {rate(each.bandwidth)}, {each.latency:g} s" for name, each in links.items()),
    )
    run.table(f"{run.folder.name}: an exchange by formula", COLUMNS, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['entries'] / 1e9:g} G entries", {})
        x, y = panel.setdefault(f"{row['message']}: {row['route']}", ([], []))
        x.append(row["workers"])
        y.append(row["seconds"])
    labels = {"xlabel": "devices", "ylabel": "seconds of an exchange, computed"}
    run.plot("scale.png", panels, xscale="log", yscale="log", **labels)
    return 0
