"""`jc.recommend`: what to take, from shapes, a link and a machine; the loss is not run and nothing is compiled.

The model is that of `jc.plan`: traced collectives on a link of given latency and bandwidth, and work that is so many
nanoseconds for each entry to encode, and so many for each entry that is decoded, of every message that arrives:

    work = encode d + decode d (1 + share n)

share: of the entries that a message carries, n messages of which a worker decodes where they are gathered; 1 / n where
chunks are added up by their owners.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.arrays import like_of
from jaxcomp.base import Algorithm
from jaxcomp.exchange.links import Link
from jaxcomp.layout import layout_of, plan_of
from jaxcomp.plan.advise import Row, choose, predicted, shared_work, verdict, without_twins
from jaxcomp.plan.candidates import Candidate, check_every, default_candidates, traced
from jaxcomp.plan.facts import Facts, Work
from jaxcomp.plan.links import KINDS, Collective, Fit
from jaxcomp.plan.predict import Line

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
    """rows: a `Row` for each candidate; chosen: the fastest that is eligible; link, workers: what was asked. Print
    it."""

    rows: tuple[Row, ...]
    chosen: Row
    verdict: str
    link: Link
    workers: int

    @property
    def table(self) -> str:
        """The candidates, the fastest first."""
        dense = min((row for row in self.rows if row.candidate.dense), key=lambda row: row.seconds, default=None)
        head = ("", "candidate", "MB sent", "bytes", "expected error", "links ms", "work ms", "ms", "pays below")
        cells: list[tuple[str, ...]] = [head]
        for row in sorted(self.rows, key=lambda row: (row.refused is not None, row.seconds)):
            work = row.parts.encode + row.parts.decode
            less = (dense.sent_bytes if dense else row.sent_bytes) / max(row.sent_bytes, 1e-9)
            cells.append(
                (
                    "->" if row is self.chosen else "",
                    row.candidate.name,
                    f"{row.sent_bytes / 1e6:.4g}",
                    f"1/{less:.3g}",
                    _error(row),
                    f"{1e3 * row.parts.network:.4g}",
                    f"{1e3 * work:.4g}",
                    f"{1e3 * (row.parts.network + work):.4g}",
                    row.refused or _pays(row, dense),
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
        return f"{self.table}\n\n{self.verdict}"


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

    Nothing is measured: `jc.plan` measures. Messages are traced, so bytes are exact; times are those of a model.

    Args:
        params: parameters or their shapes, a tree, of one device.
        workers: n >= 2.
        link: latency in seconds and bandwidth in bytes per second; None: 100 Mbit/s with 1 ms.
        candidates: as for `plan`.
        machine: nanoseconds of work for each entry; or what a plan has measured (`plan.facts`), whose work is taken.
        gradient: seconds of loss and gradient of a step, which all candidates have in common.
        max_error: messages may lose at most this share of |x|^2 by what theory bounds.
        max_every: as for `plan`.

    Raises:
        TypeError, ValueError: workers below 2, a link without bandwidth, no candidates, no parameters.

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
    candidates = default_candidates(max_every or 1) if candidates is None else list(candidates)
    if isinstance(workers, bool) or not isinstance(workers, (int, np.integer)) or workers < 2:
        raise ValueError(f"recommend: workers must be an integer of at least 2; got {workers!r}")
    if not isinstance(link, Link):
        raise TypeError(f"recommend: link must be a jc.Link, say jc.Link(1e-3, 12.5e6) for 100 Mbit/s; got {link!r}")
    if not (link.bandwidth > 0 and link.latency >= 0):
        raise ValueError(f"recommend: link must have a bandwidth > 0 and a latency >= 0; got {link}")
    if not candidates or not all(isinstance(each, Candidate) for each in candidates):
        raise ValueError(f"recommend: candidates must be a list of jc.Candidate; got {candidates!r}")
    like, sizes = like_of(params), {"data": int(workers)}
    entries = float(sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(like)))
    if not entries:
        raise ValueError(f"recommend: params must hold at least one entry; got {params!r}")
    sent = traced(candidates, like, "data", sizes)
    fits = {"data": {kind: Fit(kind, link.latency, 1 / link.bandwidth) for kind in KINDS}}
    if isinstance(machine, Facts):
        work = shared_work(machine.work, candidates)
    else:
        work = {each.name: _work(machine, each, sent[each.name], entries, int(workers)) for each in candidates}
    facts = Facts({}, sizes, fits, work, gradient, 0.4, 0.0)
    limits = {"max_error": max_error, "max_every": max_every}
    rows = [predicted(each, facts, like, "data", collectives=sent[each.name], **limits) for each in candidates]
    if any(row.candidate.dense for row in rows):
        idle = "compresses nothing: every leaf travels dense"
        rows = [row._replace(refused=row.refused or idle) if _is_idle(row.candidate, like) else row for row in rows]
    rows = without_twins(rows, like, "data", sizes)
    chosen = choose(rows)
    return Recommendation(tuple(rows), chosen, verdict(rows, chosen), link, int(workers))


def _is_idle(candidate: Candidate, like: Any) -> bool:
    """Whether a candidate that compresses finds nothing to compress."""
    if candidate.dense or candidate.every > 1 or not isinstance(candidate.algorithm, Algorithm):
        return False
    plan = plan_of(layout_of(candidate.algorithm), like)
    return not (plan.groups or plan.parts or plan.bare)


def _work(machine: Machine, candidate: Candidate, sent: Sequence[Collective], entries: float, workers: int) -> Work:
    """Of a candidate on this machine, as lines through zero."""
    encode = next((ns for name, ns in machine.encode if candidate.name.startswith(name)), OTHER) * 1e-9
    gathered = max((one.operand_bytes for one in sent if one.kind == "all_gather"), default=0.0)
    arriving = min(gathered / (4 * entries), 1.0) * workers if entries else 0.0
    decode = (machine.decode * (arriving if not candidate.dense else 0.0) + machine.copy) * 1e-9
    return Work(Line(0.0, encode), Line(0.0, encode + decode))


def _error(row: Row) -> str:
    loss = row.loss
    if loss.bound is None:
        return "not known"
    if row.candidate.dense:
        return "0" if "f32" in row.candidate.name else "2^-16"
    return f"<= {loss.bound:.4g}" + (", unbiased" if loss.unbiased else ", sent later" if loss.memory else ", biased")


def _pays(row: Row, dense: Row | None) -> str:
    """The bandwidth below which it is faster than the best dense candidate, at this latency and this machine."""
    if dense is None or row.candidate.dense:
        return ""
    less = dense.sent_bytes - row.sent_bytes
    own = lambda each: each.parts.encode + each.parts.decode
    more = own(row) - own(dense)
    if less <= 0:
        return "never: it sends more than dense"
    if more <= 0:
        return "always"
    return f"{8 * less / more / 1e6:.3g} Mbit/s"
