"""Five set-ups that people have: what to exchange there, by `jc.recommend`, with times checked message by message.

For each: the table of the best candidates, the advice in a sentence, and the seconds on the links of the advised and of
the best dense candidate, by formula and by `experiments.scale.simulate`. Work is of machines that are not here: it is
computed. Bytes are those of traced programs; `python -m experiments pods` compiles two of these set-ups. Writes to
runs/NAME: config.json, results.json, table.md, which is docs/results/setups.md between its markers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jaxcomp as jc
from experiments.lib.run import Run, parser_of
from experiments.pods import SIZES, gpt, shard_of
from experiments.scale.simulate import simulated
from jaxcomp.plan.advise import best_of, columns_of, duration
from jaxcomp.plan.predict import Advice

__all__ = ["SETUPS", "Setup", "main"]

GBIT = 1e9 / 8
SHOWN = 6  # compressed candidates


class Setup(NamedTuple):
    """title, about: in words. size: of the GPT (`experiments.pods`). machine: of `jc.Machine`. tokens: of a
    device's step; flops: operations a second that it does, both assumed. chips: over which a worker's parameters are
    cut."""

    title: str
    about: str
    size: str
    machine: str
    links: Mapping[str, jc.Link]
    tokens: int
    flops: float
    chips: int = 1

    @property
    def gradient(self) -> float:
        """Seconds of loss and gradient: 6 operations for each parameter and token."""
        return 6e9 * float(self.size) * self.tokens / self.flops


NVLINK = jc.Link(3e-6, 3600 * GBIT, 8)
H100 = (16_384, 4e14)
SETUPS = (
    Setup("One host of 8 H100", "NVLink, 450 GB/s each way", "1.3", "h100", {"nvlink": NVLINK}, *H100),
    Setup(
        "Four hosts of 8 H100 at 100 Gbit/s",
        "one network card of 100 Gbit/s a host",
        "1.3",
        "h100",
        {"nvlink": NVLINK, "net": jc.Link(2e-5, 100 * GBIT, 4)},
        *H100,
    ),
    Setup(
        "Two clusters at 10 Gbit/s",
        "four hosts of 8 H100 each, 400 Gbit/s a host; 10 Gbit/s and 5 ms between the clusters",
        "1.3",
        "h100",
        {"nvlink": NVLINK, "net": jc.Link(2e-5, 400 * GBIT, 4), "wan": jc.Link(5e-3, 10 * GBIT, 2)},
        *H100,
    ),
    Setup(
        "Sixteen volunteers at 100 Mbit/s",
        "computers with 2 cores, 20 ms",
        "0.1",
        "cpu",
        {"internet": jc.Link(2e-2, 0.1 * GBIT, 16)},
        2048,
        1e11,
    ),
    Setup(
        "Two slices of TPU v5e, 256 chips each, joined by DCN",
        "parameters cut over the 256 chips of a slice; 25 Gbit/s a host of 4 chips, so 6.25 a chip",
        "1.3",
        "v5e",
        {"dcn": jc.Link(5e-5, 6.25 * GBIT, 2)},
        2048,
        1e14,
        256,
    ),
)


def seconds_on(row: Advice, links: Mapping[str, jc.Link]) -> float:
    """Simulated seconds of an exchange on the links, per step."""
    each = [one.times * simulated(one.kind, one.operand_bytes, one.axis.split(","), links) for one in row.collectives]
    return sum(each) / row.candidate.every


def told(setup: Setup) -> dict[str, Any]:
    """What is said of a set-up."""
    params, _ = gpt(SIZES[setup.size])
    found = jc.recommend(
        shard_of(params, setup.chips), link=setup.links, machine=setup.machine, gradient=setup.gradient
    )
    dense = best_of(found.rows, dense=True)
    assert dense is not None
    compared = [dense] if found.chosen is dense else [dense, found.chosen]
    compressed = sorted(
        (row for row in found.rows if not row.candidate.dense and not row.refused),
        key=lambda row: (row.bound, row.seconds),
    )
    plain = [row for row in found.rows if row.candidate.dense and not row.candidate.bucket_bytes]
    columns, marks = columns_of([*plain, *compressed[:SHOWN]], found.chosen, found.facts)
    checks = [(row.candidate.name, row.per_step.network, seconds_on(row, found.links)) for row in compared]
    return {
        "title": setup.title,
        "columns": columns,
        "advised": marks,
        "verdict": found.verdict,
        "checks": checks,
        "machine": found.machine,
    }


def lines_of(setup: Setup, row: Mapping[str, Any]) -> list[str]:
    """A section of the page."""
    heads = [head for head in row["columns"] if head != "known from"]
    effect = [
        f"{words} ({known})"
        for words, known in zip(row["columns"]["effect on the loss"], row["columns"]["known from"], strict=True)
    ]
    cells = {**row["columns"], "effect on the loss": effect}
    cells["candidate"] = [f"**{x}**" if mark else x for x, mark in zip(cells["candidate"], row["advised"], strict=True)]
    cells = {head: [x.replace("|", "\\|") for x in column] for head, column in cells.items()}
    body = ["| " + " | ".join(line) + " |" for line in zip(*(cells[head] for head in heads), strict=True)]
    said = "; ".join(f"{name} {duration(a)}, simulated {duration(b)}" for name, a, b in row["checks"])
    return [
        f"## {setup.title}",
        "",
        f"{setup.about[0].upper()}{setup.about[1:]}. A GPT of {setup.size} G parameters; {setup.tokens:,} tokens a "
        f"device, whose gradient is taken to need {duration(setup.gradient)}.",
        "",
        "| " + " | ".join(heads) + " |",
        "| "
        + " | ".join(
            "---" if head in ("candidate", "loses") or head.startswith(("effect", "pays")) else "---:" for head in heads
        )
        + " |",
        *body,
        "",
        f"{row['verdict'][0].upper()}{row['verdict'][1:]}.".replace("|", "\\|"),
        "",
        f"On the links, by formula and message by message: {said}. Work is computed, not measured.",
        "",
    ]


def main(arguments: Sequence[str]) -> int:
    run = Run(parser_of("setups", __doc__), arguments, "setups")
    rows = run.rows_of(SETUPS, lambda setup: setup.title, told)
    run.keep(rows)
    lines = [line for setup, row in zip(SETUPS, rows, strict=False) for line in lines_of(setup, row)]
    text = "\n".join(lines).rstrip("\n") + "\n"
    run.path("table.md").write_text(text)
    run.say(text)
    return run.status
