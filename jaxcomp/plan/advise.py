"""Turns facts into advice: a prediction for every candidate, their order, and the reason in words."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.arrays import like_of
from jaxcomp.compressors.tree import layout_of
from jaxcomp.groups import groups_of
from jaxcomp.plan.candidates import Candidate, Loss, collectives_of, loss_of, plan_for, sent_bytes
from jaxcomp.plan.facts import Facts, Work
from jaxcomp.plan.links import Collective, Seconds, seconds_of
from jaxcomp.plan.predict import Bucket, Line, Parts, factors_of, step_seconds

__all__ = ["MARGIN", "Row", "best_of", "choose", "predicted", "table", "verdict"]

LEAST = 1e-9  # seconds that are told apart
MARGIN = 0.05  # by which compressing must be faster than dense to be advised
MORE_STEPS = '. Steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'


class Row(NamedTuple):
    """One candidate. error: measured, of a message; measured: seconds per step, None where it was not run.
    expected: of one that was not run where others were: predicted seconds per step, with their `predict.factors_of`.
    refused: why it is not eligible, in words; None if it is. bound: whether its work was not measured, because even
    without any it would not be the fastest, or the budget was spent; its seconds are then a lower bound."""

    candidate: Candidate
    parts: Parts
    sent_bytes: float
    loss: Loss
    error: float | None = None
    measured: float | None = None
    refused: str | None = None
    bound: bool = False
    expected: float | None = None

    @property
    def known(self) -> bool:
        """Whether its seconds are more than a lower bound."""
        return self.measured is not None or not self.bound

    @property
    def seconds(self) -> float:
        """Per step: measured, where it was; else predicted, with what was learnt from those that were."""
        predicted = self.parts.total if self.expected is None else self.expected
        return predicted if self.measured is None else self.measured

    @property
    def per_step(self) -> Parts:
        """The parts with those of an exchange divided by H: total = gradient + encode + network + decode - hidden."""
        p, every = self.parts, self.candidate.every
        shares = {name: getattr(p, name) / every for name in ("encode", "network", "decode", "hidden")}
        return p._replace(**shares)


def predicted(
    candidate: Candidate,
    facts: Facts,
    like: Any,
    axis: Any,
    *,
    collectives: Sequence[Collective] | None = None,
    max_error: float | None = None,
    max_every: int | None = None,
) -> Row:
    """The predicted step of one candidate.

    Args:
        candidate: whose encoding is known to `facts` by its name.
        facts: measured, or assumed.
        like: shapes of the gradients of one device.
        axis: of the workers.
        collectives: of its exchange, if they are known already.
        max_error: a candidate whose messages lose more of |x|^2 is not eligible.
        max_every: one with more steps to an exchange is not eligible.
    """
    if collectives is None:
        collectives = collectives_of(candidate, like, axis, facts.sizes, joined=facts.about.get("device") != "cpu")
    workers = int(np.prod([facts.sizes[name] for name in _names(axis, facts)]))
    entries = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(like))
    network: Seconds = seconds_of(collectives, facts.fits, facts.sizes)
    known = candidate.name in facts.work
    work = facts.work[candidate.name] if known else Work(Line(0.0, 0.0), Line(0.0, 0.0))
    shares = shares_of(candidate, like, workers)
    encode, everything = work.encode.seconds(entries), work.all.seconds(entries)
    decode = max(everything - encode, 0.0)
    buckets = [Bucket(share, encode * share, network.mean * share, decode * share) for share in shares]
    parts = step_seconds(
        facts.gradient,
        facts.forward_share,
        buckets,
        overlap=facts.overlap if len(shares) > 1 else 0.0,
        every=candidate.every,
        deviation=network.deviation,
    )
    loss = loss_of(candidate, like, workers)
    lost = work.error if work.error is not None else loss.bound
    refused = None
    if max_error is not None and (lost is None or lost > max_error):
        refused = f"a message loses {'an unknown part' if lost is None else f'{lost:.3g}'} of |x|^2, more than allowed"
    if max_every is not None and candidate.every > max_every:
        refused = f"an exchange every {candidate.every} steps, and max_every is {max_every}"
    sent = sent_bytes(collectives, facts.sizes) / candidate.every
    return Row(candidate, parts, sent, loss, work.error, None, refused, not known)


def shared_work(work: Mapping[str, Work], candidates: Sequence[Candidate]) -> dict[str, Work]:
    """The same, and of each candidate whose algorithm and route are those of one that has been measured."""
    found = dict(work)
    for each in candidates:
        same = [one.name for one in candidates if one.algorithm is each.algorithm and one.via == each.via]
        known = next((name for name in same if name in work), None)
        if known is not None:
            found.setdefault(each.name, work[known])
    return found


def with_expected(rows: Sequence[Row]) -> list[Row]:
    """The rows; of those that were not run, what is expected after what the others took."""
    runs = [(row.parts, row.candidate.every, row.measured) for row in rows if row.measured is not None]
    factors = factors_of(runs)
    expected = lambda row: factors.of(row.parts, row.candidate.every) if runs and row.measured is None else None
    return [row._replace(expected=expected(row)) for row in rows]


def without_twins(rows: Sequence[Row], like: Any, axis: Any, sizes: Mapping[str, int]) -> list[Row]:
    """The rows; what would be several buckets and is only one is refused where it is there without them, too."""
    whole = {(id(x.algorithm), x.via, x.every): x.name for x in (r.candidate for r in rows) if not x.bucket_bytes}
    names = axis if isinstance(axis, tuple | list) else (axis,)
    workers = int(np.prod([sizes[name] for name in names if name in sizes]))
    out = []
    for row in rows:
        each = row.candidate
        twin = whole.get((id(each.algorithm), each.via, each.every))
        if each.bucket_bytes and twin and len(shares_of(each, like, workers)) == 1:
            row = row._replace(refused=row.refused or f"the same as {twin}: all leaves are one bucket")
        out.append(row)
    return out


def _names(axis: Any, facts: Facts) -> Sequence[str]:
    names = list(axis) if isinstance(axis, Mapping | tuple | list) else [axis]
    return [name for name in names if name in facts.sizes]


def shares_of(candidate: Candidate, like: Any, workers: int) -> list[float]:
    """Share of the entries in each bucket, in the order in which buckets are ready.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> like = [jnp.zeros(6000), jnp.zeros(2000)]
    >>> shares_of(Candidate("f32", jc.direct(jc.identity()), bucket_bytes=1), like, 2)
    [0.25, 0.75]
    """
    plan = plan_for(candidate, like, workers)
    if plan is None or not candidate.bucket_bytes:
        return [1.0]
    plan = groups_of(layout_of(candidate.algorithm).in_buckets(candidate.bucket_bytes), like_of(like))  # pyright: ignore
    sizes: dict[int, float] = {}
    for group in (group for group in plan.groups if not group.small):
        sizes[group.bucket] = sizes.get(group.bucket, 0.0) + float(np.prod(group.shape))
    total = sum(sizes.values())
    return [sizes[number] / total for number in sorted(sizes)] if total else [1.0]


# ------------------------------------------------------------------------------------------------
# The choice


def choose(rows: Sequence[Row], margin: float = MARGIN, name: str = "plan") -> Row:
    """The candidate that is advised: the fastest; a dense one where compressing saves less than the margin.

    name: of the function that the user called, for errors.

    Raises:
        ValueError: there is none, or none is eligible.
    """
    tried = _comparable(rows)
    if not tried:
        raise ValueError(f"{name}: candidates must hold at least one that is eligible; all are refused")
    best = min(tried, key=lambda row: row.seconds)
    dense = min((row for row in tried if row.candidate.dense), key=lambda row: row.seconds, default=None)
    return dense if dense is not None and dense.seconds <= (1 + margin) * best.seconds else best


def verdict(rows: Sequence[Row], chosen: Row) -> str:
    """The reason for the choice, in a sentence or two."""
    dense, best = best_of(rows, dense=True), best_of(rows, dense=False)
    if chosen.candidate.dense:
        text = f"do not compress: {chosen.candidate.name}"
        if best is None:
            some = not all(row.candidate.dense for row in rows)
            return f"{text}; {'no compressed candidate is eligible' if some else 'there is no compressed candidate'}"
        text += f" takes {_ms(chosen.seconds)} a step. The fastest compressed candidate, {best.candidate.name},"
        if not best.known:
            return f"{text} was {_unmeasured(best, rows)}"
        more = (best.seconds - chosen.seconds) / max(chosen.seconds, LEAST)
        share = f"{abs(more):.0%}"
        text += " takes the same time" if share == "0%" else f" is {share} {'slower' if more > 0 else 'faster'}"
        text += "" if best.bound else _difference(best, chosen)
        left = [row for row in rows if row.refused is None and not row.candidate.dense and _left_out(row, rows)]
        many = f"{len(left)} compressed candidate{'' if len(left) == 1 else 's'}"
        return text + (f". {many} could not be measured: the budget was too short" if left else "")
    text = f"compress: {chosen.candidate.name} takes {_ms(chosen.seconds)} a step"
    if dense is None:
        return text
    own, other = chosen.per_step, dense.per_step
    return (
        f"{text}, {dense.candidate.name}, the fastest dense candidate{_at_every_step(dense, rows)}, "
        f"{_ms(dense.seconds)}. Of a step it is on the links for {_ms(own.network)} in place of {_ms(other.network)} "
        f"and works for {_ms(own.encode + own.decode)} to encode and decode. What it loses: {chosen.loss.words}"
        f"{'' if chosen.loss.is_useful else MORE_STEPS}"
    )


def reason(row: Row, dense: Row | None, rows: Sequence[Row]) -> str:
    """The reason why a candidate is faster or slower than the best dense one, or why its work was not measured."""
    if row.refused:
        return row.refused
    if row is dense:
        return f"the best dense candidate{_at_every_step(row, rows)}"
    if not row.known:
        return _unmeasured(row, rows)
    if dense is None:
        return ""
    both = row.measured is not None and dense.measured is not None
    more = row.seconds - dense.seconds if both else row.parts.total - dense.parts.total
    words = f"{_ms(abs(more))} {'slower' if more > 0 else 'faster'} than {dense.candidate.name}"
    if abs(more) <= LEAST:
        words = f"takes the same time as {dense.candidate.name}"
    words += "" if row.bound else _difference(row, dense)
    return words + (f", an exchange every {row.candidate.every} steps" if row.candidate.every > 1 else "")


def _comparable(rows: Sequence[Row]) -> list[Row]:
    """Eligible rows: the ones that were run, else those whose work is known, else all."""
    eligible = [row for row in rows if row.refused is None]
    known = [row for row in eligible if row.known] or eligible
    return [row for row in known if row.measured is not None] or known


def best_of(rows: Sequence[Row], dense: bool) -> Row | None:
    """The fastest of either kind; of dense ones that exchange at every step, if there are any."""
    kind = [row for row in rows if row.candidate.dense == dense]
    kind = _comparable([row for row in kind if dense and row.candidate.every == 1] or kind)
    return min(kind, key=lambda row: row.seconds, default=None)


def _at_every_step(dense: Row, rows: Sequence[Row]) -> str:
    """An addition to the reason of the best dense candidate, where other dense ones exchange less often."""
    fewer = any(row.candidate.dense and row.candidate.every > dense.candidate.every for row in rows)
    return " with an exchange at every step" if fewer and dense.candidate.every == 1 else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _unmeasured(row: Row, rows: Sequence[Row]) -> str:
    """The reason why the work of a candidate was not measured: its links alone decide, or there was no time for it."""
    fastest = _fastest(rows)
    if fastest is None or _left_out(row, rows):
        return "not measured: the budget was spent"
    more = _ms(row.parts.total - fastest.parts.total)
    return f"not measured: without encoding and decoding it is {more} slower than {fastest.candidate.name}"


def _fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the least predicted time of those whose work was measured."""
    known = [each for each in rows if each.refused is None and not each.bound]
    return min(known, key=lambda each: each.parts.total, default=None)


