"""Data sets, and how they are split among workers."""

import gzip
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import Parser, UserError, existing_folder
from experiments.lib.errors import reading

__all__ = ["DATASETS", "Dataset", "add_rows", "batch_of", "imbalanced_split", "load", "read_idx", "read_rows"]
__all__ += ["skewed_volumes", "split"]


# (images as stored [n, height, width], labels) for training and for the test, and rows of such images as f32.
Raw = tuple[list[tuple[np.ndarray, np.ndarray]], Callable[[np.ndarray], np.ndarray]]


class Dataset(NamedTuple):
    """Images f32[n, height, width, 1], labels i32[n], for training and for the test.

    rows: i64[m], ascending: train_x holds the images of these examples alone, f32[m, ...]; None: of all.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    rows: np.ndarray | None = None

    def images_of(self, examples: np.ndarray) -> np.ndarray:
        """Training images of examples, by their numbers in the whole data set."""
        return self.train_x[examples if self.rows is None else np.searchsorted(self.rows, examples)]

    @property
    def num_classes(self) -> int:
        return int(max(self.train_y.max(), self.test_y.max())) + 1


def digits(folder: Path | None) -> Raw:
    """scikit-learn's 1,797 images of 8 x 8 pixels; every fifth is for the test. Needs no download."""
    package = importlib.util.find_spec("sklearn")  # importing it takes longer than all the rest, in every process
    if package is None or package.origin is None:
        raise UserError("digits needs scikit-learn, where they are kept")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int32)
    tested = np.arange(len(y)) % 5 == 4
    return [(x[~tested], y[~tested]), (x[tested], y[tested])], lambda rows: (rows - x.mean()) / x.std()


def mnist(folder: Path | None) -> Raw:
    """The four idx files of MNIST, plain or gzipped, in `folder`."""
    if folder is None:
        raise UserError("mnist needs --data-dir, the folder with its four idx files")
    existing_folder(folder)

    def read(stem: str) -> np.ndarray:
        found = [folder / f"{stem}{end}" for end in ("", ".gz") if (folder / f"{stem}{end}").is_file()]
        if not found:
            raise UserError(f"no file {stem} or {stem}.gz in {folder}")
        return read_idx(found[0])

    parts = []
    for part in ("train", "t10k"):
        labels, images = read(f"{part}-labels-idx1-ubyte"), read(f"{part}-images-idx3-ubyte")
        if images.ndim != 3 or len(images) != len(labels):
            raise UserError(f"{folder}: {part} has {len(labels)} labels, and images of shape {images.shape}")
        parts.append((images, labels.astype(np.int32)))
    return parts, lambda rows: (rows / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)


DATASETS = {"digits": digits, "mnist": mnist}


def load(name: str, folder: Path | None = None, choose: Callable | None = None, test: bool = True) -> Dataset:
    """A data set, or a worker's part of it.

    choose: labels of all examples -> indices of those whose images to keep, ascending. test: with images of the test.
    """
    ((train_x, train_y), (test_x, test_y)), scaled = DATASETS[name](folder)
    rows = None if choose is None else choose(train_y)
    images = lambda stored: scaled(stored).astype(np.float32)[..., None]
    kept = images(train_x if rows is None else train_x[rows])
    return Dataset(name, kept, train_y, images(test_x[: None if test else 0]), test_y, rows)


def add_rows(p: Parser, without: str) -> None:
    """--data, a file for `read_rows`. without: what there is if it is not given."""
    files = "LIBSVM text (plain, .gz, .bz2, .xz), .npz of X and y or of a sparse matrix, .mat"
    p.add_argument("--data", type=Path, default=None, help=f"{files}; without it {without}")


