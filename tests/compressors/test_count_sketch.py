"""Count sketches, and FetchSGD."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, run_shard_map, vmap_step

import jaxcomp as jc
from jaxcomp.algorithms.fetch_sgd import median
from jaxcomp.compressors.count_sketch import add_to_sketch, counters, estimates, sketch_of

count_sketch_file = sys.modules["jaxcomp.compressors.count_sketch"]  # whose name is that of its function


def matrix_of(key, rows, columns, size):
    """S as float64[r, c, d], from the hashes."""
    out = np.zeros((rows, columns, size))
    for row in range(rows):
        place, negative = map(np.asarray, counters(key, row, jnp.arange(size), columns))
        out[row, place, np.arange(size)] = np.where(negative, -1, 1)
    return out


def test_entries_of_different_blocks_share_a_counter_as_often_as_chance_has_it(key):
    columns, blocks = 30, 20_000
    place, negative = map(np.asarray, counters(key, 2, jnp.arange(blocks * columns), columns))
    place = place.reshape(blocks, columns)
    assert all(len(set(row)) == columns for row in place[:100])  # within a block never
    offsets = np.bincount(place[:, 0], minlength=columns)
    assert np.max(np.abs(offsets - blocks / columns)) < 6 * np.sqrt(blocks / columns)
    # Any two blocks: the differences of their offsets are as even, for neighbours and at a distance.
    for apart in (1, 2, 64):
        found = np.bincount((place[apart:, 0] - place[:-apart, 0]) % columns, minlength=columns)
        assert np.max(np.abs(found - blocks / columns)) < 6 * np.sqrt(blocks / columns)
    other, negative_there = map(np.asarray, counters(key, 3, jnp.arange(blocks * columns), columns))
    assert abs(np.mean(place[:, 0] == other[::columns]) - 1 / 30) < 6 * np.sqrt(1 / 30 / blocks)
    for bits in (
        negative,
        negative ^ negative_there,
        negative[1:] ^ negative[:-1],
        negative ^ np.roll(negative, columns),
    ):
        assert abs(np.mean(bits) - 0.5) < 3 / np.sqrt(bits.size)


@pytest.mark.parametrize(("size", "columns"), [(1, 1), (7, 7), (50, 7), (49, 7), (6, 50), (2100, 2099), (2100, 1)])
def test_runs_and_reductions_make_one_sketch(size, columns, key, seed, monkeypatch):
    """The form for CPUs and TPUs, that for GPUs, and the hashes themselves, entry by entry."""
    x, rows = jnp.asarray(np.random.default_rng(seed).integers(-99, 99, size), jnp.float32), 3
    found, read = [], []
    for short in (0, 2**31):
        monkeypatch.setattr(count_sketch_file, "SHORT", short)
        found.append(sketch_of(key, x, rows, columns))
        read.append(estimates(key, found[-1], size, lambda rows: rows[0] + 100 * rows[1] - 7 * rows[2]))
    by_entry = add_to_sketch(key, jnp.zeros((rows, columns)), x, jnp.arange(size))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], by_entry)
    np.testing.assert_array_equal(read[0], read[1])
    back = [row.T @ y for row, y in zip(matrix_of(key, rows, columns, size), np.float64(by_entry), strict=True)]
    np.testing.assert_array_equal(read[0], back[0] + 100 * back[1] - 7 * back[2])


def test_sums_saturate_and_tiny_entries_count(key, monkeypatch):
    largest = float(np.finfo(np.float32).max)
    for short in (0, 2**31):
        monkeypatch.setattr(count_sketch_file, "SHORT", short)
        assert np.all(np.isfinite(sketch_of(key, jnp.full(3000, largest), 2, 7)))
        tiny = np.asarray(sketch_of(key, jnp.full(3000, 5e-36), 2, 7))
        assert np.max(np.abs(tiny)) > 5e-36


@pytest.mark.parametrize(("flag", "value"), [("jax_debug_key_reuse", True), ("jax_numpy_rank_promotion", "raise")])
@pytest.mark.parametrize("algorithm", [jc.direct(jc.count_sketch(0.6)), jc.fetch_sgd(k=5, sketch=0.9, rows=1)])
def test_flags_where_rows_are_long(algorithm, flag, value):
    """With as many counters as real models have: rows of the laws are shorter than `SHORT`."""
    before = getattr(jax.config, flag)
    jax.config.update(flag, value)
    try:
        tx = jc.compressed_mean(algorithm, AXIS)
        state, step = vmap_step(tx, jnp.ones(3000), 2)
        step(state, jnp.ones((2, 3000)))
        run_shard_map(tx, jnp.ones(3000), jnp.ones((1, 2, 3000)))
    finally:
        jax.config.update(flag, before)


def test_signs_of_many_rows_are_independent(key):
    bits = np.array([np.asarray(counters(key, row, jnp.arange(20_000), 7)[1]) for row in range(64)])
    likeness = np.corrcoef(bits) - np.eye(64)
    assert np.max(np.abs(likeness)) < 6 / np.sqrt(20_000)


def test_sketch_is_linear_and_its_payload_the_sum(key, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, 500)).astype(np.float32)
    compressor = jc.count_sketch(0.2, rows=4)
    state = compressor.init(key, x)
    s = matrix_of(state.shared.round_key(), 4, 25, 500)
    compress = jax.jit(lambda v: compressor.compress(key, v, state)[0])
    sketch = lambda v: compress(v).values
    np.testing.assert_allclose(sketch(x), (s @ np.float64(x)).reshape(-1), atol=1e-5)
    np.testing.assert_allclose(sketch(x) + sketch(y), sketch(x + y), atol=1e-5)
    x_hat = jax.jit(lambda payload: compressor.decompress(payload, state.shared, x))(compress(x))
    want = np.mean([row.T @ (row @ np.float64(x)) for row in s], axis=0)
    np.testing.assert_allclose(x_hat, want, atol=1e-5)
    assert compressor.spec.omega(500) == 499 / 100


def test_median_of_rows(seed):
    rows = np.random.default_rng(seed).standard_normal((7, 50)).astype(np.float32)
    np.testing.assert_array_equal(median(list(jnp.asarray(rows))), np.median(rows, axis=0))


def test_fetch_sgd_is_its_algorithm(seed):
    n, d, k, rows, rounds = 3, 1500, 20, 5, 4
    grads = np.random.default_rng(seed).standard_t(2, (rounds, n, d)).astype(np.float32)
    tx = jc.compressed_mean(jc.fetch_sgd(k=k, sketch=0.5, rows=rows, momentum=0.8), AXIS)
    state, step = vmap_step(tx, jnp.zeros(d), n)
    s = matrix_of(jax.random.fold_in(jax.random.wrap_key_data(state.shared.algorithm.seed), 0), rows, 150, d)
    u = e = np.zeros((rows, 150))
    for g in grads:
        direction, state = step(state, jnp.asarray(g))
        u = 0.8 * u + s @ np.float64(g.mean(0))
        e = e + u
        found = np.median([row.T @ x for row, x in zip(s, e, strict=True)], axis=0)
        best = np.argsort(-np.abs(found), kind="stable")[:k]
        delta = np.zeros(d)
        delta[best] = found[best]
        e = e - s @ delta
        # Entries of some hundreds are sums in f32 over four rounds: up to eight units of the last place.
        np.testing.assert_allclose(direction, delta, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(state.shared.algorithm.errors[0], e, atol=1e-3)
    assert float(jc.info(state).sent_bytes) == pytest.approx(2 * (n - 1) / n * 4 * rows * 150)
    fewer, step_of_two = vmap_step(tx, jnp.zeros(d), 2)
    fewer = jc.redistribute(state, fewer)  # sketches are equal on all workers, so they stay
    direction, _ = step(state, jnp.asarray(grads[0]))
    again, _ = step_of_two(fewer, jnp.asarray(np.stack([grads[0].mean(0)] * 2)))
    np.testing.assert_allclose(again, direction, atol=1e-5)


def test_fetch_sgd_of_a_tree_under_shard_map(seed):
    tree = {"b": jnp.zeros(7), "w": jnp.zeros((40, 50))}
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal((2, 2, *x.shape)), jnp.float32), tree)
    tx = jc.compressed_mean(jc.fetch_sgd(0.01, momentum=0.0), AXIS)
    directions, _ = run_shard_map(tx, tree, grads)
    np.testing.assert_allclose(directions["b"], np.mean(grads["b"], 1), rtol=1e-6)
    assert np.count_nonzero(directions["w"][0]) == 20


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jc.count_sketch(), "count_sketch: give exactly one of ratio and columns"),
        (lambda: jc.count_sketch(1.5), r"count_sketch: ratio must be in \(0, 1\]; got 1.5"),
        (lambda: jc.count_sketch(columns=0), "count_sketch: columns must be an integer"),
        (lambda: jc.count_sketch(0.1, rows=0), "count_sketch: rows must be an integer in 1"),
        (lambda: jc.fetch_sgd(k=1, rows=4), "fetch_sgd: rows must be an odd integer"),
        (lambda: jc.fetch_sgd(), "fetch_sgd: give exactly one of ratio and k"),
        (lambda: jc.fetch_sgd(k=1, sketch=0.0), "fetch_sgd: sketch must be in"),
        (lambda: jc.fetch_sgd(k=1, momentum=1.0), "fetch_sgd: momentum must be in"),
    ],
)
def test_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()
