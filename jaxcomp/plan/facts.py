"""What was measured of a machine, as a file that people can read and change.

The file is JSON. `latency` (seconds of a message) and `per_byte` (seconds of a byte that a worker sends) of each
collective may be edited to see the plan for another link; `ratios` are how measured times deviate from that line at
some sizes, and may be emptied. `leaves` are the shapes of the gradient at one device. `samples` are for reading only.
Times are in seconds.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.plan.links import Fit, Sample
from jaxcomp.plan.predict import Line

__all__ = ["Facts", "Work", "from_text", "leaves_of", "leaves_to_text", "read", "to_text", "write"]

VERSION = 2


class Work(NamedTuple):
    """Of one candidate, against entries. encode: to compress; all: with decoding, the memory and the layout of the
    tree; error: of the message that was measured, |C(x) - x|^2 / |x|^2, None where it is not known."""

    encode: Line
    all: Line
    error: float | None = None


class Facts(NamedTuple):
    """All that a prediction needs.

    about: which machine, model and versions these are of; two plans with equal `about` share a file.
    sizes: axis -> workers. fits: axis -> kind -> `Fit`. work: candidate -> `Work`.
    gradient: seconds of loss and gradient; forward_share: of it.
    overlap: e of `predict`.
    """

    about: Mapping[str, Any]
    sizes: Mapping[str, int]
    fits: Mapping[str, Mapping[str, Fit]]
    work: Mapping[str, Work]
    gradient: float
    forward_share: float
    overlap: float


def leaves_to_text(like: Any) -> list[str]:
    """Shapes and dtypes of a tree's leaves.

    >>> leaves_to_text({"w": jax.ShapeDtypeStruct((3, 4), "float32"), "b": jax.ShapeDtypeStruct((), "bfloat16")})
    ['bfloat16[]', 'float32[3,4]']
    """
    return [f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(like)]


def leaves_of(facts: Facts, where: str = "the file") -> list[jax.ShapeDtypeStruct]:
    """Inverse of `leaves_to_text`, from what a plan has measured.

    Raises:
        ValueError: there are none, or they are not written so.
    """
    found = []
    for text in facts.about.get("leaves", ()):
        match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", str(text))
        if match is None:
            raise ValueError(f"plan: leaves in {where} must be like float32[784,10]; got {text!r}")
        found.append(jax.ShapeDtypeStruct(tuple(map(int, filter(None, match[2].split(",")))), jnp.dtype(match[1])))
    if not found:
        raise ValueError(f"plan: {where} must name the leaves of the gradient; it has none")
    return found


def to_text(facts: Facts) -> str:
    """The file."""
    plain = {
        "version": VERSION,
        "about": dict(facts.about),
        "sizes": dict(facts.sizes),
        "gradient": facts.gradient,
        "forward_share": facts.forward_share,
        "overlap": facts.overlap,
        "fits": {
            axis: {
                kind: fit._asdict() | {"samples": [sample._asdict() for sample in fit.samples]}
                for kind, fit in each.items()
            }
            for axis, each in facts.fits.items()
        },
        "work": {
            name: {"encode": work.encode._asdict(), "all": work.all._asdict(), "error": work.error}
            for name, work in facts.work.items()
        },
    }
    return json.dumps(plain, indent=1) + "\n"


def from_text(text: str, where: str = "the file") -> Facts:
    """Inverse of `to_text`.

    Raises:
        ValueError: it is no such file, of another version, or a number is missing.
    """
    try:
        plain = json.loads(text)
        if plain["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}; got {plain['version']}")
        fits = {
            axis: {kind: _fit(kind, fit) for kind, fit in each.items()} for axis, each in dict(plain["fits"]).items()
        }
        work = {
            name: Work(_line(each["encode"]), _line(each["all"]), each["error"])
            for name, each in dict(plain["work"]).items()
        }
        numbers = [float(plain[name]) for name in ("gradient", "forward_share", "overlap")]
        return Facts(plain["about"], {a: int(n) for a, n in plain["sizes"].items()}, fits, work, *numbers)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"plan: {where} must hold what a plan has measured; {type(error).__name__}: {error}") from None


def _fit(kind: str, plain: Mapping[str, Any]) -> Fit:
    latency, per_byte = float(plain["latency"]), float(plain["per_byte"])
    wait, cores = float(plain.get("wait", 0)), int(plain.get("cores", 0))
    if not (latency >= 0 and per_byte >= 0 and wait >= 0 and cores >= 0):
        got = f"{latency}, {per_byte}, {wait}, {cores}"
        raise ValueError(f"latency, per_byte, wait and cores of {kind} must be >= 0; got {got}")
    a, both, c = map(float, plain.get("covariance", (0, 0, 0)))
    ratios = tuple((int(n), float(sent), float(ratio)) for n, sent, ratio in plain.get("ratios", ()))
    samples = tuple(Sample(**sample) for sample in plain.get("samples", ()))
    return Fit(kind, latency, per_byte, (a, both, c), ratios, samples, wait, cores)


def _line(plain: Mapping[str, Any]) -> Line:
    return Line(float(plain["base"]), float(plain["slope"]), tuple((float(x), float(t)) for x, t in plain["points"]))


def read(path: str | Path) -> str | None:
    """The text of the file; None if there is none."""
    path = Path(path)
    return path.read_text() if path.exists() else None


def write(path: str | Path, facts: Facts) -> None:
    """Replaces the file at once: whoever reads meanwhile sees the old one or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_text(facts))
    partial.replace(path)
