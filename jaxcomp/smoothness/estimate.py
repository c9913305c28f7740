"""The smoothness matrix of a generalised linear model from its local data, form by form.

f(x) = (1/m) sum_j phi(a_j' x) + (l2/2)|x|^2 has   L = (c/m) A'A + l2 I   with c = sup phi''. Each form has a
collector: `add` takes rows, a chunk at a time, `finish` returns the operator. Nothing of size d x d
is made for the diagonal and low-rank forms.

Safe constants. diag: c Diag(L) >= L holds with c = lambda_max(N) for N = D^(-1/2) L D^(-1/2). With |A| in place of
A, N is a nonnegative matrix, whose largest eigenvalue is below max_j (N x)_j / x_j for every positive
x (Collatz, Wielandt); a few products with N make that tight. It never exceeds the largest
number of non-zeros in a row. Low rank: either the exact eigenvectors of the m x m Gram matrix, or,
for many rows, Frequent Directions, a one-pass sketch B with 0 <= A'A - B'B <= delta I.

Reference: Liberty 2013, Ghashami, Liberty, Phillips, Woodruff 2016 (Frequent Directions); Boehning
1992 (softmax). The use of Collatz-Wielandt and of the sketch for a certified M >= L is ours.
"""

import abc
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxcomp.smoothness.operator import (
    Diagonal,
    LowRank,
    Operator,
    Softmax,
    blocks_of,
    dense_of,
    diagonal_of,
    safe_factor,
    stack,
)
from jaxcomp.smoothness.sources import need

__all__ = ["FORMS", "LOSSES", "Collector", "check_finite", "check_magnitude", "collector", "glm", "lift_loss", "square"]

FORMS = ("dense", "diagonal", "low_rank", "block")
LOSSES = {"logistic": 1 / 4, "squared": 1.0, "huber": 1.0, "softmax": 1 / 2}
EXACT_FEATURES = 2048  # up to here the diagonal form computes its safe constant from the full matrix
EXACT_ROWS = 4096  # up to here the low-rank form takes the exact eigenvectors of the Gram matrix
POWER_STEPS = 30
LARGEST = 1e140  # magnitude of a feature: 1e28 squares of it can be added


def _product(matrix: Any, vector: np.ndarray) -> np.ndarray:
    return np.asarray(matrix @ vector).reshape(-1)


def square(rows: Any) -> Any:
    """The square of each entry of dense or sparse rows."""
    return rows.multiply(rows) if hasattr(rows, "multiply") else rows * rows


def _dense(rows: Any) -> np.ndarray:
    return rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows, np.float64)


class Collector(abc.ABC):
    """Takes the rows of one worker and returns its operator. Subclasses say what they keep.

    passes: how often all rows must be added. `arrays` and `restore` carry it over an interruption.
    """

    passes = 1

    def __init__(self, d: int, curvature: float, l2: float):
        self.d, self.curvature, self.l2 = d, curvature, l2
        self.count = 0

    @abc.abstractmethod
    def add(self, rows: Any) -> None:
        """Adds rows [k, d], dense or CSR."""

    def next_pass(self) -> None:  # noqa: B027 - most take one pass
        """Called between two passes."""

    @abc.abstractmethod
    def finish(self) -> Operator:
        """The operator of all rows added."""

    def arrays(self) -> dict[str, np.ndarray]:
        """All that was collected, as arrays."""
        state = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray | int | float)}
        return {name: np.asarray(value) for name, value in state.items()}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        for name, value in arrays.items():
            setattr(self, name, value.copy() if value.ndim else value.item())

    def scale(self) -> float:
        """c / m, with m the rows added in one pass."""
        return self.curvature * self.passes / self.count


class DenseCollector(Collector):
    """A'A, [d, d]."""

    def __init__(self, d: int, curvature: float, l2: float):
        super().__init__(d, curvature, l2)
        self.gram = np.zeros((d, d))

    def add(self, rows):
        rows = _dense(rows)
        self.count += rows.shape[0]
        self.gram += rows.T @ rows

    def matrix(self) -> np.ndarray:
        return self.scale() * self.gram + self.l2 * np.eye(self.d)

    def finish(self) -> Operator:
        return dense_of(self.matrix())


