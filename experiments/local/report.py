"""Table and plot of `python -m experiments local`."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.report import spread
from experiments.local.methods import Setup
from experiments.local.training import seconds_of

__all__ = ["HEAD", "NOTES", "bytes_of", "plot", "rows"]

HEAD = ["method", "train loss", "test loss", "vs f32 same H", "lanes/round", "message", "sent/step", "vs ddp:f32", "s"]
NOTES = """\
test loss: of the shared point; in nats a byte. vs f32 same H: test loss over that of uncompressed differences with the
same H. lanes/round: bytes a worker sends in the compiled exchanges of a round. message: bytes of the messages of a
worker in a round, all fragments, as jc.wire encodes them in its best code (- where they are added on the way).
sent/step: bytes a worker sends for each step, with those messages to all others where there are any, else by the lanes.

s: computed, not measured: steps without an exchange as fast as those of the fastest curve here, and links of
{mbit:g} Mbit/s for what a delay does not hide."""


def bytes_of(line: dict[str, Any], setup: Setup, workers: int) -> float:
    """Bytes a worker sent up to a line of the journal: messages to all others, or by the lanes of a sum."""
    if line["message_bytes"] is None or line["route"] == "sum":
        return line["sent_bytes"]
    return rounds_until(line["step"], setup) * line["message_bytes"] * (workers - 1)


def rounds_until(step: int, setup: Setup) -> float:
    """Rounds up to a step; of a round in fragments the share of them that was merged."""
    from jaxcomp.transforms.fragments import Timetable

    times = Timetable(setup.every, setup.fragments, setup.delay)
    merged = sum(bool(times.merges(p, t)) for t in range(1, step + 1) for p in range(setup.fragments))
    return merged / setup.fragments


def of_row(row: dict[str, Any]) -> Setup:
    return Setup(*(row[name] for name in Setup._fields))


def rows(results: list[dict[str, Any]], options: dict[str, Any]) -> list[list[str]]:
    """A row for each curve, means over the seeds."""
    workers = options["workers"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault(row["label"], []).append(row)
    mean = lambda group, key: float(np.mean([row[key] for row in group]))
    dense = {row["every"]: mean(groups[row["label"]], "test") for row in results if row["label"].startswith("f32 ")}
    sent = {
        label: float(np.mean([bytes_of(r, of_row(r), workers) / r["step"] for r in g])) for label, g in groups.items()
    }
    compute, table = min(row["seconds"] for row in results), []
    for label, group in groups.items():
        setup, test = of_row(group[0]), [row["test"] for row in group]
        base = None if setup.plain else dense.get(setup.every)
        messages = group[0]["message_bytes"] is not None and group[0]["route"] != "sum"
        merged = max(rounds_until(group[0]["step"], setup), 1e-9)
        seconds = seconds_of(setup, group[0]["step"], compute, sent[label] * setup.every, options["mbit"])
        table.append(
            [
                label,
                f"{mean(group, 'loss'):.4f}",
                spread(test),
                f"{100 * (np.mean(test) / base - 1):+.2f} %" if base else "-",
                f"{mean(group, 'sent_bytes') / merged:,.0f}",
                f"{mean(group, 'message_bytes'):,.0f}" if messages else "-",
                f"{sent[label]:,.0f}",
                f"{sent['ddp:f32'] / sent[label]:,.0f} x" if sent.get("ddp:f32") and sent[label] else "-",
                f"{seconds:,.1f}",
            ]
        )
    return table


def plot(path: Path, lines: list[dict[str, Any]], setups: dict[str, Setup], options: dict[str, Any], text: str) -> None:
    """Test loss of the shared point by steps, by bytes and by computed time."""
    from experiments.lib.plots import LINES, new_figure, save

    figure, axes = new_figure(3, height=4.6)
    workers, mbit = options["workers"], options["mbit"]
    labels = [label for label in setups if any(line["label"] == label for line in lines)]
    compute = min(line["seconds"] for line in lines if line["step"] > 1)
    for look, label in zip(LINES, labels, strict=False):
        setup = setups[label]
        runs = [[line for line in lines if (line["label"], line["seed"]) == (label, seed)] for seed in options["seeds"]]
        runs = [run for run in runs if run]
        length = min(map(len, runs))
        losses = np.array([[line["test"] for line in run[:length]] for run in runs])
        steps = np.array([line["step"] for line in runs[0][:length]])
        sent = np.array([bytes_of(line, setup, workers) for line in runs[0][:length]])
        round_bytes = sent[-1] / steps[-1] * setup.every
        seconds = [seconds_of(setup, int(step), compute, round_bytes, mbit) for step in steps]
        # Before the first exchange nothing is sent, and the shared point is the first one.
        shown = [slice(None), sent > 0, slice(None)]
        for axis, x, where in zip(axes, (steps, sent / 1e6, np.array(seconds)), shown, strict=True):
            marks = max(1, length // 6)
            axis.plot(x[where], losses.mean(0)[where], label=label, markevery=marks, markersize=5, **look)
            if len(losses) > 1:
                band = losses.min(0)[where], losses.max(0)[where]
                axis.fill_between(x[where], *band, color=look["color"], alpha=0.15, linewidth=0)
    axes[0].set(xlabel="step", ylabel="test loss of the shared point (nats a byte)", title="loss by step")
    axes[1].set(xlabel="MB sent by each worker", xscale="log", title="loss by bytes sent")
    axes[2].set(xlabel=f"seconds, computed for links of {mbit:g} Mbit/s", xscale="log", title="loss by time")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{text}, {workers} workers, {len(options['seeds'])} seed(s), band: min to max", fontsize=10)
    save(figure, path)
