"""Smoothness operators in one file: arrays, and where they come from.

A NumPy .npz with the operator's arrays and a JSON text: format version, form, shape, dtype, and the
provenance of the preprocessing pass (hash of the data, split, loss, l2, library version).
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcomp.files import refusing, write_arrays
from jaxcomp.smoothness.operator import Blocks, DenseMatrix, Diagonal, LowRank, Operator, Softmax
from jaxcomp.smoothness.sources import digest_of

__all__ = ["describe", "form_of", "load", "save"]

VERSION = 1
# The words of the files, which outlive the names of the types.
FORMS: dict[str, Any] = {
    "Dense": DenseMatrix,
    "Diagonal": Diagonal,
    "LowRank": LowRank,
    "Blocks": Blocks,
    "Softmax": Softmax,
}


def form_of(operator: Operator) -> str:
    """The word for the form of an operator, as `describe` says it: "Dense", "Diagonal", "LowRank", "Blocks", "Softmax".

    >>> from jaxcomp.smoothness.operator import diagonal_of
    >>> form_of(diagonal_of(np.ones(3)))
    'Diagonal'
    """
    return next(word for word, form in FORMS.items() if isinstance(operator, form))


def save(path: str | Path, operator: Operator, **provenance: Any) -> None:
    """Writes an operator (or a stack of them) and its provenance; all or nothing.

    Args:
        path: of the file; used as it is.
        operator: of any form.
        provenance: anything that JSON can hold; `digest` is what `load(data=...)` compares.
    """
    content = {
        "version": VERSION,
        "form": form_of(operator),
        "inner": form_of(operator.inner) if isinstance(operator, Softmax) else None,
        "shape": list(np.shape(operator.diag)),
        "provenance": provenance,
    }
    arrays = {f"array_{i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(operator))}
    write_arrays(path, {"header": np.array(json.dumps(content)), **arrays})


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Header and arrays of a file; whatever is wrong with it becomes a ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"smoothness.load: no file {path}")
    with Path(path).open("rb") as raw:
        with refusing(f"smoothness.load: {path} is not a file of smoothness.save"):
            file = np.load(raw, allow_pickle=False)
            header = json.loads(str(file["header"]))
            version = header["version"]
        if version != VERSION:
            raise ValueError(f"smoothness.load: {path} has format version {version}; this library reads {VERSION}")
        yield header, file


def describe(path: str | Path) -> dict[str, Any]:
    """Form, shape and provenance of the file at `path`, without its arrays."""
    with _opened(path) as (header, _):
        return {"form": header["form"], "shape": tuple(header["shape"]), **header["provenance"]}


def load(path: str | Path, *, shape: tuple[int, ...] | None = None, data: Any = None) -> Operator:
    """The operator of a file that `save` wrote.

    Args:
        path: of the file.
        shape: expected shape of the diagonal, (d,) or (workers, d).
        data: the data that the operator should belong to: a path or an array, whose hash is compared.

    Raises:
        ValueError: not such a file, another format version, shape or data.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".npz") as file:
    ...     save(file.name, Diagonal(np.ones(2), np.float64(1), np.float64(1)))
    ...     print(load(file.name, shape=(2,)).diag)
    [1. 1.]
    """
    with _opened(path) as (header, file):
        if shape is not None and tuple(header["shape"]) != tuple(shape):
            raise ValueError(f"smoothness.load: {path} holds shape {tuple(header['shape'])}; expected {tuple(shape)}")
        kept = header["provenance"].get("digest")
        if data is not None and digest_of(data) != kept:
            raise ValueError(f"smoothness.load: {path} was made from other data (hash {str(kept)[:12]}...)")
        with refusing(f"smoothness.load: {path} is damaged"):
            form = FORMS[header["form"]]
            fields = len(form._fields) if header["inner"] is None else len(FORMS[header["inner"]]._fields) + 2
            arrays = [file[f"array_{i}"] for i in range(fields)]
            if header["inner"] is not None:
                operator = Softmax(FORMS[header["inner"]](*arrays[:-2]), *arrays[-2:])
            else:
                operator = form(*arrays)
            if not all(np.all(np.isfinite(a)) for a in arrays):
                raise ValueError("an array in it is not finite")
    if list(np.shape(operator.diag)) != header["shape"]:
        raise ValueError(f"smoothness.load: {path} is damaged: shape {np.shape(operator.diag)}")
    return operator
