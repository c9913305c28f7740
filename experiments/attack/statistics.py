"""Bias, omega and alpha of random compressors at awkward vectors, against what their specs claim.

Of N draws of C(x): the mean is within what omega allows for N independent errors, N |mean - x|^2 <= BIAS omega |x|^2;
the mean of |C(x) - x|^2 is at most omega |x|^2 (or (1 - alpha) |x|^2), but for SIGMAS standard errors of that mean.
What looks wrong is drawn again, eight times as often, before it is said to fall.
"""

from collections.abc import Callable

import jax
import numpy as np

import jaxcomp as jc
from experiments.attack.draw import compressor_text, made, vector

__all__ = ["drawn", "measured"]

DRAWS = 1024
BIAS, SIGMAS = 40.0, 6.0
ROUNDING = 1e-5  # of f32, relative to |x|^2


def drawn(rng: np.random.Generator) -> tuple[str, Callable[[], None]]:
    text, size, seed = compressor_text(rng), int(rng.choice([1, 2, 33, 64, 300])), int(rng.integers(2**31))
    kind, x = vector(rng, size)

    def attempt() -> None:
        share = measured(made(text), x, seed, DRAWS)
        if share > 1:
            share = measured(made(text), x, seed + 1, 8 * DRAWS)
        assert share <= 1, f"{share:.1f} times what its spec allows"

    return f"{text} at {size} entries, {kind}", attempt


def measured(compressor, x: np.ndarray, seed: int, draws: int) -> float:
    """The largest of the three figures, as a share of what the spec allows."""
    norm = float(np.sum(np.float64(x) ** 2))
    batches = jax.random.split(jax.random.key(seed), draws).reshape(-1, DRAWS)  # keys, so many at a time
    rough = jax.jit(jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0]))
    got = np.concatenate([np.asarray(rough(keys), np.float64) for keys in batches])
    assert np.all(np.isfinite(got)), "C(x) is not finite"
    if norm == 0:
        assert not np.any(got), "C(0) is not zero"
        return 0.0
    errors = np.sum((got - np.float64(x)) ** 2, axis=1) / norm
    mean, slack = errors.mean(), ROUNDING + SIGMAS * errors.std() / np.sqrt(draws)
    shares = [0.0]
    if compressor.spec.omega is not None:
        omega = compressor.spec.omega(x.size)
        bias = np.sum((got.mean(axis=0) - np.float64(x)) ** 2) / norm
        shares += [bias / (BIAS * omega / draws + ROUNDING**2 * draws), mean / (omega + slack)]
    if compressor.spec.alpha is not None:
        shares.append(mean / (1 - compressor.spec.alpha(x.size) + slack))
    return float(max(shares))
