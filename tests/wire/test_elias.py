"""Elias-coded messages: the code itself, bits that are counted against bits that are sent, hostile bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles_smoothness as oracle
import pytest

import jaxcomp as jc
from jaxcomp import packing
from jaxcomp.codes.stream import elias_length
from jaxcomp.payloads import Dense, Quantized
from jaxcomp.wire import bitstream, elias
from jaxcomp.wire.frame import seal, unseal


def test_lengths():
    numbers = np.concatenate([np.arange(1, 200), 2 ** np.arange(8, 31), 2 ** np.arange(8, 31) - 1])
    np.testing.assert_array_equal(elias_length(numbers), [oracle.elias_omega_length(int(n)) for n in numbers])
    assert [oracle.elias_omega_length(n) for n in range(1, 18)] == [1, 3, 3, 6, 6, 6, 6, *[7] * 8, 11, 11]


def levels_of(seed, size, density, most):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(size) < density, rng.integers(-most, most + 1, size), 0)


def quantized(levels, width):
    codes = np.where(levels > 0, 2 * levels - 1, -2 * levels).astype(np.uint32)
    return Quantized(jnp.ones(1), packing.pack(jnp.asarray(codes), width))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "density", "most"), [(1, 1.0, 1), (33, 0.2, 1), (123, 0.05, 7), (5000, 0.01, 127), (300, 1.0, 2**14)]
)
def test_counted_bits_are_those_sent(size, density, most, seed):
    levels = levels_of(seed, size, density, most)
    payload = quantized(levels, packing.width_for(2 * most + 1))
    bits = int(jax.jit(lambda p: jc.code_bits(p, code="elias"))(payload))
    assert bits == oracle.elias_bits(levels)
    codes = bitstream.unpack_words(np.asarray(payload.words))
    count, stream = elias.encode_levels(codes)
    assert count == np.count_nonzero(levels)
    assert 32 + 8 * len(stream) - 7 <= bits <= 32 + 8 * len(stream)
    back = jc.wire.decode(jc.wire.encode(payload, code="elias"))
    np.testing.assert_array_equal(back.words, payload.words)
    np.testing.assert_array_equal(back.norms, payload.norms)


def test_words_on_the_host_are_those_of_jax(seed):
    codes = np.random.default_rng(seed).integers(0, 2**5, 96).astype(np.uint32)
    words = np.asarray(packing.pack(jnp.asarray(codes), 5))
    where = np.flatnonzero(codes)
    np.testing.assert_array_equal(bitstream.pack_words(where, codes[where], 5, 3), words)
    np.testing.assert_array_equal(bitstream.unpack_words(words), codes)


def test_named_errors():
    for data, said in (
        (b"", "Elias stream must be long enough"),
        (elias.encode_levels(np.array([0] * 9 + [1]))[1], "Elias index must be below 4"),
        (b"\xff" * 40, "at most 32 digits"),
        (b"\x08", "Elias padding must be zeros"),
    ):
        with pytest.raises(jc.WireError, match=said):
            list(elias.Records(memoryview(data), 1, 4, levels=True))
    with pytest.raises(jc.WireError, match="Elias stream must be the 1 that 1 gaps need"):
        elias.decode_gaps(memoryview(b"\x00\x00"), 4, np.empty(1, np.int32))
    with pytest.raises(ValueError, match="code must be one of fixed, elias, best; got 'zip'"):
        jc.wire.encode(Dense(np.ones(1)), code="zip")
    with pytest.raises(ValueError, match="code must be one of fixed, elias, best; got 'zip'"):
        jc.code_bits(Dense(np.ones(1)), code="zip")


def test_a_short_message_cannot_ask_for_a_long_array():
    body = unseal(jc.wire.encode(quantized(np.zeros(32, int), 3), code="elias"))
    # type, array header (dtype, ndim, length), one norm, width, groups, non-zeros, filler
    place = 1 + 3 + 4 + 1
    huge = bytes(body[:place]) + b"\xff\xff\xff\xff\x01" + bytes(body[place + 1 :])
    with pytest.raises(jc.WireError, match="Quantized groups"):
        jc.wire.decode(seal(huge))
