"""1-bit Adam and 0/1 Adam as optimizers: Adam with the exchange where these methods have it, inside."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.algorithms.onebit_adam import check_adam, onebit_directions
from jaxcomp.algorithms.zero_one_adam import Times, zero_one_updates
from jaxcomp.arrays import root_key
from jaxcomp.base import Compressor, check_compressor
from jaxcomp.checks import is_whole
from jaxcomp.compressors.signs import sign
from jaxcomp.exchange.axes import Axis, Placement, check_gradients
from jaxcomp.exchange.binding import exchange_of
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.groups import join, split
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = ["onebit_adam", "zero_one_adam"]

Array = jax.Array
Transformation = optax.GradientTransformationExtraArgs


def onebit_adam(
    learning_rate: float | optax.Schedule,
    axis_name: Axis,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    compressor: Compressor | None = None,
    memory: str = "float32",
    via: str = "two_shot",
    **options: Any,
) -> Transformation:
    """1-bit Adam: Adam for `freeze_step` steps, then the variance stands still and compressed momenta are exchanged.

    t <= freeze_step:   Adam on the mean gradient, uncompressed;
    afterwards:         c_i = b1 m + (1 - b1) g_i + e_i,   m <- mean_i C(c_i),   e_i <- c_i - C(c_i),   v stays;
    x <- x - learning_rate (m / (sqrt v + eps) + weight_decay x).

    With the default C, `sign()`, and via="two_shot" an entry costs one bit each way, with a memory on both. Run
    `update` where the axis is bound, as with `compressed_mean`; what comes out is equal on all workers.

    Args:
        learning_rate: number or optax schedule.
        axis_name: mapped axis of the workers.
        freeze_step: length of the warm-up, at least 1; the authors take 15 to 25 % of the steps, once v is stable.
        b1, b2, eps, weight_decay: of Adam; weight decay is decoupled.
        bias_correction: divide m by 1 - b1^t and v by 1 - b2^min(t, freeze_step). The release does not, whatever its
            flag says.
        compressor: C, with a known alpha; sign("l2") is the release's.
        memory: dtype of e_i, as for `error_feedback`.
        via, options: as for `compressed_mean`, `weights`, `seed`, `measure`, `link`, `sharded`, `bucket_bytes` say.

    Returns:
        `optax.GradientTransformationExtraArgs`: an optimizer. Entries without a gradient in the warm-up stay in place.

    Raises:
        ValueError: an argument is out of range, or nothing is known about the compressor.

    Reference: Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He 2021, algorithm 1.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.onebit_adam(0.1, "data", freeze_step=10)
    >>> step = lambda g: tx.update(g, tx.init(g), g)[0]
    >>> print(jax.vmap(step, axis_name="data", out_axes=None)(jnp.array([[3.0, -1.0], [1.0, -1.0]])))
    [-0.1  0.1]
    """
    check_adam("onebit_adam", b1, b2, eps)
    _check_steps("onebit_adam", freeze_step=freeze_step)
    compressor = sign() if compressor is None else compressor
    check_compressor("onebit_adam", compressor)
    algorithm = onebit_directions(
        compressor, freeze_step=int(freeze_step), b1=b1, b2=b2, eps=eps, bias_correction=bias_correction, memory=memory
    )
    parts: list[Any] = [compressed_mean(algorithm, axis_name, via, **options)]
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.with_extra_args_support(optax.chain(*parts, optax.scale_by_learning_rate(learning_rate)))


def zero_one_adam(
    learning_rate: float | optax.Schedule,
    axis_name: Axis,
    *,
    freeze_step: int,
    variance_repeat: int = 16,
    double_every: int = 32768,
    longest: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    bias_correction: bool = True,
    compressor: Compressor | None = None,
    memory: str = "float32",
    via: str = "two_shot",
    weights: Sequence[float] | Array | None = None,
    seed: int | Array = 0,
    measure: bool | int = False,
    link: Link | Mapping[str, Link] = DEFAULT,
) -> Transformation:
    """0/1 Adam: the variance at fewer and fewer steps, and local steps between exchanges of their compressed sum.

    At every step, with the step size gamma,

        m_i <- b1 m_i + (1 - b1) g_i,   u_i <- u_i + gamma m_i,   x_i <- x_i - gamma m_i / (sqrt v + eps);

    at a step with an exchange, with G the sum of the gammas and x the point shared after the last one,

        c_i = u_i / G + e_i,   m_i <- m = mean_i C(c_i),   e_i <- c_i - C(c_i),
        x_i <- x <- x - G m / (sqrt v + eps),   u_i <- 0;

    at a step with a variance (there is an exchange, too),   v <- b2 v + (1 - b2) (mean_i g_i)^2   before all that, from
    uncompressed gradients. Variances come at step 0 and then at intervals that double after every `variance_repeat` of
    them; from `freeze_step` on there are none. Exchanges come at every step up to there, then at every H-th, H = 1,
    doubled every `double_every` steps, up to `longest`.

    The parameters are the worker's own, as with `local_updates`: give them a leading axis of workers and pass each
    worker its row. Right after an exchange they are equal up to the rounding of x_i + update.

    Args:
        learning_rate: number or optax schedule; may be zero.
        axis_name: mapped axis of the workers.
        freeze_step, variance_repeat, double_every, longest: see above, at least 1; defaults are the release's.
        b1, b2, eps: of Adam.
        bias_correction: divide m by 1 - b1^t, and v by 1 - b2^j after j variances.
        compressor: C, with a known alpha; `sign()` if not given.
        memory: dtype of e_i, as for `error_feedback`.
        via, weights, seed, measure, link: as for `compressed_mean`.

    Returns:
        `optax.GradientTransformationExtraArgs`: an optimizer, whose update needs the parameters. Entries without a
        gradient at the variances stay in place.

    Raises:
        ValueError: an argument is out of range; no parameters.

    Reference: Lu, Li, Zhang, De Sa, He 2022, algorithm 1. There u_i itself is compressed; divided by G it has the scale
    of a momentum, so that e_i needs no new scale when the step size changes, and a step size of zero does no harm.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.zero_one_adam(0.1, "data", freeze_step=10)
    >>> def step(g):
    ...     x = jc.per_worker(jnp.zeros(2), "data")
    ...     return tx.update(g, tx.init(x), x)[0]
    >>> updates = jax.vmap(step, axis_name="data")(jnp.array([[3.0, -3.0], [1.0, -1.0]]))
    >>> print((10 * updates).round(2))
    [[-1.  1.]
     [-1.  1.]]
    """
    name = "zero_one_adam"
    check_adam(name, b1, b2, eps)
    numbers = {
        "freeze_step": freeze_step,
        "variance_repeat": variance_repeat,
        "double_every": double_every,
        "longest": longest,
    }
    _check_steps(name, **numbers)
    compressor = sign() if compressor is None else compressor
    check_compressor(name, compressor)
    times = Times(*map(int, numbers.values()))
    algorithm = zero_one_updates(
        compressor, times, b1=b1, b2=b2, eps=eps, bias_correction=bias_correction, memory=memory
    )
    placement = Placement(axis_name)
    options = {"weights": weights, "measure": int(measure), "code": "fixed" if measure else None, "link": link}
    run = exchange_of(name, algorithm, placement, via, root_key(seed), **options)

    def init(params):
        return run.init(jax.tree.map(jnp.asarray, params), starts=True)

    def update(grads, state, params=None, **extra):
        del extra
        if params is None:
            raise ValueError(f"{name}: update needs the parameters of this worker: tx.update(grads, state, params)")
        check_gradients(grads, placement)
        count = state.shared.count
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        given = lambda groups: (split(groups, grads), split(groups, params), rate)
        updates, after = run.step(state, given, jax.tree.leaves(grads))
        return join(after.about.groups, updates, params), after

    return Transformation(init, update)  # pyright: ignore[reportArgumentType]


def _check_steps(name: str, **numbers: int) -> None:
    for what, value in numbers.items():
        if not is_whole(value):
            raise ValueError(f"{name}: {what} must be an integer of at least 1; got {value}")
