"""Time of the parts of a DIANA+ round with simulated workers, and of the preprocessing pass."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench.timing import machine, time_all
from experiments.lib.cli import Parser, at_least
from experiments.lib.data import FILES
from experiments.lib.report import new_console, show

__all__ = ["main"]

LEARNING = 0.1  # of the shifts; no time depends on it


def main(arguments: Sequence[str]) -> int:
    from experiments.smoothness.problems import PROBLEMS, data_set, make_problem

    p = Parser(prog="python -m experiments bench smoothness", description=__doc__)
    p.add_argument("--data", type=data_set, default="digits", help=f"{', '.join(PROBLEMS)}, or a file: {FILES}")
    p.add_argument("--data-dir", type=Path, default=None, help="folder of the data sets with a name but digits")
    p.add_argument("--workers", type=at_least(1), default=20, help="simulated by vmap")
    p.add_argument("--repeats", type=at_least(1), default=21, help="rounds; the median is shown")
    options = p.parse_args(arguments)

    import jax
    import jax.numpy as jnp

    import jaxcomp as jc
    from experiments.smoothness.runner import gradient_of
    from jaxcomp.base import State, accumulate, add_own, for_worker

    console = new_console()
    with jax.enable_x64(True):
        problem = make_problem(options.data, options.data_dir, options.workers)
        n, d, mu = problem.workers, problem.d, problem.l2
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            rows, labels = problem.features.reshape(-1, d), problem.labels.reshape(-1)
            source = jc.smoothness.open_source(rows, labels)
            S = jc.smoothness.preprocess(source, Path(folder) / "s.npz", workers=n, l2=mu)
        preprocessing = time.perf_counter() - start

        h = jc.smoothness.steps(S.diag, d / 32, method="diana+", workers=n, mu=mu)
        compressor = jc.precondition(jc.dithering(steps=h, per_worker=True), S)
        x = jnp.asarray(problem.optimum)
        data = (jnp.asarray(problem.features), jnp.asarray(problem.labels))
        state = compressor.init(jax.random.key(0), x)
        shifts = jnp.zeros((n, d), x.dtype)
        keys = jax.random.split(jax.random.key(1), n)

        gradients = jax.jit(jax.vmap(lambda x, a, b: gradient_of(a, b, mu)(x), in_axes=(None, 0, 0)))

        def one(key, g, shift, worker, shared):
            mine = for_worker(compressor, shared, worker, n)
            payload, _ = compressor.compress(key, g - shift, State(state.local, mine))
            return payload, add_own(compressor, shift, payload, LEARNING, mine)

        send = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, None)))
        decode = jax.jit(lambda payloads, shared: accumulate(compressor, x, payloads, None, shared))
        workers = jnp.arange(n)
        g = gradients(x, *data)
        payloads, _ = send(keys, g, shifts, workers, state.shared)
        calls = {
            "gradients": lambda: gradients(x, *data),
            "compress, and move the shifts": lambda: send(keys, g, shifts, workers, state.shared),
            "decode and add": lambda: decode(payloads, state.shared),
        }
        with console.status("compiling") as status:
            seconds = time_all(calls, options.repeats, status.update)
    table = [[name, f"{1e3 * s:.2f}", f"{s / seconds['gradients']:.2f}"] for name, s in seconds.items()]
    title = f"{options.data}, {n} workers, d = {d}, {problem.features.shape[1]} rows each, float64; {machine()}"
    notes = f"All workers, one round. Preprocessing pass (dense, from memory): {preprocessing:.2f} s."
    show(console, title, ["part", "ms", "/ gradients"], table, notes)
    return 0