def _left_out(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a candidate was not measured though it might be the fastest."""
    fastest = _fastest(rows)
    return row.bound and row.measured is None and (fastest is None or row.parts.total < fastest.parts.total)


def _difference(row: Row, dense: Row) -> str:
    """The end of a sentence: predicted seconds per step, on the links and at work, against those of a dense one.

    Where both were run it says that this is from the parts, since what was measured may differ.
    """
    own, other = row.per_step, dense.per_step
    link = other.network - own.network
    work = own.encode + own.decode - other.encode - other.decode
    begin = ": it " if row.measured is None or dense.measured is None else "; by the parts it "
    side = lambda seconds: f"{'saves' if seconds > 0 else 'costs'} {_ms(abs(seconds))}"
    parts = [f"{side(x)} {where}" for x, where in ((link, "on the links"), (-work, "of work")) if abs(x) > LEAST]
    return begin + (" and ".join(parts) or "takes as long on the links and to encode and decode")


def table(rows: Sequence[Row], chosen: Row) -> str:
    """The rows as text, the best first; what was not measured comes later. The one that is advised has an arrow.

    All times are per step, MB sent, too.
    """
    dense = best_of(rows, dense=True)
    head = (
        "",
        "candidate",
        "ms/step",
        "+-",
        "gradient",
        "encode",
        "links",
        "decode",
        "hidden",
        "measured",
        "expected",
        "MB sent",
    )
    head = (*head, "lost", "bound", "why")
    cells: list[tuple[str, ...]] = [head]
    for row in sorted(rows, key=lambda row: (row.refused is not None, not row.known, row.seconds)):
        p = row.per_step
        times = (p.deviation, p.gradient, p.encode, p.network, p.decode, abs(p.hidden))
        cells.append(
            (
                "->" if row is chosen else "",
                row.candidate.name,
                f"{'>' if row.bound else ''}{1e3 * p.total:.4g}",
                *(f"{1e3 * seconds:.4g}" for seconds in times),
                *("-" if x is None else f"{1e3 * x:.4g}" for x in (row.measured, row.expected)),
                f"{row.sent_bytes / 1e6:.4g}",
                "-" if row.error is None else f"{row.error:.3g}",
                "-" if row.loss.bound is None else f"{row.loss.bound:.4g}",
                reason(row, dense, rows),
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    left = (0, 1, len(head) - 1)
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
