"""How near the share of entries above each method's threshold comes to the target.

Achieved over target, 1 is ideal: entries above the threshold (sent, or left over because the message was full) over k.
On vectors of known laws with exact zeros among them, and on gradients recorded from real training, without and with
error feedback. Methods that adapt see one vector after the other; the first quarter of the rounds is not counted.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new, fraction
from experiments.lib.folders import Journal, run_options, start_run
from experiments.lib.report import new_console, progress_bar, show
from experiments.sidco.sources import LAWS, ZEROS, draws, record_images, record_text

__all__ = ["main"]


def methods() -> dict[str, Callable[[float], Any]]:
    """name -> (ratio -> compressor)."""
    import jaxcomp as jc

    return {
        "SIDCo-E": lambda r: jc.sidco(r),
        "SIDCo-P": lambda r: jc.sidco(r, law="pareto"),
        "SIDCo-GP": lambda r: jc.sidco(r, law="gamma"),
        "SIDCo-E, M = 3, no counts": lambda r: jc.sidco(r, adapt=None),
        "SIDCo-P, M = 3, no counts": lambda r: jc.sidco(r, law="pareto", adapt=None),
        "SIDCo-E, paper": lambda r: jc.sidco(r, adapt="paper"),
        "SIDCo-E, climb": lambda r: jc.sidco(r, adapt="climb"),
        "DGC": lambda r: jc.dgc(r),
        "RedSync": lambda r: jc.redsync(r),
        "Gaussian-k": lambda r: jc.gaussian_k(r),
    }


class Row(NamedTuple):
    """Achieved over target of one method on one source, a number for each round."""

    source: str
    feedback: bool
    method: str
    ratio: float
    achieved: np.ndarray


def meter(compressor: Any, ratio: float, size: int, feedback: bool) -> Callable[[Iterable[np.ndarray]], np.ndarray]:
    """Runs a compressor over vectors f32[size], with or without a memory, and counts; compiled once."""
    import jax
    import jax.numpy as jnp

    from jaxcomp.base import State, overflow, residual

    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    key = jax.random.key(0)
    k = max(1, int(ratio * size))

    @jax.jit
    def step(x, memory, local, round_):
        message = x + memory if feedback else x
        payload, local = compressor.compress(jax.random.fold_in(key, round_), message, State(local))
        rest = residual(compressor, message, payload, ()) if feedback else memory
        count = jnp.sum(payload.indices < size, dtype=jnp.int32) + overflow(compressor, local)
        return rest, local, count / jnp.float32(k)

    def run(vectors: Iterable[np.ndarray]) -> np.ndarray:
        memory = jnp.zeros((size,)) if feedback else jnp.zeros(())
        local, achieved = compressor.init(key, like).local, []
        for round_, x in enumerate(vectors):
            memory, local, one = step(x, memory, local, round_)
            achieved.append(float(one))
        return np.array(achieved)

    return run


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments sidco quality", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--log2-size", type=at_least(8), default=18, help="d = 2^this entries of the vectors of known laws")
    p.add_argument("--rounds", type=at_least(4), default=24, help="vectors of each law")
    p.add_argument("--steps", type=at_least(4), default=60, help="gradients recorded from each training")
    p.add_argument("--ratios", type=fraction, nargs="+", default=[0.1, 0.01, 0.001], metavar="RATIO", help="targets")
    p.add_argument("--mnist", type=Path, default=None, help="folder with MNIST's idx files; without it digits are used")
    p.add_argument(
        "--text", type=Path, default=None, help="a text (plain or .xz) for the LSTM; without it it is left out"
    )
    p.add_argument("--seed", type=at_least(0), default=0, help="of data and training")
    run_options(p, "sidco-quality")
    options = p.parse_args(arguments)
    console, folder = new_console(), choose_new(options.runs, options.name, "sidco-quality")
    known: list[Row] = []
    recorded: list[Row] = []
    with progress_bar(console, "") as bar:
        task = bar.add_task("recording gradients", total=None)
        sources = {}
        if options.mnist is not None:
            sources["CNN, MNIST"] = record_images("mnist", options.mnist, options.steps, options.seed)
        else:
            sources["CNN, digits"] = record_images("digits", None, options.steps, options.seed)
        if options.text is not None:
            sources["LSTM, text"] = record_text(options.text, options.steps, options.seed)
        table = methods()
        bar.update(task, total=len(table) * len(options.ratios), completed=0)
        for name, make in table.items():
            for ratio in options.ratios:
                bar.update(task, description=f"{name}, {ratio:g}")
                known += on_laws(name, make(ratio), ratio, options)
                recorded += on_gradients(name, make(ratio), ratio, sources)
                bar.advance(task)

    start_run(folder, vars(options))
    lines = (row._replace(achieved=row.achieved.tolist())._asdict() for row in known + recorded)
    Journal(folder).add(*lines)
    head = ["method", *(f"{ratio:g}" for ratio in options.ratios)]
    shares = ", ".join(f"{share:.0%}" for share in ZEROS)
    title = f"{len(LAWS)} known laws, each with {shares} zeros; d = 2^{options.log2_size}"
    show(console, title, head, cells(known, options.ratios), NOTES, folder / "laws.md")
    for source in sources:
        for feedback in (False, True):
            chosen = [row for row in recorded if (row.source, row.feedback) == (source, feedback)]
            title = f"{source}, {'with' if feedback else 'without'} error feedback; d = {sources[source].shape[1]:,}"
            name = f"{source.split(',')[0].lower()}-{'feedback' if feedback else 'plain'}.md"
            show(console, title, head, cells(chosen, options.ratios), NOTES, folder / name)
    console.print(f"plots: {plot_laws(known, options, folder)} {plot_recorded(recorded, options, folder)}")
    return 0


def on_laws(name: str, compressor: Any, ratio: float, options: Any) -> list[Row]:
    size = 2**options.log2_size
    run = meter(compressor, ratio, size, feedback=False)
    rows = []
    for law in LAWS:
        for zeros in ZEROS:
            achieved = run(draws(law, zeros, size, options.rounds, options.seed))
            source = law if not zeros else f"{law}, {zeros:.0%} zeros"
            rows.append(Row(source, False, name, ratio, achieved))
    return rows


def on_gradients(name: str, compressor: Any, ratio: float, sources: dict[str, np.ndarray]) -> list[Row]:
    return [
        Row(source, feedback, name, ratio, meter(compressor, ratio, gradients.shape[1], feedback)(gradients))
        for source, gradients in sources.items()
        for feedback in (False, True)
    ]


def settled(row: Row) -> np.ndarray:
    return row.achieved[len(row.achieved) // 4 :]


NOTES = """\
Entries above the threshold over k, 1 is ideal: mean, [5 %, 95 %] of single rounds, and the range of the means of the
sources where there are several. The first quarter of the rounds is not counted."""


def cells(rows: list[Row], ratios: list[float]) -> list[list[str]]:
    table = []
    for method in dict.fromkeys(row.method for row in rows):
        line = [method]
        for ratio in ratios:
            chosen = [settled(row) for row in rows if (row.method, row.ratio) == (method, ratio)]
            together = np.concatenate(chosen)
            low, high = np.quantile(together, [0.05, 0.95])
            means = [float(np.mean(values)) for values in chosen]
            spread = f" ({min(means):.3g} .. {max(means):.3g})" if len(means) > 1 else ""
            line.append(f"{np.mean(together):.3g} [{low:.3g}, {high:.3g}]{spread}")
        table.append(line)
    return table


def plot_laws(rows: list[Row], options: Any, folder: Path) -> Path:
    """For each target, the mean of every method on every law, with the 90 % interval."""
    from experiments.lib.plots import LINES, new_figure, save

    figure, axes = new_figure(len(options.ratios), height=6.5)
    names = list(dict.fromkeys(row.method for row in rows))
    sources = list(dict.fromkeys(row.source for row in rows))
    for axis, ratio in zip(axes, options.ratios, strict=True):
        axis.axvspan(0.9, 1.1, color="#BBBBBB", alpha=0.4, linewidth=0)
        for i, (look, name) in enumerate(zip(LINES, names, strict=False)):
            chosen = [settled(row) for row in rows if (row.method, row.ratio) == (name, ratio)]
            means = np.array([np.mean(values) for values in chosen])
            ends = np.array([np.quantile(values, [0.05, 0.95]) for values in chosen]).T
            lengths = np.maximum(np.stack([means - ends[0], ends[1] - means]), 0)
            heights = np.arange(len(sources)) + (i - len(names) / 2) * 0.08
            axis.errorbar(
                np.maximum(means, 1e-3),
                heights,
                xerr=lengths,
                linestyle="none",
                marker=look["marker"],
                color=look["color"],
                markersize=3.5,
                elinewidth=0.8,
                label=name,
            )
        axis.set(xscale="log", xlabel="achieved / target", title=f"target {ratio:g}", xlim=(3e-3, 1e2))
        axis.set_yticks(np.arange(len(sources)), sources if axis is axes[0] else [])
        axis.invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    path = folder / "laws.png"
    save(figure, path)
    return path


def plot_recorded(rows: list[Row], options: Any, folder: Path) -> Path:
    """The same over training time, at the smallest target: a panel for each source, without and with memory."""
    from experiments.lib.plots import LINES, new_figure, save

    ratio = min(options.ratios)
    panels = list(dict.fromkeys((row.source, row.feedback) for row in rows))
    figure, axes = new_figure(len(panels), height=4.6)
    for axis, (source, feedback) in zip(axes, panels, strict=True):
        axis.axhspan(0.9, 1.1, color="#BBBBBB", alpha=0.4, linewidth=0)
        chosen = [row for row in rows if (row.source, row.feedback, row.ratio) == (source, feedback, ratio)]
        for look, row in zip(LINES, chosen, strict=False):
            axis.plot(np.maximum(row.achieved, 1e-3), label=row.method, markevery=10, markersize=4, **look)
        what = "with" if feedback else "without"
        axis.set(yscale="log", xlabel="training step", title=f"{source}, {what} error feedback")
    axes[0].set_ylabel(f"achieved / target at {ratio:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    path = folder / "recorded.png"
    save(figure, path)
    return path
