"""Facts measured of a machine, as a file that people can read and change.

The file is JSON. `latency` (seconds of a message) and `per_byte` (seconds of a byte that a worker sends) of each
collective may be edited to see the plan for another link; `ratios` are how measured times deviate from that line at
some sizes, and may be emptied. `work` of a candidate is base + slope times the entries of the gradient. `leaves` are
the shapes of the gradient at one device. `trials` are steps that were run; they count as long as nothing else in the
file is edited. Times are in seconds.
"""

import hashlib
import json
import math
import re
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.checks import is_within
from jaxcomp.plan.links import Fit, Fits, check_kind

__all__ = [
    "Facts",
    "Line",
    "Trials",
    "Work",
    "from_text",
    "leaves_of",
    "leaves_to_text",
    "read_file",
    "to_text",
    "trials_of",
    "write_file",
]

VERSION = 2
MOST_ENTRIES = 2**40  # of a leaf
FLOATS = ("float16", "bfloat16", "float32", "float64")  # dtypes that a leaf may have


class Line(NamedTuple):
    """Seconds against entries: base + slope d, both >= 0."""

    base: float
    slope: float

    def seconds(self, entries: float) -> float:
        """Seconds for so many entries; none for none."""
        return self.base + self.slope * entries if entries > 0 else 0.0


class Work(NamedTuple):
    """Work of one candidate, against entries. encode: to compress; all: with decoding, the memory and the layout of
    the tree; error: of the message that was measured, |C(x) - x|^2 / |x|^2, None where it is not known."""

    encode: Line
    all: Line
    error: float | None = None


class Trials(NamedTuple):
    """Candidates that were run. options: the arguments of `plan` that say which ones; seconds: candidate -> measured
    seconds per step; digest: of the rest of the file, which tells whether it has been edited."""

    options: Mapping[str, Any]
    seconds: Mapping[str, float]
    digest: str


class Facts(NamedTuple):
    """All that a prediction needs, and what was run.

    about: which machine, model and versions these are of; two plans with equal `about` share a file.
    sizes: axis -> workers. fits: axis -> kind -> `Fit`. work: candidate -> `Work`.
    gradient: seconds of loss and gradient; forward_share: of it.
    overlap: e of `predict`. trials: None where nothing was run.
    """

    about: Mapping[str, Any]
    sizes: Mapping[str, int]
    fits: Fits
    work: Mapping[str, Work]
    gradient: float
    forward_share: float
    overlap: float
    trials: Trials | None = None


def trials_of(facts: Facts, options: Mapping[str, Any], seconds: Mapping[str, float]) -> Trials:
    """The steps that were run with these options, to be kept in the file with these facts."""
    digest = hashlib.sha256(to_text(facts._replace(trials=None)).encode()).hexdigest()[:16]
    return Trials(dict(options), dict(seconds), digest)


def leaves_to_text(like: Any) -> list[str]:
    """Shapes and dtypes of a tree's leaves.

    >>> leaves_to_text({"w": jax.ShapeDtypeStruct((3, 4), "float32"), "b": jax.ShapeDtypeStruct((), "bfloat16")})
    ['bfloat16[]', 'float32[3,4]']
    """
    return [f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(like)]


def leaves_of(facts: Facts, where: str = "the file") -> list[jax.ShapeDtypeStruct]:
    """Inverse of `leaves_to_text`; ValueError where there are none, or of a dtype that no gradient has."""
    found, leaves = [], facts.about.get("leaves", ())
    for text in leaves if isinstance(leaves, list | tuple) else (leaves,):
        match = re.fullmatch(r"(\w+)\[((?:\d{1,12}(?:,\d{1,12})*)?)\]", text if isinstance(text, str) else "")
        if match is None or match[1] not in FLOATS:
            raise ValueError(
                f"plan: leaves in {where} must be like float32[784,10], with a dtype of {', '.join(FLOATS)}; "
                f"got {reprlib.repr(text)}"
            )
        shape = tuple(map(int, filter(None, match[2].split(","))))
        if math.prod(shape) >= MOST_ENTRIES:
            raise ValueError(
                f"plan: leaves in {where} must have fewer than 2^40 entries each; got {reprlib.repr(text)}"
            )
        found.append(jax.ShapeDtypeStruct(shape, jnp.dtype(match[1])))
    if not found:
        raise ValueError(f"plan: {where} must name the leaves of the gradient; it has none")
    return found


