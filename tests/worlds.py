"""Meshes, and the same step run on n workers in different ways: vmap, shard_map, pmap, bytes on the host."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from jaxcomp.arrays import like_of, root_key, wide_like, zeros_like
from jaxcomp.base import (
    Mean,
    Round,
    State,
    Sum,
    accumulate,
    add_own,
    advance,
    answered,
    for_worker,
    residual,
    sides,
)
from jaxcomp.compressors.tree import as_leaves, each_of, from_leaves, layout_of
from jaxcomp.groups import groups_of, join, split
from jaxcomp.payloads import Dense

AXIS = "data"
N = 4
PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((40, 30))}


def gradients(seed, rounds=3, workers=N, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((rounds, workers, *p.shape)), p.dtype), params)


def heterogeneous(seed, rounds=5, workers=N, size=60):
    """[rounds, workers, size]: each worker around its own point."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((1, workers, size))
    return (points + 0.3 * rng.standard_normal((rounds, workers, size))).astype(np.float32)


def fsum(rows):
    """The exact sum over workers, entry by entry."""
    rows = np.asarray(rows, np.float64).reshape(len(rows), -1)
    return [sum(map(Fraction, column)) for column in rows.T.tolist()]


def mesh_of(sizes=N, names=(AXIS, "model"), kind=AxisType.Auto):
    """sizes: of the axes, or the number of workers; kind: of all axes."""
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def assert_close(found, want, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, want)


def assert_same(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)


def at(tree, index=0):
    """The part of each array at an index of its leading axis."""
    return jax.tree.map(lambda x: x[index], tree)


def mesh_step(tx, params, mesh, axis=AXIS, across=None, **options):
    """The state, and the compiled step(state, grads) whose gradients have a leading axis of workers.

    across: how gradients lie, if not P(axis); options: of `jax.jit`.
    """
    across = P(axis) if across is None else across
    state, specs = jc.init_state(tx, params, mesh, axis)
    step = lambda state, grads: tx.update(at(grads), state, params)
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, across), out_specs=(P(), specs))
    return state, jax.jit(step, **options)


def vmap_step(tx, params, workers=N, axis=AXIS):
    state, axes = jc.init_state(tx, params, workers, axis)
    step = lambda state, grads: tx.update(grads, state, params)
    return state, jax.jit(jax.vmap(step, in_axes=(axes, 0), out_axes=(None, axes), axis_name=axis))


def run_shard_map(tx, params, grads, check_vma=True):
    """grads: tree of [rounds, workers, ...]. Returns directions [rounds, ...] and the state, step by step."""
    workers = jax.tree.leaves(grads)[0].shape[1]
    state, specs = jc.init_state(tx, params, mesh_of(workers), AXIS)
    step = _sharded(tx, workers, check_vma, *_frozen(specs))
    return _loop(lambda state, g: step(state, g, params), state, grads)


def run_vmap(tx, params, grads):
    workers = jax.tree.leaves(grads)[0].shape[1]
    state, axes = jc.init_state(tx, params, workers, AXIS)
    step = _mapped(tx, *_frozen(axes))
    return _loop(lambda state, g: step(state, g, params), state, grads)


def _frozen(tree):
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return tuple(leaves), structure


@functools.cache
def _sharded(tx, workers, check_vma, leaves, structure):
    """One function for each optimizer, so that what runs it again does not compile it again."""
    specs = jax.tree.unflatten(structure, leaves)

    def step(state, grads, params):
        return tx.update(at(grads), state, params)

    ins, outs = (specs, P(AXIS), P()), (P(), specs)
    return jax.jit(jax.shard_map(step, mesh=mesh_of(workers), in_specs=ins, out_specs=outs, check_vma=check_vma))


@functools.cache
def _mapped(tx, leaves, structure):
    axes = jax.tree.unflatten(structure, leaves)
    step = lambda state, grads, params: tx.update(grads, state, params)
    return jax.jit(jax.vmap(step, in_axes=(axes, 0, None), out_axes=(None, axes), axis_name=AXIS))


def run_pmap(tx, params, grads):
    workers = jax.tree.leaves(grads)[0].shape[1]
    devices = jax.devices()[:workers]
    state = jax.pmap(lambda _: tx.init(params), axis_name=AXIS, devices=devices)(jnp.arange(workers))
    step = jax.pmap(lambda s, g: tx.update(g, s, params), axis_name=AXIS, devices=devices)
    directions, state = _loop(step, state, grads)
    return jax.tree.map(lambda d: d[:, 0], directions), state


def _loop(step, state, grads):
    rounds = jax.tree.leaves(grads)[0].shape[0]
    directions = []
    for t in range(rounds):
        direction, state = jax.block_until_ready(step(state, at(grads, t)))
        directions.append(direction)
    return jax.tree.map(lambda *d: jnp.stack(d), *directions), state


# ------------------------------------------------------------------------------------------------
# Workers as threads, messages as bytes


