"""Workers with parameters of their own, under vmap and on meshes: what tests of local updates compare."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import at, mesh_of

import jaxcomp as jc

PARAMS = {
    "a": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4),
    "b": np.ones(8, np.float32),
    "c": np.ones(16, np.float32),
}


def stacked(params, workers=4):
    return jax.tree.map(lambda p: jnp.stack([p] * workers), params)


def vmap_step(tx, params=PARAMS, workers=4, axis="data", plain=False, **options):
    """Parameters of all workers, the state, and step(own, state, grads); plain: of updates that are equal on all."""
    state, axes = jc.init_state(tx, params, workers, axis)

    def step(own, state, grads):
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    where = None if plain else 0
    step = jax.vmap(step, in_axes=(where, axes, 0), out_axes=(where, axes), axis_name=axis)
    return params if plain else stacked(params, workers), state, jax.jit(step, **options)


def vmap_steps(tx, params, grads, plain=False, axis="data"):
    """Points after each of the steps with these gradients [t, n, ...], and the state."""
    own, state, step = vmap_step(tx, params, jax.tree.leaves(grads)[0].shape[1], axis, plain)
    points = []
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        own, state = step(own, state, at(grads, t))
        points.append(jax.tree.map(np.asarray, own))
    return points, state


def mesh_step(tx, params=PARAMS, mesh=None, axis="data", rows=None, across=None, specs=None, **options):
    """Parameters of all workers, the state, and step(own, state, grads) in a `shard_map`, as a user writes it.

    rows: how these parameters lie; across: how gradients lie, unless like them; specs: how parameters are cut.
    """
    mesh, rows = mesh_of() if mesh is None else mesh, P(axis) if rows is None else rows
    state, where = jc.init_state(tx, params, mesh, axis, specs)

    def step(own, state, grads):
        mine, g = at((own, grads))
        updates, state = tx.update(g, state, mine)
        return jax.tree.map(lambda p: p[None], optax.apply_updates(mine, updates)), state

    ins, outs = (rows, where, across or rows), (rows, where)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs), **options)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), rows)
    workers = mesh.shape[jax.tree.leaves(rows)[0][0]]
    return jax.device_put(stacked(params, workers), places), state, step


def one_worker(tx, inner, grads):
    """Point and state of a single worker with `tx` after these gradients [t, ...], and the point of `inner`."""
    point, state, want, other = PARAMS, tx.init(PARAMS), PARAMS, inner.init(PARAMS)
    step, plain = jax.jit(tx.update), jax.jit(inner.update)
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        g = at(grads, t)
        updates, state = step(g, state, point)
        point = optax.apply_updates(point, updates)
        updates, other = plain(g, other, want)
        want = optax.apply_updates(want, updates)
    return point, state, want


def random_gradients(seed, steps, workers=4, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((steps, workers, *p.shape)), p.dtype), params)


class Board:
    """Where the exchange threads of n workers leave their bytes."""

    def __init__(self, size):
        self.places, self.barrier = [None] * size, threading.Barrier(size, timeout=120)

    def gather(self, index):
        def run(message):
            self.places[index] = message
            self.barrier.wait()
            every = list(self.places)
            self.barrier.wait()
            return every

        return run
