"""Does it pay? Time to a loss of every method at every rate, for four kinds of models, against the best dense exchange.

One process for each worker, each on a host of its own, all with the same batches. The loss to reach is the one that
f32 `psum` has after --steps steps; of local updates the loss of the point that all workers share counts. A method is
trained to it once, without a limit: how many steps it needs does not depend on the links. Then the links get each rate
in turn, a few steps are timed, and their losses must be those of the training, bit for bit. Time to the loss: steps
times the median step. What passes the links then is counted. Written to runs/NAME: config.json, results.json (a row as
soon as it is measured), table.md, losses.md, links.md, scoreboard.png.
"""

import itertools
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, common, one_thread, positive, share
from experiments.lib.netlab import Lab, add_rates, laboratory, rate_name
from experiments.lib.pool import Pool
from experiments.lib.report import spread
from experiments.lib.run import Columns, Run, parser_of
from experiments.network import counted, pool_in
from experiments.network.methods import DENSE, KNOWN, local_of, trained_name

__all__ = ["MODELS", "break_even", "main"]

# name -> (data, learning rate of Adam, what it is)
MODELS = {
    "mlp": ("digits", 1e-3, "MLP on digits"),
    "cnn": ("digits", 1e-3, "CNN on digits"),
    "transformer": ("text", 3e-3, "transformer on characters"),
    "ngrams": ("text", 3e-3, "embedded n-grams of characters"),
    "transformer-wide": ("text", 2e-3, "wide transformer on characters"),
}
METHODS = [*DENSE, "dithering:two_shot", "mxfp4:two_shot", "power-sgd-2", "top-k", "sidco-narrow"]
METHODS += ["local-f32@20", "local-int4@20"]


def parser() -> Parser:
    p = parser_of("scoreboard", __doc__)
    p.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS)[:4], help="what is trained")
    what = f"besides psum-f32, which is always there: {KNOWN}, demo, local-CODE@H, stream-CODE@H, overlap-CODE@H"
    p.add_argument("--methods", type=scored_name, nargs="+", default=METHODS, metavar="METHOD", help=what)
    add_rates(p, "10mbit 100mbit 1gbit 10gbit none")
    common(p, "ratio", "levels", batch=16, workers={"type": at_least(2), "help": "processes, each on its own host"})
    common(p, steps={"type": at_least(20), "default": 150, "help": "of f32 psum, whose loss is the one to reach"})
    p.add_argument("--longest", type=at_least(1), default=4, help="times as many steps a method may take")
    p.add_argument("--seconds", type=positive, default=6.0, help="to time steps at a rate; at least three")
    common(p, seeds={"help": "of the start and the batches; means count"})
    p.add_argument("--outer-lr", type=positive, default=None, help="of local updates: 0.7, or 1 for sparse-loco")
    p.add_argument("--outer-momentum", type=share, default=None, help="of Nesterov: 0.9, or 0 for sparse-loco")
    p.add_argument("--text", type=Path, default=None, help="plain or .xz; the source of this package if not given")
    return p


def scored_name(text: str) -> str:
    """An option: what can be trained, or overlap-CODE@H."""
    return text if text.startswith("overlap-") and local_of(text) is not None else trained_name(text)


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "scoreboard"), []
    o = run.options
    o.rates, o.methods = list(dict.fromkeys(o.rates)), list(dict.fromkeys(["psum-f32", *o.methods]))
    one_thread()
    try:
        with laboratory(o.workers) as lab, run.console.status("") as status, pool_in(lab) as pool:
            pool.hear()
            for model in dict.fromkeys(o.models):
                targets: dict[int, float] = {}  # by seed, from the first method
                for method in o.methods:
                    row = measured(o, lab, pool, model, method, targets, status.update)
                    steps = ", ".join("missed" if s is None else str(s) for s in row["steps"])
                    each = ", ".join(f"{1e3 * s:.0f}" for s in row["step_seconds"])
                    rows.append(row)
                    run.keep(rows)
                    run.say(f"{model}, {method}: {steps} steps, {each} ms a step")
    finally:  # whatever was measured until Ctrl-C, too
        if rows:
            report(run, rows)
    return 0


