"""Workers under vmap, each with parameters of its own: what tests of local updates compare with."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc

PARAMS = {
    "a": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4),
    "b": np.ones(8, np.float32),
    "c": np.ones(16, np.float32),
}


def vmap_steps(tx, params, grads, plain=False, axis="data"):
    """The same with vmap; plain: of an optimizer whose updates are equal on all workers."""
    workers = jax.tree.leaves(grads)[0].shape[1]
    state, axes = jc.init_state(tx, params, workers, axis)
    own = params if plain else jax.tree.map(lambda p: jnp.stack([p] * workers), params)

    def step(own, state, grads):
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    where = None if plain else 0
    step = jax.jit(jax.vmap(step, in_axes=(where, axes, 0), out_axes=(where, axes), axis_name=axis))
    points = []
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        own, state = step(own, state, jax.tree.map(lambda g: g[t], grads))  # noqa: B023
        points.append(jax.tree.map(np.asarray, own))
    return points, state


def one_worker(tx, inner, grads):
    """Point and state of a single worker with `tx` after these gradients [t, ...], and the point of `inner`."""
    point, state, want, other = PARAMS, tx.init(PARAMS), PARAMS, inner.init(PARAMS)
    step, plain = jax.jit(tx.update), jax.jit(inner.update)
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        g = jax.tree.map(lambda g: g[t], grads)  # noqa: B023
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
