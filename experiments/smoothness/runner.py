"""Runs one setup for all its budgets and seeds at once: runs and workers are both mapped, rounds are scanned."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from experiments.smoothness.setups import Setup
from jaxcomp.algorithms.bidirectional import Down
from jaxcomp.compressors.precondition import Preconditioned

__all__ = ["Curves", "gradient_of", "run_setup"]

AXIS = "workers"


class Curves(NamedTuple):
    """[budgets, seeds, rounds] each: |x - x*|^2 / |x*|^2 after each round, and the bits sent until then, by a worker
    (mean over the workers) and to each worker."""

    errors: np.ndarray
    up: np.ndarray
    down: np.ndarray

    def sent(self, count: str) -> np.ndarray:
        """Bits sent "up", "down", or "both"."""
        return self.up + self.down if count == "both" else getattr(self, count)

    def reached(self, target: float) -> np.ndarray:
        """[budgets, seeds]: rounds until the error was at most target; infinite if it never was."""
        below = self.errors <= target
        return np.where(below.any(-1), below.argmax(-1) + 1, np.inf)

    def bits_to(self, target: float, count: str = "up") -> np.ndarray:
        """[budgets, seeds]: bits up to that round."""
        return np.where(self.errors <= target, self.sent(count), np.inf).min(-1)

    def decided(self, target: float, count: str) -> bool:
        """No budget can need fewer bits any more than the best that reached the target: each has reached it itself,
        has diverged, or has spent more already."""
        needed = self.bits_to(target, count)
        reached = np.isfinite(needed)
        spent = np.where(reached, needed, self.sent(count)[..., -1]).mean(1)
        diverged = ~reached & ~(self.errors[..., -1] <= 1e6)
        done = reached.all(1)
        return bool(np.all(done | diverged.any(1) | (spent > spent[done].min(initial=np.inf))))


def gradient_of(features: jax.Array, labels: jax.Array, l2: float) -> Callable[[jax.Array], jax.Array]:
    def gradient(x):
        pull = -labels * jax.nn.sigmoid(-labels * (features @ x))
        return features.T @ pull / features.shape[0] + l2 * x

    return gradient


def run_setup(
    problem: Problem,
    setup: Setup,
    seeds: list[int],
    *,
    target: float,
    max_rounds: int,
    chunk: int = 100,
    count: str = "up",
) -> Curves:
    """Rounds until it is clear which budget reaches `target` with the fewest bits, or max_rounds; needs 64-bit mode.

    One run for each budget and seed. count: which bits decide that; chunk: rounds between two looks from the host.
    """
    chunk = min(chunk, max_rounds)
    repeat = lambda *rows: jnp.repeat(jnp.asarray(np.stack(rows)), len(seeds), axis=0)
    steps, plans = (jax.tree.map(repeat, *each) for each in (setup.steps, setup.plans))
    keys = jax.vmap(jax.random.key)(jnp.tile(jnp.asarray(seeds), len(setup.plans)))
    operator = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), setup.operator)
    data = (jnp.asarray(problem.features), jnp.asarray(problem.labels))
    size = float(np.sum(problem.optimum**2))
    bound = lambda steps, key: jc.methods.rounds(setup.make(steps), AXIS, seed=key, code="elias")

    def start(steps, key, plan):
        state, _ = jc.init_state(bound(steps, key), jnp.zeros(problem.d), problem.workers, AXIS)
        return jc.state.refresh(state, operator, plan)

    def advance(state, steps, key, data):
        run = bound(steps, key)
        one = lambda state, features, labels: run.step(state, gradient_of(features, labels, problem.l2))
        axes = jc.state.state_axes(state)
        everyone = jax.vmap(one, in_axes=(axes, 0, 0), out_axes=(axes, 0), axis_name=AXIS)

        def body(state, _):
            state, bits = everyone(state, *data)
            error = jnp.sum((run.point(state) - problem.optimum) ** 2) / size
            parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, Down))
            down = next((part.bits for part in parts if isinstance(part, Down)), 32.0 * problem.d)
            return state, (error, jnp.mean(bits.astype(jnp.float64)), jnp.asarray(down, jnp.float64))

        return jax.lax.scan(body, state, length=chunk)

    # All runs have the operator in common; each has a plan of its own.
    is_plan = lambda part: isinstance(part, Preconditioned)
    shapes = jax.eval_shape(start, *jax.tree.map(lambda a: a[0], (steps, keys, plans)))
    runs = jax.tree.map(lambda part: Preconditioned(None, 0) if is_plan(part) else 0, shapes, is_leaf=is_plan)
    state = jax.jit(jax.vmap(start, out_axes=runs))(steps, keys, plans)
    advance = jax.jit(jax.vmap(advance, in_axes=(runs, 0, 0, None), out_axes=(runs, 0)), donate_argnums=0)
    parts = []
    while True:
        state, part = advance(state, steps, keys, data)
        parts.append(jax.device_get(part))
        whole = (np.concatenate(each, 1)[:, :max_rounds] for each in zip(*parts, strict=True))
        errors, up, down = (each.reshape(len(setup.plans), len(seeds), -1) for each in whole)
        curves = Curves(errors, np.cumsum(up, -1), np.cumsum(down, -1))
        if chunk * len(parts) >= max_rounds or curves.decided(target, count):
            return curves
