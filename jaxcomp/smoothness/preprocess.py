"""The preprocessing pass: data in, one file of smoothness operators out, once, before training.

Rows are read in chunks, as often as the form needs; what was collected is kept beside the result
every few seconds, so that an interrupted pass goes on where it was.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxcomp.files import BROKEN, read_arrays, write_arrays
from jaxcomp.smoothness.estimate import Collector, check_finite, check_magnitude, collector, lift_loss, square
from jaxcomp.smoothness.operator import Blocks, DenseMatrix, Diagonal, LowRank, Operator, Softmax, stack
from jaxcomp.smoothness.sources import Source, assign
from jaxcomp.smoothness.store import describe, load, save

__all__ = ["mean_lambda_max", "preprocess", "scaled_rows"]

LABELS = ((-1.0, 1.0), (0.0, 1.0), (1.0, 2.0))


def scaled_rows(rows: Any) -> Any:
    """Each row divided by its largest magnitude; zero rows stay."""
    if hasattr(rows, "indptr"):
        largest = np.asarray(abs(rows).max(axis=1).todense()).reshape(-1)
        rows = rows.copy()
        rows.data = rows.data / np.repeat(np.where(largest > 0, largest, 1), np.diff(rows.indptr))
        return rows
    largest = np.max(np.abs(rows), axis=1, initial=0)
    return rows / np.where(largest > 0, largest, 1)[:, None]


def _scan(source: Source, scale: bool, show: Callable[[int], None]) -> tuple[np.ndarray, np.ndarray]:
    """Norms [N] and labels [N] of all rows, which are checked to be finite."""
    norms, labels, done = [], [], 0
    for rows, y in source.chunks():
        if scale:
            check_finite(rows)
            rows = scaled_rows(rows)
        check_magnitude(rows)
        norms.append(np.sqrt(np.asarray(square(rows).sum(1)).reshape(-1)))
        labels.append(y)
        done += len(y)
        show(done)
    if not done:
        raise ValueError("the data has no rows")
    return np.concatenate(norms), np.concatenate(labels)


def classes_of(labels: np.ndarray, loss: str) -> int | None:
    """Checks labels against the loss; number of classes for softmax.

    Raises:
        ValueError: labels outside of the set that the loss allows.
    """
    if not np.all(np.isfinite(labels)):
        raise ValueError("labels must be finite; got NaN or infinity")
    if loss in ("squared", "huber"):
        return None
    values = np.unique(labels)
    if loss == "logistic":
        if not any(set(values) <= set(pair) for pair in LABELS):
            raise ValueError(f"the logistic loss needs labels -1/+1, 0/1 or 1/2; got {_few(values)}")
        return None
    if np.any(values != np.rint(values)) or values.size < 2:
        raise ValueError(f"the softmax loss needs at least two integer labels; got {_few(values)}")
    return values.size


def _few(values: np.ndarray) -> str:
    return ", ".join(f"{v:g}" for v in values[:5]) + (", ..." if values.size > 5 else "")


def mean_lambda_max(operator: Operator) -> float:
    """lambda_max of the mean of a stack of operators: a smoothness constant of the mean loss.

    >>> from jaxcomp.smoothness.operator import diagonal_of
    >>> mean_lambda_max(stack([diagonal_of([1.0, 0.0]), diagonal_of([0.0, 2.0])]))
    1.0
    """
    if isinstance(operator, Softmax):
        return mean_lambda_max(operator.inner)
    if isinstance(operator, Diagonal):
        return float(np.max(np.mean(operator.diag, axis=0)))
    n = operator.diag.shape[0]
    if isinstance(operator, LowRank):
        parts = [u * np.sqrt(s / n) for u, s in zip(operator.vectors, operator.sigma, strict=True)]
        joined = np.concatenate(parts, 1).astype(np.float32)  # the product is what takes time; 1e-5 covers rounding
        largest = np.linalg.eigvalsh((joined.T @ joined).astype(np.float64))[-1]
        return float(np.mean(operator.base) + largest * (1 + 1e-5))
    if isinstance(operator, Blocks):
        mean = np.mean(operator.matrix_root @ operator.matrix_root, axis=0)
        return float(np.max(np.linalg.eigvalsh(mean)))
    assert isinstance(operator, DenseMatrix)
    mean = np.mean(operator.matrix_root @ np.swapaxes(operator.matrix_root, 1, 2), axis=0)
    return float(np.linalg.eigvalsh(mean)[-1])


class Pass:
    """One run over the data: a collector for each worker, and what is kept for an interruption."""

    def __init__(self, make: Callable[[], Collector], owner: np.ndarray, workers: int, partial: Path, key: str):
        self.collectors = [make() for _ in range(workers)]
        self.owner, self.partial, self.key = owner, partial, key
        self.turn, self.row = 0, 0  # pass number, rows of it that are done

    def keep(self) -> None:
        arrays = {"key": np.array(self.key), "turn": np.array(self.turn), "row": np.array(self.row)}
        for i, one in enumerate(self.collectors):
            arrays |= {f"{i}/{name}": value for name, value in one.arrays().items()}
        write_arrays(self.partial, arrays)

    def resume(self) -> bool:
        """Takes up what an interrupted pass with the same options left; True if there was one."""
        try:
            content = read_arrays(self.partial)  # all of it, before anything is taken up
            if str(content["key"]) != self.key:
                return False
        except BROKEN:
            return False
        for i, one in enumerate(self.collectors):
            one.restore({name.split("/", 1)[1]: a for name, a in content.items() if name.startswith(f"{i}/")})
        self.turn, self.row = int(content["turn"]), int(content["row"])
        return True

    def go(self, source: Source, scale: bool, keep_every: float, show: Callable[[int, int], None]) -> list[Operator]:
        kept = time.monotonic()
        for turn in range(self.turn, self.collectors[0].passes):
            start = 0
            for rows, _ in source.chunks():
                end = start + rows.shape[0]
                if end > self.row:
                    self._deal(scaled_rows(rows) if scale else rows, self.owner[start:end])
                    self.row = end
                    show(turn, end)
                    if time.monotonic() - kept > keep_every:
                        self.keep()
                        kept = time.monotonic()
                start = end
            if turn + 1 < self.collectors[0].passes:
                for one in self.collectors:
                    one.next_pass()
                self.turn, self.row = turn + 1, 0
        return [one.finish() for one in self.collectors]

    def _deal(self, rows: Any, owner: np.ndarray) -> None:
        for worker in np.unique(owner[owner >= 0]):
            self.collectors[worker].add(rows[owner == worker])


def preprocess(
    source: Source,
    out: str | Path,
    *,
    workers: int,
    loss: str = "logistic",
    l2: float = 0.0,
    form: str = "dense",
    split: str = "contiguous",
    scale: bool = False,
    seed: int = 0,
    concentration: float = 0.5,
    rank: int | None = None,
    blocks: int | None = None,
    keep_every: float = 10.0,
    show: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Operator:
    """Computes each worker's smoothness operator and writes them, stacked, to one file.

    If `out` was made with the same options from the same data it is loaded instead, and what an
    interrupted pass left is taken up.

    Args:
        source: rows and labels (`open_source`).
        out: file to write.
        workers: n.
        loss, l2, form, rank, blocks: as for `glm`.
        split: "contiguous", "sorted", "iid" or "dirichlet" (`assign`).
        scale: divide each row by its largest magnitude first.
        seed, concentration: of the split.
        keep_every: seconds between two savings of the unfinished pass.
        show: called with what is being done, rows done and rows in all.

    Returns:
        The stack of operators.

    Raises:
        ValueError: an option out of range, labels that do not fit the loss, entries that are not
            finite, a worker without rows, or `out` holds something else.
    """
    import jaxcomp

    make = collector(form, source.num_features, loss=loss, l2=l2, rank=rank, blocks=blocks)
    out = Path(out)
    options = {
        "digest": source.digest,
        "labels": source.labels_digest,
        "workers": workers,
        "features": source.num_features,
        "loss": loss,
        "l2": l2,
        "option_form": form,
        "split": split,
        "scaled": scale,
        "seed": seed,
        "concentration": concentration,
        "rank": rank,
        "blocks": blocks,
        "dtype": "float64",
        "library": jaxcomp.__version__,
    }
    if out.exists():
        return _made_before(out, options)
    norms, labels = _scan(source, scale, lambda rows: show("reading", rows, 0))
    classes = classes_of(labels, loss)
    if l2 == 0 and not np.any(norms):
        raise ValueError(
            "the squares of all features are zero, and so are the smoothness matrices with l2 = 0; give l2 (--l2)"
        )
    owner = assign(split, norms, labels, workers, seed=seed, concentration=concentration)
    run = Pass(make, owner, workers, Path(f"{out}.partial"), json.dumps(options, sort_keys=True))
    run.resume()
    passes = run.collectors[0].passes
    shown = lambda number, rows: show(f"pass {number + 1} of {passes}", rows, owner.size)
    operators = run.go(source, scale, keep_every, shown)
    operator = stack([lift_loss(one, loss, l2, classes) for one in operators])
    rows = np.bincount(owner[owner >= 0], minlength=workers).tolist()
    largest = np.asarray(operator.lambda_max).tolist()
    save(out, operator, **options, rows=rows, lambda_max=largest, mean_lambda_max=mean_lambda_max(operator))
    run.partial.unlink(missing_ok=True)
    return operator


def _made_before(out: Path, options: dict[str, Any]) -> Operator:
    """Reads the file, if it was made with these options."""
    made = describe(out)
    if {name: made.get(name) for name in options} != options:
        raise ValueError(f"{out} exists and was made from other data or options; choose another file")
    return load(out)