# ------------------------------------------------------------------------------------------------
# The file


def to_text(facts: Facts) -> str:
    """The file."""
    kept = {"version": VERSION, **facts._asdict()}
    if facts.trials is None:
        del kept["trials"]
    return json.dumps(_plain(kept), indent=1) + "\n"


def _plain(node: Any) -> Any:
    """The same of dictionaries alone, with the names of fields."""
    node = node._asdict() if hasattr(node, "_asdict") else node
    return {key: _plain(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def from_text(text: str, where: str = "the file") -> Facts:
    """Inverse of `to_text`; ValueError, naming what is missing or out of range, where it is no such file."""
    try:
        return _facts(json.loads(text))
    except (KeyError, RecursionError, TypeError, AttributeError, ValueError, OverflowError) as error:
        why = {KeyError: f"there is no {error}", RecursionError: "it is nested too deeply"}.get(type(error), error)
        raise ValueError(f"plan: {where} must hold what a plan has measured; {why}") from None


def _facts(plain: Mapping[str, Any]) -> Facts:
    if plain["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}; got {plain['version']!r}")
    about, names = dict(plain["about"]), plain["about"].get("candidates", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"candidates of about must be a list of names; got {reprlib.repr(names)}")
    sizes = {axis: _whole(n, f"sizes of {axis}") for axis, n in plain["sizes"].items()}
    if not sizes or dict(about.get("axes", sizes)) != sizes:
        raise ValueError(f"sizes must be the axes of about, {about.get('axes')}; got {sizes}")
    if strange := [axis for axis in plain["fits"] if not set(axis.split(",")) <= set(sizes)]:
        raise ValueError(f"fits must be of axes of sizes, {', '.join(sizes)}; got {strange[0]!r}")
    fits = {axis: {kind: _fit(kind, x) for kind, x in each.items()} for axis, each in plain["fits"].items()}
    line = lambda each, name: Line(*(_number(each[part], f"{part} of {name}") for part in Line._fields))
    work = {
        name: Work(
            line(each["encode"], f"encode of {name}"),
            line(each["all"], f"all of {name}"),
            None if each["error"] is None else _number(each["error"], f"error of {name}"),
        )
        for name, each in plain["work"].items()
    }
    shares = [_number(plain[name], name, most=1.0) for name in ("forward_share", "overlap")]
    trials = plain.get("trials")
    if trials is not None:
        seconds = {name: _number(x, f"trials of {name}") for name, x in trials["seconds"].items()}
        trials = Trials(dict(trials["options"]), seconds, str(trials["digest"]))
    return Facts(about, sizes, fits, work, _number(plain["gradient"], "gradient"), *shares, trials=trials)


def _fit(kind: str, plain: Mapping[str, Any]) -> Fit:
    check_kind("fits", kind)
    latency, per_byte = (_number(plain[name], f"{name} of {kind}") for name in ("latency", "per_byte"))
    covariance = tuple(map(float, plain.get("covariance", (0, 0, 0))))
    if len(covariance) != 3 or not all(map(math.isfinite, covariance)):
        raise ValueError(f"covariance of {kind} must be three numbers; got {covariance}")
    name = f"ratios of {kind}"
    ratios = tuple((_whole(n, name), _number(sent, name), _number(x, name)) for n, sent, x in plain.get("ratios", ()))
    return Fit(kind, latency, per_byte, covariance, ratios)


def _number(value: Any, name: str, most: float = sys.float_info.max) -> float:
    if not is_within(value, 0, most):
        allowed = "in [0, 1]" if most == 1 else ">= 0"
        raise ValueError(f"{name} must be a number {allowed}; got {reprlib.repr(value)}")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"{name} must be an integer in [1, 2^31); got {reprlib.repr(value)}")
    return value


def read_file(path: str | Path) -> str | None:
    """The text of the file; None if there is none; ValueError where it cannot be read as text."""
    path = Path(path)
    try:
        return path.read_text() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan: {path} must be a file of text; {error}") from None


def write_file(path: str | Path, facts: Facts) -> None:
    """Replaces the file at once: whoever reads meanwhile sees the old one or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_text(facts))
    partial.replace(path)
