"""The command line of the experiments: options, and errors that fit on one line."""

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Parser", "UserError", "at_least", "choose_new", "common", "fail", "fraction"]
__all__ += ["named_folder", "number", "one_or_more", "one_thread", "positive", "rule_of", "share"]


def one_thread() -> None:
    """Has XLA's CPU backend run each operation in one thread; call it before JAX looks for devices.

    For programs of many small operations in loops, and for many processes on few cores: threads
    that share an operation wait for each other, and on a busy machine they wait a hundred times longer
    than they work.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()


class UserError(Exception):
    """Something the user can mend; shown as one line, without a traceback."""


class Parser(argparse.ArgumentParser):
    """argparse with defaults in the help and errors on one line."""

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        fail(f"{self.prog}: {message} (--help lists all options)")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def number(within: Callable[[Any], bool], what: str, kind: type = float) -> Callable[[str], Any]:
    """A number option within bounds, which `what` says in words."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if within(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'} {what}; got {text!r}")

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An integer option with a lower bound."""
    return number(lambda value: value >= least, f"of at least {least}", int)


fraction = number(lambda value: 0 < value <= 1, "in (0, 1]")
share = number(lambda value: 0 <= value < 1, "in [0, 1)")
positive = number(lambda value: 0 < value < math.inf, "above 0")
one_or_more = number(lambda value: 1 <= value < math.inf, "of at least 1")


def rule_of(text: str) -> str | float:
    """A rule of `jc.allocate.ratios`: a name or an exponent, which may be a fraction."""
    if text in ("sqrt", "phi", "released", "uniform"):
        return text
    with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
        if (value := float(Fraction(text))) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"must be sqrt, phi, released, uniform or a number >= 0; got {text!r}")


# Options that several experiments have, with their usual defaults.
COMMON: dict[str, dict[str, Any]] = {
    "data-dir": {"type": Path, "help": "folder with the files of --data mnist"},
    "workers": {"type": at_least(1), "default": 4, "help": "how many"},
    "steps": {"type": at_least(1), "default": 300, "help": "steps"},
    "batch": {"type": at_least(1), "default": 32, "help": "examples of each worker in a step"},
    "lr": {"type": positive, "default": 1e-3, "help": "learning rate"},
    "ratio": {"type": fraction, "default": 0.01, "help": "share of entries that sparse methods keep"},
    "levels": {"type": at_least(1), "default": 7, "help": "levels of dithering; 7 fill 4 bits"},
    "seed": {"type": at_least(0), "default": 0, "help": "of data, model and compression"},
    "seeds": {"type": at_least(0), "nargs": "+", "default": [0], "metavar": "SEED", "help": "a run for each"},
    "log-every": {"type": at_least(1), "default": 10, "help": "steps between lines of metrics.jsonl"},
    "checkpoint-every": {"type": at_least(1), "default": 100, "help": "steps between checkpoints"},
    "resume": {"action": "store_true", "help": "continue --name with the options it was started with"},
    "worker": {"type": int, "help": argparse.SUPPRESS},  # which one a process is, where workers are processes
    "address": {"help": argparse.SUPPRESS},  # and where they meet
}


def common(parser: Any, *names: str, **defaults: Any) -> None:
    """Adds options of `COMMON` to a parser or to a group of one.

    defaults: another default, or (default, help), or a dictionary of whatever differs.
    """
    for name, changed in ({name: {} for name in names} | defaults).items():
        if isinstance(changed, tuple):
            changed = {"default": changed[0], "help": changed[1]}
        elif not isinstance(changed, dict):
            changed = {"default": changed}
        flag = name.replace("_", "-")
        parser.add_argument(f"--{flag}", **COMMON[flag] | changed)


def choose_new(runs: Path, name: str | None, kind: str) -> Path:
    """A folder that is not there yet: runs/NAME, or the next free runs/KIND-N."""
    if name is None:
        return next(folder for n in itertools.count(1) if not (folder := runs / f"{kind}-{n}").exists())
    folder = named_folder(runs, name)
    if folder.exists():
        raise UserError(f"{folder} exists; choose another --name")
    return folder


def named_folder(runs: Path, name: str) -> Path:
    """runs/NAME, which must lie below runs."""
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"--name must be a folder below --runs; got {name}")
    return runs / name


def existing_folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"no folder {path}")
    return path
