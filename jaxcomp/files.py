"""Files of arrays (NumPy .npz): written whole or not at all, and refused in words where they are damaged."""

import contextlib
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BROKEN", "read_arrays", "refusing", "write_arrays"]

# What is raised for a damaged .npy or .npz: one byte may turn a file into one of another compression method, or an
# encrypted one.
BROKEN = (
    ArithmeticError,
    AttributeError,
    IndexError,
    MemoryError,
    RuntimeError,
    lzma.LZMAError,
    struct.error,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@contextlib.contextmanager
def refusing(said: str) -> Iterator[None]:
    """Inside, what a damaged file raises becomes a ValueError that begins with these words."""
    try:
        yield
    except BROKEN as error:
        raise ValueError(f"{said}: {error}") from None


def write_arrays(path: str | Path, arrays: dict[str, Any]) -> None:
    """Writes arrays as .npz, whole or not at all, and on the disk when this returns."""
    draft = Path(f"{path}.tmp")
    with draft.open("wb") as out:
        np.savez(out, **arrays)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, path)


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises one of BROKEN if it is none."""
    with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as kept:
        return {name: kept[name] for name in kept.files}
