"""Rotations, `rotate`, `drive` and `eden` against float64, and what is proved of them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracles_rotations as oracle
import pytest
from jitted import made_for, roundtrip
from variants import variants
from worlds import mesh_of, mesh_step, vmap_step

import jaxcomp as jc
from jaxcomp.base import State, accumulate
from jaxcomp.compressors import hadamard
from jaxcomp.compressors.eden import ERRORS, centroids, distortion
from jaxcomp.compressors.hadamard import rotation_of


def vector(seed, d, power=3):
    rng = np.random.default_rng(seed)
    return (rng.laplace(size=d) ** power).astype(np.float32)


def matrix_of(rotation, key):
    """R, column by column."""
    eye = jnp.eye(rotation.size)
    return np.asarray(jax.jit(jax.vmap(lambda x: rotation.forward(x, key), out_axes=1))(eye), np.float64)


# ------------------------------------------------------------------------------------------------
# The rotation


@pytest.mark.sampled
@pytest.mark.parametrize("case", variants([(1, 4), (2, 4), (7, 4), (64, 64), (300, 128)], {(7, 4), (300, 128)}))
def test_rotations_are_orthogonal_and_undone(case, key):
    d, block = case
    rotation = rotation_of(d, block)
    matrix = matrix_of(rotation, key)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    back = jax.jit(jax.vmap(lambda y: rotation.backward(y, key), out_axes=1))(jnp.asarray(matrix.T, jnp.float32))
    np.testing.assert_allclose(back, np.eye(d), atol=1e-6)


@pytest.mark.parametrize("block", variants([2, 8, 128, 1024], {128}))
def test_a_block_is_multiplied_by_hadamards_matrix_and_signs(block, key):
    """Entry for entry, apart from the order of the entries and from their signs before."""
    matrix = matrix_of(rotation_of(block, block), key) * np.sqrt(block)
    np.testing.assert_allclose(np.abs(matrix), 1, atol=1e-5)
    signs = np.sign(matrix[0]) * oracle.hadamard(block)[0]  # of the row that belongs to the first one
    rows = {tuple(row) for row in oracle.hadamard(block)}
    assert {tuple(row) for row in np.round(matrix * signs)} == rows


def test_long_vectors_are_rotated_in_tiles(key, seed):
    """2^16 entries at a time, with what is left over, and undone so."""
    d, block = 2 * 2**16 + 5000, 1024
    x = jnp.asarray(vector(seed, d))
    rotation = rotation_of(d, block)
    y = jax.jit(rotation.forward)(x, key)
    np.testing.assert_allclose(jnp.sum(y**2), jnp.sum(x**2), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(rotation.backward)(y, key), x, rtol=1e-4, atol=1e-4 * float(jnp.abs(x).max()))
    deviations = np.concatenate(rotation.deviations(x, rotation.forward_in_pieces(x, key)))
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(np.asarray(y[:block])))), deviations[0], rtol=1e-5)
    assert rotation.shapes == [(131, 1024), (1, 904), (1, 1024)]
    assert len({float(entry**2) for entry in np.asarray(y[:100])}) == 100


# ------------------------------------------------------------------------------------------------
# Centroids and bounds


def test_centroids_are_those_of_max():
    """Max 1960, table I."""
    np.testing.assert_allclose(centroids(1), [0.7979], atol=1e-4)
    np.testing.assert_allclose(centroids(2), [0.4528, 1.510], atol=1e-3)
    np.testing.assert_allclose(centroids(3), [0.2451, 0.7560, 1.344, 2.152], atol=1e-3)
    for bits, error in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        assert abs(distortion(bits) - error) < 2e-5
    assert distortion(8) < 4.2e-5


@pytest.mark.parametrize("bits", variants(range(1, 9), {2, 8}))
def test_bounds_hold_for_all_laws_with_such_moments(bits):
    found = oracle.largest_error(centroids(bits))
    assert ERRORS[bits] * 0.95 < found <= ERRORS[bits]


@pytest.mark.sampled
@pytest.mark.parametrize("scale", ["unbiased", "least_squares"])
@pytest.mark.parametrize("bits", variants([1, 2, 4], {2}))
def test_eden_is_the_nearest_centroid_and_a_scale(bits, scale, key, seed):
    d, block = 1280, 256
    x = vector(seed, d)
    compressor = jc.eden(bits, block=block, scale=scale)
    state = compressor.init(key, jax.ShapeDtypeStruct((d,), jnp.float32))
    payload, _ = jax.jit(compressor.compress)(key, jnp.asarray(x), state)
    rotation = rotation_of(d, block)
    shared = jax.random.wrap_key_data(state.shared.seed)
    y = np.asarray(jax.jit(rotation.forward)(jnp.asarray(x), shared), np.float64)
    want = np.concatenate([oracle.eden(b, centroids(bits), scale) for b in y.reshape(-1, block)])
    want = jax.jit(rotation.backward)(jnp.asarray(want, jnp.float32), shared)
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    got = jax.jit(lambda p, s: compressor.decompress(p, s, like))(payload, state.shared)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(x).max())
    assert jc.lane_bytes(payload) == d * bits // 8 + 4 * d // block


@pytest.mark.slow
def test_errors_are_those_of_the_normal_law_whatever_the_vector(key, seed):
    """vNMSE 1 / (1 - D) - 1 for the unbiased scale, D for least squares, if no few entries outweigh the others."""
    for x in (vector(seed, 2**14, 1), np.random.default_rng(seed).standard_normal(2**14).astype(np.float32)):
        for bits in (1, 3, 2.5):
            for scale in ("unbiased", "least_squares"):
                compressor = jc.eden(bits, scale=scale)
                x_hat, _ = jax.jit(lambda x, c=compressor: jc.roundtrip(c, x, key=key))(jnp.asarray(x))
                error = float(np.sum(np.square(np.float64(x_hat) - x)) / np.sum(np.square(np.float64(x))))
                d = distortion(bits)
                assert abs(error / (d / (1 - d) if scale == "unbiased" else d) - 1) < 0.08
                if scale == "unbiased":
                    assert abs(np.float64(x_hat) @ x / (np.float64(x) @ x) - 1) < 1e-4


def test_unbiased_for_dense_vectors_biased_for_very_sparse_ones(key, seed):
    rng = np.random.default_rng(seed)
    draw = jax.jit(jax.vmap(lambda key, x: jc.roundtrip(jc.drive(), x, key=key)[0], in_axes=(0, None)))
    keys = jax.random.split(key, 4096)
    dense = rng.standard_normal(128).astype(np.float32)
    mean = np.asarray(draw(keys, jnp.asarray(dense)), np.float64).mean(0)
    assert np.sum(np.square(mean - dense)) < 2 * 0.58 / 4096 * np.sum(np.square(dense)) + 2e-3 * np.sum(dense**2)
    sparse = jnp.zeros(128).at[jnp.array([3, 60])].set(jnp.array([1.0, 0.5]))
    np.testing.assert_allclose(draw(keys[:8], sparse)[:, 60], 0, atol=1e-6)  # the smaller of two entries is lost
    assert jc.drive().spec.omega is None


@pytest.mark.parametrize("bits", variants([0.25, 0.5, 1.5, 2.5, 3.25], {0.5, 2.5}))
def test_fractions_of_bits_cost_what_they_say(bits, key, seed):
    d = 2**13
    x = jnp.asarray(vector(seed, d))
    x_hat, payload = jax.jit(lambda x: jc.roundtrip(jc.eden(bits), x, key=key))(x)
    assert jc.lane_bytes(payload) == d * bits / 8 + 8
    decoded = jc.wire.decode(jc.wire.encode(payload))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), payload, decoded))
    error = float(jnp.sum(jnp.square(x_hat - x)) / jnp.sum(jnp.square(x)))
    cos2 = 1 - distortion(bits)
    assert abs(error * cos2 / (1 - cos2) - 1) < 0.1


def test_non_finite_zero_and_huge_entries(key):
    for compressor in (jc.eden(1.5), jc.rotate(jc.block_scaled("mxfp4"))):
        for x in ([np.nan, 1.0, np.inf, 0.0], [0.0] * 4, [3e38, -3e38, 3e38, 1.0], [1e-30] * 4, [1e-44] * 4, []):
            x_hat, payload = roundtrip(compressor, jnp.asarray(x, jnp.float32), key)
            assert np.isfinite(x_hat).all()
            assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(payload))


def test_what_is_made_for_one_length_is_not_filled_up():
    d = 2**18 + 5
    compressor = jc.rotate(jc.dithering(steps=np.full(d, 0.3)))
    tx = jc.compressed_mean(jc.direct(compressor), None)
    direction, _ = jax.jit(tx.update)(jnp.ones(d), tx.init(jnp.ones(d)))
    assert direction.shape == (d,)
    assert jc.eden(4).spec.layout.multiple == jc.rotate(jc.natural()).spec.layout.multiple == 4096
    assert jc.drive(block=2**14).spec.layout.multiple == 1024


def test_wrong_arguments_are_named():
    for make, what in (
        (lambda: jc.eden(0), "bits must be above 0"),
        (lambda: jc.eden(9), "at most 8"),
        (lambda: jc.eden(2, block=100), "power of two"),
        (lambda: jc.drive(scale="biased"), "scale must be"),
        (lambda: jc.rotate(jc.top_k(0.1), block=1), "power of two"),
        (lambda: jc.rotate(jc.flat(jc.top_k(0.1))), "acts on trees"),
        (lambda: jc.error_feedback(jc.eden(0.25)), "least_squares"),
    ):
        with pytest.raises(ValueError, match=what):
            make()


def test_rotated_payloads_of_linear_compressors_may_be_added(key, seed):
    compressor, d = jc.rotate(jc.rand_k(0.5), block=64), 300
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    assert compressor.spec.linear

    @jax.jit
    def run(one, two):
        state = compressor.init(key, like)
        payloads = [compressor.compress(key, x, state)[0] for x in (one, two)]
        parts = [compressor.decompress(p, state.shared, like) for p in payloads]
        return compressor.decompress(jax.tree.map(jnp.add, *payloads), state.shared, like), parts[0] + parts[1]

    both, apart = run(jnp.asarray(vector(seed, d, 1)), jnp.asarray(vector(seed + 1, d, 1)))
    np.testing.assert_allclose(both, apart, rtol=1e-5, atol=1e-6 * float(jnp.linalg.norm(apart)))


# ------------------------------------------------------------------------------------------------
# Workers


def test_rotations_of_their_own_average_the_errors_of_equal_gradients(key, seed):
    """Ten workers with one gradient: errors of one rotation are equal, of ten they are independent."""
    x = jnp.asarray(vector(seed, 4096, 1))
    workers = jnp.tile(x, (10, 1))

    def error(compressor):
        tx = jc.compressed_mean(jc.direct(compressor), "data", seed=key)
        state, step = vmap_step(tx, x, 10, "data")
        mean, _ = step(state, workers)
        return float(jnp.sum(jnp.square(mean - x)) / jnp.sum(jnp.square(x)))

    alone, apart = error(jc.eden(1)), error(jc.eden(1, per_worker=True))
    assert abs(alone - 0.571) < 0.05
    assert abs(apart - 0.0571) < 0.01


@pytest.mark.parametrize("name", variants(["eden", "rotate"], {"eden"}))
def test_messages_are_decoded_with_the_rotation_of_their_worker(name, key, seed):
    compressor = {
        "eden": jc.eden(2, block=64, per_worker=True),
        "rotate": jc.rotate(jc.rand_k(0.5), block=64, per_worker=True),
    }[name]
    like = jax.ShapeDtypeStruct((200,), jnp.float32)
    state = compressor.init(key, like)
    xs = jnp.stack([jnp.asarray(vector(seed + i, 200)) for i in range(3)])

    @jax.jit
    def run(xs):
        mine = [compressor.for_worker(state.shared, i, 3) for i in range(3)]
        payloads = [compressor.compress(key, x, State((), s))[0] for x, s in zip(xs, mine, strict=True)]
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *payloads)
        total = accumulate(compressor, jnp.zeros(200), stacked, None, state.shared)
        return total, sum(compressor.decompress(p, s, like) for p, s in zip(payloads, mine, strict=True))

    total, want = run(xs)
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("via", variants(["gather", "two_shot"], {"two_shot"}))
def test_workers_of_a_mesh_agree(via, key, seed):
    params = {"w": jnp.zeros((40, 50)), "b": jnp.zeros(7)}
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((4, *p.shape)), jnp.float32), params)
    tx = jc.compressed_mean(jc.error_feedback(jc.drive()), "data", via=via)
    state, step = mesh_step(tx, params, mesh_of(4, ("data",)), "data")
    total = 0
    for _ in range(30):
        mean, state = jax.block_until_ready(step(state, grads))
        total = total + np.asarray(mean["w"])
    exact = 30 * np.asarray(grads["w"]).mean(0)
    assert np.sum(np.square(total - exact)) < 0.03 * np.sum(np.square(exact))
    sent = float(jc.info(state).lane_bytes)
    assert sent < 2.2 * 2048 / 8 * 2 + 200


def test_mean_on_the_wire_in_one_bit(key, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 2048)) + 1, jnp.float32)
    run = jax.jit(jax.vmap(lambda x: jc.collectives.pmean(x, "data", wire=jc.eden(4), key=key), axis_name="data"))
    mean = np.asarray(x).mean(0)
    assert np.sum(np.square(run(x)[0] - mean)) < 0.03 * np.sum(np.square(mean))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("bits", "d", "block"),
    [(4, 3772, 1024), (8, 20_000, 8192), (4, 12_288, 4096), (4, 4097, 4096), (2.5, 2048, 1024), (1, 77, 32)],
)
def test_accelerators_rotate_and_code_the_same(bits, d, block, platform, key, seed, monkeypatch):
    """By products in exact pieces, sums of rows, and tables; where a sum is rounded otherwise a code may differ."""
    monkeypatch.setattr(hadamard, "MANY", 0)
    monkeypatch.setattr(sys.modules["jaxcomp.compressors.eden"], "ONE_LOOP", 0)
    x, compressor, rotation = jnp.asarray(vector(seed, d)), jc.eden(bits, block=block), rotation_of(d, block)
    state = compressor.init(key, x)
    message = jax.jit(compressor.compress)(key, x, state)[0]

    def run(x, message):
        y = rotation.forward(x, key)
        decoded = compressor.decompress(message, state.shared, x)
        return y, rotation.backward(y, key), decoded, jc.roundtrip(compressor, x, key=key)[0]

    here, there = jax.jit(run)(x, message), made_for(platform, run, x, message)
    size = float(jnp.max(jnp.abs(x)))
    for found, want in zip(there[:3], here[:3], strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * size)
    errors = [float(jnp.sum((found - x) ** 2)) for found in (here[3], there[3])]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
