"""The same step run on n workers in different ways: vmap, shard_map, pmap, bytes on the host."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc

AXIS = "data"
N = 4
PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((40, 30))}


def gradients(seed, rounds=3, workers=N):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((rounds, workers, *p.shape)), p.dtype), PARAMS)


def fsum(rows):
    """The exact sum over workers, entry by entry."""
    rows = np.asarray(rows, np.float64).reshape(len(rows), -1)
    return [sum(map(Fraction, column)) for column in rows.T.tolist()]


def mesh_of(workers):
    return jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])


def run_shard_map(tx, params, grads, check_vma=True, jit=True):
    """grads: tree of [rounds, workers, ...]. Returns directions [rounds, ...] and the state, step by step."""
    workers = jax.tree.leaves(grads)[0].shape[1]
    mesh = mesh_of(workers)
    state, specs = jc.init_state(tx, params, mesh, AXIS)

    def step(state, grads, params):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, params)

    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS), P()), out_specs=(P(), specs), check_vma=check_vma)
    step = jax.jit(step) if jit else step
    return _loop(lambda state, g: step(state, g, params), state, grads)


def run_vmap(tx, params, grads):
    workers = jax.tree.leaves(grads)[0].shape[1]
    make = jax.vmap(lambda _: tx.init(params), axis_name=AXIS, out_axes=jc.state_axes(jax.eval_shape(tx.init, params)))
    state = make(jnp.arange(workers))
    axes = jc.state_axes(state)
    step = jax.jit(
        jax.vmap(lambda s, g: tx.update(g, s, params), in_axes=(axes, 0), out_axes=(None, axes), axis_name=AXIS)
    )
    return _loop(step, state, grads)


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
        direction, state = jax.block_until_ready(step(state, jax.tree.map(lambda g: g[t], grads)))  # noqa: B023
        directions.append(direction)
    return jax.tree.map(lambda *d: jnp.stack(d), *directions), state
