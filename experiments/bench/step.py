"""One update of a GPT's whole tree: milliseconds and temporary memory, beside a plain `pmean` of it, in turn."""

import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench.timing import machine
from experiments.bench.trees import gpt_like, made, methods, update_of
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["main"]

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


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench step", description=__doc__)
    p.add_argument("--layers", type=at_least(1), default=12, help="of the GPT; 12 are 146 leaves, 42.0 M parameters")
    p.add_argument("--workers", type=at_least(1), default=2, help="virtual devices")
    p.add_argument("--rounds", type=at_least(1), default=9, help="steps of each method, one of each in turn")
    p.add_argument("--only", nargs="+", default=None, help="methods whose names contain one of these")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    options = p.parse_args(arguments)

    import jax
    import numpy as np
    from jax.sharding import AxisType

    import jaxcomp as jc

    jax.config.update("jax_num_cpu_devices", options.workers)
    mesh = jax.make_mesh((options.workers,), ("data",), axis_types=(AxisType.Auto,))
    like = gpt_like(options.layers)
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    console = new_console()
    chosen = [name for name in METHODS if options.only is None or any(part in name for part in options.only)]
    programs, states, temporary, grads = {}, {"pmean": []}, {}, None
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    with console.status("") as status:
        for name in ["pmean", *chosen]:
            status.update(f"compiling {name}")
            step, shapes = update_of(None if name == "pmean" else methods()[name], like, mesh)
            grads = made(shapes[0]) if grads is None else grads
            programs[name] = step.lower(*shapes).compile()
            if name != "pmean":
                states[name] = [jc.init_state(jc.compressed_mean(methods()[name](), "data"), zeros, mesh, "data")[0]]
            memory = programs[name].memory_analysis()
            temporary[name] = "" if memory is None else f"{memory.temp_size_in_bytes / (4 * size):.2f}"
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for i in range(options.rounds + 1):
            for name, program in programs.items():
                status.update(f"round {i} of {options.rounds}: {name}")
                start = time.perf_counter()
                out = jax.block_until_ready(program(grads, *states[name]))
                seconds[name].append(time.perf_counter() - start)
                states[name] = [out[1]] if states[name] else []
                del out
    base = np.median(seconds["pmean"][1:])
    table = []
    for name, each in seconds.items():
        low, middle, high = np.quantile(each[1:], [0.0, 0.5, 1.0])
        at_most = METHODS.get(name)
        table.append(
            [name, f"{1e3 * middle:.0f}", f"{1e3 * low:.0f} to {1e3 * high:.0f}", f"{middle / base:.2f}"]
            + ["" if at_most is None else f"{at_most}", temporary[name]]
        )
    head = ["method", "ms a step", "least to most", "/ pmean", "at most", "temporary / gradient"]
    notes = (
        f"{size / 1e6:.1f} M parameters in {len(jax.tree.leaves(like))} leaves, {options.workers} workers as virtual "
        f"devices; median of {options.rounds} rounds, in each of which every method takes a step. States are donated. "
        "Temporary memory is what one device needs besides arguments and results."
    )
    show(console, f"Steps of a GPT's tree; {machine()}", head, table, notes, options.markdown)
    return 0
