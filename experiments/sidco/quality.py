"""How near the share of entries above each method's threshold comes to the target.

Achieved over target, 1 is ideal: entries above the threshold (sent, or left over because the message was full) over k.
On vectors of known laws with exact zeros among them, and on gradients recorded from real training, without and with
error feedback. Methods that adapt see one vector after the other; the first quarter of the rounds is not counted.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxcomp as jc
from experiments.lib.cli import at_least, common, fraction
from experiments.lib.data import batch_of, load
from experiments.lib.models import CharLstm, Cnn
from experiments.lib.run import Run, parser_of
from experiments.lib.step import classified, dense
from experiments.lib.text import read_characters, windows
from jaxcomp.base import State, overflow, residual

__all__ = ["LAWS", "ZEROS", "draws", "main"]

METHODS: dict[str, Callable[[float], Any]] = {
    "SIDCo-E": jc.sidco,
    "SIDCo-P": lambda r: jc.sidco(r, law="pareto"),
    "SIDCo-GP": lambda r: jc.sidco(r, law="gamma"),
    "SIDCo-E, M = 3, no counts": lambda r: jc.sidco(r, adapt=None),
    "SIDCo-P, M = 3, no counts": lambda r: jc.sidco(r, law="pareto", adapt=None),
    "SIDCo-E, paper": lambda r: jc.sidco(r, adapt="paper"),
    "SIDCo-E, climb": lambda r: jc.sidco(r, adapt="climb"),
    "DGC": jc.dgc,
    "RedSync": jc.redsync,
    "Gaussian-k": jc.gaussian_k,
}
NOTES = """\
Entries above the threshold over k, 1 is ideal: mean, [5 %, 95 %] of single rounds, and the range of the means of the
sources where there are several. The first quarter of the rounds is not counted."""


# Magnitudes of d entries.
LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "Laplace": lambda rng, d: rng.exponential(size=d),
    "gamma 0.2": lambda rng, d: rng.gamma(0.2, size=d),
    "gamma 0.5": lambda rng, d: rng.gamma(0.5, size=d),
    "Pareto 0.2": lambda rng, d: (rng.random(d) ** -0.2 - 1) / 0.2,
    "Pareto 0.4": lambda rng, d: (rng.random(d) ** -0.4 - 1) / 0.4,
    "half-normal": lambda rng, d: np.abs(rng.standard_normal(d)),
    "Student t3": lambda rng, d: np.abs(rng.standard_t(3, d)),
    "scale mixture": lambda rng, d: np.abs(rng.standard_normal(d) * np.exp(rng.standard_normal(d))),
}
ZEROS = (0.0, 0.1, 0.5)  # shares of exact zeros


def draws(law: str, zeros: float, size: int, number: int, seed: int) -> Iterator[np.ndarray]:
    """`number` vectors f32[size] of a law with random signs, a share of whose entries is exactly zero."""
    rng = np.random.default_rng([seed, list(LAWS).index(law), int(100 * zeros)])
    for _ in range(number):
        x = LAWS[law](rng, size) * rng.choice([-1.0, 1.0], size)
        x[rng.random(size) < zeros] = 0
        yield x.astype(np.float32)


def record_images(data: str, folder: Path | None, steps: int, seed: int) -> np.ndarray:
    """Gradients f32[steps, d] of a CNN, trained dense with Adam on batches of 64."""
    images = load(data, folder)
    everyone = [np.arange(len(images.train_y))]

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = batch_of(everyone, 64, seed, step)
        return images.train_x[chosen], images.train_y[chosen]

    return record(Cnn(images.train_x.shape[1:], images.num_classes, rngs=nnx.Rngs(seed)), batch, steps, rate=1e-3)


def record_text(path: Path, steps: int, seed: int) -> np.ndarray:
    """Gradients f32[steps, d] of a character LSTM, trained dense with Adam on 32 windows of 64 characters."""
    codes, characters = read_characters(path)

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = windows(codes[:-1], 32, 64, seed, step)
        return rows[:, :-1], rows[:, 1:]

    return record(CharLstm(characters, rngs=nnx.Rngs(seed)), batch, steps, rate=2e-3)


def record(model: Any, batch: Callable, steps: int, rate: float) -> np.ndarray:
    """All leaves of each gradient as one vector, in the order of `jax.tree.leaves`."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    gradient = jax.grad(classified(graph, rest))
    return np.stack([flat for _, flat in dense(params, gradient, rate, map(batch, range(steps)))])


