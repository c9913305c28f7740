"""Characters of a text as a data set: windows of them, and the same moved on by one as the targets."""

import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.lib.cli import Parser, UserError, at_least, common

__all__ = ["Text", "add_options", "add_sizes", "bytes_of", "read_characters", "text_of", "windows"]


class Text(NamedTuple):
    """name; codes i32[n], numbers of the characters; characters: how many there are; train: how many codes are for
    training, those after them for the test."""

    name: str
    codes: np.ndarray
    characters: int
    train: int


def add_options(p: Parser, *, batch: int, width: int, layers: int, lr: float) -> None:
    """Options of the experiments that train a transformer on a text, with these defaults."""
    p.add_argument("--text", type=Path, default=None, help="plain or .xz; without it the source of this package")
    add_sizes(p, width=width, layers=layers)
    common(p, "ratio", "levels", "seed", batch=(batch, "windows of all workers in a step"), lr=lr)


def add_sizes(p: Parser, *, width: int, layers: int) -> None:
    """Options of the sizes of a transformer."""
    p.add_argument("--length", type=at_least(2), default=64, help="characters of a window")
    p.add_argument("--width", type=at_least(2), default=width, help="of the residual stream")
    p.add_argument("--heads", type=at_least(1), default=4, help="of attention")
    p.add_argument("--layers", type=at_least(1), default=layers, help="blocks")


def bytes_of(path: Path | None) -> bytes:
    """What a text is made of; of this package's own source if there is no path.

    path: plain or .xz; of a folder all files NAME.txt and NAME.txt.xz in the order of their names.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if path is None:
        return b"".join(file.read_bytes() for file in sorted(Path(jc.__file__).parent.rglob("*.py")))
    files = sorted([*path.glob("*.txt"), *path.glob("*.txt.xz")]) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"no file {path}" if files else f"no .txt or .txt.xz in {path}")
    plain = lambda file: lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    try:
        return b"".join(map(plain, files))
    except (OSError, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def read_characters(path: Path | None) -> tuple[np.ndarray, int]:
    """Codes i32[n] and the number of different characters (`bytes_of`)."""
    raw = bytes_of(path)
    known, codes = np.unique(np.frombuffer(raw, np.uint8), return_inverse=True)
    if len(codes) < 1000:
        raise UserError(f"{path} is too short: {len(codes)} characters")
    return codes.astype(np.int32), len(known)


def text_of(path: Path | None) -> Text:
    """A text of which the last tenth is for the test."""
    codes, characters = read_characters(path)
    name = "source of jaxcomp" if path is None else path.name
    return Text(name, codes, characters, len(codes) * 9 // 10)


def windows(codes: np.ndarray, number: int, length: int, seed: int, step: int) -> np.ndarray:
    """i32[number, length + 1] from random places. Depends on nothing but its arguments."""
    starts = np.random.default_rng([seed, 4, step]).integers(0, len(codes) - length, number)
    return codes[starts[:, None] + np.arange(length + 1)]
