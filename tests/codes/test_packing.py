"""Bit packing: exact inverse at every width, and the documented layout."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jitted import made_for
from variants import variants

import jaxcomp as jc
from jaxcomp.base import accumulate
from jaxcomp.packing import Lanes, Places, num_code_words, pack, places_of, unpack, width_for


@pytest.mark.sampled
@pytest.mark.parametrize("width", variants(range(1, 33), {1, 2, 3, 4, 7, 8, 11, 16, 31, 32}))
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 1025, 2048, 3050])
def test_exact_inverse_and_layout(width, size, seed):
    rng = np.random.default_rng([seed, width, size])
    codes = rng.integers(0, 2**width, size, dtype=np.uint64).astype(np.uint32)
    words = jax.jit(pack, static_argnums=1)(codes, width)
    assert words.shape == (width, -(-size // 32))
    assert words.size == num_code_words(size, width)
    np.testing.assert_array_equal(words, oracles.pack(codes, width))
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=1)(words, size), codes)


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_words_from_slices_are_those_of_the_vector(width, seed):
    rng = np.random.default_rng([seed, width])
    codes = jnp.asarray(rng.integers(0, 2**width, 3072, dtype=np.uint32))
    places = places_of(3072, width)
    assert places is not None
    made = jax.jit(lambda codes: places.pack(places.slices(codes)).reshape(width, -1))(codes)
    np.testing.assert_array_equal(made, oracles.pack(np.asarray(codes), width))
    blocks = np.repeat(np.arange(96), 32)  # a number for each 32 entries
    slices = jax.jit(places.slices)
    for mine, each in zip(slices(np.arange(96)), slices(blocks), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(mine, each.shape), each)
    unpacked = jax.jit(lambda codes: places.unpack(pack(codes, width)))(codes)
    np.testing.assert_array_equal(unpacked.reshape(-1), codes)
    assert unpacked.shape == places.whole


@pytest.mark.parametrize(("size", "width"), [(0, 4), (1000, 4), (1024, 3), (2**20 + 32, 8)])
def test_other_numbers_have_no_places(size, width):
    assert places_of(size, width) is None


def test_high_bits_are_dropped():
    np.testing.assert_array_equal(unpack(pack(jnp.array([9, 7], jnp.uint32), 3), 2), [1, 7])


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1, 3, 9, 16, 17, 32])
@pytest.mark.parametrize("size", [2**19, 2**19 + 5])
def test_rows_of_many_codes_on_a_tpu_change_no_word(size, width, seed):
    codes = np.random.default_rng(seed).integers(0, 2**width, size, dtype=np.uint64).astype(np.uint32)
    words = pack(jnp.asarray(codes), width)
    assert np.array_equal(made_for("tpu", lambda codes: pack(codes, width), codes), words)
    assert np.array_equal(made_for("tpu", lambda words: unpack(words, size), words), codes)


@pytest.mark.parametrize(("num_codes", "width"), [(1, 1), (2, 1), (3, 2), (2**16, 16), (2**16 + 1, 17), (2**32, 32)])
def test_width_for(num_codes, width):
    assert width_for(num_codes) == width


def test_vmap():
    codes = jnp.arange(200, dtype=jnp.uint32).reshape(4, 50)
    words = jax.vmap(lambda c: pack(c, 8))(codes)
    np.testing.assert_array_equal(jax.vmap(lambda w: unpack(w, 50))(words), codes)


@pytest.mark.parametrize("width", [0, 33, -1])
def test_width_out_of_range(width):
    with pytest.raises(ValueError, match=r"width must be in 1 \.\. 32 bits"):
        pack(jnp.zeros(3, jnp.uint32), width)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="must be a vector"):
        pack(jnp.zeros((3, 3), jnp.uint32), 2)
    with pytest.raises(ValueError, match=r"need words of shape \(w, 2\)"):
        unpack(jnp.zeros((3, 1), jnp.uint32), 64)


# ------------------------------------------------------------------------------------------------
# As a TPU works on them


@pytest.fixture
def in_lanes(monkeypatch):
    """As in a program for TPUs, whose registers have 128 lanes."""
    monkeypatch.setattr(jc.backend, "lanes", lambda: 128)
    monkeypatch.setattr(jc.packing, "lanes", lambda: 128)


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("size", [0, 33, 1024, 5000, 32 * 1024, 96 * 1024])
def test_lanes_change_no_word(width, size, seed, in_lanes):
    codes = np.random.default_rng([seed, width, size]).integers(0, 2**width, size, dtype=np.uint64).astype(np.uint32)
    words = jax.jit(lambda codes: pack(codes, width))(codes)
    np.testing.assert_array_equal(words, oracles.pack(codes, width))
    np.testing.assert_array_equal(jax.jit(lambda words: unpack(words, size))(words), codes)
    found = places_of(32 * 1024, width)
    assert isinstance(found, Lanes if width in (1, 2, 4, 8) else Places) or (width == 3 and found is None)


CODED = {
    "dithering": jc.dithering(7),
    "dithering(1)": jc.dithering(1, block_size=512),
    "dithering(100)": jc.dithering(100),
    **{f: jc.block_scaled(f) for f in ("int8", "int4", "mxfp8", "mxfp4", "nvfp4")},
    "int4, stochastic": jc.block_scaled("int4", rounding="stochastic"),
    "sign": jc.sign(),
    "natural": jc.natural(),
}


SELECTED = {
    "top_k": jc.top_k(0.01),
    "sidco": jc.sidco(0.01),
    "chunked": jc.chunked(jc.top_k(k=16), 1024),
    "dct": jc.dct(jc.top_k(k=4), 64),
    "skcompress": jc.skcompress(jc.top_k(0.05)),
    "count_sketch": jc.count_sketch(0.1),
    "eden": jc.eden(4),
    "dithering, rows of 96": jc.dithering(7, block_size=96),
}


@pytest.mark.sampled
@pytest.mark.parametrize("target", ["gpu", "tpu"])
@pytest.mark.parametrize("name", CODED | SELECTED)
@pytest.mark.parametrize("size", [5000, 33 * 1024])
def test_a_payload_of_an_accelerator_is_that_of_a_cpu(name, size, target, seed):
    """Bit for bit, with the same draws; and so is what it decodes to, alone and added up. Of rotated vectors the codes
    are, and what is added up is within 64 units in the last place of the largest number."""
    compressor = (CODED | SELECTED)[name]
    x = np.random.default_rng([seed, size]).standard_normal(size).astype(np.float32)
    x = np.round(x * 32) / 32 if name in CODED else x  # whose sums of squares are exact: each backend adds in its order
    state = compressor.init(jax.random.key(1), jnp.asarray(x))

    def both(x):
        payload, _ = compressor.compress(jax.random.key(2), x, state)
        two = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
        added = accumulate(
            compressor, jax.ShapeDtypeStruct(x.shape, x.dtype), two, jnp.array([0.5, 0.25]), state.shared
        )
        return payload, compressor.decompress(payload, state.shared, x), jc.backend.made(added)

    of_cpu, other = jax.jit(both)(x), made_for(target, both, x)
    for number, (one, another) in enumerate(zip(of_cpu, other, strict=True)):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(another), strict=True):
            if name == "eden" and a.dtype == np.float32:
                np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-18 * np.max(np.abs(a)))
            elif number < 2:
                np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
            else:
                np.testing.assert_array_equal(a, b)  # but for signs of zeros: 0 + x is compiled as x


@pytest.mark.sampled
@pytest.mark.parametrize("name", CODED)
def test_words_of_long_vectors_are_the_same_with_64_bits_enabled(name, seed):
    compressor, x = CODED[name], np.random.default_rng(seed).standard_normal(4096).astype(np.float32)

    def payload(x):
        state = compressor.init(jax.random.key(1), x)
        return compressor.compress(jax.random.key(2), x, state)[0]

    narrow = jax.jit(payload)(x)
    with jax.enable_x64(True):
        wide = jax.jit(payload)(x)
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_a_vector_of_no_entries_in_blocks():
    compressor = jc.dithering(7, blocks=4)
    payload, _ = compressor.compress(jax.random.key(0), jnp.zeros(0), compressor.init(jax.random.key(0), jnp.zeros(0)))
    assert [x.shape for x in jax.tree.leaves(payload)] == [(0,), (4, 0)]
