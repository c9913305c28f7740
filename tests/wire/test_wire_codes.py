"""Messages in the shortest code: round trips, bits counted against bits sent, bytes that lie."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import FRAME, decode_guarded, same, survives
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import examples, quantized, sparse

import jaxcomp as jc
from jaxcomp import codes
from jaxcomp.codes import schemes
from jaxcomp.payloads import Quantized, Sparse
from jaxcomp.payloads import quantized as quantized_
from jaxcomp.payloads import sparse_records as records
from jaxcomp.wire.bitstream import pack_words, padded_words, stream_bytes
from jaxcomp.wire.frame import seal, unseal, varint
from jaxcomp.wire.limits import PAD_BYTES


def best(payload):
    return jc.wire.encode(payload, code="best")


COUNTED = {"dense", "scaled", "sparse-empty", "local", "levels-wide"}  # others in the next test


@pytest.mark.sampled
@pytest.mark.parametrize("name", examples())
def test_shortest_code_of_every_payload(name):
    payload, kind = examples()[name]
    message = best(payload)
    assert unseal(message)[0] == kind
    for data in (message, jc.wire.encode(payload, code="elias")):
        assert same(jc.wire.decode(data), payload)
    if name in COUNTED:
        bits = int(jc.code_bits(jax.tree.map(jnp.asarray, payload), code="best"))
        # A dim, a dtype, a count or a rounding to bytes for each array; nothing else.
        assert 0 <= 8 * len(message) - bits <= 8 * (FRAME + 16 * len(jax.tree.leaves(payload)))


def test_bits_in_jit_for_any_content(seed):
    """One program counts the bits of messages of all densities; each equals its message up to headers."""
    count = jax.jit(lambda p: jnp.asarray(jc.code_bits(p, code="best")))
    rng = np.random.default_rng(seed)
    kinds = set()
    for density in (0, 0.001, 0.01, 0.3, 0.7, 1):
        for payload in (quantized(rng, 6400, density, 7), sparse(rng, 640, int(640 * density), 640)):
            message = best(payload)
            assert same(jc.wire.decode(message), payload)
            paid = sum(leaf.nbytes for leaf in payload) // PAD_BYTES  # what a short message must cost
            assert 0 <= 8 * len(message) - int(count(payload)) <= 8 * (FRAME + 32 + paid)
            kinds.add(unseal(message)[0])
    assert kinds >= {quantized_.CODED_LEVELS, quantized_.CODED_NONZEROS, records.CODED_SPARSE}


INDEX = st.one_of(st.integers(0, 40), st.integers(0, 2**31 - 1), st.sampled_from([0, 1, 2**31 - 2, 2**31 - 1]))


ENTRY = st.tuples(INDEX, st.floats(width=32, allow_nan=False))
ENTRIES = st.lists(ENTRY, max_size=60, unique_by=lambda entry: entry[0])


@settings(max_examples=250, deadline=None)
@given(ENTRIES, st.booleans(), st.sampled_from(["fixed", "elias", "best"]))
def test_sparse_round_trip(entries, ordered, code):
    entries = sorted(entries) if ordered else entries
    payload = Sparse(np.array([v for _, v in entries], np.float32), np.array([i for i, _ in entries], np.int32))
    assert same(jc.wire.decode(jc.wire.encode(payload, code=code)), payload)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 32), st.integers(0, 4), st.data(), st.sampled_from(["fixed", "elias", "best"]))
def test_levels_round_trip(width, groups, data, code):
    some = st.lists(st.integers(0, min(2**width, 2**32 - 1) - 1), min_size=32 * groups, max_size=32 * groups)
    codes_ = np.array(data.draw(st.one_of(st.just([0] * 32 * groups), st.just([1] * 32 * groups), some)), np.uint32)
    payload = Quantized(np.ones(1, np.float32), pack_words(np.arange(codes_.size), codes_, width, groups))
    assert same(jc.wire.decode(jc.wire.encode(payload, code=code)), payload)


# ------------------------------------------------------------------------------------------------
# Hostile bytes

CODED = [name for name, (_, kind) in examples().items() if kind >= quantized_.ELIAS_QUANTIZED] + ["nested", "leaves"]


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(CODED), st.sampled_from(["elias", "best"]), st.data())
def test_bit_flips_under_a_correct_checksum(name, code, data):
    assert survives(examples()[name][0], data, code)


@pytest.mark.parametrize("name", ["local-none", "sparse-nothing", "levels-few", "levels"])
def test_every_truncation(name):
    body = bytes(unseal(best(examples()[name][0])))
    for cut in range(len(body)):
        assert decode_guarded(seal(body[:cut])) is None
    assert decode_guarded(seal(body + b"\0")) is None


def key_message(words, bits, count, capacity=None):
    stream = stream_bytes(words, bits)
    capacity = count if capacity is None else capacity
    values = bytes([0, 0]) + bytes(4 * count)
    return seal(
        bytes([records.CODED_SPARSE])
        + varint(capacity)
        + varint(count)
        + varint(0)
        + varint(len(stream))
        + stream
        + values
    )


@pytest.mark.parametrize("coder", codes.CODERS)
def test_streams_of_every_coder_are_read(coder):
    """The decoder takes what any coder wrote, whichever the encoder would have chosen."""
    keys, counts = np.arange(3, 9000, 17).astype(np.int32), np.array([530], np.int32)
    words, bits = codes.encode_keys(keys, counts, coder=coder)
    np.testing.assert_array_equal(jc.wire.decode(key_message(words, bits, keys.size)).indices, keys)


def test_streams_that_lie_are_named(seed):
    keys = np.cumsum(np.random.default_rng(seed).geometric(0.01, 600)).astype(np.int32)
    counts = np.array([600], np.int32)
    words, bits = codes.encode_keys(keys, counts, coder="huffman")
    good = key_message(words, bits, 600)
    np.testing.assert_array_equal(jc.wire.decode(good).indices, keys)

    def changed(position, number, width, field):
        """The message with a field of the stream overwritten."""
        other = words.copy()
        for i in range(width):
            bit = position + i
            other[bit // 32] &= np.uint32(0xFFFFFFFF ^ (1 << bit % 32))
            other[bit // 32] |= np.uint32((number >> i & 1) << bit % 32)
        with pytest.raises(jc.WireError, match=field):
            jc.wire.decode(key_message(other, bits, 600))

    changed(0, 99, 8, "scheme must be below 47; got 99")
    changed(8 + 9, 1, 4, "table must be the lengths of a complete prefix code")
    changed(8, 400, 9, "table must be")
    lengths, start = codes.read_lengths(words, np.int32(8), schemes.CLASSES)
    assert lengths.max() > 0
    changed(int(start), 7, 12, "key stream bytes must be")  # a chunk that would end where no chunk begins
    with pytest.raises(jc.WireError, match="key stream bytes must be"):
        jc.wire.decode(key_message(words, bits - 9, 600))
    with pytest.raises(jc.WireError, match=r"key stream count must be at most .* in .* bytes"):
        jc.wire.decode(key_message(words[:2], 64, 600))
    rice, total = codes.encode_keys(keys, counts, coder="rice")
    with pytest.raises(jc.WireError, match="key stream bytes must be"):
        jc.wire.decode(key_message(rice[: int(total) // 64], total // 2, 600))  # fewer marks than keys
    spare = -int(total) % 8
    if spare:
        rice[int(total) // 32] |= np.uint32(1 << int(total) % 32)
        with pytest.raises(jc.WireError, match="padding must be zeros"):
            jc.wire.decode(key_message(rice, total, 600))
    far = np.array([2**31 - 1, 2**31 - 1], np.int32)
    wide, total = codes.encode_keys(far, np.array([1, 1], np.int32), coder="sketchml")
    with pytest.raises(jc.WireError, match="key must be below 2147483648; got 4294967294"):
        jc.wire.decode(key_message(wide, total, 2))


def test_words_of_bytes():
    np.testing.assert_array_equal(padded_words(b"\1\0\0\0\2"), [1, 2, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("code", ["fixed", "elias", "best"])
def test_a_million_entries_in_half_a_second(code, seed):
    """Of one core, best of three."""
    rng = np.random.default_rng(seed)
    indices = np.cumsum(rng.geometric(0.01, 10**6)).astype(np.int32)
    payload = Sparse(rng.standard_normal(10**6).astype(np.float32), indices)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        message = jc.wire.encode(payload, code=code)
        middle = time.process_time()
        back = jc.wire.decode(message)
        seconds.append((middle - start, time.process_time() - middle))
    assert same(back, payload)
    encode, decode = np.min(seconds, axis=0)
    assert encode < 0.5
    assert decode < 0.5
