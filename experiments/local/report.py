"""Table and curves of `python -m experiments local`."""

from typing import Any

import numpy as np

from experiments.lib.report import spread
from experiments.local.methods import Setup

__all__ = ["BY_BYTES", "BY_TIME", "NOTES", "bytes_of", "compute_of", "panels", "rows", "seconds_of"]

BY_BYTES, BY_TIME = "loss by bytes sent", "loss by time"
NOTES = """\
test loss: of the shared point; in nats a byte. vs f32 same H: over that of uncompressed differences with the same H,
optimizer and rates. message: bytes of a worker's messages in a round, all fragments and the share of its moments, in
the best code of jc.wire (- where they are added on the way). sent/step: with those messages to all others where there
are any, else by the lanes of the compiled exchanges. s: computed, not measured: steps as fast as those of the fastest
curve, and links of {mbit:g} Mbit/s for what a delay does not hide."""


def seconds_of(setup: Setup, steps: int, compute: float, sent_bytes: float, mbit: float) -> float:
    """Time of so many steps on links of so many Mbit/s, if an exchange waits for nothing else.

    A round of H steps takes H compute, and for each of its P exchanges what its delay does not hide:
    max(0, sent / bandwidth - delay compute). compute: seconds of a step without an exchange. sent_bytes: of a worker in
    a whole round, all fragments.

    >>> setup = Setup("f32 H=10", "f32", 10)
    >>> print(seconds_of(setup, 100, 0.1, 1.25e6, 10.0), seconds_of(setup._replace(delay=5), 100, 0.1, 1.25e6, 10.0))
    20.0 15.0
    """
    each = sent_bytes / setup.fragments / (mbit * 1e6 / 8)
    waits = max(0.0, each - setup.delay * compute)
    return steps * compute + steps / setup.every * setup.fragments * waits


def rounds_until(step: int, setup: Setup) -> float:
    """Rounds up to a step; of a round in fragments the share of them that was merged."""
    from jaxcomp.transforms.local_updates import Timetable

    times = Timetable(setup.every, setup.fragments, setup.delay)
    merged = sum(bool(times.merges(p, t)) for t in range(1, step + 1) for p in range(setup.fragments))
    return merged / setup.fragments


def bytes_of(line: dict[str, Any], setup: Setup, workers: int) -> float:
    """Bytes a worker sent up to a line of the journal: messages to all others, or by the lanes of a sum."""
    if line["message_bytes"] is None or line["route"] == "sum":
        return line["sent_bytes"]
    return rounds_until(line["step"], setup) * line["message_bytes"] * (workers - 1)


def compute_of(results: list[dict[str, Any]]) -> float:
    """Seconds of a step without an exchange: those of the fastest curve, whatever ran beside the others."""
    return min(row["seconds"] for row in results)


def rows(results: list[dict[str, Any]], workers: int, mbit: float) -> list[dict[str, str]]:
    """A row for each curve, means over the seeds."""
    groups: dict[Setup, list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault(Setup(*(row[name] for name in Setup._fields)), []).append(row)
    mean = lambda setup, key: float(np.mean([row[key] for row in groups[setup]]))
    same = lambda setup: (setup.every, setup.rates)
    dense = {same(setup): mean(setup, "test") for setup in groups if setup.is_dense}
    sent = {
        setup.label: float(np.mean([bytes_of(row, setup, workers) / row["step"] for row in group]))
        for setup, group in groups.items()
    }
    compute, table = compute_of(results), []
    for setup, group in groups.items():
        first, each_step = group[0], sent[setup.label]
        base = None if setup.plain else dense.get(same(setup))
        messages = first["message_bytes"] is not None and first["route"] != "sum"
        row = {"method": setup.label, "test loss": spread([each["test"] for each in group])}
        row["vs f32 same H"] = f"{100 * (mean(setup, 'test') / base - 1):+.2f} %" if base else "-"
        row["message"] = f"{mean(setup, 'message_bytes'):,.0f}" if messages else "-"
        row["sent/step"] = f"{each_step:,.0f}"
        known = sent.get("ddp:f32") and each_step
        row["vs ddp:f32"] = f"{sent['ddp:f32'] / each_step:,.0f} x" if known else "-"
        seconds = seconds_of(setup, first["step"], compute, each_step * setup.every, mbit)
        table.append(row | {"s": f"{seconds:,.1f}"})
    return table


def panels(
    lines: list[dict[str, Any]], setups: list[Setup], workers: int, mbit: float, compute: float
) -> dict[str, dict[str, Any]]:
    """Test loss of the shared point by steps, by bytes, and by computed time.

    compute: seconds of a step without an exchange.
    """
    from experiments.lib.plots import by_seed

    found: dict[str, dict[str, Any]] = {"loss by step": {}, BY_BYTES: {}, BY_TIME: {}}
    for setup in setups:
        mine = [line | {"sent": bytes_of(line, setup, workers)} for line in lines if line["label"] == setup.label]
        if mine:
            (steps, *_), (sent, *_), losses = by_seed(mine, "step", "sent", "test")
            a_round = sent[-1] / steps[-1] * setup.every
            begun = sent > 0  # before the first exchange nothing is sent, and the shared point is the first one
            found["loss by step"][setup.label] = steps, losses
            found[BY_TIME][setup.label] = [seconds_of(setup, t, compute, a_round, mbit) for t in steps], losses
            if begun.any():
                found[BY_BYTES][setup.label] = sent[begun] / 1e6, losses[:, begun]
    return found
