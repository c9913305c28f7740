"""Table and plot of `python -m experiments local`."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.report import spread
from experiments.local.methods import Setup
from experiments.local.training import seconds_of

__all__ = ["NOTES", "bytes_of", "plot", "rows"]

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


def rows(results: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each curve, means over the seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault(row["label"], []).append(row)
    setups = {label: Setup(*(group[0][name] for name in Setup._fields)) for label, group in groups.items()}
    mean = lambda label, key: float(np.mean([row[key] for row in groups[label]]))
    dense = {setups[label].every: mean(label, "test") for label in groups if label.startswith("f32 ")}
    each = lambda label: [bytes_of(row, setups[label], options["workers"]) / row["step"] for row in groups[label]]
    sent = {label: float(np.mean(each(label))) for label in groups}
    compute, table = min(row["seconds"] for row in results), []
    for label, group in groups.items():
        setup, first = setups[label], group[0]
        base = None if setup.plain else dense.get(setup.every)
        messages = first["message_bytes"] is not None and first["route"] != "sum"
        merged = max(rounds_until(first["step"], setup), 1e-9)
        times = (compute, sent[label] * setup.every, options["mbit"])
        row = {"method": label, "train loss": f"{mean(label, 'loss'):.4f}"}
        row["test loss"] = spread([each["test"] for each in group])
        row["vs f32 same H"] = f"{100 * (mean(label, 'test') / base - 1):+.2f} %" if base else "-"
        row["lanes/round"] = f"{mean(label, 'sent_bytes') / merged:,.0f}"
        row["message"] = f"{mean(label, 'message_bytes'):,.0f}" if messages else "-"
        row["sent/step"] = f"{sent[label]:,.0f}"
        known = sent.get("ddp:f32") and sent[label]
        row["vs ddp:f32"] = f"{sent['ddp:f32'] / sent[label]:,.0f} x" if known else "-"
        table.append(row | {"s": f"{seconds_of(setup, first['step'], *times):,.1f}"})
    return table


def plot(path: Path, lines: list[dict[str, Any]], setups: dict[str, Setup], options: dict[str, Any], text: str) -> None:
    """Test loss of the shared point by steps, by bytes and by computed time."""
    from experiments.lib.plots import LINES, curve, new_figure, save

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
            curve(axis, x[where], losses[:, where], label, look)
    axes[0].set(xlabel="step", ylabel="test loss of the shared point (nats a byte)", title="loss by step")
    axes[1].set(xlabel="MB sent by each worker", xscale="log", title="loss by bytes sent")
    axes[2].set(xlabel=f"seconds, computed for links of {mbit:g} Mbit/s", xscale="log", title="loss by time")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{text}, {workers} workers, {len(options['seeds'])} seed(s), band: min to max", fontsize=10)
    save(figure, path)
