"""Tasks for unequal workers, all simulated in one compiled program: local steps, compression, mean.

Ratios, weights, data and batches are arguments, so all rules, skews and seeds share the program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomp as jc
from experiments.dagc.data import imbalanced_split, skewed_volumes
from experiments.federated.model import flat_model, local_batches, local_steps
from experiments.lib.data import load
from jaxcomp.base import Compressor, State, accumulate, for_worker

__all__ = ["Outcome", "Simulation", "Task", "classification", "heterogeneous_quadratics"]

Array = jax.Array
EXAMINED = 2000  # test examples looked at after each round


class Task(NamedTuple):
    """One draw of data.

    start f32[d]; volumes f64[n], realised; inputs: what `changes` needs, an array each; better: +1 or -1.
    """

    start: Array
    volumes: np.ndarray
    inputs: Any
    better: int


class Simulation(NamedTuple):
    """changes(vector, inputs, t) -> f32[n, d], what each worker would send; score(vector, inputs) -> f32[]."""

    task: Callable[[float, int], Task]
    changes: Callable[[Array, Any, Any], Array]
    score: Callable[[Array, Any], Array]


class Outcome(NamedTuple):
    """scores f32[rounds], after each round; sent f32[rounds], entries that all workers sent in each."""

    scores: Array
    sent: Array


def classification(options: dict[str, Any]) -> Simulation:
    """Images split by `imbalanced_split`; SGD steps at each worker; score: test accuracy."""
    data = load(options["task"], options["data_dir"])
    model = flat_model(options["model"], data, 0)
    examined = min(EXAMINED, len(data.test_y))
    rounds, steps, batch = options["rounds"], options["local_steps"], options["batch"]

    def task(skew: float, seed: int) -> Task:
        parts = imbalanced_split(data.train_y, options["workers"], skew, options["alpha"], seed)
        batches = lambda t: [local_batches(part, steps, batch, seed, t, i) for i, part in enumerate(parts)]
        inputs = {"x": jnp.asarray(data.train_x), "y": jnp.asarray(data.train_y)}
        inputs |= {"test_x": jnp.asarray(data.test_x[:examined]), "test_y": jnp.asarray(data.test_y[:examined])}
        inputs["chosen"] = jnp.asarray(np.array([batches(t) for t in range(rounds)]), jnp.int32)
        start = flat_model(options["model"], data, seed).start
        return Task(start, np.array([len(part) for part in parts], float), inputs, +1)

    def changes(vector, inputs, t):
        def one(chosen):
            return local_steps(model, vector, inputs["x"][chosen], inputs["y"][chosen], options["lr"])

        return lax.map(one, inputs["chosen"][t])

    return Simulation(task, changes, lambda v, inputs: model.test(v, inputs["test_x"], inputs["test_y"])[1])


def heterogeneous_quadratics(options: dict[str, Any]) -> Simulation:
    """f_i(x) = 1/2 sum_j h_ij (x_j - c_ij)^2, exact gradients; score: |grad f|^2, to be made small.

    Curvatures in [0.1, 1] and minima of standard deviation 1 are drawn for each worker.
    """
    shape = (options["workers"], 1000)

    def task(skew: float, seed: int) -> Task:
        rng, volumes = np.random.default_rng([seed, 12]), skewed_volumes(shape[0], skew)
        drawn = {"curvature": rng.uniform(0.1, 1.0, shape), "center": rng.standard_normal(shape)}
        drawn["weights"] = volumes / volumes.sum()
        return Task(jnp.zeros(shape[1]), volumes, {k: jnp.asarray(v, jnp.float32) for k, v in drawn.items()}, -1)

    def gradients(vector, inputs):
        return inputs["curvature"] * (vector - inputs["center"])

    return Simulation(
        task,
        lambda vector, inputs, t: -options["lr"] * gradients(vector, inputs),
        lambda vector, inputs: jnp.sum(jnp.square(inputs["weights"] @ gradients(vector, inputs))),
    )


def runner(
    simulation: Simulation, compressor: Compressor, rounds: int, budget: int | None = None
) -> Callable[..., Outcome]:
    """(start, amounts [n], weights [n], inputs) -> outcome: error feedback on what each worker would send.

    With a budget, of entries of all workers in a round, amounts are thresholds up to a factor: in each round
    that with which the messages, memory included, fill the budget. Fitted once, before there is a memory,
    thresholds would send two or three times as much; fitted every fifth round, a fifth more.
    """

    @jax.jit
    def run(start: Array, amounts: Array, weights: Array, inputs: Any) -> Outcome:
        state = compressor.init(jax.random.key(0), start)
        numbers = jnp.arange(weights.shape[0], dtype=jnp.int32)

        def round_(carry, t):
            vector, memory = carry
            messages = memory + simulation.changes(vector, inputs, t)
            factor = 1 if budget is None else factor_for(budget, messages, amounts)
            now = jc.set_amounts(state, factor * amounts)

            def compress(worker):
                number, message = worker
                own = State(now.local, for_worker(compressor, now.shared, number, weights.shape[0]))
                return compressor.compress(jax.random.key(0), message, own)[0]

            payloads = lax.map(compress, (numbers, messages))
            memory = jax.vmap(lambda m, i: m.at[i].set(0, mode="drop"))(messages, payloads.indices)
            vector = accumulate(compressor, vector, payloads, weights, state.shared)
            sent = jnp.sum(payloads.indices < start.size).astype(jnp.float32)
            return (vector, memory), Outcome(simulation.score(vector, inputs), sent)

        memory = jnp.zeros((weights.shape[0], start.size), start.dtype)
        return lax.scan(round_, (start, memory), jnp.arange(rounds))[1]

    return run


def factor_for(budget: int, messages: Array, thresholds: Array) -> Array:
    """`jc.allocate.calibrate` inside a program: with factor * thresholds all workers send `budget` entries.

    One sort of all quotients; the factor is the geometric mean of the last that fits and the next.
    """
    quotients = jnp.sort((jnp.abs(messages) / thresholds[:, None]).reshape(-1))[::-1]
    budget = min(budget, quotients.size - 1)
    return jnp.maximum(jnp.sqrt(quotients[budget - 1]) * jnp.sqrt(quotients[budget]), jnp.float32(1e-30))


TASKS: dict[str, Callable[[dict[str, Any]], Simulation]] = {
    "digits": classification,
    "mnist": classification,
    "quadratics": heterogeneous_quadratics,
}
