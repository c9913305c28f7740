"""SparseLoCo: the largest entries of each chunk in two bits each, with a memory that decays."""

from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.base import Algorithm
from jaxcomp.compressors.binned import binned
from jaxcomp.compressors.chunked import chunked
from jaxcomp.compressors.combine import compose
from jaxcomp.compressors.sparsify import top_k
from jaxcomp.compressors.tree import flat
from jaxcomp.factories import factory

__all__ = ["sparse_loco"]


@factory
def sparse_loco(
    *,
    k: int = 64,
    chunk: int = 4096,
    bits: int = 2,
    decay: float = 0.95,
    per_chunk: bool = False,
    memory: str = "float32",
) -> Algorithm:
    """Sends the k largest entries of each chunk in a few bits, and remembers the rest: for `local_updates`.

    message_i = decay e_i + Delta_i,   e_i <- message_i - C(message_i),   direction = (1/n) sum_i C(message_i),

    where C keeps the k largest magnitudes of each chunk and puts each into one of 2^bits bins, which decodes to the
    mean of what is in it. Chunks run through all leaves end to end, whatever their shapes. The outer optimizer
    is optax.sgd(1.0): the memory, which is sent bit by bit, takes the place of a momentum.

        tx = jc.local_updates(optax.adamw(1e-3), optax.sgd(1.0), jc.sparse_loco(), "data", every=30)

    Bytes: 12 bits a place and 2 a value in the exchange, k / chunk times 14 bits an entry. In the best code of
    `jc.wire` a place takes about log2(chunk / k) + 1.5 bits and a value its entropy: over 200 times less than f32.
    via="ladder" sends that code in the exchange itself. alpha is that of the composition (`chunked`, `binned`).

    Args:
        k: entries of each chunk, at least 1.
        chunk: entries, 1 .. 2^24.
        bits: of a value, 1 .. 4.
        decay: factor on the memory, in [0, 1].
        per_chunk: bins for each chunk, with 2^bits means in f32 each; else for all chunks together.
        memory: dtype in which the memory is kept between rounds: "float32", "bfloat16" or "int8" (`error_feedback`).

    Returns:
        `error_feedback(flat(compose(chunked(top_k(k=k), chunk), binned(bits))), decay=decay, memory=memory)`, whose
        parts check the arguments.

    Raises:
        ValueError: an argument is out of range.

    Reference: Sarfi, Thérien, Lidin, Belilovsky 2025 (SparseLoCo). The release differs: it takes the mean over those
    who sent an entry, not over all workers; cuts each tensor into chunks of its own, with sides of one where a
    dimension is prime; and takes bins of equal width, the middle one of which holds both signs (`binned`).

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jax.random.normal(jax.random.key(0), (2**20,))
    >>> compressor = jc.compose(jc.chunked(jc.top_k(k=64), 4096), jc.binned(2, blocks=1))  # that of sparse_loco()
    >>> _, payload = jc.roundtrip(compressor, x, key=jax.random.key(1))
    >>> 4 * x.size // len(jc.wire.encode(payload, code="best")) > 200
    True
    """
    values = binned(bits, block_size=k) if per_chunk else binned(bits, blocks=1)
    return error_feedback(flat(compose(chunked(top_k(k=k), chunk), values)), decay=decay, memory=memory)
