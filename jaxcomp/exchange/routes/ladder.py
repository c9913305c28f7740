"""via="ladder": messages whose size depends on what is in them, in a collective of static shapes.

Every worker codes its payload into words (`jaxcomp.payloads`). The largest number of words that any of them needs, a
`pmax`, decides which rung of a static ladder of capacities is taken: each rung is one branch of a `switch` with an
all-gather of that many words, and as the number is equal on all workers, all take the same branch. The last rung
gathers the payloads as they are: for content that no code makes shorter.

The rungs are 2^(-1/4) apart down to a sixteenth of the payload and 1/2 apart below, so a message is padded by 19 %
at most, by 9 % in the mean, and there are about twenty. (n - 1) times the capacity of the rung is sent by each worker,
and 2 (n - 1) / n times four bytes to agree on it.

What the conditional costs inside `shard_map`: it is an ordering point, so nothing that the collective could have
overlapped with runs beside it; one more latency for the `pmax`; and buffers for the longest rung, which are written
whatever the rung is: 0.6 ms beside 3.5 ms for a gather of 4 MB, two CPU devices on one core
(`python -m experiments bench codes`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.axes import on_equal_types
from jaxcomp.exchange.collectives import all_max, gather_bytes, gather_tree, gathered
from jaxcomp.exchange.routes.route import Parcel, Way, gathering_route
from jaxcomp.payloads import Coded, decode_message, encode_message, lane_bytes
from jaxcomp.payloads.registry import unpack_message
from jaxcomp.payloads.words import Cursor, joined

__all__ = ["LADDER", "decode_messages", "encode_messages", "gather_coded", "rungs"]

Array = jax.Array
LEAST = 16  # words of the lowest rung


def rungs(words: int) -> tuple[int, ...]:
    """Capacities below that of a payload of so many words, ascending.

    >>> rungs(1000)
    (16, 32, 63, 75, 89, 106, 125, 149, 177, 211, 250, 298, 354, 421, 500, 595, 708, 841)
    """
    shares = [2 ** (-i / 4) for i in range(1, 17)] + [2.0**-i for i in range(5, 11)]
    return tuple(sorted({max(LEAST, math.ceil(words * share)) for share in shares if words > LEAST}))


def gather_coded(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], Any]:
    """All payloads, as an all-gather would bring them, for the bytes of their codes."""
    payloads, is_stack = tuple(parcel.payload for parcel in parcels), [len(parcel.like.shape) > 1 for parcel in parcels]
    workers, axis = way.workers, way.axis
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), payloads)
    steps = rungs(lane_bytes(payloads) // 4)
    if not steps:
        return gathered(payloads, axis)
    message = on_equal_types(lambda payloads: encode_messages(payloads, is_stack), payloads)
    words = jnp.pad(message.words, (0, max(steps[-1] - message.words.size, 0)))
    need = all_max(jnp.where(message.fits, message.used, steps[-1] + 1), axis)
    rung = jnp.searchsorted(jnp.asarray(steps, jnp.int32), need).astype(jnp.int32)

    def gathered_at(step, words):
        return jnp.pad(gather_tree(words[:step], axis), ((0, 0), (0, steps[-1] - step)))

    def coded(payloads, words):
        branches = [functools.partial(gathered_at, step) for step in steps]
        rows = lax.switch(jnp.minimum(rung, len(steps) - 1), branches, words)
        return on_equal_types(lambda rows: lax.map(lambda row: decode_messages(row, like, is_stack), rows), rows)

    rows = lax.cond(rung < len(steps), coded, lambda payloads, words: gather_tree(payloads, axis), payloads, words)
    sent = [*((workers - 1) * 4.0 * step for step in steps), gather_bytes(payloads, axis)]
    agreed = 2 * (workers - 1) / workers * 4  # on the rung, in one word
    return rows, jnp.asarray(sent, jnp.float32)[rung] + agreed


# Leaves that are vectors of their own would each have a coder of its own.
LADDER = gathering_route("ladder", gather_coded, layout=lambda given, workers: given.together(), buckets=False)


# ------------------------------------------------------------------------------------------------
# The payloads of all groups, one after the other; each row of a stack is coded by itself


def encode_messages(payloads: tuple[Any, ...], is_stack: Sequence[bool]) -> Coded:
    """The words of all payloads, one after the other."""
    pairs = zip(payloads, is_stack, strict=True)
    return joined([_encode_rows(payload) if stack else encode_message(payload) for payload, stack in pairs])


def decode_messages(words: Array, like: tuple[Any, ...], is_stack: Sequence[bool]) -> tuple[Any, ...]:
    """Inverse of `encode_messages`, from the words in use or more."""
    room = jax.eval_shape(lambda payloads: encode_messages(payloads, is_stack), like).words.size
    cursor = Cursor(words, room)
    read = lambda each, stack: _decode_rows(cursor, each) if stack else unpack_message(cursor, each)
    return tuple(map(read, like, is_stack))


def _encode_rows(stack: Any) -> Coded:
    """How many words each row has, then the words of all rows, one after the other."""
    coded = lax.map(encode_message, stack)
    rows = coded.used.shape[0]
    starts = rows + jnp.cumsum(coded.used, dtype=jnp.int32) - coded.used
    buffer = jnp.pad(coded.used.astype(jnp.uint32), (0, coded.words.size))
    put = lambda buffer, row: (lax.dynamic_update_slice(buffer, row[0], (row[1],)), None)
    buffer, _ = lax.scan(put, buffer, (coded.words, starts))
    return Coded(buffer, rows + jnp.sum(coded.used, dtype=jnp.int32), jnp.all(coded.fits))


def _decode_rows(cursor: Cursor, like: Any) -> Any:
    """The payload of a stack whose words begin here."""
    rows = jax.tree.leaves(like)[0].shape[0]
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like)
    used = cursor.take(rows).astype(jnp.int32)
    ends = cursor.position + jnp.cumsum(used, dtype=jnp.int32)
    capacity = jax.eval_shape(encode_message, row).words.size
    words = cursor.words
    one = lambda start: decode_message(lax.dynamic_slice(words, (start,), (capacity,)), row)
    payload = lax.map(one, ends - used)
    cursor.position = ends[-1]
    return payload
