"""One registry: a payload in one file, the choice of the shortest code, and what an exchange may know of a payload."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import same

import jaxcomp as jc
from jaxcomp.base import Lengths
from jaxcomp.payloads import (
    Choices,
    Coding,
    Dense,
    Family,
    Leaves,
    Quantized,
    Scaled,
    Sketch,
    Sparse,
    decode_message,
    encode_message,
    limits,
    local_indices,
    num_entries,
    register,
    registry,
    shortest,
    words,
)
from jaxcomp.wire.format import read_array, write_array


class Signs(NamedTuple):
    """A payload that the library does not know."""

    bits: Any


@pytest.fixture
def signs():
    family = Family(
        type=Signs,
        codings=lambda payload, code: Choices([Coding(99, (code,), 8 * payload.bits.size)]),
        check=lambda payload: None,
        write=lambda out, payload, coding: write_array(out, payload.bits),
        readers={99: lambda reader: Signs(read_array(reader, "Signs.bits"))},
        pack=words.uncoded,
        unpack=words.uncoded_like,
        entries=lambda payload: None,
    )
    register(family)
    yield family
    del registry._families[Signs], registry._readers[99]


def test_a_new_payload_is_one_call(signs):
    payload = Leaves(Dense(np.ones(2, np.float32)), (Signs(np.arange(5, dtype=np.uint8)),))
    for code in ("fixed", "elias", "best"):
        assert same(jc.wire.decode(jc.wire.encode(payload, code=code)), payload)
        assert jc.code_bits(payload, code=code) == 64 + 40
    device = jax.tree.map(jnp.asarray, payload)
    assert same(decode_message(encode_message(device).words, device), payload)
    assert num_entries(payload) is None
    assert limits(payload, None) == [None, None]
    with pytest.raises(ValueError, match="registered already"):
        register(signs)


def test_the_shortest_that_fits():
    codings = [
        Coding(1, ("fixed", "best"), 50),
        Coding(2, ("elias", "best"), 40, fits=False),
        Coding(3, ("best",), 45),
        Coding(4, ("best",), 45),
    ]
    traced = [coding._replace(bits=jnp.asarray(coding.bits), fits=jnp.asarray(coding.fits)) for coding in codings]
    for options in (codings, traced):
        assert [int(x) for x in shortest(options, "fixed")] == [0, 50]
        assert [int(x) for x in shortest(options, "elias")] == [0, 50]  # nothing fits: the first
        assert [int(x) for x in shortest(options, "best")] == [2, 45]  # the first of equal ones
        assert [int(x) for x in shortest(options[:1], "other")] == [0, 50]


@pytest.mark.parametrize("scale", [np.float32(0.5), np.array([0.5, 2, 4], np.float32), np.zeros(0, np.float32)])
def test_a_scale_for_all_or_for_each_block(scale):
    payload = Scaled(np.arange(9).astype(jnp.float8_e4m3fn), scale)
    assert jc.code_bits(payload) == jc.code_bits(payload, code="best") == 72 + 32 * scale.size
    for code in ("fixed", "elias", "best"):
        assert same(jc.wire.decode(jc.wire.encode(payload, code=code)), payload)
    device = jax.tree.map(jnp.asarray, payload)
    message = jax.jit(encode_message)(device)
    assert message.fits
    assert same(jax.jit(lambda words: decode_message(words, device))(message.words), payload)


SPARSE = Sparse(jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1, 5, 9, 9]))
LOCAL = SPARSE._replace(indices=local_indices(SPARSE.indices, 9))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (Dense(jnp.ones(7)), 7),
        (Scaled(jnp.ones(7, jnp.bfloat16), jnp.float32(1)), 7),
        (SPARSE, 2),
        (LOCAL, 2),
        (SPARSE._replace(values=Dense(jnp.ones(4))), 2),
        (Sparse(jnp.ones(3), jnp.array([5, 1, 2])), 3),
        (Sparse(jnp.zeros(2), jnp.array([9, 9])), 0),
        (Sparse(jnp.zeros(0), jnp.zeros(0, jnp.int32)), 0),
        (Quantized(jnp.ones(1), jnp.zeros((3, 4), jnp.uint32)), None),
        (Leaves(Dense(jnp.ones(7)), (SPARSE, LOCAL)), 11),
        (Leaves(Dense(jnp.ones(7)), (Quantized(jnp.ones(1), jnp.zeros((3, 4), jnp.uint32)),)), None),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, tuple) else None,
)
def test_number_of_entries(payload, count):
    for form in (payload, jax.tree.map(np.asarray, payload)):
        got = num_entries(form)
        assert got is None if count is None else int(got) == count


def test_number_of_entries_of_a_sketch():
    none = jnp.zeros(0, jnp.int32)
    counts, keys = jnp.array([2, 1], jnp.int32), jnp.array([1, 4, 2, 9], jnp.int32)
    assert int(num_entries(Sketch(jnp.ones(3), counts, keys, jnp.zeros((3, 1), jnp.uint32), none))) == 3


def test_limits_of_each_array():
    lengths = Lengths((3, 1), 9)
    values, indices = (lengths, 0), (lengths, 9)
    scaled = SPARSE._replace(values=Scaled(jnp.ones(4, jnp.bfloat16), jnp.float32(1)))
    quantized = SPARSE._replace(values=Quantized(jnp.ones(1), jnp.zeros((3, 1), jnp.uint32)))
    assert limits(SPARSE, lengths) == [values, indices]
    assert limits(LOCAL, lengths) == [values, values, None]
    assert limits(scaled, lengths) == [values, None, indices]
    assert limits(quantized, lengths) == [None] * 3
    assert limits(SPARSE, None) == [None, None]
    tree = Leaves(Dense(jnp.ones(7)), (SPARSE, SPARSE))
    assert limits(tree, Leaves(None, (None, lengths))) == [None, None, None, values, indices]
    assert limits(tree, None) == [None] * 5


def test_unknown_types_are_named():
    for function in (jc.code_bits, encode_message, num_entries):
        with pytest.raises(TypeError, match="unknown payload type tuple"):
            function((jnp.zeros(3),))
