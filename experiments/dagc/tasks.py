"""Tasks for unequal workers, all simulated in one compiled program: local steps, compression, mean.

Ratios, weights, data and batches are arguments, so all rules, skews and seeds share the program.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomp as jc
from experiments.lib.data import DATASETS, imbalanced_split, load, skewed_volumes
from experiments.lib.flat import flat_model, local_batches, local_steps
from jaxcomp.base import State, accumulate, for_worker

__all__ = ["TASKS", "Simulation", "Task", "factor_for", "heterogeneous_quadratics", "runner"]

Array = jax.Array
EXAMINED = 2000  # examples looked at after each round, at most
STEPS, BATCH = 5, 16  # of SGD at a worker in a round


class Task(NamedTuple):
    """One draw of data: start f32[d]; volumes f64[n], realised; inputs: arrays that a simulation needs."""

    start: Array
    volumes: np.ndarray
    inputs: Any


class Simulation(NamedTuple):
    """task(skew, seed); changes(vector, inputs, t) -> f32[n, d], what each worker would send; score(vector, inputs) ->
    f32[], better: +1 where it is to be large, else -1."""

    task: Callable[[float, int], Task]
    changes: Callable[[Array, Any, Any], Array]
    score: Callable[[Array, Any], Array]
    better: int


def classification(o: Any) -> Simulation:
    """Images split by `imbalanced_split`; SGD steps at each worker; score: test accuracy, or loss in training."""
    data = load(o.task, o.data_dir)
    model, by_loss = flat_model(data, 0), o.by == "loss"
    # The volumes weigh the workers, so what they minimise together is the mean loss over the training examples.
    looked_at = (data.train_x, data.train_y) if by_loss else (data.test_x, data.test_y)

    def task(skew: float, seed: int) -> Task:
        parts = imbalanced_split(data.train_y, o.workers, skew, o.alpha, seed)
        batches = lambda t: [local_batches(part, STEPS, BATCH, seed, t, i) for i, part in enumerate(parts)]
        chosen = np.array([batches(t) for t in range(o.rounds)], np.int32)
        inputs = {"x": data.train_x, "y": data.train_y, "chosen": chosen}
        inputs["looked_at"] = [part[:EXAMINED] for part in looked_at]
        start = flat_model(data, seed).start
        return Task(start, np.array([len(part) for part in parts], float), jax.tree.map(jnp.asarray, inputs))

    def changes(vector, inputs, t):
        one = lambda chosen: local_steps(model, vector, inputs["x"][chosen], inputs["y"][chosen], o.lr)
        return lax.map(one, inputs["chosen"][t])

    score = lambda vector, inputs: model.test(vector, *inputs["looked_at"])[0 if by_loss else 1]
    return Simulation(task, changes, score, -1 if by_loss else +1)


def heterogeneous_quadratics(o: Any) -> Simulation:
    """f_i(x) = 1/2 sum_j h_ij (x_j - c_ij)^2, exact gradients; score: |grad f|^2, to be made small.

    Curvatures in [0.1, 1] and minima of standard deviation 1 are drawn for each worker.
    """
    shape = (o.workers, 1000)

    def task(skew: float, seed: int) -> Task:
        rng, volumes = np.random.default_rng([seed, 12]), skewed_volumes(shape[0], skew)
        inputs = {"curvature": rng.uniform(0.1, 1.0, shape), "center": rng.standard_normal(shape)}
        inputs["weights"] = volumes / volumes.sum()
        return Task(jnp.zeros(shape[1]), volumes, {k: jnp.asarray(v, jnp.float32) for k, v in inputs.items()})

    gradients = lambda vector, inputs: inputs["curvature"] * (vector - inputs["center"])
    changes = lambda vector, inputs, t: -o.lr * gradients(vector, inputs)
    score = lambda vector, inputs: jnp.sum(jnp.square(inputs["weights"] @ gradients(vector, inputs)))
    return Simulation(task, changes, score, -1)


TASKS: dict[str, Callable[[Any], Simulation]] = {
    **dict.fromkeys(DATASETS, classification),
    "quadratics": heterogeneous_quadratics,
}


@functools.cache
def runner(
    simulation: Simulation, workers: int, rounds: int, ratio: float, by_threshold: bool
) -> Callable[..., tuple[Array, Array]]:
    """(start, amounts [n], weights [n], inputs) -> scores f32[rounds], entries that all workers sent f32[rounds].

    Error feedback on what each worker would send, by top-k, whose amounts are ratios, or by thresholds. Their amounts
    are thresholds up to a factor: in each round that with which the messages, memory included, fill the budget of the
    ratio. Fitted once, before there is a memory, thresholds would send two or three times as much; fitted every fifth
    round, a fifth more.
    """
    more = {"sparsifier": jc.contrib.hard_threshold, "base": 1.0} if by_threshold else {}
    room = min(float(workers), 1 / ratio)  # whatever the rule gives to one worker
    compressor = jc.dagc([1] * workers, ratio, rule="uniform", capacity=room, **more)

    @jax.jit
    def run(start: Array, amounts: Array, weights: Array, inputs: Any) -> tuple[Array, Array]:
        state = compressor.init(jax.random.key(0), start)
        budget = int(jc.allocate.counts([ratio] * workers, start.size).sum())

        def round_(carry, t):
            vector, memory = carry
            messages = memory + simulation.changes(vector, inputs, t)
            now = jc.state.set_amounts(state, (factor_for(budget, messages, amounts) if by_threshold else 1) * amounts)

            def compress(worker):
                number, message = worker
                own = State(now.local, for_worker(compressor, now.shared, number, workers))
                return compressor.compress(jax.random.key(0), message, own)[0]

            payloads = lax.map(compress, (jnp.arange(workers, dtype=jnp.int32), messages))
            memory = jax.vmap(lambda m, i: m.at[i].set(0, mode="drop"))(messages, payloads.indices)
            vector = accumulate(compressor, vector, payloads, weights, state.shared)
            sent = jnp.sum(payloads.indices < start.size).astype(jnp.float32)
            return (vector, memory), (simulation.score(vector, inputs), sent)

        memory = jnp.zeros((workers, start.size), start.dtype)
        return lax.scan(round_, (start, memory), jnp.arange(rounds))[1]

    return run


def factor_for(budget: int, messages: Array, thresholds: Array) -> Array:
    """`jc.allocate.calibrate` inside a program: with factor * thresholds all workers send `budget` entries.

    One sort of all quotients; the factor is the geometric mean of the last that fits and the next.
    """
    quotients = jnp.sort((jnp.abs(messages) / thresholds[:, None]).reshape(-1))[::-1]
    budget = min(budget, quotients.size - 1)
    return jnp.maximum(jnp.sqrt(quotients[budget - 1]) * jnp.sqrt(quotients[budget]), jnp.float32(1e-30))
