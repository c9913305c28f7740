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
    from experiments.lib.plots import by_seed
    from experiments.lib.run import draw_panels

    workers, mbit = options["workers"], options["mbit"]
    compute = min(line["seconds"] for line in lines if line["step"] > 1)
    panels: dict[str, dict[str, Any]] = {"loss by step": {}, "loss by bytes sent": {}, "loss by time": {}}
    for label, setup in setups.items():
        mine = [line | {"sent": bytes_of(line, setup, workers)} for line in lines if line["label"] == label]
        if mine:
            (steps, *_), (sent, *_), losses = by_seed(mine, "step", "sent", "test")
            seconds = [seconds_of(setup, int(t), compute, sent[-1] / steps[-1] * setup.every, mbit) for t in steps]
            begun = sent > 0  # before the first exchange nothing is sent, and the shared point is the first one
            curves = ((steps, losses), (sent[begun] / 1e6, losses[:, begun]), (seconds, losses))
            for panel, curve in zip(panels.values(), curves, strict=True):
                panel[label] = curve
    time = {"xlabel": f"seconds, computed for links of {mbit:g} Mbit/s", "xscale": "log"}
    each = {"loss by bytes sent": {"xlabel": "MB sent by each worker", "xscale": "log"}, "loss by time": time}
    title = f"{text}, {workers} workers, {len(options['seeds'])} seed(s), band: min to max"
    draw_panels(path, panels, title, each, xlabel="step", ylabel="test loss of the shared point (nats a byte)")
