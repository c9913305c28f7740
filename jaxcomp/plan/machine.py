"""The work of compressing on a machine: copies of the gradient that a codec takes, and how fast a copy is.

A copy reads and writes every entry in f32, 8 bytes an entry: d entries take 8 d / bandwidth. With n workers a step that
compresses d entries takes, in copies,

    compress + decompress                       what is added on the way, or one message
    compress + decompress + (n - 1) more        n messages that are gathered; more = decompress, of a sparse message
                                                9 times its share of the entries (64 bytes are moved for each)
    (1 + 1 / n) compress + 2 decompress         two shots: chunks of n messages, then of one

and besides 0.9 to join the leaves and to cut them apart again, or 2.3 where there is a memory, which is read, written
and read: what steps of a whole tree take beyond their codecs, counted in their text compiled for an H100
(docs/results/accelerators.md). Sums of dense f32 take nothing of all that.

The machines of `Machine.of` stand in machines.json, each with its source, date and code.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import has_role
from jaxcomp.checks import is_within
from jaxcomp.exchange.axes import axis_names
from jaxcomp.exchange.routes.route import held_by
from jaxcomp.plan.candidates import Candidate
from jaxcomp.plan.facts import Line, Work
from jaxcomp.plan.links import Collective, workers_of

__all__ = ["MACHINES", "Codec", "Machine", "platform_of"]

MACHINES = Path(__file__).with_name("machines.json")
LAYOUT, MEMORY = 0.9, 2.3  # copies
SCATTERED = 9.0  # copies of a sparse message with all entries: 64 + 8 bytes for each
SAMPLE = 2**16  # entries of which the length of a message is taken
KEPT = ("memory", "narrow memory", "shift")
# Beginning of what JAX calls a device -> name of the machine.
DEVICES = {
    "cpu": "cpu",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "TPU v5 lite": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
}


class Codec(NamedTuple):
    """compress, decompress: copies of the vector; seconds: that both take besides, whatever the length."""

    compress: float
    decompress: float
    seconds: float = 0.0


class Machine(NamedTuple):
    """A machine, as `recommend` and `jaxcomp plan --machine` take it.

    name: in verdicts. bandwidth: bytes per second that a copy reads and writes. memory: bytes of a device.
    codecs: beginning of a compressor's name, or name of an algorithm without one -> `Codec`; the longest that fits
    counts. source, date, code: where the figures are from, and whether they were measured.

    >>> Machine.of("h200").codecs["top_k"].compress
    1.45
    """

    name: str
    bandwidth: float
    memory: float
    codecs: Mapping[str, Codec]
    source: str = "stated"
    date: str = ""
    code: str = ""

    @classmethod
    def of(cls, name: str | Path) -> "Machine":
        """The machine with this name, or in this file.

        Raises:
            ValueError: there is none, or the file is none of a machine.
        """
        every = _presets()
        if isinstance(name, str) and name in every:
            return every[name]
        if not Path(name).is_file():
            raise ValueError(f"machine must be a file of a machine or one of {', '.join(every)}; got {str(name)!r}")
        try:
            return cls.from_dict(json.loads(Path(name).read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"machine must be a file that Machine.save has written; {name}: {error}") from None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that `of` knows."""
        return tuple(_presets())

    @classmethod
    def here(cls) -> "Machine":
        """The machine whose devices are there; that of a CPU where JAX has devices that are not known."""
        kind = jax.devices()[0].device_kind
        return cls.of(next((name for begin, name in DEVICES.items() if kind.startswith(begin)), "cpu"))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Machine":
        """Inverse of `as_dict`; ValueError where numbers are out of range."""
        codecs = {str(name): Codec(*each) for name, each in plain["codecs"].items()}
        return cls(**{**plain, "codecs": codecs}).check("machine")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {**self._asdict(), "codecs": {name: list(each) for name, each in self.codecs.items()}}

    def save(self, path: str | Path) -> None:
        """Writes the machine to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def check(self, name: str) -> "Machine":
        """The same; raises ValueError, named after the function `name`, where a number is out of range."""
        numbers = [x for each in self.codecs.values() for x in each]
        if not (is_within(self.bandwidth, 1.0) and all(is_within(x, 0.0) for x in (self.memory, *numbers))):
            raise ValueError(
                f"{name}: machine must have a bandwidth of at least 1 byte per second, and copies, seconds and bytes "
                f"that are finite and >= 0; got {self}"
            )
        return self

    @property
    def words(self) -> str:
        """Name, and how the figures are known."""
        return f"{self.name} ({self.source}{', ' if self.date else ''}{self.date})"

    def codec(self, name: str) -> Codec | None:
        """The one of the longest beginning of a name; None where there is none."""
        found = max((each for each in self.codecs if name.startswith(each)), key=len, default=None)
        return None if found is None else self.codecs[found]

    def seconds(self, copies: float) -> float:
        """Seconds of so many copies of an entry."""
        return 8 * copies / self.bandwidth

    def work(self, candidate: Candidate, sent: Sequence[Collective], sizes: Mapping[str, int]) -> Work | None:
        """The work of an exchange that has these collectives (see the module); None where a codec is not known.

        sizes: axis -> workers.
        """
        parts = (
            candidate.algorithm.items() if isinstance(candidate.algorithm, Mapping) else [(None, candidate.algorithm)]
        )
        every = [self._one(algorithm, axis, sent, sizes) for axis, algorithm in parts]
        known = [each for each in every if each is not None]
        if len(known) < len(every):
            return None
        add = lambda lines: Line(sum(x.base for x in lines), sum(x.slope for x in lines))
        return Work(add([each.encode for each in known]), add([each.all for each in known]))

    def _one(self, algorithm: Any, axis: Any, sent: Sequence[Collective], sizes: Mapping[str, int]) -> Work | None:
        compressor = algorithm.compressor
        line = lambda copies, seconds: Line(seconds, self.seconds(copies))
        remembers = any(has_role(algorithm.roles, role) for role in KEPT)
        if compressor is not None and compressor.spec.name == "identity" and not remembers:
            return Work(line(0.0, 0.0), line(0.0, 0.0))
        made = getattr(algorithm.made, "name", repr(algorithm))
        codec = self.codec(made if compressor is None else compressor.spec.name)
        if codec is None:
            return None
        if compressor is None:
            return Work(line(codec.compress, codec.seconds), line(codec.compress + codec.decompress, codec.seconds))
        own = [one for one in sent if axis is None or one.axis == ",".join(axis_names(axis))]
        workers = max((workers_of(one.axis, sizes) for one in own), default=1)
        kinds = {one.kind for one in own}
        more = codec.decompress
        if compressor.spec.selects or compressor.entries is not None:
            share = held_by(compressor, jax.ShapeDtypeStruct((SAMPLE,), jnp.float32)) / (8 * SAMPLE)
            more = min(SCATTERED * share, more)
        encode, decode = codec.compress, codec.decompress
        if "all_to_all" in kinds:
            decode += codec.compress / workers + codec.decompress
        elif "all_gather" in kinds:
            decode += (workers - 1) * more
        whole = encode + decode + (MEMORY if remembers else LAYOUT)
        return Work(line(encode, codec.seconds), line(whole, codec.seconds))


def platform_of(name: str) -> str:
    """ "cpu", "gpu" or "tpu": of the name of a machine, or of what JAX calls a device.

    >>> platform_of("h200"), platform_of("NVIDIA H100 80GB HBM3"), platform_of("TPU v5 lite"), platform_of("mine")
    ('gpu', 'gpu', 'tpu', 'cpu')
    """
    words = next((device for device, known in DEVICES.items() if name.startswith((device, known))), name)
    return {"NVIDIA": "gpu", "TPU": "tpu"}.get(words.partition(" ")[0], "cpu")


@functools.cache
def _presets() -> dict[str, Machine]:
    return {each["name"]: Machine.from_dict(each) for each in json.loads(MACHINES.read_text())}
