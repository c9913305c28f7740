"""Compile time and memory of one update of a GPT's whole tree, beside a plain `psum` of it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.timing import bench_parser, report
from experiments.lib.cli import at_least
from experiments.lib.codecs import chosen
from experiments.lib.report import new_console
from experiments.lib.training import find_mesh

__all__ = ["gpt_like", "main", "methods", "num_entries", "temporary", "update_of"]

WIDTH, TOKENS = 512, 8192


def gpt_like(layers: int, width: int = WIDTH, tokens: int = TOKENS) -> dict[str, Any]:
    """Shapes of a GPT: 12 leaves a layer and two more; 12 layers of width 512 are 146 leaves, 42.0 M parameters."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    norm = lambda: {"scale": f32(width), "bias": f32(width)}
    dense = lambda rows, columns: {"kernel": f32(rows, columns), "bias": f32(columns)}
    layer = lambda: {
        **{"norm_1": norm(), "qkv": dense(width, 3 * width), "out": dense(width, width)},
        **{"norm_2": norm(), "up": dense(width, 4 * width), "down": dense(4 * width, width)},
    }
    return {"embed": f32(tokens, width), "layers": [layer() for _ in range(layers)], "norm": f32(width)}


def num_entries(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def methods(workers: int = 2) -> dict[str, Callable[[], Any]]:
    """One algorithm for each compressor of the law table that has one, with its defaults, for so many workers."""
    ef, direct, ratio = jc.error_feedback, jc.direct, 1e-3
    return {
        "direct(identity)": lambda: direct(jc.identity()),
        "direct(cast bf16)": lambda: direct(jc.cast("bfloat16")),
        "error_feedback(cast fp8)": lambda: ef(jc.cast("float8_e4m3fn")),
        "error_feedback(int4)": lambda: ef(jc.block_scaled("int4")),
        "direct(natural)": lambda: direct(jc.natural()),
        "direct(dithering)": lambda: direct(jc.dithering(7)),
        "diana(dithering)": lambda: jc.diana(jc.dithering(7)),
        "direct(rand_k)": lambda: direct(jc.rand_k(ratio)),
        "direct(bernoulli)": lambda: direct(jc.bernoulli(ratio)),
        "error_feedback(contract(rand_k))": lambda: ef(jc.contract(jc.rand_k(ratio))),
        "error_feedback(top_k)": lambda: ef(jc.top_k(ratio)),
        "error_feedback(sidco)": lambda: ef(jc.sidco(ratio)),
        "error_feedback(sidco gamma)": lambda: ef(jc.sidco(ratio, law="gamma")),
        "error_feedback(sidco pareto)": lambda: ef(jc.sidco(ratio, law="pareto")),
        "error_feedback(narrow(sidco))": lambda: ef(jc.narrow(jc.sidco(ratio), values="bfloat16", indices="uint16")),
        "error_feedback(dgc)": lambda: ef(jc.contrib.dgc(ratio)),
        "error_feedback(redsync)": lambda: ef(jc.contrib.redsync(ratio)),
        "error_feedback(gaussian_k)": lambda: ef(jc.contrib.gaussian_k(ratio)),
        "error_feedback(hard_threshold)": lambda: ef(jc.contrib.hard_threshold(0.1)),
        "error_feedback(compose(top_k, dithering))": lambda: ef(jc.compose(jc.top_k(ratio), jc.dithering(127))),
        "error_feedback(skcompress(top_k))": lambda: ef(jc.skcompress(jc.top_k(ratio))),
        "error_feedback(skcompress recentred)": lambda: ef(jc.skcompress(jc.top_k(ratio), mode="recentred")),
        "error_feedback(dagc)": lambda: ef(jc.dagc([3, *[1] * (workers - 1)], ratio)),
        "momentum_correction(dgc)": lambda: jc.contrib.momentum_correction(jc.contrib.dgc(ratio)),
        "power_sgd(4)": lambda: jc.power_sgd(4),
        "error_feedback(per_leaf(sidco))": lambda: ef(jc.per_leaf(jc.sidco(ratio))),
    }


def update_of(make: Callable[[], Any] | None, like: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted update that is not compiled yet, and shapes of its arguments; None: a plain mean of the tree."""
    workers = mesh.shape["data"]
    shaped = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like)
    grads = jax.tree.map(lambda x: shaped(x, P("data")), rows)
    own = lambda grads: jax.tree.map(lambda g: g[0], grads)
    if make is None:
        mean = lambda grads: jax.lax.pmean(own(grads), "data")
        return jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())), (grads,)
    tx = jc.compressed_mean(make(), "data")
    abstract = jax.sharding.AbstractMesh((workers,), ("data",))
    state, specs = jc.init_state(tx, like, abstract, "data")
    # The state comes first: XLA hands what is donated to results of its size in their order.
    update = lambda grads, state: tx.update(own(grads), state)[::-1]
    step = jax.shard_map(update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(specs, P()))
    return jax.jit(step, donate_argnums=1), (grads, jax.tree.map(shaped, state, specs))


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench trees", __doc__)
    p.add_argument("--layers", type=at_least(1), nargs="+", default=[12, 48], help="of the GPT")
    p.add_argument("--workers", type=at_least(1), default=2, help="virtual devices")
    p.add_argument("--only", nargs="+", default=None, help="methods whose names contain one of these")
    p.add_argument("--times", type=at_least(1), default=3, help="compile each so often; the least is shown")
    o = p.parse_args(arguments)

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = find_mesh(o.workers)
    trees = {layers: gpt_like(layers) for layers in o.layers}
    every = methods(o.workers)
    wanted = {name: every[name] for name in chosen(every, o.only, "--only")}
    step, shapes = update_of(None, gpt_like(1), mesh)
    step.lower(*shapes).compile()  # JAX itself
    seconds: dict[tuple[str, int], float] = {}
    memory: dict[str, str] = {}  # with the first tree
    with new_console().status("compiling") as status:
        for name, make in {"psum": None, **wanted}.items():
            for layers, like in trees.items():
                status.update(f"compiling {name}, {layers} layers")
                seconds[name, layers], program = compiled(make, like, mesh, o.times)
                memory.setdefault(name, temporary(program, like))
    beyond = lambda name, layers: seconds[name, layers] - seconds["psum", layers]
    columns: dict[str, Callable[[str], str]] = {"method": str}
    for layers, like in trees.items():
        leaves = len(jax.tree.leaves(like))
        columns[f"{leaves} leaves, CPU s"] = lambda name, layers=layers: f"{seconds[name, layers]:.1f}"
        columns[f"{leaves}, beyond psum"] = lambda name, layers=layers: f"{beyond(name, layers):+.1f}"
        columns.setdefault("temporary / gradient", memory.__getitem__)
    millions = num_entries(trees[o.layers[0]]) / 1e6
    notes = (
        f"Trace and compile of one update at {o.workers} workers, in CPU seconds of the process, the least of "
        f"{o.times}. The first tree has {millions:.1f} M parameters, and its is the temporary memory: what one device "
        "needs besides arguments and results, over the bytes of a gradient."
    )
    return report(o, "GPT trees", columns, memory, notes)


def temporary(program: Any, like: Any) -> str:
    """Memory that a program needs besides arguments and results, over the bytes of a tree."""
    return f"{program.memory_analysis().temp_size_in_bytes / (4 * num_entries(like)):.2f}"


def compiled(make: Callable[[], Any] | None, like: Any, mesh: Any, times: int) -> tuple[float, Any]:
    """Least CPU seconds of so many traces and compilations from nothing, and the program."""
    least = float("inf")
    for _ in range(times):
        step, shapes = update_of(make, like, mesh)
        jax.clear_caches()
        start = time.process_time()
        program = step.lower(*shapes).compile()
        least = min(least, time.process_time() - start)
    return least, program
