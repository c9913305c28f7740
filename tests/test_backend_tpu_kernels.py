"""Kernels for TPUs give what XLA's form gives: run here by an interpreter, and compiled in `tests/accelerators`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp import backend, backend_tpu_kernels, select
from jaxcomp.base import accumulate
from jaxcomp.compressors import blocks
from jaxcomp.compressors.hadamard import rotation_of
from tests.jitted import made_for

ROW = backend_tpu_kernels.ROWS * backend_tpu_kernels.LANES
SIZES = [ROW, 8 * ROW + 4096, 17 * ROW]  # less than what is fetched at a time, and more, of which a part is left
ROWS = {
    "dithering": lambda d: jc.dithering(7),
    "dithering, 4096 entries": lambda d: jc.dithering(1, block_size=4096),
    "dithering, 128 entries": lambda d: jc.dithering(127, block_size=128, norm="inf"),
    "dithering, 32 entries": lambda d: jc.dithering(7, block_size=32),
    "dithering, 8192 entries": lambda d: jc.dithering(7, block_size=8192),
    "dithering, one norm": lambda d: jc.dithering(7, blocks=1),
    "dithering, bfloat16": lambda d: jc.dithering(100, norm_dtype=jnp.bfloat16),
    "dithering, steps": lambda d: jc.dithering(steps=np.random.default_rng(d).uniform(0.2, 0.3, d)),
    "int8": lambda d: jc.block_scaled("int8"),
    "int4, at random": lambda d: jc.block_scaled("int4", rounding="stochastic"),
    "mxfp4": lambda d: jc.block_scaled("mxfp4"),
    "sign": lambda d: jc.sign(),
    "terngrad": lambda d: jc.terngrad(),
}
KEY = jax.random.key(0)


@pytest.fixture
def with_kernels(monkeypatch):
    """function(*args) as a TPU computes it with kernels, interpreted; of which there must be so many (None: any)."""

    def run(count, function, *args):
        calls, real = [], backend_tpu_kernels.pl.pallas_call

        def interpreted(*args, **kwargs):
            calls.append(args)
            return real(*args, interpret=True, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(backend_tpu_kernels.pl, "pallas_call", interpreted)
            for module in (backend, blocks):
                patch.setattr(module, "has_kernels", lambda: True)
            found = made_for("tpu", function, *args)
        for name in ("into_vector", "blocks_rotated", "few_rows_times", "running"):
            getattr(backend_tpu_kernels, name).clear_cache()  # the interpreted ones
        assert len(calls) == count or (count is None and calls)
        return found

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_kernels_code_and_decode_like_xla(name, size, seed, with_kernels):
    """Norms up to the order of their sums, codes the same but where a norm is another; decoded the same."""
    compressor = ROWS[name](size)
    whole = "8192" not in name or size % 8192 == 0  # a shorter last block is left to XLA
    x = jax.random.normal(jax.random.key(seed), (size,)).at[7].set(jnp.nan).at[size - 1].set(0)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = compressor.init(KEY, like)
    compress = lambda x: compressor.compress(KEY, x, state)[0]

    def decode(payload, other, total):
        several = jax.tree.map(lambda *parts: jnp.stack(parts), payload, other, payload)
        added = lambda total, weights: accumulate(compressor, total, several, weights, state.shared)
        decoded = compressor.decompress(payload, state.shared, like)
        return decoded, added(total, None), added(like, jnp.array([0.5, 0.25, 0.25]))

    mine, theirs = with_kernels(whole, compress, x), made_for("tpu", compress, x)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        if a.dtype == jnp.uint32:
            assert np.mean(np.asarray(a != b)) < 1e-3
        else:
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6)
    payloads = theirs, made_for("tpu", compress, -2 * x)
    found, wanted = with_kernels(3 * whole, decode, *payloads, x), made_for("tpu", decode, *payloads, x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_kernels_take_what_a_vmap_gives(seed, with_kernels):
    rows = jax.random.normal(jax.random.key(seed), (3, 2 * ROW))
    keys, compressor = jax.random.split(KEY, 3), jc.block_scaled("int8", rounding="stochastic")
    run = jax.vmap(lambda key, x: jc.roundtrip(compressor, x, key=key)[0])
    np.testing.assert_array_equal(with_kernels(2, run, keys, rows), made_for("tpu", run, keys, rows))


@pytest.mark.parametrize("size", [ROW - 1024, ROW + 1024, ROW + 7])
def test_other_vectors_are_coded_by_xla(size, with_kernels):
    """Short ones, those whose words fill no rows of lanes, and those that fill none themselves."""
    found = with_kernels(0, lambda x: jc.roundtrip(jc.sign(), x, key=KEY)[0], jnp.full(size, -0.5))
    np.testing.assert_array_equal(found, np.full(size, -0.5))


def test_zeros_and_what_is_not_finite(with_kernels):
    """Law 5: NaN and infinities count as zeros; a block of zeros stays one."""
    x = jnp.zeros(ROW).at[ROW - 3].set(jnp.inf).at[600].set(2.0)
    for compressor in (jc.dithering(7), jc.block_scaled("int8"), jc.terngrad()):
        found = with_kernels(2, lambda x: jc.roundtrip(compressor, x, key=KEY)[0], x)  # noqa: B023
        np.testing.assert_allclose(found, jnp.zeros(ROW).at[600].set(2.0), rtol=1e-6)


# The second, third and seventh have whole rows of lanes and begin with a tile of 1024; the fifth does not.
LEAVES = [(1024,), (64, 256), (3, 16, 384), (7,), (48, 128), (1017,), (16, 8192), (20, 100), (5, 100)]


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_leaves_are_added_to_their_parts_of_a_memory(dtype, others, seed, with_kernels):
    """With what stands there of other vectors, too. Those whose part begins within a tile are left to XLA."""
    rng = np.random.default_rng(seed)
    leaves = tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in LEAVES)
    size = -(-sum(leaf.size for leaf in leaves) // 1024) * 1024
    filled = np.arange(size) < sum(leaf.size for leaf in leaves)
    memory, *rest = (jnp.asarray(rng.normal(size=size) * filled, jnp.float32) for _ in range(1 + others))
    one = lambda e, g, *more: jnp.clip(sum(more, 0.5 * e) + jnp.where(jnp.isfinite(g), g, 0), -3.0, 3.0)
    add = lambda memory, leaves, *rest: backend.accumulated(one, memory, backend.Pieces(leaves), *rest)
    whole = jnp.pad(jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in leaves]), (0, size))[:size]
    found = with_kernels(3, add, memory, leaves, *rest)
    np.testing.assert_allclose(found, one(memory, whole, *rest), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_leaves_end_to_end(dtype, seed, with_kernels):
    rng = np.random.default_rng(seed)
    leaves = [jnp.asarray(rng.normal(size=shape), dtype) for shape in LEAVES]
    odd = lambda *leaves: backend.end_to_end(leaves, jnp.float32)
    with_kernels(0, odd, *leaves)
    leaves.append(jnp.ones((-sum(leaf.size for leaf in leaves) % 1024,), dtype))
    found = with_kernels(3, lambda *leaves: backend.end_to_end(leaves, jnp.float32), *leaves)
    np.testing.assert_array_equal(found, jnp.concatenate([leaf.reshape(-1) for leaf in leaves]).astype(jnp.float32))


@pytest.mark.parametrize("size", [ROW, ROW + 5, 9 * ROW + 1])
def test_running_sums_and_maxima(size, seed, with_kernels):
    x = jnp.asarray(np.random.default_rng(seed).integers(-99, 99, size), jnp.int32)
    both = lambda x: (backend.running(jnp.add, x), backend.running(jnp.maximum, x))
    for found, wanted in zip(with_kernels(2, both, x), (np.cumsum(x), np.maximum.accumulate(x)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    with_kernels(0, both, x[: ROW - 1])
    sums = with_kernels(1, lambda x: backend.running(jnp.add, x), x.astype(jnp.float32))
    np.testing.assert_array_equal(sums, np.cumsum(x))  # of integers, exact
    negative = with_kernels(1, lambda x: backend.running(jnp.maximum, x), x.astype(jnp.float32) - 200)
    np.testing.assert_array_equal(negative, np.maximum.accumulate(x) - 200)


@pytest.mark.parametrize("size", [2**18, 2**18 + 5, 3 * 2**18 + 77])
def test_entries_one_by_one(size, seed, with_kernels):
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    ranks = np.random.default_rng(seed).integers(0, 32, size).astype(np.int32)
    found = with_kernels(1, select._bit_of_rank, words, ranks)
    assert np.array_equal(found, select._bit_of_rank(words, ranks))
    both = with_kernels(1, lambda *args: backend.each_entry(lambda a, b: (b - 1, a >> 3), *args), words, ranks)
    assert np.array_equal(both[0], ranks - 1)
    assert np.array_equal(both[1], words >> 3)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.7])
def test_set_bits_are_found_with_kernels(density, seed, with_kernels):
    size, mask = 2**23 + 33, np.random.default_rng(seed).random(2**23 + 33) < density
    words, capacity = select.mask_words(jnp.asarray(mask)), 2**18
    found, count = with_kernels(None, lambda words: select.indices_of_words(words, capacity, size), words)
    assert count == mask.sum()
    assert np.array_equal(found, np.append(np.flatnonzero(mask), np.full(capacity, size))[:capacity])


def test_vectors_are_joined_by_copies(with_kernels):
    parts = [np.arange(1024 * n, dtype=np.uint16) for n in (1, 3, 40)]
    assert np.array_equal(with_kernels(1, lambda *parts: backend.side_by_side(parts), *parts), np.concatenate(parts))
    many = [parts[0]] * 40
    assert np.array_equal(with_kernels(1, lambda *parts: backend.side_by_side(parts), *many), np.concatenate(many))
    twice = [np.stack([part, part[::-1]]) for part in parts]
    mapped = jax.vmap(lambda *parts: backend.side_by_side(parts))
    assert np.array_equal(with_kernels(None, mapped, *twice), np.concatenate(twice, axis=1))
    odd = [parts[0], parts[1][:5]]
    assert np.array_equal(with_kernels(0, lambda *parts: backend.side_by_side(parts), *odd), np.concatenate(odd))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("shape", [(2, 384, 1280), (1, 128, 128), (3, 1024, 256)], ids=str)
def test_few_rows_times_matrices(shape, axis, seed, with_kernels):
    rng = np.random.default_rng(seed)
    m, rows = rng.standard_normal(shape), rng.standard_normal((shape[0], 4, shape[axis]))
    m, rows = (np.asarray(x * 2.0 ** rng.integers(-9, 9, x.shape), np.float32) for x in (m, rows))
    found = with_kernels(1, lambda rows, m: backend.rows_times(rows, m, axis), rows, m)
    exact = np.einsum("nkl,nlc->nkc", np.float64(rows), np.float64(m if axis == 1 else m.swapaxes(1, 2)))
    sizes = np.einsum("nkl,nlc->nkc", np.abs(rows), np.abs(m if axis == 1 else m.swapaxes(1, 2)))
    assert np.max(np.abs(found - exact) / sizes) < 2.0**-23 * np.sqrt(shape[axis])  # of sums in f32
    chosen = rng.integers(0, shape[axis], 4)  # and products are exact
    ones = np.zeros_like(rows)
    ones[:, np.arange(4), chosen] = 1
    taken = with_kernels(1, lambda rows, m: backend.rows_times(rows, m, axis), ones, m)
    assert np.array_equal(taken, np.take(m, chosen, axis) if axis == 1 else np.take(m, chosen, axis).swapaxes(1, 2))


def test_kernels_multiply_what_fits():
    like = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    takes = backend_tpu_kernels.multiplies
    assert takes(like(2, 4, 256), like(2, 256, 128), 1)
    assert takes(like(2, 40, 128), like(2, 256, 128), 2)
    assert not takes(like(2, 41, 128), like(2, 256, 128), 2)
    assert not takes(like(2, 4, 64), like(2, 64, 128), 1)
    assert not takes(like(2, 4, 128, dtype=jnp.bfloat16), like(2, 128, 128, dtype=jnp.bfloat16), 1)


@pytest.mark.parametrize(("rows", "tail"), [(8, 0), (9, 128), (21, 4095 // 128 * 128), (70, 1024)])
def test_blocks_are_rotated_by_kernels(rows, tail, key, seed, with_kernels):
    rotation = rotation_of(rows * 4096 + tail, 4096)
    x, y = np.random.default_rng(seed).integers(-8, 9, (2, rotation.size)).astype(np.float32)  # whose sums are exact
    if not tail:
        assert np.array_equal(with_kernels(1, rotation.forward, x, key), rotation.forward(x, key))
        assert np.array_equal(with_kernels(1, rotation.backward, y, key), rotation.backward(y, key))
        return
    last = rotation.size - 4096  # from here on entries are rotated twice
    for function, given in ((rotation.forward, x), (rotation.backward, y)):
        found, exact = np.asarray(with_kernels(1, function, given, key)), np.asarray(function(given, key))
        assert np.array_equal(found[: last - tail], exact[: last - tail])
        assert np.allclose(found, exact, rtol=1e-6, atol=4e-6)


def test_rotations_leave_other_blocks_to_xla(key, with_kernels):
    for size, block in ((8 * 4096, 2048), (7 * 4096, 4096), (8 * 4096 + 1, 4096)):
        rotation = rotation_of(size, block)
        assert with_kernels(0, rotation.forward, jnp.ones(size), key).shape == (size,)


def test_who_differentiates_a_kernel_is_told_what_to_do(with_kernels):
    through = lambda x: jnp.sum(x + jax.lax.stop_gradient(jc.roundtrip(jc.sign(), x, key=KEY)[0] - x))
    with pytest.raises(TypeError, match=r"jax.lax.stop_gradient\(x\)"):
        with_kernels(None, jax.grad(through), jnp.ones(ROW))
    inside = lambda x: jnp.sum(x + jc.roundtrip(jc.sign(), jax.lax.stop_gradient(x), key=KEY)[0])
    assert np.array_equal(with_kernels(None, jax.grad(inside), jnp.ones(ROW)), np.ones(ROW))
