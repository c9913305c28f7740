"""Selecting the largest entries: thresholds and compaction against sorts, over sizes.

Every method turns d floats into the indices of about `ratio` d of them. The last row is all that error
feedback needs, from the message in a donated buffer to payload and residual.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.timing import Fresh, machine, time_all
from experiments.lib.cli import Parser, UserError, at_least, choose_new, fraction
from experiments.lib.folders import run_options, start_run
from experiments.lib.report import new_console, show

__all__ = ["main"]

READ, SORT, TORCH = "read pass (sum of magnitudes)", "lax.top_k", "torch.topk"
SIDCO = "jc.sidco"
WHOLE = "jc.sidco + residual"


def methods(x: Any, ratio: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls to time, and the compiled programs behind ours, for one size."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import jaxcomp as jc
    from jaxcomp.base import residual
    from jaxcomp.select import indices_of_words, words_above

    d = x.size
    k = max(1, int(ratio * d))
    key = jax.random.key(1)
    threshold = jnp.quantile(jnp.abs(x[:: max(1, d >> 16)]), 1 - ratio)
    places = min(d, k + k // 4 + 64)
    sparsifiers = {
        SIDCO: jc.sidco(ratio),
        "jc.sidco pareto": jc.sidco(ratio, law="pareto"),
        "jc.sidco gamma": jc.sidco(ratio, law="gamma"),
        "jc.top_k": jc.top_k(ratio),
        "jc.dgc": jc.dgc(ratio),
        "jc.gaussian_k": jc.gaussian_k(ratio),
        "jc.redsync": jc.redsync(ratio),
    }
    functions = {
        READ: lambda x: jnp.sum(jnp.abs(x)),
        SORT: lambda x: lax.top_k(jnp.abs(x), k)[1],
        "lax.approx_max_k": lambda x: lax.approx_max_k(jnp.abs(x), k)[1],
        "jnp.nonzero, threshold given": lambda x, t: jnp.nonzero(jnp.abs(x) > t, size=places, fill_value=d)[0],
        "mask to indices, threshold given": lambda x, t: indices_of_words(words_above(x, t), places, d)[0],
    }
    for name, compressor in sparsifiers.items():
        state = compressor.init(key, x)
        functions[name] = lambda x, c=compressor, s=state: c.compress(key, x, s)[0]

    sidco = sparsifiers[SIDCO]

    def whole(message):
        payload, local = sidco.compress(key, message, sidco.init(key, message))
        return payload, local, residual(sidco, message, payload, ())

    compiled = {}
    calls: dict[str, Any] = {}
    for name, function in functions.items():
        arguments = (x, threshold) if "given" in name else (x,)
        compiled[name] = jax.jit(function).lower(*arguments).compile()
        calls[name] = lambda f=compiled[name], a=arguments: f(*a)
    compiled[WHOLE] = jax.jit(whole, donate_argnums=0).lower(x).compile()
    calls[WHOLE] = Fresh(lambda: jax.block_until_ready(x + 0), compiled[WHOLE])
    torch = torch_if_installed()
    if torch is not None and jax.default_backend() == "cpu":
        tensor = torch.from_numpy(np.array(x))
        calls[TORCH] = lambda: torch.topk(tensor.abs(), k, sorted=False)[1]
    return calls, compiled


def torch_if_installed() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return torch


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench select", description=__doc__)
    p.add_argument("--log2-sizes", type=at_least(10), nargs="+", default=[18, 20, 22, 24, 26], help="d = 2^these")
    p.add_argument("--ratio", type=fraction, default=0.001, help="share of entries to select")
    p.add_argument("--repeats", type=at_least(1), default=7, help="rounds; the median is shown")
    run_options(p, "bench-select")
    options = p.parse_args(arguments)
    if max(options.log2_sizes) > 30:
        raise UserError(f"--log2-sizes must be at most 30; got {max(options.log2_sizes)}")

    import jax

    sizes = sorted(set(options.log2_sizes))
    console, folder = new_console(), choose_new(options.runs, options.name, "bench-select")
    seconds: dict[int, dict[str, float]] = {}
    extra: dict[str, float] = {}
    with console.status("") as status:
        for size in sizes:
            x = jax.random.laplace(jax.random.key(0), (2**size,))
            calls, compiled = methods(x, options.ratio)
            seconds[size] = time_all(calls, options.repeats, lambda text, s=size: status.update(f"2^{s}: {text}"))
            extra = {name: memory_of(program) / (4 * x.size) for name, program in compiled.items()}
            del calls, compiled

    at = 24 if 24 in sizes else sizes[-1]
    base = seconds[at]
    table = []
    for name in base:
        row = [name, *(f"{1e3 * seconds[size][name]:.2f}" for size in sizes)]
        row.append(f"{base[name] / base[READ]:.1f}")
        row.append(f"{base[SORT] / base[name]:.1f} x")
        row.append(f"{base[TORCH] / base[name]:.1f} x" if TORCH in base else "-")
        row.append(f"{extra[name]:.2f}" if name in extra else "-")
        table.append(row)
    head = ["method", *(f"2^{size} ms" for size in sizes), f"2^{at} / read pass", "faster than lax.top_k"]
    head += ["than torch.topk", "extra memory / d words"]
    slope = slope_of(sizes, [seconds[size][SIDCO] for size in sizes])
    notes = (
        f"ratio {options.ratio:g}, Laplace entries; medians of {options.repeats}. Read pass: "
        f"{4 * 2**at / 1e9 / base[READ]:.0f} GB/s at 2^{at}. Time of {SIDCO} grows like d^{slope:.2f} from 2^20 on.\n"
        f"Extra memory: temporary buffers of the compiled program at 2^{sizes[-1]}, without arguments and results."
    )
    start_run(folder, vars(options))
    show(console, f"Selection; {machine()}", head, table, notes, folder / "table.md")
    console.print(f"plot: {plot(sizes, seconds, options, folder)}")
    return 0


def memory_of(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)


def slope_of(sizes: list[int], seconds: list[float]) -> float:
    """Exponent of d, by least squares over sizes from 2^20 on (all of them if there are fewer than two)."""
    chosen = [i for i, size in enumerate(sizes) if size >= 20]
    chosen = chosen if len(chosen) > 1 else list(range(len(sizes)))
    if len(chosen) < 2:
        return float("nan")
    return float(np.polyfit([sizes[i] for i in chosen], np.log2([seconds[i] for i in chosen]), 1)[0])


def plot(sizes: list[int], seconds: dict[int, dict[str, float]], options: Any, folder: Path) -> Path:
    from experiments.lib.plots import LINES, new_figure, save

    figure, (left, right) = new_figure(2)
    names = [name for name in seconds[sizes[0]] if "given" not in name and name != READ]
    for look, name in zip(LINES, names, strict=False):
        times = np.array([seconds[size][name] for size in sizes])
        reads = np.array([seconds[size][READ] for size in sizes])
        left.plot(2.0 ** np.array(sizes), 1e3 * times, label=name, markersize=5, **look)
        right.plot(2.0 ** np.array(sizes), times / reads, label=name, markersize=5, **look)
    left.set(xscale="log", yscale="log", xlabel="entries", ylabel="milliseconds", title="time")
    right.set(xscale="log", yscale="log", xlabel="entries", ylabel="multiples of one read pass", title="cost")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
    left.legend(fontsize=8)
    figure.suptitle(f"Selecting {options.ratio:g} of the entries; {machine()}", fontsize=10)
    path = folder / "select.png"
    save(figure, path)
    return path
