"""`jc.testing.check_payload`: what is right passes, and each mistake in a family of one's own is named."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.payloads import Choices, Coding, Family, lane_bytes, register, registry
from jaxcomp.payloads.words import uncoded, uncoded_like
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import read_array, write_array


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What is registered here is not when other tests run."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.setattr(registry, "_readers", dict(registry._readers))


class Gridded(NamedTuple):
    """codes: u8[d];  grid: f32[b, 2], one row for 8 codes."""

    codes: Any
    grid: Any


def check(payload):
    for name, array, dtype, ndim in (("codes", payload.codes, np.uint8, 1), ("grid", payload.grid, np.float32, 2)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
            raise WireError(f"Gridded.{name}", getattr(array, "dtype", type(array).__name__), np.dtype(dtype).name)
    if payload.grid.shape != (-(-payload.codes.size // 8), 2):
        raise WireError("Gridded.grid shape", payload.grid.shape, "a row for 8 codes")


def write(out, payload, coding):
    write_array(out, payload.codes)
    write_array(out, payload.grid)


RIGHT = Family(
    type=Gridded,
    codings=lambda payload, code: Choices([Coding(210, (code,), 8 * lane_bytes(payload))]),
    check=check,
    write=write,
    readers={210: lambda reader: Gridded(read_array(reader, "Gridded.codes"), read_array(reader, "Gridded.grid"))},
    pack=uncoded,
    unpack=uncoded_like,
    entries=lambda payload: payload.codes.size,
)


def registered(kind, changes):
    """A type of its own, with a family that differs from the right one, and a payload of it."""
    own = collections.namedtuple(f"Own{kind}", ["codes", "grid"])
    codings = lambda payload, code: Choices([Coding(kind, (code,), 8 * lane_bytes(payload))])
    reader = lambda reader: own(read_array(reader, "codes"), read_array(reader, "grid"))
    register(RIGHT._replace(**{"type": own, "codings": codings, "readers": {kind: reader}} | changes(own, kind)))
    return own(np.arange(20, dtype=np.uint8), np.ones((3, 2), np.float32))


def of_empty(payload):
    """A check that says nothing; what is wrong then fails where it is used."""


WRONG = {
    211: (lambda own, kind: {"limits": lambda payload, lengths: []}, "arrays: Family.limits says something of each"),
    212: (
        lambda own, kind: {"codings": lambda payload, code: Choices([Coding(kind, (code,), 64 * lane_bytes(payload))])},
        "bits: the bytes hold all bits of the code",
    ),
    213: (
        lambda own, kind: {"entries": lambda payload: 20 if isinstance(payload.codes, np.ndarray) else 21},
        "arrays: Family.entries counts alike",
    ),
    214: (
        lambda own, kind: {
            "readers": {kind: lambda reader: own(read_array(reader, "codes")[::-1], read_array(reader, "grid"))}
        },
        "bytes: .*codes.* of 20 entries differ",
    ),
    215: (
        lambda own, kind: {"unpack": lambda cursor, like: uncoded_like(cursor, like)._replace(grid=like.grid * 0)},
        "words: decode_message",
    ),
    216: (
        lambda own, kind: {
            "check": of_empty,
            "readers": {
                kind: lambda reader: own(
                    *(lambda a, b: (a, b.reshape(3, 2)))(read_array(reader, "codes"), read_array(reader, "grid"))
                )
            },
        },
        "changes: a record whose byte .* ends in a payload or in WireError; got ValueError",
    ),
}


def test_what_is_right_passes():
    register(RIGHT)
    for size in (0, 1, 20):
        payload = Gridded(np.arange(size, dtype=np.uint8), np.ones((-(-size // 8), 2), np.float32))
        tried = jc.testing.check_payload(jax.tree.map(jnp.asarray, payload))
        assert tried == tuple(jc.testing.PAYLOAD_LAWS)


@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_is_named(kind):
    changes, says = WRONG[kind]
    with pytest.raises(jc.testing.LawBroken, match=says):
        jc.testing.check_payload(registered(kind, changes))


def test_what_is_no_payload():
    with pytest.raises(TypeError, match=r"testing.check_payload: unknown payload type dict"):
        jc.testing.check_payload({})
    with pytest.raises(ValueError, match="laws must be of bytes, bits"):
        jc.testing.check_payload(jc.payloads.Dense(np.ones(3, np.float32)), laws=["cut"])
