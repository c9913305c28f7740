"""What a message may ask of its reader: time and memory in proportion to its length; and content that is kept."""

import time

import jax
import numpy as np
import pytest
from hostile import decode_guarded, same
from variants import variants

import jaxcomp as jc
from experiments.bench import wire as bench
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sparse, registry
from jaxcomp.wire.bitstream import pack_words
from jaxcomp.wire.frame import FRAME_BYTES, seal, unseal, varint
from jaxcomp.wire.limits import FREE_BYTES, MAX_LEAVES, PAD_BYTES, PART_BYTES, STREAM_BYTES, missing

NOTHING = bytes([1, 0, 0, 1, 0])  # Dense of no numbers
CODES = ["fixed", "elias", "best"]


def seconds_to_decode(data):
    """Of one core, best of three; whether it is decoded or refused does not matter."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        try:
            jc.wire.decode(data)
        except jc.WireError as error:
            assert error.field  # noqa: PT017
        seconds.append(time.process_time() - start)
    return min(seconds)


def allowed(data):
    return 0.05 + 1e-6 * len(data)


def leaves_of(leaf, number):
    return seal(bytes([5]) + NOTHING + varint(number) + leaf * number)


def few_levels(rng, size, width, density):
    where = np.flatnonzero(rng.random(size) < density)
    return Quantized(np.ones(1, np.float32), pack_words(where, np.ones(where.size), width, -(-size // 32)))


# ------------------------------------------------------------------------------------------------
# Time


def test_empty_tables_are_not_decoded_one_by_one():
    """400 Huffman tables of no symbols for no levels took 10 seconds, in 5 kB."""
    table = bytes([11, 0, 1, 0, 8, 0, 2, 0, 0])
    data = leaves_of(table, 400)
    assert jc.wire.decode(leaves_of(table, 3)).leaves[2].words.shape == (8, 0)
    with pytest.raises(jc.WireError, match="number of parts and streams must be at most"):
        jc.wire.decode(data)
    assert seconds_to_decode(data) < allowed(data)


def test_short_elias_streams_do_not_look_at_what_follows():
    leaf = bytes(unseal(jc.wire.encode(few_levels(np.random.default_rng(1), 64, 3, 0.3), code="elias")))
    data = leaves_of(leaf, 1500)
    assert seconds_to_decode(data) < allowed(data)
    many = leaves_of(leaf, 29)  # as many as need no filler
    assert len(jc.wire.decode(many).leaves) == 29
    assert seconds_to_decode(many) < allowed(many)


@pytest.mark.slow
@pytest.mark.parametrize("code", variants(CODES, {"best"}))
def test_many_small_leaves_come_back_in_time(code):
    """A message that is too short for its parts ends with zeros that its reader counts."""
    small = Sparse(np.ones(1, np.float32), np.array([7], np.int32))
    payload = Leaves(Dense(np.zeros(0, np.float32)), (small,) * MAX_LEAVES)
    data = jc.wire.encode(payload, code=code)
    assert len(data) + FREE_BYTES >= PART_BYTES * MAX_LEAVES
    assert seconds_to_decode(data) < allowed(data)
    assert same(jc.wire.decode(data), payload)
    body = bytes(unseal(data))
    assert body.endswith(bytes(20_000))
    for other in (body[:-1], body + b"\0", body[:-9] + b"\1" + bytes(8)):
        with pytest.raises(jc.WireError):
            jc.wire.decode(seal(other))


def test_the_shortest_of_very_many_streams_is_none():
    rng = np.random.default_rng(0)
    payload = Leaves(Dense(np.zeros(0, np.float32)), tuple(few_levels(rng, 64, 3, 0.1) for _ in range(300)))
    lengths = {code: len(jc.wire.encode(payload, code=code)) for code in CODES}
    assert lengths["best"] == lengths["fixed"] < lengths["elias"]
    assert same(jc.wire.decode(jc.wire.encode(payload, code="best")), payload)


def test_missing_bytes():
    assert missing(100, PAD_BYTES * 100, FREE_BYTES + 100) == 0
    assert missing(100, PAD_BYTES * 100 + 1, 0) == 1
    assert missing(100, 0, FREE_BYTES + 107) == 7
    assert PART_BYTES < STREAM_BYTES < FREE_BYTES


@pytest.mark.parametrize("code", CODES)
def test_leaves_stand_in_no_other_payload(code):
    inner = Leaves(Dense(np.ones(1, np.float32)), ())
    for payload in (Leaves(Dense(np.ones(1, np.float32)), (inner,)), Dense(inner)):
        with pytest.raises(TypeError, match=r"wire\.encode: Leaves must be the whole message"):
            jc.wire.encode(payload, code=code)
    with pytest.raises(jc.WireError, match="Leaves must be the whole message"):
        jc.wire.decode(leaves_of(bytes([5]) + NOTHING + varint(0), 2))


def test_messages_nest_as_deep_as_they_are_read():
    payload = Dense(np.ones(1, np.float32))
    for _ in range(7):
        payload = Dense(payload)
    assert same(jc.wire.decode(jc.wire.encode(payload)), payload)
    with pytest.raises(TypeError, match="nesting must be at most 8; got more than 8 levels"):
        jc.wire.encode(Dense(payload))


# ------------------------------------------------------------------------------------------------
# Memory


def dense_payloads():
    """Those whose messages are shortest for their arrays."""
    rng = np.random.default_rng(2)
    nothing = Dense(np.zeros(0, np.float32))
    return {
        "indices without values": Sparse(nothing, np.arange(200_000, dtype=np.int32)),
        "levels of one bit": few_levels(rng, 300_000, 1, 0.96),
        "levels of eight bits, all one": few_levels(rng, 300_000, 8, 1),
        "levels that are zero": few_levels(rng, 300_000, 8, 0),
        "few levels": few_levels(rng, 300_000, 8, 0.001),
        "padding": Sparse(np.zeros(99_999, np.float16), np.full(99_999, 7, np.int32)),
        "scales": Scaled(np.ones(3, np.float16), np.ones(3, np.float32)),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", dense_payloads())
def test_memory_of_valid_messages(name, code):
    payload = dense_payloads()[name]
    data = jc.wire.encode(payload, code=code)
    assert same(decode_guarded(data, limit_seconds=2), payload)  # 64 times its length and the workspace
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) <= PAD_BYTES * len(data)
    assert seconds_to_decode(data) < allowed(data)


def test_long_arrays_are_refused_before_they_are_made():
    groups = varint(2**30)
    with pytest.raises(jc.WireError, match="Quantized groups"):
        jc.wire.decode(seal(bytes([7, 0, 1, 0, 1]) + groups + bytes([0, 0])))
    with pytest.raises(jc.WireError, match="an array of"):
        jc.wire.decode(seal(bytes([13]) + varint(2**30) + bytes([0, 0, 1, 0])))
    assert FRAME_BYTES == 17


# ------------------------------------------------------------------------------------------------
# Content


@pytest.mark.sampled
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("values", "indices"),
    [
        ([1, 2, 0], [1, 9, 9]),
        ([1, 2, 3], [1, 9, 9]),
        ([1, 0, 2], [1, 9, 9]),
        ([1, -0.0, 0], [1, 9, 9]),
        ([0, 0, -0.0], [1, 9, 9]),
        ([1, 2], [9, 9]),
    ],
)
def test_no_value_is_dropped_where_padding_breaks_its_rule(values, indices, code):
    payload = Sparse(np.array(values, np.float32), np.array(indices, np.int32))
    data = jc.wire.encode(payload, code=code)
    assert same(jc.wire.decode(data), payload)
    bits = int(jc.code_bits(jax.tree.map(jax.numpy.asarray, payload), code=code))
    assert 0 <= 8 * len(data) - bits <= 8 * (FRAME_BYTES + 16)


@pytest.mark.parametrize("shape", [(0, 9), (0, 2**35), (33, 1), (33, 0)])
def test_words_of_no_width_are_refused_both_ways(shape):
    payload = Quantized(np.ones(1, np.float32), np.zeros(shape, np.uint32))
    for code in CODES:
        with pytest.raises(TypeError, match=r"Quantized width must be 1 \.\. 32"):
            jc.wire.encode(payload, code=code)
    norms = bytes([0, 1, 1]) + np.float32(1).tobytes()
    words = bytes([11, 2]) + varint(shape[0]) + varint(shape[1]) + payload.words.tobytes()
    with pytest.raises(jc.WireError, match=r"Quantized width must be 1 \.\. 32"):
        jc.wire.decode(seal(bytes([4]) + norms + words))


@pytest.mark.parametrize(
    "payload",
    [
        Quantized(np.ones(1, np.float32), np.zeros((3, 1), np.uint16)),
        Quantized(np.ones(1, np.int32), np.zeros((3, 1), np.uint32)),
        Quantized(np.ones((1, 1), np.float32), np.zeros((3, 1), np.uint32)),
        Scaled(np.ones(2, np.int8), np.float32(1)),
        Scaled(np.ones(2, np.float16), np.ones((1, 1), np.float32)),
        Leaves(Dense(Dense(np.ones(1, np.float32))), ()),
        Leaves(Dense(np.ones(1, np.float32)), (np.ones(1, np.float32),)),
        Sparse(np.ones(2, np.float32), LocalIndices(np.arange(2, dtype=np.uint16), np.array([2, 1], np.int32))),
        Sparse(np.ones(2, np.float32), LocalIndices(np.arange(2, dtype=np.uint16), np.array([3, -1], np.int32))),
    ],
    ids=[
        *("u16 words", "i32 norms", "2-d norms", "integers scaled", "2-d scales", "nested dense", "bare leaf"),
        *("more local indices than there are", "less than none"),
    ],
)
def test_encode_refuses_what_decode_would(payload):
    with pytest.raises(TypeError, match=r"wire\.encode: "):
        jc.wire.encode(payload)


def test_counts_beyond_the_local_indices_are_refused():
    body = bytes.fromhex("0600000100000100070001010000803f030101000b")  # no index, and a count of 65,536
    with pytest.raises(
        jc.WireError, match=r"LocalIndices\.counts must be none negative, and at most 0 in all; got 65536"
    ):
        jc.wire.decode(seal(body))


def test_bench(tmp_path, capsys):
    assert bench.main(["--messages", "60", "--scale", "20", "--markdown", str(tmp_path / "b.md")]) in (0, 1)
    assert "of the memory allowed" in capsys.readouterr().out
    assert "Leaves" in (tmp_path / "b.md").read_text()


def test_the_messages_of_the_bench_begin_with_every_kind_of_record():
    bodies = [body for *_, body in bench.cases_of(np.random.default_rng(0), (3, 40, 900, 20_000), registry.CODES)]
    assert {body[0] for body in bodies} == set(registry._readers)
    for body in bodies[:: len(bodies) // 20]:
        tried = bench.judge(body)
        assert tried.fell is None
        assert same(jc.wire.decode(jc.wire.encode(tried.payload)), tried.payload)


def test_an_error_that_is_no_refusal_falls(monkeypatch):
    def broken(data):
        raise IndexError("9")

    monkeypatch.setattr(jc.wire, "decode", broken)
    assert bench.decoded(seal(b"\x01")) == (None, "IndexError: 9")
