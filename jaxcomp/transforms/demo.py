"""DeMo: workers exchange the fast components of their momenta, and keep the others to themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.checks import is_integer
from jaxcomp.compressors.dct import dct_of_blocks
from jaxcomp.compressors.sparsify import top_k
from jaxcomp.exchange.axes import Axis
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = ["demo"]


def demo(
    learning_rate: float | optax.Schedule,
    axis_name: Axis,
    *,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 64,
    weight_decay: float = 0.0,
    mean: str = "senders",
    memory: str = "float32",
    via: str = "auto",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Decoupled momentum: the largest cosine coefficients of each block are sent, and leave the momentum.

    delta_i <- decay delta_i + g_i,   q_i = top-k of each block of T delta_i,   delta_i <- delta_i - T' q_i,
    x <- x - learning_rate (sign(T' mean_i q_i) + weight_decay x),

    where the mean of a coefficient is over the workers that sent it, or over all (`mean`), and
    T the orthonormal DCT-II of blocks of chunk x chunk of the last two axes of each leaf (`dct`). That is error
    feedback that forgets, with alpha = k / chunk^2, and a sign. Vectors and scalars, and small leaves, are exchanged
    as they are.

    A coefficient travels in 32 bits and ceil(log2) of the size of its block for its place, 12 for 64 x 64.

    Args:
        learning_rate: number or optax schedule. It stands behind the sign, and not in delta as in the release; for a
            constant one that is the same.
        axis_name: mapped axis of the workers.
        decay: of delta, in [0, 1].
        k: coefficients of a block that are sent, at least 1; all of a block with fewer.
        chunk: side of a block.
        weight_decay: decoupled.
        mean: "senders": a coefficient is divided by the weights of those who sent it, as in the release. What few
            send is then as large as what all send, and the direction is no longer what left the momenta divided by n,
            though each momentum still loses what it sent and no more. It needs all messages: routes that bring their
            sum alone are refused, and "auto" always gathers. "all": by the weights of all, as in error feedback.
        memory: dtype of delta, as for `error_feedback`.
        via: how messages travel, as for `compressed_mean`.
        options: its `weights`, `seed`, `measure` and `sharded`.

    Returns:
        `optax.GradientTransformationExtraArgs`: an optimizer; updates are equal on all workers.

    Raises:
        ValueError: an argument is out of range.

    Reference: Peng, Quesnelle, Kingma 2024 (DeMo), algorithm 1. The release counts a coefficient of zero among those
    sent where a block has fewer than k others; here it is not. Messages are added in the order of the workers, so the
    result does not vary from run to run.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.demo(0.1, "data", k=1, chunk=4)
    >>> grads = jnp.stack([jnp.ones((40, 40)), -3 * jnp.ones((40, 40))])
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0], axis_name="data", out_axes=None)
    >>> updates = jax.jit(step)(grads)
    >>> print(updates.min(), updates.max())
    0.1 0.1
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"demo: decay must be in [0, 1]; got {decay}")
    if not is_integer(k):
        raise ValueError(f"demo: k must be an integer of at least 1; got {k!r}")
    if mean not in ("senders", "all"):
        raise ValueError(f"demo: mean must be 'senders' or 'all'; got {mean!r}")
    read_by = dct_of_blocks(top_k(k=k), chunk, by_senders=True) if mean == "senders" else None
    algorithm = error_feedback(dct_of_blocks(top_k(k=k), chunk), decay=decay, read_by=read_by, memory=memory)
    parts: list[Any] = [
        compressed_mean(algorithm, axis_name, via, **options),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates)),
    ]
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.with_extra_args_support(optax.chain(*parts, optax.scale_by_learning_rate(learning_rate)))
