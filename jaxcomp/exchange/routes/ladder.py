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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.collectives import all_max
from jaxcomp.exchange.lanes import all_gather, gather_bytes
from jaxcomp.exchange.routes.route import (
    Call,
    Carried,
    Outgoing,
    Route,
    accepts_all,
    gathered_by,
    stateless,
)
from jaxcomp.exchange.varying import axis_size, on_equal_types
from jaxcomp.layout import Layout, rows_of
from jaxcomp.payloads import Coded, Leaves, decode_message, encode_message, lane_bytes

__all__ = ["LADDER", "decode", "encode", "gather", "rungs"]

Array = jax.Array
LEAST = 16  # words of the lowest rung


def rungs(words: int) -> tuple[int, ...]:
    """Capacities below that of a payload of so many words, ascending.

    >>> rungs(1000)
    (16, 32, 63, 75, 89, 106, 125, 149, 177, 211, 250, 298, 354, 421, 500, 595, 708, 841)
    """
    shares = [2 ** (-i / 4) for i in range(1, 17)] + [2.0**-i for i in range(5, 11)]
    return tuple(sorted({max(LEAST, math.ceil(words * share)) for share in shares if words > LEAST}))


def carry(out: Outgoing, call: Call) -> Carried:
    """All messages, in code (see `Route.carry`)."""
    is_stack = [rows_of(vector) is not None for vector in getattr(out.like, "vectors", (out.like,))]
    payloads, sent_bytes = gathered_by(functools.partial(gather, is_stack=is_stack), out.payload, None, call)
    return Carried(payloads, call.weights, "ladder", sent_bytes, out.state)


def gather(payload: Any, lengths: Any, call: Call, is_stack: list[bool] | None = None) -> tuple[Any, Any]:
    """All payloads, as an all-gather would bring them, for the bytes of their codes.

    Args:
        payload, lengths, call: as for `route.Gather`; padding has no code, so lengths are not needed.
        is_stack: for each vector of the payload, whether its arrays have a leading axis of rows; None: no vector.
    """
    del lengths
    is_stack = is_stack or [False] * len(getattr(payload, "leaves", (payload,)))
    workers, axis = axis_size(call.axis), call.axis
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), payload)
    steps = rungs(lane_bytes(payload) // 4)
    if not steps:
        return all_gather(payload, axis), gather_bytes(payload, axis)
    message = on_equal_types(lambda payload: encode(payload, is_stack), payload)
    words = jnp.pad(message.words, (0, max(steps[-1] - message.words.size, 0)))
    need = all_max(jnp.where(message.fits, message.used, steps[-1] + 1), axis)
    rung = jnp.searchsorted(jnp.asarray(steps, jnp.int32), need).astype(jnp.int32)

    def gathered_at(step):
        def branch(words):
            rows = all_gather(words[:step], axis)
            return jnp.pad(rows, ((0, 0), (0, steps[-1] - step)))

        return branch

    def coded(payload, words):
        rows = lax.switch(jnp.minimum(rung, len(steps) - 1), [gathered_at(step) for step in steps], words)
        return on_equal_types(lambda rows: lax.map(lambda row: decode(row, like, is_stack), rows), rows)

    rows = lax.cond(rung < len(steps), coded, lambda payload, words: all_gather(payload, axis), payload, words)
    sent = [*((workers - 1) * 4.0 * step for step in steps), gather_bytes(payload, axis)]
    agreed = 2 * (workers - 1) / workers * 4  # on the rung, in one word
    return rows, jnp.asarray(sent, jnp.float32)[rung] + agreed


def layout(given: Layout, workers: int) -> Layout:
    """As it is, but for leaves that are vectors of their own: each would have a coder of its own."""
    del workers
    return given.together()


LADDER = Route("ladder", accepts_all, layout, stateless, carry)


# ------------------------------------------------------------------------------------------------
# Stacks: each row is coded by itself


def encode(payload: Any, is_stack: list[bool]) -> Coded:
    """`encode_message` of a payload some of whose vectors are stacks: these first, row by row, then the others."""
    stacks, others = _apart(payload, is_stack)
    parts = [*map(_encode_rows, stacks), *map(encode_message, others)]
    buffer = jnp.zeros((sum(part.words.size for part in parts),), jnp.uint32)
    start = jnp.zeros((), jnp.int32)
    for part in parts:
        # The zeros after what is used are overwritten by the next part.
        buffer = lax.dynamic_update_slice(buffer, part.words, (start,))
        start = start + part.used
    return Coded(buffer, start, jnp.all(jnp.stack([part.fits for part in parts])))


def decode(words: Array, like: Any, is_stack: list[bool]) -> Any:
    """Inverse of `encode`, from the words in use or more."""
    stacks, others = _apart(like, is_stack)
    words = jnp.pad(words, (0, jax.eval_shape(lambda payload: encode(payload, is_stack), like).words.size))
    position, found = jnp.zeros((), jnp.int32), []
    for stack in stacks:
        payload, position = _decode_rows(words, position, stack)
        found.append(payload)
    rest = [decode_message(lax.dynamic_slice(words, (position,), (_capacity(each),)), each) for each in others]
    if not isinstance(like, Leaves):
        return (found or rest)[0]
    by_row, whole = iter(found), iter(rest[0].leaves)
    return Leaves(rest[0].dense, tuple(next(by_row if stack else whole) for stack in is_stack))


def _apart(payload: Any, is_stack: list[bool]) -> tuple[list[Any], list[Any]]:
    """The payloads of stacks; and, if there is anything else, one payload of that."""
    if not isinstance(payload, Leaves):
        return ([payload], []) if is_stack[0] else ([], [payload])
    pairs = list(zip(payload.leaves, is_stack, strict=True))
    rest = Leaves(payload.dense, tuple(each for each, stack in pairs if not stack))
    return [each for each, stack in pairs if stack], [rest]


def _capacity(like: Any) -> int:
    return jax.eval_shape(encode_message, like).words.size


def _encode_rows(stack: Any) -> Coded:
    """How many words each row has, then the words of all rows, one after the other."""
    coded = lax.map(encode_message, stack)
    rows = coded.used.shape[0]
    starts = rows + jnp.cumsum(coded.used, dtype=jnp.int32) - coded.used
    buffer = jnp.pad(coded.used.astype(jnp.uint32), (0, coded.words.size))
    put = lambda buffer, row: (lax.dynamic_update_slice(buffer, row[0], (row[1],)), None)
    buffer, _ = lax.scan(put, buffer, (coded.words, starts))
    return Coded(buffer, rows + jnp.sum(coded.used, dtype=jnp.int32), jnp.all(coded.fits))


def _decode_rows(words: Array, position: Array, like: Any) -> tuple[Any, Array]:
    """The payload of a stack whose words begin at `position`, and the place after them."""
    rows = jax.tree.leaves(like)[0].shape[0]
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like)
    used = lax.dynamic_slice(words, (position,), (rows,)).astype(jnp.int32)
    ends = position + rows + jnp.cumsum(used, dtype=jnp.int32)
    capacity = _capacity(row)
    one = lambda start: decode_message(lax.dynamic_slice(words, (start,), (capacity,)), row)
    return lax.map(one, ends - used), ends[-1]