class Row(NamedTuple):
    """Achieved over target of one method on one source, a number for each round."""

    source: str
    feedback: bool
    method: str
    ratio: float
    achieved: np.ndarray

    @property
    def settled(self) -> np.ndarray:
        return self.achieved[len(self.achieved) // 4 :]


def meter(compressor: Any, ratio: float, size: int, feedback: bool) -> Callable[[Iterable[np.ndarray]], np.ndarray]:
    """Runs a compressor over vectors f32[size], with or without a memory, and counts; compiled once."""
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
    p = parser_of("sidco quality", __doc__)
    p.add_argument("--log2-size", type=at_least(8), default=18, help="d = 2^this entries of the vectors of known laws")
    p.add_argument("--rounds", type=at_least(4), default=24, help="vectors of each law")
    p.add_argument("--steps", type=at_least(4), default=60, help="gradients recorded from each training")
    p.add_argument("--ratios", type=fraction, nargs="+", default=[0.1, 0.01, 0.001], metavar="RATIO", help="targets")
    p.add_argument("--mnist", type=Path, default=None, help="folder with MNIST's idx files; without it digits are used")
    p.add_argument("--text", type=Path, default=None, help="for the LSTM, plain or .xz; without it it is left out")
    common(p, "seed")
    run = Run(p, arguments, "sidco-quality")
    o, size = run.options, 2**run.options.log2_size

    name = "digits" if o.mnist is None else "MNIST"
    sources = {f"CNN, {name}": record_images(name.lower(), o.mnist, o.steps, o.seed)}
    if o.text is not None:
        sources["LSTM, text"] = record_text(o.text, o.steps, o.seed)

    known: list[Row] = []
    recorded: list[Row] = []

    def one(case: tuple[str, float]) -> None:
        method, ratio = case
        compressor = METHODS[method](ratio)
        measure = meter(compressor, ratio, size, feedback=False)
        for law, zeros in itertools.product(LAWS, ZEROS):
            source = f"{law}, {zeros:.0%} zeros" if zeros else law
            known.append(Row(source, False, method, ratio, measure(draws(law, zeros, size, o.rounds, o.seed))))
        for (source, x), feedback in itertools.product(sources.items(), (False, True)):
            recorded.append(Row(source, feedback, method, ratio, meter(compressor, ratio, x.shape[1], feedback)(x)))

    run.rows_of(list(itertools.product(METHODS, o.ratios)), lambda case: f"{case[0]}, {case[1]:g}", one)
    run.add(*(row._replace(achieved=row.achieved.tolist())._asdict() for row in known + recorded))
    shares = ", ".join(f"{share:.0%}" for share in ZEROS)
    table(run, f"{len(LAWS)} known laws, each with {shares} zeros; d = 2^{o.log2_size}", known, "laws.md")
    for source, feedback in dict.fromkeys((row.source, row.feedback) for row in recorded):
        chosen = [row for row in recorded if (row.source, row.feedback) == (source, feedback)]
        title = f"{source}, {'with' if feedback else 'without'} error feedback; d = {sources[source].shape[1]:,}"
        table(run, title, chosen, f"{source.split(',')[0].lower()}-{'feedback' if feedback else 'plain'}.md")
    laws: dict[str, dict[str, Any]] = {f"target {ratio:g}": {} for ratio in o.ratios}
    for method, ratio in itertools.product(METHODS, o.ratios):
        chosen = [row for row in known if (row.method, row.ratio) == (method, ratio)]
        means = np.maximum([np.mean(row.settled) for row in chosen], 1e-3)
        laws[f"target {ratio:g}"][method] = ([row.source for row in chosen], means)
    run.plot(
        "laws.png", laws, "mean of each law; intervals stand in the table", yscale="log", ylabel="achieved / target"
    )
    least = min(o.ratios)
    over_time: dict[str, dict[str, Any]] = {}
    for row in recorded:
        if row.ratio == least:
            panel = f"{row.source}, {'with' if row.feedback else 'without'} error feedback"
            line = (range(len(row.achieved)), np.maximum(row.achieved, 1e-3))
            over_time.setdefault(panel, {})[row.method] = line
    labels = {"xlabel": "training step", "ylabel": f"achieved / target at {least:g}"}
    run.plot("recorded.png", over_time, yscale="log", **labels)
    return 0


def table(run: Run, title: str, rows: list[Row], name: str) -> None:
    """A row for each method, a column for each ratio."""

    def cell(method: str, ratio: float) -> str:
        chosen = [row.settled for row in rows if (row.method, row.ratio) == (method, ratio)]
        together = np.concatenate(chosen)
        low, high = np.quantile(together, [0.05, 0.95])
        means = [float(np.mean(values)) for values in chosen]
        spread = f" ({min(means):.3g} .. {max(means):.3g})" if len(means) > 1 else ""
        return f"{np.mean(together):.3g} [{low:.3g}, {high:.3g}]{spread}"

    columns = {"method": "{method}"}
    columns |= {f"{r:g}": lambda row, r=r: cell(row["method"], r) for r in run.options.ratios}
    run.table(title, columns, [{"method": m} for m in dict.fromkeys(row.method for row in rows)], NOTES, name)
