"""One message of each worker through a route, on the level of `Route.reduce`: with vmap, on a mesh, among replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of

from jaxcomp.arrays import row_of
from jaxcomp.base import Compressor, Lengths, Spec, State, for_worker
from jaxcomp.compressors.vector import lift
from jaxcomp.exchange.axes import axis_index, axis_names, axis_size, varying
from jaxcomp.exchange.mean import mean_of
from jaxcomp.exchange.routes import Call, Outgoing, route_of
from jaxcomp.layout import Parts
from jaxcomp.payloads import Sparse


class Counts(NamedTuple):
    count: Any


def uneven(counts, values=jnp.float32):
    """The largest entries of a vector: counts[i] of them at worker i, then padding."""
    room = max(counts)

    def compress(key, x, state):
        count = state.shared.count[0]
        kept = jnp.sort(jnp.where(jnp.arange(room) < count, lax.top_k(jnp.abs(x), room)[1], x.size)).astype(jnp.int32)
        return Sparse(x.at[kept].get(mode="fill", fill_value=0).astype(values), kept), state.local

    def decompress(payload, shared, like):
        return jnp.zeros(like.shape, like.dtype).at[payload.indices].set(payload.values.astype(like.dtype), mode="drop")

    return Compressor(
        lambda key, like: State((), Counts(jnp.asarray(counts, jnp.int32))),
        compress,
        decompress,
        Spec("uneven", omega=None, alpha=lambda d: 1 / d, linear=False),
        lengths=lambda like: Lengths(tuple(counts), like.size),
        for_worker=lambda shared, worker, workers: row_of("uneven", shared, worker, workers),
    )


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


LIKES = {
    "small": Parts(shape(7), (shape(300), shape(3, 64))),
    "none": Parts(shape(0), (shape(300), shape(3, 64))),
    "dense": Parts(shape(7), ()),
    "vector": shape(300),
    "stack": shape(3, 64),
}


def messages(seed, like, lead):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal((*lead, *x.shape)), x.dtype), like)


def send(via, compressor, like, message, call):
    """What one worker does: the result of the route, and its payload."""
    compressor, axis = lift(compressor), call.axis
    state = compressor.init(jax.random.key(0), like)
    mine = for_worker(compressor, state.shared, axis_index(axis), axis_size(axis))
    local = varying(state.local, (*axis_names(axis), *call.outer))
    key = jax.random.fold_in(jax.random.key(1), axis_index((*axis_names(axis), *call.outer)))
    payload, _ = compressor.compress(key, message, State(local, mine))
    payload = varying(payload, (*axis_names(axis), *call.outer))
    route = route_of(via)
    memory = route.init(jax.random.key(2), compressor, like)
    out = Outgoing(jax.random.fold_in(key, 1), compressor, payload, state.shared, like, memory)
    carried = route.carry(out, call)
    return carried._replace(mean=mean_of(out, carried, call)), payload


def first(tree):
    return jax.tree.map(lambda a: a[0], tree)


def row(tree):
    return jax.tree.map(lambda a: a[None], tree)


def grid(second):
    return jax.make_mesh((2, 2), (AXIS, second), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def on_vmap(step, given):
    """step(message, call) -> equal on all workers; given: [n, ...]."""
    return jax.jit(jax.vmap(lambda x: step(x, Call(AXIS)), axis_name=AXIS, out_axes=None))(given)


def on_mesh(step, given, check_vma=True):
    workers = len(jax.tree.leaves(given)[0])
    one = lambda x: step(first(x), Call(AXIS))
    return jax.jit(jax.shard_map(one, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(), check_vma=check_vma))(
        given
    )


def on_shards(step, given):
    """given: [2 workers, 2 shards, ...]; results have a leading axis of shards."""
    one = lambda x: row(varying(step(first(first(x)), Call(AXIS, outer=("shard",))), "shard"))
    return jax.jit(jax.shard_map(one, mesh=grid("shard"), in_specs=P(AXIS, "shard"), out_specs=P("shard")))(given)


def on_replicas(step, given):
    """given: [2 workers, ...], equal on 2 devices each."""
    one = lambda x: step(first(x), Call(AXIS, replicas=("replica",)))
    return jax.jit(jax.shard_map(one, mesh=grid("replica"), in_specs=P(AXIS), out_specs=P()))(given)


def ragged_by_definition(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA's CPU backend lacks, with all_gather, as its documentation says."""
    gathered = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    operands, starts, sizes, places = gathered
    me = lax.axis_index(axis_name)
    for sender in range(lax.axis_size(axis_name)):
        j = lax.iota(jnp.int32, operands.shape[1])
        inside = j < sizes[sender, me]
        words = operands[sender][jnp.minimum(starts[sender, me] + j, operands.shape[1] - 1)]
        output = output.at[jnp.where(inside, places[sender, me] + j, output.size)].set(words, mode="drop")
    return output


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