def measured(
    o: Any, lab: Lab, pool: Pool, model: str, method: str, targets: dict[int, float], say: Callable[[str], None]
) -> dict[str, Any]:
    """A row: steps to the loss for each seed, seconds of a step at each rate, bytes."""
    data, rate, _ = MODELS[model]
    task: dict[str, Any] = {"what": "training", "data": data, "model": model, "batch": o.batch}
    task |= {"ratio": o.ratio, "levels": o.levels, "outer": (o.outer_lr, o.outer_momentum)}
    task |= {"rate": rate, "optimizer": "adam", "data_dir": str(o.text) if o.text and data == "text" else None}
    say(f"{model}, {method}: to the loss")
    lab.shape()
    overlapped = method.startswith("overlap-")  # the steps of stream-, with exchanges beside them
    program = pool.ask(method=method.replace("overlap-", "stream-"), **task)[0]
    row: dict[str, Any] = {"model": model, "method": method, **program, "steps": [], "losses": [], "equal": True}
    first: list[float] = []
    for seed in o.seeds:
        most = o.longest * o.steps if seed in targets else o.steps
        answer = pool.ask(what="train", steps=most, target=targets.get(seed, 0.0), seed=seed, shared=True)[0]
        row["losses"].append(float(np.mean(answer["judged"][-10:])))
        targets.setdefault(seed, row["losses"][-1])
        reached = answer["reached"] or method == "psum-f32"
        row["steps"].append(len(answer["losses"]) if reached else None)
        first = first or answer["losses"]
    row |= {"step_seconds": [], "payload_bytes": [], "said_bytes": []}
    if overlapped:
        pool.ask(method=method, **task)
    local = local_of(method)
    period = 1 if local is None else local.every
    ask = lambda steps: pool.ask(what="train", steps=steps, target=0.0, seed=o.seeds[0])
    for link in o.rates:
        say(f"{model}, {method}: {rate_name(link)}")
        lab.shape(link)
        rounds = o.seconds / (period * step_seconds(ask(2 * period), period))
        steps = period * (1 + int(np.clip(rounds, 2, 14)))
        answers, payload, _ = counted(lab, lambda steps=steps: ask(steps))
        losses = answers[0]["losses"]
        if overlapped:  # of the messages of a worker to all others, per step
            row["ledger_bytes"] = float(np.mean([answer["message_bytes"] for answer in answers]))
        else:
            number = min(len(losses), len(first))
            row["equal"] &= losses[:number] == first[:number]
        row["payload_bytes"].append(payload / len(losses))
        row["said_bytes"].append(row["ledger_bytes"])
        row["step_seconds"].append(step_seconds(answers, period))
    return row


def step_seconds(answers: list[Any], period: int) -> float:
    """Seconds of a step of the slowest worker, median over rounds of so many steps.

    The first round still finds the queues of the rate before.
    """
    ends = np.max([answer["seconds"] for answer in answers], axis=0)[period - 1 :: period]
    return float(np.median(np.diff(ends))) / period


def to_loss(row: dict[str, Any]) -> np.ndarray:
    """Seconds to the loss at each rate, mean over the seeds; NaN if a seed did not reach it."""
    return np.mean(np.array(row["steps"], float)) * np.array(row["step_seconds"])


def best_dense(rows: list[dict[str, Any]], model: str) -> np.ndarray:
    """Seconds of the fastest dense exchange to the loss, at each rate."""
    return np.nanmin([to_loss(row) for row in rows if row["model"] == model and row["method"] in DENSE], 0)


def gains_of(rows: list[dict[str, Any]], row: dict[str, Any]) -> np.ndarray:
    """How many times as fast to the loss as the fastest dense exchange, at each rate; NaN if it missed it."""
    return best_dense(rows, row["model"]) / to_loss(row)


def short(gain: float) -> str:
    """Two digits, or all of a whole number.

    >>> short(0.123), short(9.96), short(140.4)
    ('0.12', '10', '140')
    """
    return f"{gain:.2g}" if gain < 99.5 else f"{gain:.0f}"


def break_even(points: list[tuple[float | None, float, float]]) -> float | None:
    """The rate at which a method is as fast as the dense one.

    Between two rates both times are taken as a + b / rate, which a message on a link costs; so the point is exact
    where they are. None if one of them is faster at every rate measured; the highest, if there are several.

    points: (rate in bit/s or None for no limit, seconds of the method, seconds of the dense one).

    >>> round(break_even([(1e6, 1 + 1, 0.5 + 4), (None, 1.0, 0.5)]) / 1e6)
    6
    """
    line = sorted((0.0 if rate is None else 1 / rate, mine - dense) for rate, mine, dense in points)
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if (y0 > 0) != (y1 > 0):
            x = x0 - y0 * (x1 - x0) / (y1 - y0)
            return 1 / x if x > 0 else math.inf
    return None


