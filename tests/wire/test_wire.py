"""Bytes: exact round trips of every payload, and decoding that trusts nothing."""

import struct
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hostile import FRAME, decode_guarded, same, survives
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ROWS, D

import jaxcomp as jc
from jaxcomp.payloads import Dense, Leaves, Quantized, Scaled, Sketch, Sparse
from jaxcomp.wire.bitstream import pack_bits, unpack_bits
from jaxcomp.wire.format import DTYPES
from jaxcomp.wire.frame import Reader, seal, unseal, varint


def examples():
    """One payload of each kind, nested ones among them."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(9).astype(np.float32)
    indices = np.array([0, 3, 4, 70, 71, 900, 1000, 1000, 1000], np.int32)
    padded = np.where(indices < 1000, values, 0).astype(np.float32)
    sparse = Sparse(padded, indices)
    most = 2**31 - 1
    keys = np.array([0, 70, most - 1, 5, 9, most, most], np.int32)
    cells = np.zeros((5, 7), np.uint32)
    cells[:, 0] = rng.integers(0, 2**32, 5, dtype=np.uint32)
    none = np.zeros(0, np.int32)
    sketch = Sketch(np.array([0, 1.5, -2, 0], np.float32), np.array([3, 0, 2], np.int32), keys, cells, none)
    skewed = np.where(rng.random((6, 40)) < 0.2, 2**32 - 1, 0).astype(np.uint32)
    quantized = Quantized(values[:2], rng.integers(0, 2**32, (3, 4), dtype=np.uint32))
    return {
        "dense": Dense(values),
        "dense-bf16": Dense(values.astype(jnp.bfloat16)),
        "scaled": Scaled(values.astype(jnp.float8_e4m3fn), np.float32(0.5)),
        "sparse": sparse,
        "sparse-unsorted": Sparse(values, np.array([5, 1, 2, 8, 9, 3, 3, 3, 7], np.int32)),
        "quantized": quantized,
        "nested": Sparse(quantized, indices),
        "dense-nested": Dense(quantized),
        "leaves": Leaves(Dense(values), (sparse, quantized, Sparse(quantized, indices))),
        "leaves-empty": Leaves(Dense(values[:0]), ()),
        "sketch": sketch,
        "sketch-released": sketch._replace(zero=np.array([1, 3], np.int32)),
        "sketch-huffman": sketch._replace(cells=skewed),
        "sketch-empty": Sketch(values[:0], none, none, cells[:, :0], none),
        "sketch-full": Sketch(values, np.array([9], np.int32), indices[:1] + np.arange(9, dtype=np.int32), cells, none),
    }


EXAMPLES = examples()


@pytest.mark.sampled
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_round_trip_of_every_compressor(row, key, seed):
    @jax.jit
    def run(x, key):
        payload = jc.roundtrip(row.compressor, x, key=key)[1]
        return payload, jc.code_bits(payload)

    for d in (D,) if row.fixed_length else (D, 0):
        payload, bits = run(jnp.asarray(np.random.default_rng(seed).standard_t(3, d), jnp.float32), key)
        host = jax.tree.map(np.asarray, payload)
        for code, spare in (("fixed", 40), ("elias", 80), ("best", 80)):
            data = jc.wire.encode(payload, code=code)
            assert same(jc.wire.decode(data), payload)
            # Frame, types, shapes and byte padding are all there is besides the code.
            sent = int(bits) if code == "fixed" else int(jc.code_bits(host, code=code))
            assert 0 <= 8 * len(data) - sent <= 8 * (FRAME + spare)


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip_of_every_type(name):
    payload = EXAMPLES[name]
    data = jc.wire.encode(payload)
    assert same(jc.wire.decode(data), payload)
    device = jax.tree.map(jnp.asarray, payload)
    assert jc.wire.encode(device) == data
    arrays = len(jax.tree.leaves(payload))
    assert 0 <= 8 * len(data) - int(jc.code_bits(device)) <= 8 * (FRAME + 16 * arrays)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_round_trip_of_every_dtype(dtype):
    payload = Dense(np.arange(24, dtype=np.uint8).repeat(8).view(np.uint8)[: 8 * dtype.itemsize].view(dtype))
    assert same(jc.wire.decode(jc.wire.encode(payload)), payload)


def test_padding_costs_nothing_but_is_rebuilt():
    indices = np.full(100_000, 2**20, np.int32)
    indices[:3] = [7, 8, 9]
    values = np.zeros(100_000, np.float32)
    values[:3] = [1, 2, 3]
    data = jc.wire.encode(Sparse(values, indices))
    assert len(data) < 100_000 * 8 / 32
    assert same(jc.wire.decode(data), Sparse(values, indices))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 32).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(0, 2**w - 1), max_size=70))),
)
def test_bit_stream_is_the_oracle(case):
    width, values = case
    data = pack_bits(np.array(values, np.uint32), width)
    assert data == oracles.fixed_width_stream(values, width)
    np.testing.assert_array_equal(unpack_bits(memoryview(data), len(values), width), np.array(values, np.uint32))


@pytest.mark.parametrize("width", [1, 7, 20, 32])
def test_bit_stream_across_chunks(width, seed):
    values = np.random.default_rng(seed).integers(0, 2**width, 200_001, dtype=np.uint64).astype(np.uint32)
    np.testing.assert_array_equal(unpack_bits(memoryview(pack_bits(values, width)), values.size, width), values)


# ------------------------------------------------------------------------------------------------
# Hostile bytes


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data):
    assert decode_guarded(data) is None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_random_bodies_in_a_valid_frame(body):
    """WireError, or by luck a payload, which then survives another round trip."""
    payload = decode_guarded(seal(body))
    assert payload is None or same(jc.wire.decode(jc.wire.encode(payload)), payload)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_bit_flips_are_caught_by_the_checksum(name, data):
    message = bytearray(jc.wire.encode(EXAMPLES[name]))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    assert decode_guarded(bytes(message)) is None


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_bit_flips_under_a_correct_checksum(name, data):
    assert survives(EXAMPLES[name], data)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_truncation_and_extension(name):
    message = jc.wire.encode(EXAMPLES[name])
    for cut in range(len(message)):
        assert decode_guarded(message[:cut]) is None
    for more in (b"\0", b"JCMP", message):
        assert decode_guarded(message + more) is None
    body = bytes(unseal(message))
    for cut in range(len(body)):
        decode_guarded(seal(body[:cut]))
    assert decode_guarded(seal(body + b"\0")) is None


HUGE = varint(2**31 - 1)
HOSTILE = {
    "dense of 2^31 numbers": bytes([1, 0, 0, 1]) + HUGE,
    "dense of shape 2^31 x 2^31": bytes([1, 0, 0, 2]) + HUGE + HUGE,
    "empty dense of shape 0 x 2^62": bytes([1, 0, 0, 2, 0]) + varint(2**62),
    "dimension of ten bytes": bytes([1, 0, 0, 1]) + b"\xff" * 10,
    "200 dimensions": bytes([1, 0, 0, 200]) + b"\1" * 200,
    "unknown dtype": bytes([1, 0, 99, 1, 0]),
    "unknown type": bytes([77]),
    "bare array": bytes([0, 0, 1, 0]),
    "sparse with capacity 2^31 of one entry": bytes([3]) + HUGE + bytes([1, 1, 0, 0, 0]) + b"\0" * 4,
    "sparse with count above capacity": bytes([3, 1, 2, 1, 0, 0, 0]) + b"\0" * 8,
    "sparse of width 0": bytes([3, 1, 1, 0, 0, 0, 0]) + b"\0" * 4,
    "sparse of width 40": bytes([3, 1, 1, 40]) + b"\0" * 10,
    "sparse with capacity and no entry": bytes([3, 9, 0, 1, 0, 0]),
    "leaves of 2^31 parts": bytes([5, 1, 0, 0, 1, 0]) + HUGE,
    "leaves without dense": bytes([5, 0, 0, 1, 0, 0]),
    "leaves in leaves in dense": bytes([1, 5, 1, 0, 0, 1, 0, 0]),
    "nested a thousand times": bytes([1]) * 1000 + bytes([0, 0, 1, 0]),
    "sketch of 2^31 keys": bytes([13]) + HUGE + bytes([1]) + b"\xff" * 4 + bytes([0, 0]),
    "sketch without a key stream": bytes([13, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0]),
    "sketch of 2^31 groups": bytes([13, 0, 0, 0, 1, 0, 0, 0, 0, 8]) + HUGE + bytes([0, 0, 0]),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies(name):
    assert decode_guarded(seal(HOSTILE[name])) is None


def test_time_on_large_corrupt_messages(seed):
    """Within 100 ms, measured without tracemalloc, best of three."""
    message = bytearray(
        jc.wire.encode(Dense(np.random.default_rng(seed).standard_normal(1_000_000).astype(np.float32)))
    )
    message[len(message) // 2] ^= 1
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(jc.WireError, match="checksum"):
            jc.wire.decode(bytes(message))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


def test_errors_name_field_found_and_allowed():
    message = jc.wire.encode(EXAMPLES["dense"])
    cases = [
        (b"", "message length must be at least 17 bytes; got 0"),
        (b"NOPE" + message[4:], "magic must be b'JCMP'; got b'NOPE'"),
        (message[:4] + b"\7" + message[5:], "version must be 2 or 4; got 7"),
        (message[:-1], "body length must be"),
        (message[:-1] + bytes([message[-1] ^ 1]), "checksum must be"),
    ]
    for data, words in cases:
        with pytest.raises(jc.WireError, match=words):
            jc.wire.decode(data)
    with pytest.raises(jc.WireError, match="message must be bytes; got str"):
        jc.wire.decode("text")
    assert issubclass(jc.WireError, ValueError)


def test_frame_is_what_is_documented():
    body = b"some bytes"
    head = b"JCMP" + struct.pack("<BQ", 2, len(body))
    assert seal(body) == head + body + struct.pack("<I", zlib.crc32(head + body))


@given(st.integers(0, 2**63 - 1))
def test_varint_round_trip(value):
    assert Reader(memoryview(varint(value))).varint("x") == value


@pytest.mark.parametrize(
    "payload",
    [
        np.zeros(3),
        (np.zeros(3),),
        {"a": np.zeros(3)},
        Dense(np.zeros(3, complex)),
        Dense(np.zeros((1,) * 9)),
        Sparse(np.zeros(3, np.float32), np.zeros(3, np.int64)),
        Sparse(np.zeros(2, np.float32), np.zeros(3, np.int32)),
        Sparse(np.zeros(1, np.float32), np.array([-1], np.int32)),
        EXAMPLES["sketch"]._replace(counts=np.array([3, 9], np.int32)),
        EXAMPLES["sketch"]._replace(counts=np.array([5], np.int32)),
        EXAMPLES["sketch"]._replace(zero=np.zeros(1, np.int32)),
    ],
    ids=[
        *("array", "tuple", "dict", "complex", "nine dims", "i64 indices", "lengths differ", "negative"),
        *("lists too long", "keys that do not ascend", "half a zero"),
    ],
)
def test_encode_refuses_what_is_not_a_payload(payload):
    with pytest.raises(TypeError, match=r"wire\.encode"):
        jc.wire.encode(payload)


def test_limits_hold_for_long_hostile_messages():
    """A long array behind zero dimensions, filler that asks for memory, very many leaves."""
    huge = bytes([1, 0, 0, 3, 0]) + varint(2**40) * 2
    with pytest.raises(jc.WireError, match="shape"):
        jc.wire.decode(seal(huge))
    filler = bytes(200_000)
    capacity = 1 + len(filler) * 64 // 8
    body = bytes([3]) + varint(capacity) + varint(1) + bytes([1, 0]) + bytes([0, 0]) + bytes(4) + filler
    payload = jc.wire.decode(seal(body))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) <= 64 * len(body)
    leaves = bytes([5, 1, 0, 0, 1, 0]) + varint(200_000) + bytes([1, 0, 0, 1, 0]) * 200_000
    with pytest.raises(jc.WireError, match="Leaves number"):
        jc.wire.decode(seal(leaves))