class BlockCollector(DenseCollector):
    """The same, of which the diagonal blocks are kept."""

    def __init__(self, d: int, curvature: float, l2: float, blocks: int):
        super().__init__(d, curvature, l2)
        self.blocks = blocks

    def finish(self) -> Operator:
        return blocks_of(self.matrix(), self.blocks)


class ExactDiagonalCollector(DenseCollector):
    """The diagonal form where the full matrix is small: the least safe constant."""

    def finish(self) -> Diagonal:
        matrix = self.matrix()
        diag = np.diag(matrix)
        inverse = np.divide(1, np.sqrt(diag), out=np.zeros(self.d), where=diag > 0)
        return diagonal_of(diag, safe_factor(matrix, np.diag(inverse)))


class DiagonalCollector(Collector):
    """Squares of columns in the first pass; then products with |A|, for the bound on the safe constant."""

    passes = 1 + POWER_STEPS

    def __init__(self, d: int, curvature: float, l2: float):
        super().__init__(d, curvature, l2)
        self.squares, self.most_nonzeros, self.steps_done = np.zeros(d), 0, 0
        self.vector, self.image, self.bound = np.ones(d), np.zeros(d), np.inf

    def add(self, rows):
        self.count += rows.shape[0]
        if self.steps_done == 0:
            self.squares += np.asarray(square(rows).sum(0)).reshape(-1)
            nonzero = np.diff(rows.indptr) if hasattr(rows, "indptr") else np.count_nonzero(rows, axis=1)
            self.most_nonzeros = max(self.most_nonzeros, int(nonzero.max(initial=0)))
        else:
            self.image += _product(abs(rows).T, _product(abs(rows), self.vector))

    def diag(self) -> np.ndarray:
        return self.curvature * (self.steps_done + 1) / self.count * self.squares + self.l2

    def next_pass(self):
        diag = self.diag()
        if self.steps_done:
            # N similar to D^(-1) L: with x > 0, lambda_max <= max_j (L|.| x)_j / (D_jj x_j).
            used = diag > 0
            scale = self.curvature * (self.steps_done + 1) / self.count
            image = scale * self.image + self.l2 * self.vector
            ratio = np.divide(image, diag * self.vector, out=np.zeros(self.d), where=used)
            self.bound = min(self.bound, float(ratio.max(initial=0)))
            # A floor keeps the vector positive; the bound holds for any positive one.
            self.vector = np.where(used, np.maximum(ratio * self.vector, 1e-12), 1.0)
            self.vector /= self.vector.max()
        self.image = np.zeros(self.d)
        self.steps_done += 1

    def finish(self) -> Diagonal:
        diag = self.diag()
        self.next_pass()
        return diagonal_of(diag, min(self.bound, max(1, self.most_nonzeros)) * (1 + 1e-12))