def read_rows(path: Path, num_features: int | None = None) -> tuple[Any, np.ndarray]:
    """A file of rows with labels: a SciPy CSR matrix [m, d] without stored zeros, and labels f64[m].

    path: as `add_rows` says. num_features: d of LIBSVM text; None: the largest index in the file.
    """
    import scipy.sparse

    import jaxcomp as jc

    try:
        chunks = list(jc.smoothness.open_source(path, num_features=num_features).chunks())
    except ValueError as error:
        raise UserError(str(error)) from None
    if not chunks or any(labels is None for _, labels in chunks):
        raise UserError(f"{path} has no labels" if chunks else f"{path} has no rows")
    labels = np.concatenate([labels for _, labels in chunks]).astype(np.float64)
    if len(np.unique(labels)) < 2:
        raise UserError(f"{path}: all {labels.size} labels are {labels[0]:g}; two classes are needed")
    rows = scipy.sparse.csr_matrix(scipy.sparse.vstack([scipy.sparse.csr_matrix(part) for part, _ in chunks]))
    rows.eliminate_zeros()
    if not np.isfinite(rows.data).all() or not np.isfinite(labels).all():
        raise UserError(f"{path} holds NaN or infinity; labels and features must be finite")
    return rows, labels


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes (the format of MNIST), gzipped if its name ends in .gz; else parts are read when used."""
    with reading(str(path), "is it an idx file?"):
        if path.suffix == ".gz":
            data: Any = gzip.decompress(path.read_bytes())
        else:  # an empty file cannot be mapped
            data = np.memmap(path, np.uint8, "r") if path.stat().st_size else b""
    if len(data) < 4 or bytes(data[:3]) != b"\0\0\x08" or len(data) < 4 + 4 * int(data[3]):
        raise UserError(f"{path} is not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape))
    if values.size != np.prod(shape, dtype=np.int64):
        raise UserError(f"{path} holds {values.size} values, its header says {shape}")
    return values.reshape(shape)


def split(labels: np.ndarray, workers: int, alpha: float | None, seed: int) -> list[np.ndarray]:
    """Indices of each worker's examples; together they are all examples, each once.

    alpha: None: shuffled and cut into equal parts (IID). Else, of each class the workers get shares drawn from
    Dirichlet(alpha, ..., alpha): small alpha, different label mixes. Every worker gets at least one example.
    """
    rng = np.random.default_rng([seed, 1])
    if alpha is None:
        return _served(np.array_split(rng.permutation(len(labels)), workers))
    return _dealt(labels, rng, lambda _: rng.dirichlet(np.full(workers, alpha)))


def skewed_volumes(workers: int, skew: float) -> np.ndarray:
    """Volumes log-spaced from `skew` down to 1 over all workers but the last, which has 1 too. float64[n]."""
    return np.append(np.geomspace(skew, 1.0, workers - 1), 1.0)


def imbalanced_split(labels: np.ndarray, workers: int, skew: float, alpha: float, seed: int) -> list[np.ndarray]:
    """The same of unequal workers, as DAGC's released generator draws them: label mixes from Dirichlet(alpha), volumes
    log-spaced over `skew`.

    Row i of the mixes is scaled to volume v_i; class c with N_c examples is then shared in the proportions of column
    c, rounded. Every worker has at least one example; realised volumes differ a little from v.
    """
    rng = np.random.default_rng([seed, 11])
    mixes = rng.dirichlet(np.full(len(np.unique(labels)), alpha), workers)
    demand = mixes * skewed_volumes(workers, skew)[:, None]
    shares = demand / demand.sum(0)
    return _dealt(labels, rng, lambda number: shares[:, number])


def _dealt(labels: np.ndarray, rng: np.random.Generator, shares_of: Callable[[int], np.ndarray]) -> list[np.ndarray]:
    """The examples of each class, shuffled, by shares f64[workers] that are drawn or known for the class with this
    number."""
    pieces = []
    for number, label in enumerate(np.unique(labels)):
        members = rng.permutation(np.flatnonzero(labels == label))
        edges = np.rint(np.cumsum(shares_of(number))[:-1] * len(members)).astype(int)
        pieces.append(np.split(members, edges))
    return _served([np.concatenate(part) for part in zip(*pieces, strict=True)])


def _served(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Parts, sorted; whoever got nothing takes one example from the largest."""
    if len(parts) > (examples := sum(map(len, parts))):
        raise UserError(f"{len(parts)} workers for {examples} examples; each needs at least one")
    for i in range(len(parts)):
        if not parts[i].size:
            largest = max(range(len(parts)), key=lambda j: parts[j].size)
            parts[i], parts[largest] = parts[largest][:1], parts[largest][1:]
    return [np.sort(part) for part in parts]


def batch_of(parts: list[np.ndarray], size: int, seed: int, step: int) -> np.ndarray:
    """Indices [workers * size] of one step: each worker's from its own part, with replacement.

    Depends on nothing but its arguments, so that a resumed run sees the same batches.
    """
    rng = np.random.default_rng([seed, 2, step])
    return np.concatenate([part[rng.integers(0, len(part), size)] for part in parts])