def columns_of(rows: list[dict[str, Any]], rates: list[float | None]) -> Columns:
    def even(row: dict[str, Any]) -> str:
        points = zip(rates, to_loss(row), best_dense(rows, row["model"]), strict=True)
        found = None if None in row["steps"] or row["method"] in DENSE else break_even(list(points))
        return "-" if found is None else rate_name(float(f"{found:.2g}"))

    def gain(row: dict[str, Any], place: int) -> str:
        return "-" if None in row["steps"] else f"{short(gains_of(rows, row)[place])} x"

    return {
        "model": "{model}",
        "method": "{method}",
        "MB a step": lambda row: f"{row['ledger_bytes'] / 1e6:.3g}",
        "steps": lambda row: "missed" if None in row["steps"] else f"{np.mean(row['steps']):.0f}",
        **{rate_name(rate): lambda row, place=place: gain(row, place) for place, rate in enumerate(rates)},
        "even at": even,
    }


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    o, parameters = run.options, {row["model"]: row["parameters"] for row in rows}
    sizes = ", ".join(f"{MODELS[model][2]}: {number:,}" for model, number in parameters.items())
    dense = " and ".join(name for name in DENSE if name in o.methods)
    notes = f"""\
At each rate: how many times as fast to the loss of psum-f32 after {o.steps} steps as the fastest of {dense}; missed:
not reached in {o.longest} times as many. MB: sent by a worker in a step. even at: the rate at which it is as fast as
that. Sparse methods keep {o.ratio:g} of the entries. Parameters: {sizes}. {o.workers} processes on
{len(os.sched_getaffinity(0))} cores, Adam, {o.batch} examples of each worker, seeds {", ".join(map(str, o.seeds))}."""
    run.table(f"{run.folder.name}: time to the loss", columns_of(rows, o.rates), rows, notes)
    run.table(f"{run.folder.name}: losses", LOSSES, rows, about(run), "losses.md")
    run.table(f"{run.folder.name}: links", link_columns(o.rates), rows, LINKS, "links.md")
    unequal = [f"{row['model']}, {row['method']}" for row in rows if not row["equal"]]
    if unequal:
        run.console.print(f"losses at some rate were not those of the training: {'; '.join(unequal)}", style="bold red")
    run.picture(draw(o, rows), "scoreboard.png")


LOSSES: Columns = {
    "model": "{model}",
    "method": "{method}",
    "last loss": lambda row: spread(row["losses"]),
    "steps": lambda row: ", ".join("missed" if steps is None else str(steps) for steps in row["steps"]),
    "said B a step": "{ledger_bytes:,.0f}",
    "on the links B a step": lambda row: " - ".join(f"{f(row['payload_bytes']):,.0f}" for f in (min, max)),
}


def about(run: Run) -> str:
    """What the losses are, and what it takes to measure them again."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy", "optax", "flax", "jaxcomp"))
    options = shlex.join(sys.argv[1:])
    return f"""\
last loss: mean of the last ten steps, ± over the seeds; steps: of each seed. B: of a worker; on the links as the kernel
counted it, least and most of the rates. Python {platform.python_version()}, {versions}.
Seeds {", ".join(map(str, run.options.seeds))}. Command: python -m experiments {options}"""


LINKS = """\
ms: of a step. pace: steps per second, of those without a limit. on the links: bytes that the kernel counted there,
without headers, over those that the program or `jc.wire` says; least and most of the rates."""


def link_columns(rates: list[float | None]) -> Columns:
    def on_links(row: dict[str, Any]) -> str:
        found = [sent / said for sent, said in zip(row["payload_bytes"], row["said_bytes"], strict=True) if said]
        return f"{min(found):.3f} - {max(found):.3f}" if found else "-"

    seconds = lambda row, rate: row["step_seconds"][rates.index(rate)]
    columns: dict[str, Any] = {"model": "{model}", "method": "{method}"}
    for rate in rates:
        columns[f"ms, {rate_name(rate)}"] = lambda row, rate=rate: f"{1e3 * seconds(row, rate):.1f}"
    for rate in rates if None in rates else ():
        pace = lambda row, rate=rate: f"{100 * seconds(row, None) / seconds(row, rate):.1f} %"
        columns |= {} if rate is None else {f"pace, {rate_name(rate)}": pace}
    return columns | {"on the links": on_links}


def draw(o: Any, rows: list[dict[str, Any]]) -> Any:
    """A panel for each model: methods against rates, blue where a method is faster than dense, red where slower."""
    from experiments.lib.plots import new_figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(2, len(models))
    deep = -(-len(models) // columns)
    figure, axes = new_figure(columns, deep * (1.2 + 0.36 * len(o.methods)), deep)
    for axis in axes[len(models) :]:
        axis.set_axis_off()
    for number, (axis, model) in enumerate(zip(axes, models, strict=False)):
        mine = [row for row in rows if row["model"] == model]
        gains = np.array([gains_of(rows, row) for row in mine])
        axis.imshow(np.log10(gains), cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
        for (i, place), gain in np.ndenumerate(gains):
            said, dark = "missed" if np.isnan(gain) else short(gain), abs(np.log10(gain)) > 0.6
            axis.text(place, i, said, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        axis.set_xticks(range(len(o.rates)), [rate_name(rate) for rate in o.rates], fontsize=8, rotation=30)
        axis.set_yticks(range(len(mine)), [row["method"] if number % columns == 0 else "" for row in mine])
        axis.set_title(f"{MODELS[model][2]}, {mine[0]['parameters'] / 1e6:.2g} M", fontsize=10)
        axis.grid(visible=False)
    figure.supxlabel("rate of every link", fontsize=10)
    title = "times as fast to the same loss as the fastest dense exchange\n(blue: pays, red: loses)"
    figure.suptitle(title, fontsize=10)
    return figure
