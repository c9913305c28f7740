"""Time of the parts of a DIANA+ round with simulated workers, and of the preprocessing pass."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxcomp as jc
from experiments.bench.timing import bench_parser, report, time_all
from experiments.lib.cli import at_least
from experiments.lib.data import add_rows
from experiments.smoothness.problems import make_problem
from experiments.smoothness.runner import gradient_of
from jaxcomp.base import State, accumulate, add_own, for_worker

__all__ = ["main"]

LEARNING = 0.1  # of the shifts; no time depends on it


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench smoothness", __doc__, repeats=21)
    add_rows(p, "digits")
    p.add_argument("--workers", type=at_least(1), default=20, help="simulated by vmap")
    o = p.parse_args(arguments)

    with jax.enable_x64(True):
        problem = make_problem(o.data, o.workers)
        n, d, mu = problem.workers, problem.d, problem.l2
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            source = jc.smoothness.open_source(problem.features.reshape(-1, d), problem.labels.reshape(-1))
            S = jc.smoothness.preprocess(source, Path(folder) / "s.npz", workers=n, l2=mu)
        preprocessing = time.perf_counter() - start

        h = jc.smoothness.steps(S.diag, d / 32, method="diana+", workers=n, mu=mu)
        compressor = jc.precondition(jc.dithering(steps=h, per_worker=True), S)
        x = jnp.asarray(problem.optimum)
        data = (jnp.asarray(problem.features), jnp.asarray(problem.labels))
        state = compressor.init(jax.random.key(0), x)
        gradients = jax.jit(jax.vmap(lambda x, a, b: gradient_of(a, b, mu)(x), in_axes=(None, 0, 0)))

        def one(key, g, shift, worker, shared):
            mine = for_worker(compressor, shared, worker, n)
            payload, _ = compressor.compress(key, g - shift, State(state.local, mine))
            return payload, add_own(compressor, shift, payload, LEARNING, mine)

        send = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, None)))
        decode = jax.jit(lambda payloads, shared: accumulate(compressor, x, payloads, None, shared))
        sent = (jax.random.split(jax.random.key(1), n), gradients(x, *data), jnp.zeros((n, d), x.dtype), jnp.arange(n))
        payloads, _ = send(*sent, state.shared)
        calls = {
            "gradients": lambda: gradients(x, *data),
            "compress, and move the shifts": lambda: send(*sent, state.shared),
            "decode and add": lambda: decode(payloads, state.shared),
        }
        seconds = time_all(calls, o.repeats)
    rows = [{"part": part, "ms": 1e3 * s, "share": s / seconds["gradients"]} for part, s in seconds.items()]
    columns = {"part": "{part}", "ms": "{ms:.2f}", "/ gradients": "{share:.2f}"}
    title = f"{o.data}, {n} workers, d = {d}, {problem.features.shape[1]} rows each, float64"
    notes = f"All workers, one round. Preprocessing pass (dense, from memory): {preprocessing:.2f} s."
    return report(o, title, columns, rows, notes)