class HostSent(NamedTuple):
    """`base.Sent`, of payloads that arrived as bytes. arrived: of each group, of all workers."""

    request: Mean
    payloads: tuple[Any, ...]
    mine: tuple[Any, ...]
    states: tuple[State, ...]
    arrived: tuple[Any, ...]

    @property
    def mean(self):
        return self._mean(self.request.compressors)

    @property
    def direction(self):
        return self.mean

    @property
    def own(self):
        return self._own(self.request.compressors)

    @property
    def residual(self):
        each = zip(self.request.compressors, self.request.message, self.payloads, self.mine, strict=True)
        return tuple(residual(*four) for four in each)

    def add_to(self, total, weight):
        each = zip(self.request.compressors, total, self.payloads, self.mine, strict=True)
        return tuple(add_own(c, t, payload, weight, mine) for c, t, payload, mine in each)

    def read_by(self, compressors):
        return self._mean(compressors), self._own(compressors)

    def _mean(self, compressors):
        each = zip(compressors, self.arrived, self.request.states, self.request.message, strict=True)
        return tuple(_mean_on_host(c, list(arrived), state.shared, like_of(x)) for c, arrived, state, x in each)

    def _own(self, compressors):
        each = zip(compressors, self.payloads, self.mine, self.request.message, strict=True)
        return tuple(c.decompress(payload, mine, like_of(x)) for c, payload, mine, x in each)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _added_up(accumulate_by, payloads, shared, size, zeros):
    return jax.tree.map(lambda t: t * (1 / size), accumulate_by(zeros, payloads, None, shared))


def _mean_on_host(compressor, arrived, shared, like):
    add = _adding(compressor)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *arrived)
    return _added_up(add, stacked, shared, len(arrived), zeros_like(wide_like(like)))


@functools.cache
def _adding(compressor):
    return functools.partial(accumulate, compressor)


@functools.cache
def _compiled(function):
    return jax.jit(function)


class Board:
    """Where n threads leave what they send; one of them runs at a time."""

    def __init__(self, size):
        self.size, self.running = size, threading.Lock()
        self._barrier, self._places = threading.Barrier(size, timeout=120), [None] * size

    def all_gather(self, index, message):
        """The messages of all workers. Called by whoever runs, who lets the others run while he waits."""
        self._places[index] = message
        self._wait()
        every = list(self._places)
        self._wait()
        return every

    def _wait(self):
        self.running.release()
        try:
            self._barrier.wait()
        finally:
            self.running.acquire()

    def give_up(self):
        self._barrier.abort()


class HostExchange:
    """Answers the requests of one worker among n threads: every message crosses as the bytes of `jc.wire.encode`."""

    def __init__(self, index, board):
        self.index, self.size, self._board = jnp.asarray(index, jnp.int32), board.size, board
        self._number, self.sent_bytes = index, 0

    def _exchange(self, payload):
        message = jc.wire.encode(payload)
        self.sent_bytes += len(message)
        return [jc.wire.decode(each) for each in self._board.all_gather(self._number, message)]

    def answer(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        if isinstance(request, Mean):
            return self._mean(request)
        if isinstance(request, Sum):
            return self._sum(request.x)
        branch = request.yes if bool(request.predicate) else request.no
        return answered(branch(*request.operands), self.answer)

    def _mean(self, request):
        pairs = list(zip(request.compressors, request.states, strict=True))
        mine = tuple(for_worker(c, state.shared, self.index, self.size) for c, state in pairs)
        given = zip(pairs, request.keys, request.message, mine, strict=True)
        done = [_compiled(c.compress)(key, x, State(state.local, own)) for (c, state), key, x, own in given]
        payloads = tuple(payload for payload, _ in done)
        arrived = self._exchange(as_leaves(request.groups, payloads))
        arrived = tuple(zip(*(from_leaves(request.groups, each) for each in arrived), strict=True))
        after = zip(pairs, done, strict=True)
        states = tuple(State(local, advance(c, state.shared)) for (c, state), (_, local) in after)
        return HostSent(request, payloads, mine, states, arrived)

    def _sum(self, x):
        leaves, structure = jax.tree.flatten(x)
        arrived = self._exchange(Dense(jnp.concatenate([leaf.reshape(-1) for leaf in leaves] or [jnp.zeros(0)])))
        total = functools.reduce(jnp.add, [each.values for each in arrived])
        ends = np.cumsum([leaf.size for leaf in leaves])
        parts = [total[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
        return jax.tree.unflatten(structure, parts)


def run_on_host(algorithm, params, grads, seed=0):
    """`run_vmap` of `compressed_mean(algorithm, AXIS, "gather", seed=seed)`: directions and state of each worker."""
    rounds, workers = jax.tree.leaves(grads)[0].shape[:2]
    groups, board = groups_of(layout_of(algorithm), params), Board(workers)
    compressors = each_of(algorithm, groups.groups)
    shared_key, private_key = jax.random.split(root_key(seed))
    if algorithm.compressor is not None:
        shared_key, _ = jax.random.split(shared_key)

    def work(i):
        state, directions = algorithm.init(Round(shared_key, groups.groups, compressors), groups.like), []
        exchange = HostExchange(i, board)
        for t in range(rounds):
            key = jax.random.fold_in(jax.random.fold_in(private_key, t), i)
            mine = split(groups, at(grads, (t, i)))
            here = Round(key, groups.groups, compressors, exchange.index, workers)
            direction, state = answered(algorithm.update(here, mine, state), exchange.answer)
            directions.append(join(groups, direction))
        return jax.tree.map(lambda *d: jnp.stack(d), *directions), sides(state, algorithm.roles)

    def run(i):
        with board.running:
            try:
                return work(i)
            except BaseException:
                board.give_up()
                raise

    with ThreadPoolExecutor(workers) as pool:
        done = [future.result() for future in [pool.submit(run, i) for i in range(workers)]]
    return [directions for directions, _ in done], [state for _, state in done]
