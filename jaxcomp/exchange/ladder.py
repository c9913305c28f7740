"""Messages whose size depends on what is in them, in a collective of static shapes.

Every worker codes its payload into words (`payloads`). The largest number of words that any of them needs, a
`pmax`, decides on which rung of a static ladder of capacities they meet: each rung is one branch of a `switch` with
an all-gather of that many words, and as the number is equal on all workers, all take the same branch. The last rung
gathers the payloads as they are: for content that no code makes shorter.

The rungs are 2^(-1/4) apart down to a sixteenth of the payload and 1/2 apart below, so a message is padded by 19 %
at most, by 9 % in the mean, and there are about twenty.

What the conditional costs inside `shard_map`: it is an ordering point, so nothing that the collective could have
overlapped with runs beside it; one more latency for the `pmax`; and buffers for the longest rung, which are written
whatever the rung is: 0.6 ms beside 3.5 ms for a gather of 4 MB, two CPU devices on one core
(`python -m experiments bench codes`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.lanes import Axis, all_gather, all_max
from jaxcomp.payloads import decode_message, encode_message, lane_bytes

__all__ = ["ladder", "rungs"]

Array = jax.Array
LEAST = 16  # words of the lowest rung


def rungs(words: int) -> tuple[int, ...]:
    """Capacities below that of a payload of so many words, ascending.

    >>> rungs(1000)
    (16, 32, 63, 75, 89, 106, 125, 149, 177, 211, 250, 298, 354, 421, 500, 595, 708, 841)
    """
    shares = [2 ** (-i / 4) for i in range(1, 17)] + [2.0**-i for i in range(5, 11)]
    return tuple(sorted({max(LEAST, math.ceil(words * share)) for share in shares if words > LEAST}))


def ladder(payload: Any, axis: Axis) -> tuple[Any, Array]:
    """All payloads, as an all-gather would bring them, for the bytes of their codes.

    Args:
        payload: of this worker.
        axis: mapped axis.

    Returns:
        The payloads stacked on a leading axis of n, bitwise those of `lanes.all_gather`, equal on all workers; and
        the bytes that each worker contributed, f32[], equal on all workers.
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), payload)
    whole = lane_bytes(payload)
    steps = rungs(whole // 4)
    if not steps:
        return all_gather(payload, axis), jnp.asarray(whole, jnp.float32)
    message = encode_message(payload)
    words = jnp.pad(message.words, (0, max(steps[-1] - message.words.size, 0)))
    need = all_max(jnp.where(message.fits, message.used, steps[-1] + 1), axis)
    rung = jnp.searchsorted(jnp.asarray(steps, jnp.int32), need).astype(jnp.int32)

    def meet_at(step):
        def branch(words):
            rows = all_gather(words[:step], axis)
            return jnp.pad(rows, ((0, 0), (0, steps[-1] - step)))

        return branch

    def coded(payload, words):
        rows = lax.switch(jnp.minimum(rung, len(steps) - 1), [meet_at(step) for step in steps], words)
        return lax.map(lambda row: decode_message(row, like), rows)

    stacked = lax.cond(rung < len(steps), coded, lambda payload, words: all_gather(payload, axis), payload, words)
    return stacked, jnp.asarray([*(4.0 * step for step in steps), float(whole)], jnp.float32)[rung]
