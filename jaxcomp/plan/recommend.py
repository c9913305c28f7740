"""`jc.recommend`: what to take, from shapes, a link and a machine; the loss is not run and nothing is compiled.

The model is that of `jc.plan`: traced collectives on a link of given latency and bandwidth, and work that is so many
nanoseconds for each entry to encode, and so many for each entry that is decoded, of every message that arrives:

    work = encode d + decode d (1 + share n)

share: of the entries that a message carries, n messages of which a worker decodes where they are gathered; 1 / n where
chunks are added up by their owners.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxcomp.arrays import like_of
from jaxcomp.compressors.checks import is_integer
from jaxcomp.exchange.links import Link, check_link
from jaxcomp.plan.advise import best_of, choose, text_table, verdict
from jaxcomp.plan.candidates import (
    Candidate,
    Limits,
    check_candidates,
    default_candidates,
    is_amount,
    traced,
)
from jaxcomp.plan.facts import Facts, Line, Work
from jaxcomp.plan.links import KINDS, Collective, Fit, seconds_of
from jaxcomp.plan.predict import Advice, rows_of

__all__ = ["CPU", "Machine", "Recommendation", "recommend"]


class Machine(NamedTuple):
    """Nanoseconds of work for each entry. encode: by a name's beginning, the first that fits; decode: per entry
    decoded; copy: of an entry that is only moved."""

    encode: tuple[tuple[str, float], ...]
    decode: float
    copy: float

    def work(self, candidate: Candidate, sent: Sequence[Collective], entries: float, workers: int) -> Work:
        """The work of a candidate that sends these collectives, for a gradient of so many entries."""
        encode = next((ns for name, ns in self.encode if candidate.name.startswith(name)), OTHER)
        gathered = max((one.operand_bytes for one in sent if one.kind == "all_gather"), default=0.0)
        arriving = 0.0 if candidate.dense else min(gathered / (4 * entries), 1.0) * workers
        return Work(Line(0.0, 1e-9 * encode), Line(0.0, 1e-9 * (encode + self.decode * arriving + self.copy)))


# Rough values for one core of a CPU, not measured: `python -m experiments bench compressors` gives those of a machine.
CPU = Machine(
    (
        ("f32", 0.0),
        ("bf16", 1.0),
        ("fp8", 6.0),
        ("dithering", 12.0),
        ("block_scaled", 4.0),
        ("eden", 20.0),
        ("sign", 4.0),
        ("narrow", 6.0),
        ("sidco", 4.0),
        ("top_k", 8.0),
        ("power_sgd", 4.0),
    ),
    decode=2.0,
    copy=1.0,
)
OTHER = 10.0  # of a candidate that the machine does not name


class Recommendation(NamedTuple):
    """Print it for the table. rows: an `Advice` for each candidate; chosen: the fastest that is eligible; link,
    workers: what was asked; latencies: of each row, seconds per step on the links besides those of its bytes."""

    rows: tuple[Advice, ...]
    chosen: Advice
    verdict: str
    link: Link
    workers: int
    latencies: tuple[float, ...]

    @property
    def table(self) -> str:
        """The candidates, the fastest first; all columns are per step.

        bytes: sent, as a share of those of the standard; ms: on the links, at work and for the gradient. pays below:
        the bandwidth below which it is faster than the standard, at this latency and on this machine. The standard is
        the fastest dense candidate of those with an exchange at every step, or of all dense ones where there are none
        such. The printed text names it. The dense candidate that is advised may be another one, which exchanges less
        often.
        """
        dense, number = best_of(self.rows, dense=True), lambda x: "-" if math.isnan(x) else f"{x:.4g}"

        def share(row: Advice) -> str:
            known = dense is not None and row.sent_bytes >= 0
            return f"1/{dense.sent_bytes / max(row.sent_bytes, 1e-9):.3g}" if known else "-"  # pyright: ignore

        columns: dict[str, Callable[[Advice], str]] = {
            "candidate": lambda row: row.candidate.name,
            "MB sent": lambda row: number(row.sent_bytes / 1e6),
            "bytes": share,
            "expected error": _error,
            "links ms": lambda row: number(1e3 * row.per_step.network),
            "work ms": lambda row: number(1e3 * (row.per_step.encode + row.per_step.decode)),
            "ms": lambda row: number(1e3 * row.seconds),
            "pays below": lambda row: self._pays_below(row, dense),
        }
        return text_table(columns, self.rows, self.chosen, ("candidate", "expected error", "pays below"))

    def _pays_below(self, row: Advice, dense: Advice | None) -> str:
        """Why it is not eligible; else at which bandwidths it is faster than the dense candidate."""
        if row.refused or dense is None or row.candidate.dense:
            return row.refused or ""
        if row.bound or dense.bound:
            return "not known: work was not measured"
        latency = {id(row): seconds for row, seconds in zip(self.rows, self.latencies, strict=True)}
        fixed = lambda row: latency[id(row)] + row.per_step.encode + row.per_step.decode
        return _pays(_less(dense.sent_bytes, row.sent_bytes), _less(fixed(row), fixed(dense)))

    def __str__(self) -> str:
        dense = best_of(self.rows, dense=True)
        if dense is None:
            return f"{self.table}\n\n{self.verdict}"
        every = " with an exchange at every step" if dense.candidate.every == 1 else ""
        standard = f'"bytes" and "pays below" compare with {dense.candidate.name}, the fastest dense candidate{every}.'
        return f"{self.table}\n\n{standard}\n\n{self.verdict}"


def recommend(
    params: Any,
    *,
    workers: int,
    link: Link | None = None,
    candidates: Sequence[Candidate] | None = None,
    machine: Machine | Facts = CPU,
    gradient: float = 0.0,
    max_error: float | None = None,
    max_every: int | None = None,
) -> Recommendation:
    """Bytes, expected error and time of each candidate on a link, and which is fastest; it may be a dense one.

    Nothing is measured: `jc.plan` measures. Messages are traced, so bytes are exact; times are those of a model. A
    candidate that cannot carry so many entries is a row that says so.

    Args:
        params: parameters or their shapes, a tree, of one device.
        workers: n, in 2 .. 2^31 - 1.
        link: latency in seconds, in [0, 60], and bandwidth in bytes per second, >= 1, which may be infinite; None:
            100 Mbit/s with 1 ms.
        candidates: as for `plan`.
        machine: nanoseconds of work for each entry; or what a plan has measured (`plan.facts`), whose work is taken.
        gradient: seconds of loss and gradient of a step, finite and >= 0, which all candidates have in common.
        max_error: messages may lose at most this share of |x|^2, >= 0, by what theory bounds, or by what was measured
            where `machine` has it.
        max_every: as for `plan`.

    Raises:
        TypeError, ValueError: workers, a link, machine or number out of range, no candidates, two of the same name, no
            parameters.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> few = [jc.Candidate("f32", jc.direct(jc.identity()), dense=True)]
    >>> few += [jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))]
    >>> found = jc.recommend(jnp.zeros(100_000), workers=4, candidates=few)
    >>> found.chosen.candidate.name, [round(row.sent_bytes) for row in found.rows]
    ('top_k', [600000, 24000])
    >>> fast = jc.recommend(jnp.zeros(100_000), workers=4, candidates=few, link=jc.Link(1e-6, 1e10))
    >>> fast.chosen.candidate.name
    'f32'
    """
    link, limits = Link() if link is None else link, Limits(max_error, max_every).check("recommend")
    candidates = check_candidates("recommend", default_candidates(max_every or 1) if candidates is None else candidates)
    if not is_integer(workers, 2) or workers >= 2**31:
        raise ValueError(f"recommend: workers must be an integer of at least 2 and below 2^31; got {workers!r}")
    check_link("recommend", link)
    _check_machine(machine)
    if not _is_finite(gradient):
        raise ValueError(f"recommend: gradient must be finite seconds >= 0; got {gradient!r}")
    like, workers = like_of(params), int(workers)
    sizes = {"data": workers}
    entries = float(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like)))
    if not entries:
        raise ValueError(f"recommend: params must hold at least one entry; got {params!r}")
    sent = traced(candidates, like, "data", sizes)
    carried = [(each, x) for each in candidates if not isinstance(x := sent[each.name], str)]
    fits_at = lambda per_byte: {"data": {kind: Fit(kind, link.latency, per_byte) for kind in KINDS}}
    if isinstance(machine, Facts):
        work = machine.work
    else:
        work = {each.name: machine.work(each, collectives, entries, workers) for each, collectives in carried}
    facts = Facts({}, sizes, fits_at(1 / link.bandwidth), work, gradient, 0.4, 0.0)
    some_dense = any(each.dense for each, _ in carried)
    rows = rows_of(candidates, facts, like, "data", sent, limits, refuse_idle=some_dense)
    seconds = {each.name: seconds_of(x, fits_at(0.0), sizes).mean / each.every for each, x in carried}
    latencies = tuple(seconds.get(each.name, math.nan) for each in candidates)
    chosen = choose(rows, name="recommend")
    return Recommendation(tuple(rows), chosen, verdict(rows, chosen), link, workers, latencies)


def _is_finite(value: Any) -> bool:
    return is_amount(value) and value <= sys.float_info.max


def _check_machine(machine: Any) -> None:
    if not isinstance(machine, Machine | Facts):
        raise TypeError(
            f"recommend: machine must be a jaxcomp.plan.recommend.Machine or what a plan has measured, plan.facts; "
            f"got {machine!r}"
        )
    times = () if isinstance(machine, Facts) else (machine.decode, machine.copy, *(ns for _, ns in machine.encode))
    if not all(map(_is_finite, times)):
        raise ValueError(f"recommend: machine must have finite nanoseconds >= 0; got {machine}")


def _error(row: Advice) -> str:
    loss = row.loss
    if loss.bound is None:
        return "not known"
    if row.candidate.dense:
        return "0" if "f32" in row.candidate.name else "2^-16"
    return f"<= {loss.bound:.4g}" + (", unbiased" if loss.unbiased else ", sent later" if loss.memory else ", biased")


def _less(a: float, b: float) -> float:
    """a - b; zero where they differ by rounding."""
    return 0.0 if math.isclose(a, b, rel_tol=1e-9) else a - b


def _pays(saved: float, more: float) -> str:
    """The bandwidths at which more < saved / bandwidth.

    Args:
        saved: bytes per step that it sends less than dense.
        more: seconds per step that it takes more than dense, without those of bytes.

    >>> _pays(1e6, 2.0), _pays(1e6, -2.0), _pays(-1e6, -2.0)
    ('4 Mbit/s', 'always', 'only above 4 Mbit/s')
    """
    if more < 0 or (more == 0 and saved > 0):
        return "always" if saved >= 0 else f"only above {8 * saved / more / 1e6:.3g} Mbit/s"
    if saved > 0:
        return f"{8 * saved / more / 1e6:.3g} Mbit/s"
    return "never: it sends more than dense" if saved < 0 else "never: it sends as much as dense"
