"""Data sets, and how they are split among workers."""

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.cli import UserError, existing_folder

__all__ = ["DATASETS", "Dataset", "batch_of", "load", "nobody_empty", "read_idx", "split"]


class Dataset(NamedTuple):
    """Images f32[n, height, width, 1], labels i32[n], for training and for the test."""

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def num_classes(self) -> int:
        return int(max(self.train_y.max(), self.test_y.max())) + 1


def digits(folder: Path | None) -> Dataset:
    """scikit-learn's 1,797 images of 8 x 8 pixels; every fifth is for the test. Needs no download."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 8, 8, 1)
    y = labels.astype(np.int32)
    test = np.arange(len(y)) % 5 == 4
    return Dataset("digits", x[~test], y[~test], x[test], y[test])


def mnist(folder: Path | None) -> Dataset:
    """The four idx files of MNIST, plain or gzipped, in `folder`."""
    if folder is None:
        raise UserError("--data mnist needs --data-dir, the folder with its four idx files")
    existing_folder(folder)

    def read(stem: str) -> np.ndarray:
        found = [folder / f"{stem}{end}" for end in ("", ".gz") if (folder / f"{stem}{end}").is_file()]
        if not found:
            raise UserError(f"no file {stem} or {stem}.gz in {folder}")
        return read_idx(found[0])

    def images(stem: str) -> np.ndarray:
        raw = read(stem)
        if raw.ndim != 3:
            raise UserError(f"{stem} in {folder} holds no images: shape {raw.shape}")
        return ((raw / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081))[..., None]

    train_x, test_x = images("train-images-idx3-ubyte"), images("t10k-images-idx3-ubyte")
    train_y = read("train-labels-idx1-ubyte").astype(np.int32)
    test_y = read("t10k-labels-idx1-ubyte").astype(np.int32)
    if len(train_x) != len(train_y) or len(test_x) != len(test_y):
        raise UserError(f"images and labels in {folder} differ in number")
    return Dataset("mnist", train_x, train_y, test_x, test_y)


DATASETS = {"digits": digits, "mnist": mnist}


def load(name: str, folder: Path | None = None) -> Dataset:
    return DATASETS[name](folder)


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes (the format of MNIST), gzipped if its name ends in .gz.

    Raises:
        UserError: the file is not what its header says.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(f"{path} is not an idx file of bytes")
    dims = data[3]
    if len(data) < 4 + 4 * dims:
        raise UserError(f"{path} ends within its header")
    shape = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if values.size != np.prod(shape, dtype=np.int64):
        raise UserError(f"{path} holds {values.size} values, its header says {shape}")
    return values.reshape(shape)


def split(labels: np.ndarray, workers: int, alpha: float | None, seed: int) -> list[np.ndarray]:
    """Indices of each worker's examples; together they are all examples, each once.

    Args:
        labels: i32[n].
        workers: number of parts.
        alpha: None: shuffled and cut into equal parts (IID). Else, of each class the workers get
            shares drawn from Dirichlet(alpha, ..., alpha): small alpha, different label mixes.
            Every worker gets at least one example.
        seed: of the draw.
    """
    if workers > len(labels):
        raise UserError(f"{workers} workers for {len(labels)} examples; each needs at least one")
    rng = np.random.default_rng([seed, 1])
    if alpha is None:
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), workers)]
    parts: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(workers, alpha))
        edges = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, edges), strict=True):
            part.append(piece)
    return nobody_empty(parts)


def nobody_empty(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The pieces of each worker joined and sorted; whoever got nothing takes one example from the largest."""
    joined = [np.concatenate(part) for part in parts]
    for i in range(len(joined)):
        if not joined[i].size:
            largest = max(range(len(joined)), key=lambda j: joined[j].size)
            joined[i], joined[largest] = joined[largest][:1], joined[largest][1:]
    return [np.sort(part) for part in joined]


def batch_of(parts: list[np.ndarray], size: int, seed: int, step: int) -> np.ndarray:
    """Indices [workers * size] of one step: each worker's from its own part, with replacement.

    Depends on nothing but its arguments, so that a resumed run sees the same batches.
    """
    rng = np.random.default_rng([seed, 2, step])
    return np.concatenate([part[rng.integers(0, len(part), size)] for part in parts])
