"""SIDCo: a threshold from a fitted sparsity-inducing distribution, in a few passes, without a sort.

Magnitudes a = |x| of gradients follow heavy-peaked laws. Fit one to all of a, and its (1 - delta)
quantile is a threshold that about delta d entries exceed. Far tails are fitted badly by the bulk,
so it is done in stages (peaks over threshold): the first stage keeps a quarter, each further one
fits the excesses over the previous threshold, and the product of the stage ratios is delta.

`sidco_published` is the method of the paper, `sidco_counted` the one to use; `tails` has the laws.
"""

from jaxcomp.base import Compressor
from jaxcomp.compressors import tails
from jaxcomp.compressors.checks import is_whole
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.compressors.sidco_counted import counted
from jaxcomp.compressors.sidco_published import FIRST_RATIO, adaptive, published
from jaxcomp.compressors.threshold import Estimator, by_threshold

__all__ = ["sidco"]

STAGES = 3  # what "auto" means without a rule that changes it
SAMPLE = 1 << 18  # entries that "count" fits to
ADAPTS = ("count", "paper", "climb", None)
QUANTILES = ("newton", "approximate")


def sidco(
    ratio: Ratio,
    *,
    law: str = "exponential",
    stages: int | str = "auto",
    adapt: str | None = "count",
    capacity: float = 1.25,
    quantile: str = "newton",
    sample: int | None = SAMPLE,
    peak: float | None = None,
) -> Compressor:
    """Keeps the entries above a threshold estimated from a fitted distribution.

    C(x)_j = x_j if |x_j| > eta_M, else 0. With Q(e, r) the (1 - r) quantile of the law fitted to the excesses e:

        eta_1 = Q(a, 1 / 4),   eta_m = eta_(m-1) + Q(a - eta_(m-1) | a > eta_(m-1), r_m).

    Laws: "exponential" (SIDCo-E) mean(e) ln(1 / r); "pareto" (SIDCo-P) the generalised Pareto law,
    fitted by moments; "gamma" (SIDCo-GP) a gamma law for eta_1 and the Pareto law afterwards.

    Stage ratios: those published are r_m = (4 delta)^(1 / (M - 1)); with adapt="count" they follow from the number of
    entries that each stage really left, and a last threshold that misses k by more than 10 % is corrected.

    Exact zeros are left out of the fit; delta is a share of all entries. Fits are free of scale. If no entry exceeds
    the threshold about k are sent, and whatever is sent is at least as large as whatever is not, so alpha = 1 / d is
    certain, and about delta in practice. Biased. Equal magnitudes: the first k by index. NaN and infinities count as
    zeros. Where the sum of magnitudes overflows the k largest are sent, about. A zero vector sends nothing.

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        law: "exponential", "pareto" or "gamma".
        stages: M, number of fits, at least 1. "auto": 3, or, where `adapt` moves it, 1 at first.
        adapt: "count" as above; None for the published recursion with M stages; "paper" and "climb" for the
            published recursion with an M that changes when the mean of (sent / k) over 5 rounds leaves [0.8, 1.2]:
            see `sidco_published`.
        capacity: room in the message as a multiple of k = max(1, floor(delta d)), at least 1. When
            more entries exceed the threshold it rises until they fit; the others stay in the
            memory of the algorithm and are counted as overflow.
        quantile: of the gamma law: "newton" (exact) or "approximate" (closed form).
        sample: with adapt="count", the least number of entries to fit to; None for all of them. The count is
            always that of all entries.
        peak: largest value of a schedule; its first one if not given.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Abdelmoniem, Elzanaty, Alouini, Canini 2021 (SIDCo), algorithm 1. adapt="count" is ours.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([0.1, -0.2, 5.0, 0.1, 0.0, -0.1, 0.2, 0.1])
    >>> print(jc.roundtrip(jc.sidco(1 / 8), x, key=jax.random.key(0))[0])
    [0. 0. 5. 0. 0. 0. 0. 0.]
    """
    target = target_of("sidco", ratio, peak)
    _check(law, stages, adapt, quantile, sample)
    first = (1 if adapt in ("paper", "climb") else STAGES) if stages == "auto" else int(stages)
    number = 1 if not callable(ratio) and ratio >= FIRST_RATIO else first
    name = f"sidco({shown(ratio)})" if law == "exponential" else f"sidco({shown(ratio)}, {law})"
    return by_threshold(name, target, _estimator(law, adapt, quantile == "newton", number, sample), capacity=capacity)


def _estimator(law: str, adapt: str | None, exact: bool, stages: int, sample: int | None) -> Estimator:
    if adapt == "count":
        return counted(law, exact, stages, sample)
    if adapt is None:
        return published(law, exact, stages)
    return adaptive(law, exact, stages, climb=adapt == "climb")


def _check(law: str, stages: int | str, adapt: str | None, quantile: str, sample: int | None) -> None:
    for name, value, allowed in (
        ("law", law, tails.LAWS),
        ("adapt", adapt, ADAPTS),
        ("quantile", quantile, QUANTILES),
    ):
        if value not in allowed:
            raise ValueError(f"sidco: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    if sample is not None and not is_whole(sample):
        raise ValueError(f"sidco: sample must be an integer of at least 1, or None; got {sample!r}")
    if stages != "auto" and not is_whole(stages):
        raise ValueError(f'sidco: stages must be an integer of at least 1, or "auto"; got {stages!r}')
