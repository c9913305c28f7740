"""How near the share of entries above each method's threshold comes to the target.

Achieved over target, 1 is ideal: entries above the threshold (sent, or left over because the message was full) over k.
On vectors of known laws with exact zeros among them, and on gradients recorded from real training, without and with
error feedback. Methods that adapt see one vector after the other; the first quarter of the rounds is not counted.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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

__all__ = ["LAWS", "ZEROS", "draws", "main"]

METHODS: dict[str, Callable[[float], Any]] = {
    "SIDCo-E": jc.sidco,
    "SIDCo-P": lambda r: jc.sidco(r, law="pareto"),
    "SIDCo-GP": lambda r: jc.sidco(r, law="gamma"),
    "SIDCo-E, paper": lambda r: jc.sidco(r, adapt="paper"),
    "SIDCo-E, climb": lambda r: jc.sidco(r, adapt="climb"),
    "DGC": jc.contrib.dgc,
    "RedSync": jc.contrib.redsync,
    "Gaussian-k": jc.contrib.gaussian_k,
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
    chosen = (batch_of(everyone, 64, seed, step) for step in range(steps))
    model = Cnn(images.train_x.shape[1:], images.num_classes, rngs=nnx.Rngs(seed))
    return record(model, ((images.train_x[rows], images.train_y[rows]) for rows in chosen), rate=1e-3)


def record_text(path: Path, steps: int, seed: int) -> np.ndarray:
    """Gradients f32[steps, d] of a character LSTM, trained dense with Adam on 32 windows of 64 characters."""
    codes, characters = read_characters(path)
    rows = (windows(codes[:-1], 32, 64, seed, step) for step in range(steps))
    model = CharLstm(characters, rngs=nnx.Rngs(seed))
    return record(model, ((codes[:, :-1], codes[:, 1:]) for codes in rows), rate=2e-3)


def record(model: Any, batches: Iterable[Any], rate: float) -> np.ndarray:
    """All leaves of each gradient as one vector, in the order of `jax.tree.leaves`."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    gradient = jax.grad(classified(graph, rest))
    return np.stack([flat for _, flat in dense(params, gradient, rate, batches)])


# Makers of all vectors f32[d] of each source, by its name.
Sources = dict[str, Callable[[], Iterable[np.ndarray]]]


def achieved(compressor: Any, ratio: float, sources: Sources, feedback: bool) -> list[list[float]]:
    """Achieved over target for each source in each round; feedback: what was not sent is added to the next vector."""
    tx = jc.compressed_mean((jc.error_feedback if feedback else jc.direct)(compressor), None)

    @jax.jit
    def step(state, x):
        _, state = tx.update(x, state)
        info = jc.info(state)
        return state, (info.achieved_ratio * x.size + info.overflow) / max(1, int(ratio * x.size))

    def run(vectors: Iterable[np.ndarray]) -> Iterator[float]:
        state = None
        for x in vectors:
            state, one = step(tx.init(jnp.zeros(x.size)) if state is None else state, x)
            yield float(one)

    return [list(run(vectors())) for vectors in sources.values()]


def cell(sources: list[list[float]]) -> str:
    settled = [np.array(rounds[len(rounds) // 4 :]) for rounds in sources]
    together, means = np.concatenate(settled), [rounds.mean() for rounds in settled]
    low, high = np.quantile(together, [0.05, 0.95])
    spread = f" ({min(means):.3g} .. {max(means):.3g})" if len(means) > 1 else ""
    return f"{together.mean():.3g} [{low:.3g}, {high:.3g}]{spread}"


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
    o, panels = run.options, {}
    name = "digits" if o.mnist is None else "MNIST"
    recorded = {f"CNN, {name}": record_images(name.lower(), o.mnist, o.steps, o.seed)}
    if o.text is not None:
        recorded["LSTM, text"] = record_text(o.text, o.steps, o.seed)

    size, laws = 2**o.log2_size, {}
    for law, zeros in itertools.product(LAWS, ZEROS):
        name = f"{law}, {zeros:.0%} zeros" if zeros else law
        laws[name] = functools.partial(draws, law, zeros, size, o.rounds, o.seed)
    shares = ", ".join(f"{share:.0%}" for share in ZEROS)
    compare(run, f"{len(LAWS)} known laws, each with {shares} zeros; d = {size:,}", "laws", laws, False)
    for (source, x), feedback in itertools.product(recorded.items(), (False, True)):
        title = f"{source}, {'with' if feedback else 'without'} error feedback; d = {x.shape[1]:,}"
        file = f"{source.split(',')[0].lower()}-{'feedback' if feedback else 'plain'}"
        least = compare(run, title, file, {source: lambda x=x: x}, feedback)
        panels[title] = {name: (range(len(y)), np.maximum(y, 1e-3)) for name, (y,) in least.items()}
    labels = {"xlabel": "training step", "ylabel": f"achieved / target at {min(o.ratios):g}"}
    run.plot("recorded.png", panels, yscale="log", **labels)
    return run.status


def compare(run: Run, title: str, file: str, sources: Sources, feedback: bool) -> dict[str, list[list[float]]]:
    """The table FILE.md; achieved over target of each method at the least ratio, of each source in each round."""
    ratios = run.options.ratios

    def measure(method: str) -> dict[float, list[list[float]]]:
        found = {ratio: achieved(METHODS[method](ratio), ratio, sources, feedback) for ratio in ratios}
        for ratio, rounds in found.items():
            row = {"feedback": feedback, "method": method, "ratio": ratio}
            run.add(*(row | {"source": x, "achieved": y} for x, y in zip(sources, rounds, strict=True)))
        return found

    run.say(title)
    found = dict(zip(METHODS, run.rows_of(list(METHODS), str, measure), strict=False))
    columns = {f"{ratio:g}": lambda method, ratio=ratio: cell(found[method][ratio]) for ratio in ratios}
    run.table(title, {"method": str, **columns}, found, NOTES, f"{file}.md")
    return {method: rounds[min(ratios)] for method, rounds in found.items()}