class LowRankCollector(Collector):
    """The rows themselves while they are few; Frequent Directions when there are more."""

    def __init__(self, d: int, curvature: float, l2: float, rank: int):
        super().__init__(d, curvature, l2)
        self.rank, self.shrunk = rank, 0.0
        self.kept: list[Any] = []
        self.sketch = np.zeros((0, d))

    def add(self, rows):
        self.count += rows.shape[0]
        self.kept.append(rows)
        if self.count > EXACT_ROWS:
            self._fold(self._joined().shape[0] // self.rank * self.rank)

    def _fold(self, count: int) -> None:
        """Moves kept rows into the sketch, `rank` at a time, so that it plays no part in what chunks they came."""
        rows = self._joined()
        for start in range(0, count, self.rank):
            self.sketch = np.concatenate([self.sketch, _dense(rows[start : min(start + self.rank, count)])])
            self._shrink()
        self.kept = [rows[count:]]

    def _joined(self) -> Any:
        if hasattr(self.kept[0], "indptr"):
            return need("scipy.sparse", "sparse rows").vstack(self.kept).tocsr()
        return np.concatenate(self.kept)

    def _shrink(self) -> None:
        """Keeps rank directions, subtracting the square of the next from all: one step of the sketch."""
        if self.sketch.shape[0] <= self.rank:
            return
        values, left = np.linalg.eigh(self.sketch @ self.sketch.T)
        cut = max(values[-self.rank - 1], 0.0)
        values, left = values[-self.rank :], left[:, -self.rank :]
        keep = values > max(cut, 1e-14 * values[-1])
        left, values = left[:, keep], values[keep]
        self.sketch = (left * np.sqrt((values - cut) / values)).T @ self.sketch
        self.shrunk += cut

    def arrays(self):
        if not self.kept:
            return super().arrays()
        rows = self._joined()
        if not hasattr(rows, "indptr"):
            return super().arrays() | {"kept": rows}
        return super().arrays() | {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr}

    def restore(self, arrays):
        arrays = dict(arrays)
        if "kept" in arrays:
            self.kept = [arrays.pop("kept")]
        if "data" in arrays:
            parts = tuple(arrays.pop(name) for name in ("data", "indices", "indptr"))
            self.kept = [need("scipy.sparse", "sparse rows").csr_matrix(parts, shape=(parts[2].size - 1, self.d))]
        super().restore(arrays)

    def finish(self) -> LowRank:
        scale = self.scale()
        if self.count > EXACT_ROWS:
            self._fold(self._joined().shape[0])
        rows = self.sketch if self.count > EXACT_ROWS else self._joined()
        values, left = np.linalg.eigh(_dense(rows @ rows.T))
        count = min(self.rank, int(np.sum(values > 1e-12 * max(values[-1], 1e-300))))
        following = max(values[-count - 1], 0.0) if count < values.size else 0.0
        following = following if count == self.rank else 0.0
        top, left = values[values.size - count :], left[:, values.size - count :]
        vectors = np.asarray(rows.T @ (left / np.sqrt(top)))
        # Eigenvectors of the Gram matrix lose orthogonality where eigenvalues are small.
        vectors, mixing = np.linalg.qr(vectors)
        vectors = vectors * np.sign(np.where(np.diag(mixing) == 0, 1, np.diag(mixing)))
        base = self.l2 + scale * (following + self.shrunk)
        sigma = scale * (top - following)
        pad = self.rank - count  # so that operators of all workers stack
        vectors, sigma = np.pad(vectors, ((0, 0), (0, pad))), np.pad(sigma, (0, pad))
        diag = base + np.square(vectors) @ sigma
        return LowRank(vectors, sigma, np.float64(base), diag, np.float64(base + sigma.max(initial=0)))


def collector(
    form: str, d: int, *, loss: str, l2: float, rank: int | None = None, blocks: int | None = None
) -> Callable[[], Collector]:
    """A function that makes a collector for each worker.

    Raises:
        ValueError: unknown form or loss, l2 negative or not finite, rank or blocks missing.
    """
    if loss not in LOSSES:
        raise ValueError(f"smoothness: loss must be one of {', '.join(LOSSES)}; got {loss!r}")
    if not (np.isfinite(l2) and l2 >= 0):
        raise ValueError(f"smoothness: l2 must be finite and at least 0; got {l2}")
    curvature = LOSSES[loss]
    if form in ("dense", "block"):
        check_room(form, d)
    if form == "dense":
        return lambda: DenseCollector(d, curvature, l2)
    if form == "diagonal":
        kind = ExactDiagonalCollector if d <= EXACT_FEATURES else DiagonalCollector
        return lambda: kind(d, curvature, l2)
    if form == "low_rank":
        if rank is None or int(rank) != rank or rank < 1:
            raise ValueError(f'smoothness: form "low_rank" needs rank, an integer of at least 1; got {rank}')
        return lambda: LowRankCollector(d, curvature, l2, min(int(rank), d))
    if form == "block":
        if blocks is None or int(blocks) != blocks or not 1 <= blocks <= d:
            raise ValueError(f'smoothness: form "block" needs blocks in 1 .. {d}; got {blocks}')
        return lambda: BlockCollector(d, curvature, l2, int(blocks))
    raise ValueError(f"smoothness: form must be one of {', '.join(FORMS)}; got {form!r}")


def lift_loss(operator: Operator, loss: str, l2: float, classes: int | None) -> Operator:
    """The operator itself, or for the softmax loss that of all classes."""
    if loss != "softmax":
        return operator
    if classes is None or classes < 2:
        raise ValueError(f"smoothness: the softmax loss needs classes, at least 2; got {classes}")
    return Softmax(operator, np.float64(l2), np.zeros(classes))


def glm(
    features: Any,
    *,
    loss: str = "logistic",
    l2: float = 0.0,
    form: str = "dense",
    rank: int | None = None,
    blocks: int | None = None,
    classes: int | None = None,
) -> Operator:
    """Smoothness operator of a generalised linear model with mean loss and (l2/2)|x|^2.

    L = (c/m) A'A + l2 I,   c = 1/4 logistic, 1 squared ((a'x - b)^2 / 2) and huber (the same, linear in the
    tails), and for softmax the bound (1/2)(I - 11'/K) x A'A/m + l2 I on K d entries (class by class).

    Args:
        features: A, [m, d], dense or SciPy sparse; or a sequence of n of them, one per worker.
        loss: "logistic", "squared", "huber" or "softmax".
        l2: at least 0. With 0 the pseudo-inverse is used where L is singular.
        form: "dense"; "diagonal" (c Diag(L) with the safe constant c); "low_rank" (exact on `rank`
            directions, a multiple of I outside); "block" (c blockdiag(L)).
        rank: of the low-rank form.
        blocks: of the block form.
        classes: K, for softmax.

    Returns:
        An operator with float64 NumPy arrays; for a sequence, the stack of them.

    Raises:
        ValueError: an unknown name, l2 < 0, no rows, or entries that are not finite.

    Reference: Safaryan, Hanzely, Richtarik 2021, section 2; Boehning 1992 for softmax.

    >>> S = glm(np.array([[2.0, 0.0], [0.0, 4.0]]), loss="squared")
    >>> print(S.diag, S.root(np.ones(2)))
    [2. 8.] [1.41421356 2.82842712]
    """
    if isinstance(features, Sequence) and features and np.ndim(features[0]) == 2:
        options: dict[str, Any] = {"loss": loss, "l2": l2, "form": form, "rank": rank, "blocks": blocks}
        return stack([glm(one, classes=classes, **options) for one in features])
    if np.iscomplexobj(features):
        raise ValueError("smoothness: features must be real; got complex numbers")
    rows: Any = features
    rows = rows.tocsr() if hasattr(rows, "tocsr") else np.asarray(rows, np.float64)
    if rows.ndim == 3:
        return glm(list(rows), loss=loss, l2=l2, form=form, rank=rank, blocks=blocks, classes=classes)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"smoothness: features must be [rows, features], neither of them 0; got shape {rows.shape}")
    check_magnitude(rows)
    one = collector(form, rows.shape[1], loss=loss, l2=l2, rank=rank, blocks=blocks)()
    for done in range(one.passes):
        if done:
            one.next_pass()
        one.add(rows)
    return lift_loss(one.finish(), loss, l2, classes)


def check_room(form: str, d: int) -> None:
    """Raises ValueError if this machine could not hold a d x d matrix of f64."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 8 * d * d
    if needed > memory:
        raise ValueError(
            f'smoothness: form "{form}" of {d} features makes a matrix of {d} x {d} numbers, {needed / 2**30:.3g} GiB; '
            f'this machine has {memory / 2**30:.3g} GiB. Use form "diagonal" or "low_rank"'
        )


def check_finite(rows: Any) -> np.ndarray:
    """The numbers of dense or sparse rows; ValueError for NaN and infinities, which no scale makes finite."""
    values = rows.data if hasattr(rows, "indptr") else rows
    if not np.all(np.isfinite(values)):
        raise ValueError("smoothness: features must be finite; got NaN or infinity")
    return values


def check_magnitude(rows: Any) -> None:
    """Raises ValueError if rows are not finite, or hold numbers whose squares f64 cannot hold."""
    largest = np.max(np.abs(check_finite(rows)), initial=0)
    if largest > LARGEST:
        raise ValueError(
            f"smoothness: features must be at most {LARGEST:g} in magnitude, so that sums of their squares are finite; "
            f"got {largest:g}. Scale them: --scale-rows, or scale=True"
        )
