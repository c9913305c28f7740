"""One update of a GPT's whole tree: milliseconds and temporary memory, beside a plain `pmean` of it, in turn."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jaxcomp as jc
from experiments.bench.timing import bench_parser, keep_memory, report, rounds_of
from experiments.bench.trees import gpt_like, methods, num_entries, temporary, update_of
from experiments.lib.cli import at_least
from experiments.lib.codecs import chosen
from experiments.lib.report import new_console
from experiments.lib.training import find_mesh

__all__ = ["Step", "gradients_of", "main"]

# name of `trees.methods` -> at most so many times pmean
METHODS = {
    "direct(identity)": 1.1,
    "direct(cast bf16)": None,
    "direct(dithering)": 1.5,
    "diana(dithering)": None,
    "error_feedback(top_k)": 1.8,
    "error_feedback(sidco)": 1.8,
    "error_feedback(narrow(sidco))": None,
    "error_feedback(skcompress(top_k))": None,
    "momentum_correction(dgc)": None,
    "power_sgd(4)": None,
}
GRADIENTS = 3  # in turn: if all steps had the same one, error feedback's memory would grow to a multiple of it


class Step:
    """A compiled step of a tree on a mesh, whose state, if it has one, is donated and comes back.

    make: an algorithm; None: the plain mean. compile_seconds: of the program, by the wall clock.
    """

    def __init__(self, make: Callable[[], Any] | None, like: Any, mesh: Any, gradients: list[Any]):
        step, shapes = update_of(make, like, mesh)
        start = time.perf_counter()
        self.program = step.lower(*shapes).compile()
        self.compile_seconds = time.perf_counter() - start
        self.gradients, self.state = itertools.cycle(gradients), []
        if make is not None:
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
            self.state = [jc.init_state(jc.compressed_mean(make(), "data"), zeros, mesh, "data")[0]]

    def __call__(self) -> Any:
        out = self.program(next(self.gradients), *self.state)
        self.state = [out[0]] if self.state else []
        return out


def gradients_of(like: Any, mesh: Any) -> list[Any]:
    """GRADIENTS of each worker, of normal numbers, where a step of `update_of` takes them."""
    (shapes,) = update_of(None, like, mesh)[1]

    def one(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return jax.tree.map(lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32), x.sharding), shapes)

    return [one(seed) for seed in range(GRADIENTS)]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench step", __doc__)
    p.add_argument("--layers", type=at_least(1), default=12, help="of the GPT; 12 are 146 leaves, 42.0 M parameters")
    p.add_argument("--workers", type=at_least(1), default=2, help="virtual devices")
    p.add_argument("--rounds", type=at_least(1), default=9, help="steps of each method, one of each in turn")
    p.add_argument("--only", nargs="+", default=None, help="methods whose names contain one of these")
    what = "have glibc give back what a step does not need any more, as it does by default"
    p.add_argument("--give-back", action="store_true", help=what)
    o = p.parse_args(arguments)
    kept = not o.give_back and keep_memory()

    mesh, like, makers = find_mesh(o.workers), gpt_like(o.layers), methods(o.workers)
    names = chosen(METHODS, o.only, "--only")
    steps: dict[str, Step] = {}
    gradients = gradients_of(like, mesh)
    with new_console().status("") as status:
        for name in ["pmean", *names]:
            status.update(f"compiling {name}")
            steps[name] = Step(makers.get(name), like, mesh, gradients)
    seconds = rounds_of(steps, o.rounds)
    ms = lambda name, share=0.5: 1e3 * np.quantile(seconds[name], share)
    columns = {
        "method": str,
        "ms a step": lambda name: f"{ms(name):.0f}",
        "least to most": lambda name: f"{ms(name, 0):.0f} to {ms(name, 1):.0f}",
        "/ pmean": lambda name: f"{ms(name) / ms('pmean'):.2f}",
        "at most": lambda name: f"{METHODS.get(name) or ''}",
        "temporary / gradient": lambda name: temporary(steps[name].program, like),
    }
    notes = (
        f"{num_entries(like) / 1e6:.1f} M parameters in {len(jax.tree.leaves(like))} leaves, {o.workers} workers as "
        f"virtual devices; median of {o.rounds} rounds, in each of which every method takes a step; "
        f"{GRADIENTS} gradients in turn. States are donated. Temporary memory is what a device needs besides arguments "
        "and results. "
        f"Memory of the C library is {'kept' if kept else 'given back'} between steps."
    )
    return report(o, "Steps of a GPT's tree", columns, steps, notes)
