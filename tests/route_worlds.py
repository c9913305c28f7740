"""One message of each worker through a route, on the level of `Route.reduce`: with vmap, on a mesh, among replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from worlds import AXIS, at, mesh_of

from jaxcomp.arrays import row_of
from jaxcomp.base import Compressor, Lengths, Round, Spec, State
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.axes import axis_index, axis_names, axis_size, varying
from jaxcomp.exchange.driver import Message
from jaxcomp.exchange.routes import Way, route_of
from jaxcomp.groups import Group
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


def groups_of(like, *, small=False):
    """The groups of these shapes, the first of which may be of small leaves; of one shape, which has its key alone."""
    if not isinstance(like, tuple):
        return (Group((0,), like.shape, like.dtype),)
    numbers = iter(range(len(like)))
    is_small = lambda i: small and i == 0
    number = lambda i: None if is_small(i) else next(numbers)
    return tuple(Group((i,), x.shape, x.dtype, small=is_small(i), number=number(i)) for i, x in enumerate(like))


def in_buckets(groups, numbers):
    return tuple(group._replace(bucket=number) for group, number in zip(groups, numbers, strict=True))


LIKES = {
    "small": in_buckets(groups_of((shape(7), shape(300), shape(3, 64)), small=True), (0, 2, 1)),
    "none": groups_of((shape(300), shape(3, 64))),
    "dense": groups_of((shape(7),), small=True),
    "vector": shape(300),
    "stack": shape(3, 64),
}


def is_bare(like):
    return isinstance(like, jax.ShapeDtypeStruct)


def messages(seed, like, lead):
    """An array, or one for each group."""
    rng = np.random.default_rng(seed)
    one = lambda x: jnp.asarray(rng.standard_normal((*lead, *x.shape)), x.dtype)
    return one(like) if is_bare(like) else tuple(map(one, like))


class Result(NamedTuple):
    """mean: an array, or one for each group. message, carried: of the driver, and of the route."""

    mean: Any
    message: Any
    carried: Any


def round_of(compressor, like, key, axis=None):
    """A round at one worker, as an algorithm sees it."""
    groups = groups_of(like) if is_bare(like) else like
    return Round(key, groups, each_of(compressor, groups), axis_index(axis), axis_size(axis))


def shapes_of(here):
    return tuple(group.like for group in here.groups)


def send(via, compressor, like, message, way):
    """What one worker does with a message: the mean, and what came of it."""
    axes = (*axis_names(way.axis), *way.outer)
    here = round_of(compressor, like, jax.random.key(0))
    states = tuple(State(varying(s.local, axes), s.shared) for s in here.start(shapes_of(here)))
    here = here._replace(key=jax.random.fold_in(jax.random.key(1), axis_index(axes)))
    request = here.mean((message,) if is_bare(like) else message, states)
    sent, route = Message(request, way, axis_index(way.axis)), route_of(via)
    memory = State() if route.init is None else route.init(jax.random.key(2), here.compressors, shapes_of(here))
    carried = route.carry(sent.parcels, way, request.route_key, memory)
    sent.arrived = carried.arrived
    return Result(sent.mean[0] if is_bare(like) else sent.mean, sent, carried)


def row(tree):
    return jax.tree.map(lambda a: a[None], tree)


def on_vmap(step, given):
    """step(message, way) -> equal on all workers; given: [n, ...]."""
    way = Way(AXIS, len(jax.tree.leaves(given)[0]))
    return jax.jit(jax.vmap(lambda x: step(x, way), axis_name=AXIS, out_axes=None))(given)


def on_mesh(step, given, check_vma=True):
    workers = len(jax.tree.leaves(given)[0])
    one = lambda x: step(at(x), Way(AXIS, workers))
    one = jax.shard_map(one, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(), check_vma=check_vma)
    return jax.jit(one)(given)


def on_shards(step, given):
    """given: [2 workers, 2 shards, ...]; results have a leading axis of shards."""
    one = lambda x: row(varying(step(at(at(x)), Way(AXIS, 2, outer=("shard",))), "shard"))
    return jax.jit(
        jax.shard_map(one, mesh=mesh_of((2, 2), (AXIS, "shard")), in_specs=P(AXIS, "shard"), out_specs=P("shard"))
    )(given)


def on_replicas(step, given):
    """given: [2 workers, ...], equal on 2 devices each."""
    one = lambda x: step(at(x), Way(AXIS, 2, replicas=("replica",)))
    mesh = mesh_of((2, 2), (AXIS, "replica"))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(AXIS), out_specs=P()))(given)


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
