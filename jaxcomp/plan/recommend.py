"""`jc.recommend`: what to take, from shapes, links and a machine; the loss is not run and nothing is compiled.

The model is that of `jc.plan`: traced collectives on links that are stated (`jaxcomp.exchange.links`), and the work of
a machine (`jaxcomp.plan.machine`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxcomp.arrays import like_of
from jaxcomp.checks import is_integer, is_within
from jaxcomp.exchange.links import Link, stated_levels
from jaxcomp.plan.advise import best_of, choose, rate, table, verdict
from jaxcomp.plan.candidates import Candidate, Limits, candidates_of, traced
from jaxcomp.plan.facts import Facts
from jaxcomp.plan.links import stated
from jaxcomp.plan.machine import Machine, platform_of
from jaxcomp.plan.predict import Advice, rows_of
from jaxcomp.transforms.arguments import check_wrt, trained_of

__all__ = ["Recommendation", "recommend"]


class Recommendation(NamedTuple):
    """Print it for the table.

    rows: an `Advice` for each candidate. chosen: the fastest that is eligible. links: as they were stated, innermost
    first. facts: what the prediction is made of. machine: whose work it is, in words.
    """

    rows: tuple[Advice, ...]
    chosen: Advice
    links: Mapping[str, Link]
    facts: Facts
    machine: str

    @property
    def table(self) -> str:
        """The candidates, the fastest first (`jaxcomp.plan.advise.table`)."""
        return table(self.rows, self.chosen, self.facts)

    @property
    def verdict(self) -> str:
        """The advice in one sentence, with the links and the machine."""
        joined = ", ".join(f"{name} {rate(each.bandwidth)}" for name, each in self.links.items())
        workers = math.prod(self.facts.sizes.values())
        return verdict(
            self.rows, self.chosen, f"{workers:,} workers, {joined}, computed for {self.machine.split(' (')[0]}"
        )

    def __str__(self) -> str:
        dense = best_of(self.rows, dense=True)
        standard = "" if dense is None else f' "work" and "pays" compare with {dense.candidate.name}.'
        return f"{self.table}\n\nTimes are computed, work for {self.machine}.{standard}\n\n{self.verdict}"


def recommend(
    params: Any,
    *,
    workers: int | None = None,
    link: Link | Mapping[str, Link] | None = None,
    candidates: Sequence[Candidate] | None = None,
    machine: Machine | Facts | str | Path | None = None,
    gradient: float = 0.0,
    max_error: float | None = None,
    max_every: int | None = None,
    wrt: Any = None,
) -> Recommendation:
    """Bytes, expected error and time of each candidate on some links, and which is fastest; it may be a dense one.

    Nothing is measured: `jc.plan` measures. Messages are traced, so bytes are exact; times are those of a model. A
    candidate that cannot carry so many entries is a row that says so.

    Args:
        params: parameters or their shapes, a tree, of one device.
        workers: n, in 2 .. 2^31 - 1; None: the product of the widths of the links.
        link: latency in seconds, in [0, 60], and bandwidth in bytes per second, >= 1, which may be infinite; or several
            levels by name, innermost first: {"ici": jc.Link(1e-6, 50e9, 8), "dcn": jc.Link(5e-5, 1.25e9)} are groups of
            8, each with 10 Gbit/s to the others. None: 100 Mbit/s with 1 ms.
        candidates: as for `plan`; hierarchies name the levels.
        machine: which encodes and decodes: a `jc.Machine`, its name or file (`Machine.of`); or what a plan has measured
            (`plan.facts`). None: the device that is there.
        gradient: seconds of loss and gradient of a step, finite and >= 0, which all candidates have in common.
        max_error: messages may lose at most this share of |x|^2, >= 0, by what theory bounds, or by what was measured
            where `machine` has it.
        max_every: as for `plan`.
        wrt: what is trained, as for `value_and_grad`; None: all of `params`.

    Raises:
        TypeError, ValueError: workers, a link, machine or number out of range, no candidates, two of the same name, no
            parameters.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> few = [jc.Candidate("f32", jc.direct(jc.identity()), dense=True)]
    >>> few += [jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))]
    >>> found = jc.recommend(jnp.zeros(100_000), workers=4, candidates=few, machine="h100")
    >>> found.chosen.candidate.name, [round(row.sent_bytes) for row in found.rows]
    ('top_k', [600000, 24000])
    >>> fast = jc.recommend(jnp.zeros(100_000), workers=4, candidates=few, link=jc.Link(1e-6, 1e10), machine="h100")
    >>> fast.chosen.candidate.name
    'f32'
    """
    limits = Limits(max_error, max_every).check("recommend")
    if workers is not None and (not is_integer(workers, 2) or workers >= 2**31):
        raise ValueError(f"recommend: workers must be an integer of at least 2 and below 2^31; got {workers!r}")
    levels = stated_levels("recommend", Link() if link is None else link, None if workers is None else int(workers))
    axis = tuple(reversed(list(levels)))
    if math.prod(each.width or 1 for each in levels.values()) < 2:
        raise ValueError(f"recommend: workers must be at least 2; the widths of {levels} make one")
    candidates = candidates_of("recommend", candidates, axis, max_every)
    on_link = lambda each: each.via == "auto" and each.link is None
    candidates = [each._replace(link=link) if on_link(each) else each for each in candidates]
    machine = _machine_of(machine)
    if not is_within(gradient, 0):
        raise ValueError(f"recommend: gradient must be finite seconds >= 0; got {gradient!r}")
    check_wrt("recommend", wrt)
    like = like_of(params if wrt is None else trained_of(params, wrt, "recommend").part(params)[0])
    if not sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like)):
        raise ValueError(f"recommend: params must hold at least one entry; got {params!r}")
    name = axis[0] if len(axis) == 1 else axis
    sizes = {each: levels[each].width or 1 for each in axis}
    device = str(machine.about.get("device", "cpu")) if isinstance(machine, Facts) else machine.name
    sent = traced(candidates, like, name, sizes, platform=platform_of(device))
    carried = [(each, x) for each in candidates if not isinstance(x := sent[each.name], str)]
    if isinstance(machine, Facts):
        work, words = dict(machine.work), str(machine.about.get("device", "a plan's machine"))
    else:
        made = {each.name: machine.work(each, x, sizes) for each, x in carried}
        work, words = {key: value for key, value in made.items() if value is not None}, machine.words
    facts = Facts({}, sizes, stated(levels), work, gradient, 0.4, 0.0)
    rows = rows_of(candidates, facts, like, name, sent, limits, refuse_idle=any(each.dense for each, _ in carried))
    return Recommendation(tuple(rows), choose(rows, name="recommend"), levels, facts, words)


def _machine_of(machine: Any) -> Machine | Facts:
    if machine is None:
        return Machine.here()
    if isinstance(machine, str | Path):
        return Machine.of(machine)
    if not isinstance(machine, Machine | Facts):
        raise TypeError(
            f"recommend: machine must be a jc.Machine, its name or file, or what a plan has measured, plan.facts; got "
            f"{machine!r}"
        )
    return machine.check("recommend") if isinstance(machine, Machine) else machine
