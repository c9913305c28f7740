"""Bias, omega and alpha of random compressors at awkward vectors, against what their specs claim.

Of N draws of C(x): the mean is within what omega allows for N independent errors, N |mean - x|^2 <= BIAS omega |x|^2;
the mean of |C(x) - x|^2 is at most omega |x|^2 (or (1 - alpha) |x|^2), but for SIGMAS standard errors of that mean.
What looks wrong is drawn again, eight times as often, before it is said to fall.
"""

import jax
import numpy as np

import jaxcomp as jc
from experiments.attack import HELD, REFUSED, Attack
from experiments.attack.draw import compressor_text, made, vector

__all__ = ["measured", "ready"]

DRAWS = 1024
BIAS, SIGMAS = 40.0, 6.0
ROUNDING = 1e-5  # of f32, relative to |x|^2


def ready(seed: int) -> Attack:
    worst = [0.0]

    def attempt(number: int) -> str:
        said, share = one(np.random.default_rng([seed, 3, number]))
        worst[0] = max(worst[0], share)
        return REFUSED if said is None else HELD if share <= 1 else said

    return Attack(attempt, lambda: f"{100 * worst[0]:.0f} % of what specs allow")


def one(rng: np.random.Generator) -> tuple[str | None, float]:
    """The case in words (None where it is refused), and how much of what is allowed it took."""
    text, size = compressor_text(rng), int(rng.choice([1, 2, 33, 64, 300]))
    kind, x = vector(rng, size)
    said = f"({text} at {size} entries, {kind}): "
    try:
        compressor = made(text)
        if compressor.spec.omega is None and compressor.spec.alpha is None:
            return None, 0.0
        share = measured(compressor, x, int(rng.integers(2**31)), DRAWS)
        if share > 1:
            share = measured(compressor, x, int(rng.integers(2**31)), 8 * DRAWS)
    except (ValueError, TypeError) as error:
        return (None, 0.0) if str(error) else (f"{said}an error without words", 2.0)
    except Exception as error:
        return f"{said}{type(error).__name__}: {error}", 2.0
    return f"{said}{share:.1f} times what its spec allows", share


def measured(compressor, x: np.ndarray, seed: int, draws: int) -> float:
    """The largest of the three figures, as a share of what is allowed."""
    norm = float(np.sum(np.float64(x) ** 2))
    batches = jax.random.split(jax.random.key(seed), draws).reshape(-1, DRAWS)  # keys, so many at a time
    rough = jax.jit(jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0]))
    got = np.concatenate([np.asarray(rough(keys), np.float64) for keys in batches])
    if not np.all(np.isfinite(got)):
        return 2.0
    if norm == 0:
        return 2.0 if np.any(got) else 0.0
    errors = np.sum((got - np.float64(x)) ** 2, axis=1) / norm
    mean, standard = errors.mean(), errors.std() / np.sqrt(draws)
    shares = []
    slack = ROUNDING + SIGMAS * standard
    if compressor.spec.omega is not None:
        omega = compressor.spec.omega(x.size)
        bias = np.sum((got.mean(axis=0) - np.float64(x)) ** 2) / norm
        shares += [bias / (BIAS * omega / draws + ROUNDING**2 * draws), mean / (omega + slack)]
    if compressor.spec.alpha is not None:
        shares.append(mean / (1 - compressor.spec.alpha(x.size) + slack))
    return float(max(shares))
