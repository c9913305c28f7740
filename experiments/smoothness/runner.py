"""Runs one setup for all its budgets and seeds at once: runs and workers are both mapped, rounds are scanned."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from experiments.smoothness.setups import Setup
from jaxcomp.algorithms.bidirectional import Down
from jaxcomp.compressors.precondition import Preconditioned

__all__ = ["Curves", "run_setup"]

AXIS = "workers"


class Curves(NamedTuple):
    """errors [budgets, seeds, rounds]: |x - x*|^2 / |x*|^2 after each round;  bits: sent by a worker until then, mean
    over the workers;  seconds: per round and run, with all runs on this machine at once;  down: bits sent to each
    worker until then.
    """

    errors: np.ndarray
    bits: np.ndarray
    seconds: float
    down: np.ndarray

    def reached(self, target: float) -> np.ndarray:
        """[budgets, seeds]: rounds until the error was at most target; all rounds that were run if it never was."""
        below = self.errors <= target
        return np.where(below.any(-1), below.argmax(-1) + 1, self.errors.shape[-1])

    def bits_to(self, target: float, count: str = "up") -> np.ndarray:
        """[budgets, seeds]: bits up to that round, sent by a worker ("up"), to it, or both; infinite if not reached."""
        sent = {"up": self.bits, "down": self.down, "both": self.bits + self.down}[count]
        bits = np.take_along_axis(sent, self.reached(target)[..., None] - 1, -1)[..., 0]
        return np.where((self.errors <= target).any(-1), bits, np.inf)


def _swap(state: Any, operator: Any, plan: Any) -> Any:
    """The same state with other operators and plans: they are arguments, not part of what the scan carries."""
    is_plan = lambda part: isinstance(part, Preconditioned)
    return jax.tree.map(lambda part: Preconditioned(operator, plan) if is_plan(part) else part, state, is_leaf=is_plan)


def gradient_of(features: jax.Array, labels: jax.Array, l2: float) -> Callable[[jax.Array], jax.Array]:
    def gradient(x):
        pull = -labels * jax.nn.sigmoid(-labels * (features @ x))
        return features.T @ pull / features.shape[0] + l2 * x

    return gradient


def _decided(errors: np.ndarray, bits: np.ndarray, num_seeds: int, target: float) -> bool:
    """No budget can need fewer bits any more than the best that reached the target: each has reached it itself, has
    diverged, or has spent more already.
    """
    below = errors <= target
    reached = below.any(1)
    spent = np.where(reached, np.where(np.cumsum(below, 1) < 1, bits, 0).sum(1), bits.sum(1))
    lost = ~reached & (~np.isfinite(errors[:, -1]) | (errors[:, -1] > 1e6))
    reached, lost, spent = (a.reshape(-1, num_seeds) for a in (reached, lost, spent))
    done = reached.all(1)
    best = spent[done].mean(1).min() if done.any() else np.inf
    return bool(np.all(done | lost.any(1) | (spent.mean(1) > best)))


def run_setup(
    problem: Problem,
    setup: Setup,
    seeds: list[int],
    *,
    target: float,
    max_rounds: int,
    chunk: int = 100,
    count: str = "up",
    show: Callable[[int, float], None] = lambda rounds, error: None,
) -> Curves:
    """Rounds until it is clear which budget reaches `target` with the fewest bits, or max_rounds; needs 64-bit mode.

    One run for each budget and seed. count: which bits decide that, "up", or "both" directions; chunk: rounds between
    two looks from the host, after which `show` is called with rounds done and the largest error of any run.
    """
    num_seeds, chunk = len(seeds), min(chunk, max_rounds)
    repeat = lambda values: jnp.repeat(jnp.asarray(np.asarray(values)), num_seeds, axis=0)
    steps = jax.tree.map(lambda *s: repeat(s), *setup.steps)
    plans = jax.tree.map(lambda *p: repeat(np.stack(p)), *setup.plans)
    keys = jax.vmap(jax.random.key)(jnp.tile(jnp.asarray(seeds), len(setup.plans)))
    operator = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), setup.operator)
    data = (jnp.asarray(problem.features), jnp.asarray(problem.labels), jnp.asarray(problem.optimum))
    size = float(np.sum(problem.optimum**2))

    def bound(steps, key):
        return jc.rounds(setup.make(steps), AXIS, seed=key)

    def start(steps, key):
        run = bound(steps, key)
        init = lambda _: run.init(jnp.zeros(problem.d))
        axes = jc.state_axes(jax.eval_shape(init, 0))
        state = jax.vmap(init, axis_name=AXIS, out_axes=axes)(jnp.arange(problem.workers))
        return _swap(state, None, None)

    def advance(state, steps, key, plan, operator, data):
        run = bound(steps, key)
        features, labels, optimum = data
        axes = jc.state_axes(_swap(state, operator, plan))

        def worker(state, a, b):
            return run.step(state, gradient_of(a, b, problem.l2))

        everyone = jax.vmap(worker, in_axes=(axes, 0, 0), out_axes=(axes, 0), axis_name=AXIS)

        def body(state, _):
            state, bits = everyone(_swap(state, operator, plan), features, labels)
            error = jnp.sum((run.point(state) - optimum) ** 2) / size
            parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, Down))
            down = [part.bits.astype(jnp.float64) for part in parts if isinstance(part, Down)]
            return _swap(state, None, None), (error, jnp.mean(bits.astype(jnp.float64)), down)

        return jax.lax.scan(body, state, length=chunk)

    advance = jax.jit(jax.vmap(advance, in_axes=(0, 0, 0, 0, None, None)), donate_argnums=0)
    state = jax.jit(jax.vmap(start))(steps, keys)
    advance = advance.lower(state, steps, keys, plans, operator, data).compile()
    errors, bits, down, seconds, done = [], [], [], [], 0
    while done < max_rounds:
        begin = time.perf_counter()
        state, (error, sent, received) = jax.block_until_ready(advance(state, steps, keys, plans, operator, data))
        seconds.append(time.perf_counter() - begin)
        errors.append(np.asarray(error))
        bits.append(np.asarray(sent))
        whole = np.full(bits[-1].shape, 32.0 * problem.d)
        down.append(np.asarray(received[0]) if received else whole)
        done += chunk
        show(done, float(np.max(np.min(errors[-1], axis=1))))
        counted = np.concatenate(bits, 1) + (np.concatenate(down, 1) if count == "both" else 0)
        if _decided(np.concatenate(errors, 1), counted, num_seeds, target):
            break
    shape = (len(setup.plans), num_seeds, -1)
    each = float(np.median(seconds)) / chunk / (num_seeds * len(setup.plans))
    errors, bits, down = (np.concatenate(parts, 1)[:, :max_rounds] for parts in (errors, bits, down))
    sums = [np.cumsum(part, axis=1).reshape(shape) for part in (bits, down)]
    return Curves(errors.reshape(shape), sums[0], each, sums[1])
