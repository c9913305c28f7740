"""Seconds of a training step, predicted from measured parts. Nothing is measured here.

A step is the gradient, and every H steps an exchange in K buckets. Bucket k is the k-th from the end of the tree, and
is ready when the backward pass has come so far. With forward share f of the gradient time g, and shares of entries
q_1 .. q_K, the backward pass takes b_k = (1 - f) g q_k for bucket k: the work of a layer is taken to follow its
number of parameters, which is exact for matrix products and not for convolutions or embeddings. Encoding, network and
decoding of bucket k take q_k of those of the whole exchange.

One resource computes, another one exchanges:

    c_0 = f g,   c_k = c_(k-1) + b_k + encode_k                 bucket k is encoded right after it is ready
    x_k = max(c_k, x_(k-1)) + network_k                         exchanges go one after the other
    overlapped = max(c_K, x_K) + sum_k decode_k
    serial     = g + sum_k (encode_k + network_k + decode_k)

    t = serial - e (serial - overlapped)

e in [0, 1] is what of the overlap a machine gets, measured: a program that computes for T_c and exchanges for T_x, at
the same time, takes T; e = (T_c + T_x - T) / min(T_c, T_x). On one that computes and exchanges with the same cores it
is near zero: exchanging slows the computing down by as much as it saves.

With H local steps to an exchange:  t = g + (t_1 - g) / H.

Parts are measured one by one. Within a step they also wait for each other, and for the cores that all workers of a
machine share. Steps that were run say how long: with a, b >= 0.1 that minimise

    sum_i ((a network_i + b rest_i) / measured_i - 1)^2 + (a - 1)^2 + (b - 1)^2

a step that was not run is expected to take a network + b rest.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.plan.candidates import (
    Candidate,
    ErrorBound,
    Limits,
    bucket_shares,
    compresses_nothing,
    error_bound,
    sent_bytes,
)
from jaxcomp.plan.facts import Facts, Work
from jaxcomp.plan.links import Collective, seconds_of, workers_of

__all__ = ["Advice", "StepParts", "overlap_of", "rows_of", "shared_work", "step_seconds", "with_expected"]


class StepParts(NamedTuple):
    """The parts of a predicted step, in seconds; hidden: by overlap, at each exchange; links: on each of them."""

    gradient: float
    encode: float
    network: float
    decode: float
    hidden: float
    total: float
    deviation: float
    links: Mapping[str, float] = {}


class Advice(NamedTuple):
    """One candidate, a row of the table.

    sent_bytes: per step. error: measured, of a message. measured: seconds per step, None where it was not run.
    expected: of one that was not run where others were: seconds per step, predicted from these, too. refused: why it is
    not eligible; None if it is. bound: whether its work was not measured, because even without any it would not be the
    fastest, or the budget was spent; its seconds are then a lower bound. collectives: of an
    exchange.
    """

    candidate: Candidate
    parts: StepParts
    sent_bytes: float
    loss: ErrorBound
    error: float | None = None
    measured: float | None = None
    refused: str | None = None
    bound: bool = False
    expected: float | None = None
    collectives: tuple[Collective, ...] = ()

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
    def per_step(self) -> StepParts:
        """The parts with those of an exchange divided by H: total = gradient + encode + network + decode - hidden."""
        shared = ("encode", "network", "decode", "hidden")
        links = {name: seconds / self.candidate.every for name, seconds in self.parts.links.items()}
        divided = {name: getattr(self.parts, name) / self.candidate.every for name in shared}
        return self.parts._replace(links=links, **divided)


def step_seconds(
    gradient: float,
    forward_share: float,
    exchange: tuple[float, float, float],
    shares: Sequence[float] = (1.0,),
    *,
    overlap: float = 0.0,
    every: int = 1,
    deviation: float = 0.0,
) -> StepParts:
    """The predicted step (see the module).

    gradient: seconds of loss and gradient; exchange: seconds to encode, on the network and to decode; shares: of the
    entries in each bucket, in the order in which they are ready; deviation: of the seconds of one exchange.

    >>> step_seconds(3.0, 1 / 3, (0.0, 2.0, 0.0), (0.5, 0.5), overlap=1.0).total
    4.0
    """
    encode, network, decode = exchange
    computed, exchanged = forward_share * gradient, 0.0
    for share in shares:
        computed += ((1 - forward_share) * gradient + encode) * share
        exchanged = max(computed, exchanged) + network * share
    serial = gradient + encode + network + decode
    hidden = overlap * (serial - max(computed, exchanged) - decode)
    total = gradient + (serial - hidden - gradient) / every
    return StepParts(gradient, encode, network, decode, hidden, total, deviation / every)


def overlap_of(computing: float, exchanging: float, both: float) -> float:
    """The share of the overlap of a computation and an exchange that a machine gets, in [0, 1].

    >>> overlap_of(1.0, 2.0, 2.0), overlap_of(1.0, 2.0, 3.0), overlap_of(1.0, 2.0, 2.5)
    (1.0, 0.0, 0.5)
    """
    shorter = min(computing, exchanging)
    return float(np.clip((computing + exchanging - both) / shorter, 0, 1)) if shorter > 0 else 0.0


def rows_of(
    candidates: Sequence[Candidate],
    facts: Facts,
    like: Any,
    axis: Any,
    sent: Mapping[str, tuple[Collective, ...] | str],
    limits: Limits,
    *,
    refuse_idle: bool = False,
) -> list[Advice]:
    """The predicted step of each candidate. Those with the same algorithm and route share what was measured of one.

    facts: measured, or assumed; like: shapes of the gradients of one device; axis: of the workers; sent: of each name
    its collectives, or why it cannot be sent (`candidates.traced`); refuse_idle: whether a candidate that finds nothing
    to compress is not eligible.
    """
    work = shared_work(facts.work, candidates)
    whole = {(id(x.algorithm), x.via, x.every): x.name for x in candidates if not x.bucket_bytes}
    rows = []
    for each in candidates:
        collectives = sent[each.name]
        if isinstance(collectives, str):
            nan = math.nan
            nothing = StepParts(nan, nan, nan, nan, nan, nan, nan)
            rows.append(Advice(each, nothing, math.nan, ErrorBound(), refused=collectives))
            continue
        shares = bucket_shares(each, like)
        row = _predicted(each, facts, work.get(each.name), like, axis, collectives, shares)
        refused = limits.refusal(each.every, row.loss.bound if row.error is None else row.error)
        twin = whole.get((id(each.algorithm), each.via, each.every)) if each.bucket_bytes else None
        if refused is None and refuse_idle and compresses_nothing(each, like, workers_of(axis, facts.sizes)):
            refused = "compresses nothing: every leaf travels dense"
        elif refused is None and twin is not None and len(shares) == 1:
            refused = f"the same as {twin}: all leaves are one bucket"
        rows.append(row._replace(refused=refused))
    return rows


def shared_work(work: Mapping[str, Work], candidates: Sequence[Candidate]) -> dict[str, Work]:
    """The same, and of each candidate whose algorithm and route are those of one that has been measured."""
    found = dict(work)
    for each in candidates:
        same = (one.name for one in candidates if one.algorithm is each.algorithm and one.via == each.via)
        known = next((name for name in same if name in work), None)
        if known is not None:
            found.setdefault(each.name, work[known])
    return found


def _predicted(
    candidate: Candidate,
    facts: Facts,
    work: Work | None,
    like: Any,
    axis: Any,
    collectives: Sequence[Collective],
    shares: Sequence[float],
) -> Advice:
    entries = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    network = seconds_of(collectives, facts.fits, facts.sizes)
    encode, everything = (0.0, 0.0) if work is None else (work.encode.seconds(entries), work.all.seconds(entries))
    parts = step_seconds(
        facts.gradient,
        facts.forward_share,
        (encode, network.mean, max(everything - encode, 0.0)),
        shares,
        overlap=facts.overlap if len(shares) > 1 else 0.0,
        every=candidate.every,
        deviation=network.deviation,
    )._replace(links=network.each)
    sent = sent_bytes(collectives, facts.sizes) / candidate.every
    loss, error = error_bound(candidate, like, workers_of(axis, facts.sizes)), None if work is None else work.error
    return Advice(candidate, parts, sent, loss, error, bound=work is None, collectives=tuple(collectives))


def with_expected(rows: Sequence[Advice]) -> list[Advice]:
    """The rows; of those that were not run, what is expected after what the others took (see the module)."""

    def two(row: Advice) -> np.ndarray:
        network = min(row.parts.network / row.candidate.every, row.parts.total)
        return np.array([network, row.parts.total - network])

    ran = [row for row in rows if row.measured is not None]
    if not ran:
        return [row._replace(expected=None) for row in rows]
    relative = [two(row) / max(row.measured or 0.0, 1e-9) for row in ran]
    a, b = np.linalg.lstsq(np.array([[1.0, 0.0], [0.0, 1.0], *relative]), np.ones(2 + len(ran)), rcond=None)[0]
    factors = np.maximum([a, b], 0.1)
    return [row._replace(expected=float(factors @ two(row)) if row.measured is None else None) for row in rows]
