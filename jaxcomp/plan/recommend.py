"""`jc.recommend`: what to take, from shapes, a link and a machine; the loss is not run and nothing is compiled.

The model is that of `jc.plan`: traced collectives on a link of given latency and bandwidth, and work that is so many
nanoseconds for each entry to encode, and so many for each entry that is decoded, of every message that arrives:

    work = encode d + decode d (1 + share n)

share: of the entries that a message carries, n messages of which a worker decodes where they are gathered; 1 / n where
chunks are added up by their owners.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.arrays import like_of
from jaxcomp.base import Algorithm
from jaxcomp.exchange.links import Link, check_link
from jaxcomp.plan.advise import Row, best_of, choose, predicted, shared_work, verdict, without_twins
from jaxcomp.plan.candidates import (
    Candidate,
    Loss,
    check_candidates,
    check_every,
    check_max_error,
    default_candidates,
    is_amount,
    plan_for,
    traced,
)
from jaxcomp.plan.facts import Facts, Work
from jaxcomp.plan.links import KINDS, Collective, Fit, seconds_of
from jaxcomp.plan.predict import Line, Parts

__all__ = ["CPU", "Machine", "Recommendation", "recommend"]


class Machine(NamedTuple):
    """Nanoseconds of work for each entry. encode: by a name's beginning, the first that fits; decode: per entry
    decoded;
    copy: of an entry that is only moved."""

    encode: tuple[tuple[str, float], ...]
    decode: float
    copy: float


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
    """Print it for the table. rows: a `Row` for each candidate; chosen: the fastest that is eligible; link, workers:
    what was asked; latencies: of each row, seconds per step on the links besides those of its bytes."""

    rows: tuple[Row, ...]
    chosen: Row
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
        head = ("", "candidate", "MB sent", "bytes", "expected error", "links ms", "work ms", "ms", "pays below")
        cells: list[tuple[str, ...]] = [head]
        dense = best_of(self.rows, dense=True)
        standard = next((each for each in zip(self.rows, self.latencies, strict=True) if each[0] is dense), None)
        order = zip(self.rows, self.latencies, strict=True)
        place = lambda row: (row.refused is not None, math.isnan(row.seconds), row.seconds)
        for row, latency in sorted(order, key=lambda each: place(each[0])):
            p = row.per_step
            cells.append(
                (
                    "->" if row is self.chosen else "",
                    row.candidate.name,
                    _number(row.sent_bytes / 1e6),
                    f"1/{dense.sent_bytes / max(row.sent_bytes, 1e-9):.3g}" if dense and row.sent_bytes >= 0 else "-",
                    _error(row),
                    *(_number(1e3 * seconds) for seconds in (p.network, p.encode + p.decode, row.seconds)),
                    _last_cell(row, latency, standard),
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        left = (0, 1, 4, 8)
        return "\n".join(
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )

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
    link = Link() if link is None else link
    check_every("recommend", max_every)
    candidates = check_candidates("recommend", default_candidates(max_every or 1) if candidates is None else candidates)
    check_max_error("recommend", max_error)
    if isinstance(workers, bool) or not isinstance(workers, (int, np.integer)) or not 2 <= workers < 2**31:
        raise ValueError(f"recommend: workers must be an integer of at least 2 and below 2^31; got {workers!r}")
    check_link("recommend", link)
    _check_machine(machine)
    if not _is_finite(gradient):
        raise ValueError(f"recommend: gradient must be finite seconds >= 0; got {gradient!r}")
    like, sizes = like_of(params), {"data": int(workers)}
    entries = float(sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(like)))
    if not entries:
        raise ValueError(f"recommend: params must hold at least one entry; got {params!r}")
    too_long: dict[str, str] = {}
    sent = traced(candidates, like, "data", sizes, refused=too_long)
    given, candidates = candidates, [each for each in candidates if each.name in sent]
    fits_at = lambda per_byte: {"data": {kind: Fit(kind, link.latency, per_byte) for kind in KINDS}}
    if isinstance(machine, Facts):
        work = shared_work(machine.work, candidates)
    else:
        work = {each.name: _work(machine, each, sent[each.name], entries, int(workers)) for each in candidates}
    facts = Facts({}, sizes, fits_at(1 / link.bandwidth), work, gradient, 0.4, 0.0)
    limits = {"max_error": max_error, "max_every": max_every}
    rows = [predicted(each, facts, like, "data", collectives=sent[each.name], **limits) for each in candidates]
    if any(row.candidate.dense for row in rows):
        idle = "compresses nothing: every leaf travels dense"
        idles = [_is_idle(row.candidate, like, int(workers)) for row in rows]
        rows = [r._replace(refused=r.refused or idle) if is_idle else r for r, is_idle in zip(rows, idles, strict=True)]
    known = {row.candidate.name: row for row in without_twins(rows, like, "data", sizes)}
    rows = [known.get(each.name) or _refused(each, too_long[each.name]) for each in given]
    chosen = choose(rows, name="recommend")
    latency_of = lambda each: seconds_of(sent[each.name], fits_at(0.0), sizes).mean / each.every
    latencies = tuple(latency_of(each) if each.name in sent else math.nan for each in given)
    return Recommendation(tuple(rows), chosen, verdict(rows, chosen), link, int(workers), latencies)


def _refused(candidate: Candidate, why: str) -> Row:
    """The row of a candidate that cannot be laid out, of which nothing is known."""
    nothing = Loss(None, False, False, "no bound is known")
    return Row(candidate, Parts(*[math.nan] * len(Parts._fields)), math.nan, nothing, refused=why)


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


def _is_idle(candidate: Candidate, like: Any, workers: int) -> bool:
    """Whether a candidate that compresses finds nothing to compress, in the layout of its route: two shots cut small
    leaves into chunks with the others.
    """
    if candidate.dense or candidate.every > 1 or not isinstance(candidate.algorithm, Algorithm):
        return False
    plan = plan_for(candidate, like, workers)
    return not (plan.groups or plan.parts or plan.bare)


def _work(machine: Machine, candidate: Candidate, sent: Sequence[Collective], entries: float, workers: int) -> Work:
    """The work of a candidate on this machine, as lines through zero."""
    encode = next((ns for name, ns in machine.encode if candidate.name.startswith(name)), OTHER) * 1e-9
    gathered = max((one.operand_bytes for one in sent if one.kind == "all_gather"), default=0.0)
    arriving = min(gathered / (4 * entries), 1.0) * workers if entries else 0.0
    decode = (machine.decode * (arriving if not candidate.dense else 0.0) + machine.copy) * 1e-9
    return Work(Line(0.0, encode), Line(0.0, encode + decode))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _error(row: Row) -> str:
    loss = row.loss
    if loss.bound is None:
        return "not known"
    if row.candidate.dense:
        return "0" if "f32" in row.candidate.name else "2^-16"
    return f"<= {loss.bound:.4g}" + (", unbiased" if loss.unbiased else ", sent later" if loss.memory else ", biased")


def _last_cell(row: Row, latency: float, standard: tuple[Row, float] | None) -> str:
    """The reason why it is not eligible; else the bandwidths at which it is faster than the dense candidate, which is
    given with its own latency."""
    if row.refused or standard is None or row.candidate.dense:
        return row.refused or ""
    dense, dense_latency = standard
    if row.bound or dense.bound:
        return "not known: work was not measured"
    fixed = lambda each, latency: latency + each.per_step.encode + each.per_step.decode
    saved = _difference(dense.sent_bytes, row.sent_bytes)
    return _pays(saved, _difference(fixed(row, latency), fixed(dense, dense_latency)))


def _difference(a: float, b: float) -> float:
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
