"""Sources of local data: files and arrays as streams of rows, and how rows are dealt to workers.

LIBSVM text (plain, .xz, .bz2, .gz), .npy (memory-mapped), .npz, .mat, arrays in memory and SciPy
sparse matrices. A source is read in chunks of rows, as often as needed, so a file may be larger
than memory. scikit-learn parses LIBSVM, SciPy reads .mat and holds sparse rows; both are imported
only here, when they are needed.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.files import refusing

__all__ = ["SPLITS", "Source", "assign", "digest_of", "open_source"]

CHUNK_ROWS = 4096
KEPT_BYTES = 1 << 28  # of parsed LIBSVM text that are kept for the passes that follow
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}


class Source(NamedTuple):
    """Rows with labels.

    chunks() -> iterator of (rows [k, d], dense float64 or SciPy CSR; labels float64[k]).
    num_features: d.
    digest: of the content, sha256 in hex.
    labels_digest: of labels that were given apart from it; None if there were none.
    """

    chunks: Callable[[], Iterator[tuple[Any, np.ndarray]]]
    num_features: int
    digest: str
    labels_digest: str | None = None


def need(module: str, purpose: str) -> Any:
    """Imports an optional module, or says what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = {"sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise ImportError(f"{purpose} needs {package}: pip install 'jaxcomp[experiments]'") from None


def digest_of(data: Any) -> str:
    """sha256 of a file, or of an array's shape, dtype and bytes."""
    digest = hashlib.sha256()
    if isinstance(data, str | Path):
        with Path(data).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    elif hasattr(data, "indptr"):
        for part in (np.asarray(data.shape), data.indptr, data.indices, np.asarray(data.data, np.float64)):
            digest.update(np.ascontiguousarray(part).tobytes())
    else:
        array = np.asarray(data)
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def open_source(data: Any, labels: Any = None, *, num_features: int | None = None) -> Source:
    """A source from a path, an array or a sparse matrix.

    Args:
        data: path to LIBSVM text, .npy, .npz (arrays X and y, or a SciPy sparse matrix), .mat; or
            [m, d] array or sparse matrix.
        labels: [m], or a path to them (.npy), in place of those in the data; None where the loss needs none.
        num_features: d of LIBSVM text; None: the largest index in the file.

    Raises:
        ValueError: no such file, or not what its name says.
    """
    if labels is not None:
        labels = _array(labels) if isinstance(labels, str | Path) else labels
        labels = np.asarray(labels, np.float64).reshape(-1)
    return _open(data, labels, num_features)._replace(labels_digest=None if labels is None else digest_of(labels))


def _open(data: Any, labels: np.ndarray | None, num_features: int | None) -> Source:
    if not isinstance(data, str | Path):
        return _of_arrays(data, labels, digest_of(data))
    path = Path(data)
    if not path.is_file():
        raise ValueError(f"no file {path}")
    digest = digest_of(path)
    if path.suffix == ".npy":
        return _of_arrays(_array(path), labels, digest)
    if path.suffix == ".npz":
        return _of_arrays(*_npz(path, labels), digest)
    if path.suffix == ".mat":
        return _of_arrays(*_mat(path, labels), digest)
    return _libsvm(path, digest, num_features, labels)


def _array(path: str | Path) -> np.ndarray:
    """The array of a .npy file, mapped into memory."""
    with refusing(f"{path} is not a .npy file"):
        return np.lib.format.open_memmap(path, mode="r")


def _of_arrays(rows: Any, labels: Any, digest: str) -> Source:
    if not hasattr(rows, "indptr"):
        rows = rows.tocsr() if hasattr(rows, "tocsr") else rows if isinstance(rows, np.ndarray) else np.asarray(rows)
    elif getattr(rows, "format", "csr") != "csr":
        rows = rows.tocsr()
    if rows.ndim != 2 or not np.can_cast(rows.dtype, np.float64, "same_kind"):
        raise ValueError(f"features must be a real matrix [rows, features]; got {rows.dtype}{list(rows.shape)}")
    y = np.zeros(rows.shape[0]) if labels is None else np.asarray(labels, np.float64).reshape(-1)
    if y.size != rows.shape[0]:
        raise ValueError(f"{y.size} labels for {rows.shape[0]} rows")

    def chunks():
        for start in range(0, rows.shape[0], CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS]
            yield (part if hasattr(part, "indptr") else np.asarray(part, np.float64)), y[start : start + CHUNK_ROWS]

    return Source(chunks, rows.shape[1], digest)


def _npz(path: Path, labels: Any) -> tuple[Any, Any]:
    with refusing(f"cannot read {path}"), path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        if "indptr" in file:
            return need("scipy.sparse", "reading a sparse .npz").load_npz(path), labels
        if "X" in file:
            return file["X"], file["y"] if "y" in file and labels is None else labels
        names = ", ".join(file.files)
    raise ValueError(f"{path} has no array X (and y); it has {names}")


def _mat(path: Path, labels: Any) -> tuple[Any, Any]:
    loadmat = need("scipy.io", "reading .mat").loadmat
    try:
        content = loadmat(path)
    except Exception as error:  # whatever SciPy makes of a damaged file, or of format 7.3
        raise ValueError(f"cannot read {path}: {error}") from None
    arrays = {name: value for name, value in content.items() if not name.startswith("__") and np.ndim(value) == 2}
    if not arrays:
        raise ValueError(f"{path} holds no matrix")
    features = max(arrays, key=lambda name: np.prod(arrays[name].shape))
    count = arrays[features].shape[0]
    found = [value for name, value in arrays.items() if name != features and np.size(value) == count]
    return arrays[features], found[0] if found and labels is None else labels


def _libsvm(path: Path, digest: str, num_features: int | None, labels: np.ndarray | None) -> Source:
    parse = need("sklearn.datasets", "reading LIBSVM text").load_svmlight_file
    opener = OPENERS.get(path.suffix, open)

    def parsed(lines: list[bytes], d: int | None):
        try:
            return parse(io.BytesIO(b"".join(lines)), n_features=d, dtype=np.float64, zero_based=False)
        except OverflowError:
            index = max(int(found) for line in lines for found in re.findall(rb"(\d+):", line))
            raise ValueError(f"{path}: feature {index} is beyond {2**31 - 2}, the largest that can be read") from None
        except ValueError as error:
            raise ValueError(f"{path} is not LIBSVM text: {error}") from None

    def blocks():
        with opener(path, "rb") as file:
            try:
                while lines := file.readlines(1 << 22):
                    lines = [line for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
                    if lines:
                        lines[-1] = lines[-1].rstrip(b"\n") + b"\n"
                        yield lines
            except (OSError, EOFError, lzma.LZMAError) as error:
                raise ValueError(f"cannot read {path}: {error}") from None

    # Parsed once and kept where it fits; beyond that only the largest index is looked for.
    whole: list[tuple[Any, np.ndarray]] | None = []
    widest = kept = 0
    for lines in blocks():
        part, y = parsed(lines, None)
        widest = max(widest, part.shape[1])
        kept += part.data.nbytes + part.indices.nbytes + y.nbytes
        if whole is not None:
            whole.append((part, y))
        if kept > KEPT_BYTES:
            whole = None
            if num_features is not None:
                break
    d = widest if num_features is None else num_features
    if widest > d:
        raise ValueError(f"{path} has feature {widest}, beyond num_features = {d}")
    for part, _ in whole or ():
        part.resize(part.shape[0], d)

    def chunks():
        done = 0
        for rows, y in whole if whole is not None else (parsed(lines, d) for lines in blocks()):
            start, done = done, done + rows.shape[0]
            if labels is not None and done > labels.size:
                raise ValueError(f"{labels.size} labels for at least {done} rows")
            yield rows, y if labels is None else labels[start:done]
        if labels is not None and done < labels.size:
            raise ValueError(f"{labels.size} labels for {done} rows")

    return Source(chunks, d, digest)


# ------------------------------------------------------------------------------------------------
# Dealing rows to workers

SPLITS = ("contiguous", "sorted", "iid", "dirichlet")


def assign(
    split: str, norms: Any, labels: Any, workers: int, *, seed: int = 0, concentration: float = 0.5
) -> np.ndarray:
    """Worker of each row, -1 for a row that is left out.

    "contiguous": equal parts in the order of the data, the remainder left out. "sorted": the same
    after sorting by the 2-norm of the rows (the papers' heterogeneous split). "iid": the same after a
    shuffle. "dirichlet": of each label the workers get shares drawn from Dirichlet(concentration).

    Args:
        norms: 2-norm of each row, [N].
        labels: [N].
        workers: n, at least 1.
        seed: of the draws.
        concentration: of the Dirichlet law, above 0.

    Raises:
        ValueError: unknown split, or a worker would get no row.

    >>> print(assign("sorted", [3.0, 1.0, 2.0, 9.0, 5.0], np.zeros(5), 2))
    [ 1  0  0 -1  1]
    """
    norms, labels = np.asarray(norms, np.float64), np.asarray(labels)
    count = norms.size
    if workers < 1 or workers > count:
        raise ValueError(f"{workers} workers for {count} rows; each needs at least one")
    rng = np.random.default_rng([seed, 3])
    result = np.full(count, -1)
    if split == "dirichlet":
        if not concentration > 0:
            raise ValueError(f"assign: concentration must be above 0; got {concentration}")
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            edges = np.rint(np.cumsum(rng.dirichlet(np.full(workers, concentration)))[:-1] * members.size).astype(int)
            for worker, piece in enumerate(np.split(members, edges)):
                result[piece] = worker
        empty = np.flatnonzero(np.bincount(result, minlength=workers) == 0)
        if empty.size:
            raise ValueError(f"the Dirichlet split leaves worker {empty[0]} without rows; raise its concentration")
        return result
    order = {
        "contiguous": lambda: np.arange(count),
        "sorted": lambda: np.argsort(norms, kind="stable"),
        "iid": lambda: rng.permutation(count),
    }
    if split not in order:
        raise ValueError(f"assign: split must be one of {', '.join(SPLITS)}; got {split!r}")
    each = count // workers
    result[order[split]()[: each * workers]] = np.repeat(np.arange(workers), each)
    return result
