"""Compile time, step time and memory of one update of a GPT's whole tree, beside a plain `psum` of it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.timing import machine
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["compiled", "gpt_like", "made", "main", "methods", "update_of"]

WIDTH, TOKENS = 512, 8192


def gpt_like(layers: int) -> dict[str, Any]:
    """Shapes of a GPT: 12 leaves a layer and two more; 12 layers of width 512 are 146 leaves, 42.0 M parameters."""
    import jax
    import jax.numpy as jnp

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    norm = lambda: {"scale": f32(WIDTH), "bias": f32(WIDTH)}
    dense = lambda rows, columns: {"kernel": f32(rows, columns), "bias": f32(columns)}
    layer = lambda: {
        "norm_1": norm(),
        "qkv": dense(WIDTH, 3 * WIDTH),
        "out": dense(WIDTH, WIDTH),
        "norm_2": norm(),
        "up": dense(WIDTH, 4 * WIDTH),
        "down": dense(4 * WIDTH, WIDTH),
    }
    return {"embed": f32(TOKENS, WIDTH), "layers": [layer() for _ in range(layers)], "norm": f32(WIDTH)}


def methods() -> dict[str, Callable[[], Any]]:
    """One algorithm for each compressor of the law table that has one, with its defaults."""
    import jaxcomp as jc

    ef, direct, ratio = jc.error_feedback, jc.direct, 1e-3
    makers = {
        "direct(identity)": lambda: direct(jc.identity()),
        "direct(cast bf16)": lambda: direct(jc.cast("bfloat16")),
        "error_feedback(cast fp8)": lambda: ef(jc.cast("float8_e4m3fn")),
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
        "error_feedback(dgc)": lambda: ef(jc.dgc(ratio)),
        "error_feedback(redsync)": lambda: ef(jc.redsync(ratio)),
        "error_feedback(gaussian_k)": lambda: ef(jc.gaussian_k(ratio)),
        "error_feedback(hard_threshold)": lambda: ef(jc.hard_threshold(0.1)),
        "error_feedback(compose(top_k, dithering))": lambda: ef(jc.compose(jc.top_k(ratio), jc.dithering(127))),
        "error_feedback(skcompress(top_k))": lambda: ef(jc.skcompress(jc.top_k(ratio))),
        "error_feedback(skcompress recentred)": lambda: ef(jc.skcompress(jc.top_k(ratio), mode="recentred")),
        "error_feedback(dagc)": lambda: ef(jc.dagc([3, 1], ratio)),
        "momentum_correction(dgc)": lambda: jc.momentum_correction(jc.dgc(ratio)),
        "power_sgd(4)": lambda: jc.power_sgd(4),
        "error_feedback(per_leaf(sidco))": lambda: ef(jc.per_leaf(jc.sidco(ratio))),
    }
    return makers


def update_of(make: Callable[[], Any] | None, like: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted update that is not compiled yet, and shapes of its arguments; None: a plain mean of the tree."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomp as jc

    placed = lambda tree, specs: jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
    )
    workers = mesh.shape["data"]
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like)
    own = lambda grads: jax.tree.map(lambda g: g[0], grads)
    grads = placed(rows, jax.tree.map(lambda _: P("data"), rows))
    if make is None:
        step = jax.shard_map(
            lambda grads: jax.lax.pmean(own(grads), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return jax.jit(step), (grads,)
    tx = jc.compressed_mean(make(), "data")
    abstract = jax.sharding.AbstractMesh((workers,), ("data",))
    state, specs = jc.init_state(tx, like, abstract, "data")
    step = jax.shard_map(
        lambda grads, state: tx.update(own(grads), state),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
    )
    return jax.jit(step, donate_argnums=1), (grads, placed(state, specs))


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench trees", description=__doc__)
    p.add_argument("--layers", type=at_least(1), nargs="+", default=[12, 48], help="of the GPT")
    p.add_argument("--workers", type=at_least(1), default=2, help="virtual devices")
    p.add_argument("--only", nargs="+", default=None, help="methods whose names contain one of these")
    p.add_argument("--times", type=at_least(1), default=3, help="compile each so often; the least is shown")
    p.add_argument("--steps", type=at_least(0), default=0, help="also time so many steps of the smallest tree")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    options = p.parse_args(arguments)

    import jax
    from jax.sharding import AxisType

    jax.config.update("jax_num_cpu_devices", options.workers)
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = jax.make_mesh((options.workers,), ("data",), axis_types=(AxisType.Auto,))
    console = new_console()
    chosen = {
        name: make
        for name, make in methods().items()
        if options.only is None or any(part in name for part in options.only)
    }
    every = {"psum": None, **chosen}
    table, base = [], {}
    update_of(None, gpt_like(1), mesh)[0].lower(update_of(None, gpt_like(1), mesh)[1][0]).compile()  # JAX itself
    with console.status("compiling") as status:
        for name, make in every.items():
            row = [name]
            for layers in options.layers:
                status.update(f"compiling {name}, {layers} layers")
                like = gpt_like(layers)
                size = 4 * sum(leaf.size for leaf in jax.tree.leaves(like))
                seconds, program, shapes = compiled(make, like, mesh, options.times)
                base.setdefault(layers, seconds)
                memory = program.memory_analysis()
                row += [f"{seconds:.1f}", f"{seconds - base[layers]:+.1f}"]
                if layers == options.layers[0]:
                    row.append(f"{memory.temp_size_in_bytes / size:.2f}" if memory is not None else "")
                    if options.steps:
                        status.update(f"running {name}")
                        row.append(f"{1e3 * step_seconds(program, shapes, options.steps):.0f}")
            table.append(row)
    head = ["method"]
    for layers in options.layers:
        leaves = len(jax.tree.leaves(gpt_like(layers)))
        head += [f"{leaves} leaves, CPU s", "beyond psum"]
        if layers == options.layers[0]:
            head += ["temporary / gradient"] + ["ms a step"] * (options.steps > 0)
    notes = (
        f"Trace and compile of one update at {options.workers} workers, in CPU seconds of the process, "
        f"the least of {options.times}. "
        f"The smallest tree has {sum(leaf.size for leaf in jax.tree.leaves(gpt_like(options.layers[0]))) / 1e6:.1f} M "
        "parameters. Temporary memory is what one device needs besides arguments and results, over the bytes of a "
        "gradient."
    )
    show(console, f"GPT trees; {machine()}", head, table, notes, options.markdown)
    return 0


def compiled(make: Callable[[], Any] | None, like: Any, mesh: Any, times: int) -> tuple[float, Any, tuple[Any, ...]]:
    """Least CPU seconds of so many traces and compilations from nothing, the program, and shapes of its arguments."""
    import jax

    least = float("inf")
    for _ in range(times):
        step, shapes = update_of(make, like, mesh)
        jax.clear_caches()
        start = time.process_time()
        program = step.lower(*shapes).compile()
        least = min(least, time.process_time() - start)
    return least, program, shapes


def made(shapes: Any) -> Any:
    """Normal numbers for floats, zeros for the rest, where the shapes say."""
    import jax
    import numpy as np

    def one(leaf):
        rng = np.random.default_rng(0)
        floating = leaf.dtype == np.float32
        value = rng.standard_normal(leaf.shape, np.float32) if floating else np.zeros(leaf.shape, leaf.dtype)
        return jax.device_put(value.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, shapes)


def step_seconds(program: Any, shapes: tuple[Any, ...], steps: int) -> float:
    """Median of so many steps, each waited for."""
    import jax
    import numpy as np

    grads, *state = map(made, shapes)
    taken = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        out = jax.block_until_ready(program(grads, *state))
        taken.append(time.perf_counter() - start)
        state = [out[1]] if state else []
    return float(np.median(taken[1:]))
