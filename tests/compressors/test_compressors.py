"""Each compressor against its float64 definition, and its own corners and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jitted import made_for
from montecarlo import chi_square_bound, monte_carlo, z_bound
from variants import variants

import jaxcomp as jc
from jaxcomp.backend import ONE_PASS
from jaxcomp.base import accumulate, left
from jaxcomp.hashing import as_uniform, halves, random_bits, random_uniform
from jaxcomp.packing import unpack


def vector(seed, d=1000):
    return np.random.default_rng(seed).standard_t(3, d).astype(np.float32)


BY_LARGEST = {
    "terngrad": jc.terngrad(),
    "dithering": jc.dithering(7, norm=np.inf),
    "cast": jc.cast(jnp.float8_e4m3fn, scaled=True),
    **{name: jc.block_scaled(name) for name in ("int8", "int4", "mxfp8", "mxfp4", "nvfp4")},
    "binned": jc.binned(2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", BY_LARGEST)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_nan_hides_no_entry_of_a_long_vector(name, workers, seed, key):
    """Maxima forgot a NaN, and the entries before it, among them the largest."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((workers, 33 * 1024)).astype(np.float32)
    x[:, rng.integers(16, x.shape[1], 200)] = np.nan
    both = jax.jit(jax.vmap(lambda x: _compressed(BY_LARGEST[name], x, key)))
    got, want = both(jnp.asarray(x)), both(jnp.nan_to_num(x, nan=0.0))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@functools.partial(jax.jit, static_argnums=0)
def _compressed(compressor, x, key):
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    state = compressor.init(key, like)
    payload, _ = compressor.compress(key, x, state)
    return payload, compressor.decompress(payload, state.shared, like)


def compressed(compressor, x, key):
    """Payload and decoded vector; the key is the private one and that of the shared state."""
    payload, x_hat = _compressed(compressor, jnp.asarray(x), key)
    return payload, np.asarray(x_hat)


@pytest.mark.sampled
@pytest.mark.parametrize("k", [1, 3, 100, 999, 1000, 5000])
def test_top_k_is_the_oracle(k, key, seed):
    x = vector(seed)
    x[::7] = x[3]  # ties
    np.testing.assert_array_equal(compressed(jc.top_k(k=k), x, key)[1], oracles.top_k(x, k))


def test_top_k_indices_are_sorted_and_ties_go_to_the_lowest_index(key):
    payload, _ = compressed(jc.top_k(k=3), np.array([1, -2, 2, 2, -2, 1], np.float32), key)
    np.testing.assert_array_equal(payload.indices, [1, 2, 3])


@pytest.mark.parametrize(("ratio", "d", "k"), [(0.001, 1000, 1), (0.001, 16777216, 16777), (0.29, 10, 2), (1.0, 7, 7)])
def test_ratio_means_floor_and_at_least_one(ratio, d, k):
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    for compressor in (jc.top_k(ratio), jc.rand_k(ratio)):
        payload = jax.eval_shape(
            lambda x, c=compressor: c.compress(jax.random.key(0), x, c.init(jax.random.key(0), x))[0], like
        )
        assert payload.values.shape == (k,)


@pytest.mark.sampled
@pytest.mark.parametrize(("d", "k"), [(1, 1), (2, 1), (5, 2), (100, 10), (1000, 1000), (4097, 37)])
def test_rand_k_draws_distinct_indices_and_scales(d, k, key, seed):
    x = vector(seed, d)
    payload, x_hat = compressed(jc.rand_k(k=k), x, key)
    chosen = np.flatnonzero(x_hat)
    assert len(chosen) == k == payload.values.size
    np.testing.assert_allclose(x_hat, oracles.rand_k(np.float64(x), chosen), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(("d", "k"), [(6, 2), (7, 3), (30, 4)])
def test_rand_k_draws_all_pairs_equally_often(d, k, key):
    """Chi-square over singles and pairs of chosen indices, false alarm 1e-6 each."""
    draws = 6000
    keys = jax.random.split(key, draws)
    run = jax.jit(jax.vmap(lambda k_: jc.roundtrip(jc.rand_k(k=k), jnp.ones(d), key=k_)[0] != 0))
    hits = np.asarray(run(keys), np.float64)
    singles = hits.sum(0)
    # Inclusions within a draw are negatively correlated, which makes this statistic smaller: safe.
    expected = draws * k / d
    assert np.sum((singles - expected) ** 2 / (expected * (1 - k / d))) < chi_square_bound(d, 1e-6)
    pairs = (hits.T @ hits)[np.triu_indices(d, 1)]
    expected = draws * k * (k - 1) / (d * (d - 1))
    assert np.sum((pairs - expected) ** 2 / expected) < chi_square_bound(len(pairs), 1e-6)


def test_rand_k_changes_from_round_to_round_and_is_the_same_on_all_workers(key):
    compressor = jc.rand_k(k=10)
    x, compress = jnp.arange(1.0, 1001), jax.jit(compressor.compress)
    state = compressor.init(key, x)
    first = compress(jax.random.key(1), x, state)[0]
    other_worker = compress(jax.random.key(2), x, state)[0]
    np.testing.assert_array_equal(first.values, other_worker.values)
    later = compress(jax.random.key(1), x, state._replace(shared=compressor.advance(state.shared)))[0]
    assert not np.array_equal(first.values, later.values)


@pytest.mark.sampled
@pytest.mark.parametrize("probability", [1.0, 0.5, 0.01, 1e-5])
def test_bernoulli_is_the_oracle(probability, key, seed):
    x = vector(seed, 5000)
    p = np.full(5000, probability)
    uniforms = np.asarray(random_bits(key, 5000), np.float64) / 2.0**32
    _, x_hat = compressed(jc.bernoulli(probability), x, key)
    np.testing.assert_allclose(x_hat, oracles.bernoulli(x, p, uniforms), rtol=1e-4)


def test_bernoulli_divides_by_the_probability_it_really_uses():
    _, chance = jc.bernoulli(1e-9).init(jax.random.key(0), jnp.zeros(3)).shared
    assert float(chance) == 4 / 2**32  # 1e-9 * 2^32 = 4.29


def test_bernoulli_counts_overflow_and_stays_within_capacity(key):
    compressor = jc.bernoulli(np.linspace(1e-3, 2e-3, 1000))
    x = jnp.ones(1000)
    state = compressor.init(key, x)
    # A rigged state in which every entry is drawn.
    rigged = state._replace(shared=state.shared._replace(limit=jnp.full(1000, 2**32 - 1, jnp.uint32)))
    payload, local = jax.jit(compressor.compress)(key, x, rigged)
    capacity = payload.values.size
    assert capacity < 40
    assert int(left(compressor, local).overflow) == 1000 - capacity
    np.testing.assert_array_equal(payload.indices, np.arange(capacity))


CASES = [
    ({"levels": 1, "blocks": 1}, {}),
    ({"levels": 7}, {"block_size": 512}),
    ({"levels": 127, "norm": "inf", "blocks": 1}, {"order": np.inf}),
    ({"levels": 4, "blocks": 3}, {"blocks": 3}),
    ({"levels": 4, "blocks": 2000}, {"blocks": 2000}),
    ({"levels": 4, "block_size": 128}, {"block_size": 128}),
    ({"levels": 4, "block_size": 5000}, {"block_size": 5000}),
    ({"steps": 0.3, "blocks": 1}, {}),
    ({"steps": 0.3}, {"block_size": 512}),
    ({"steps": np.geomspace(0.01, 2, 1000)}, {}),
    ({"steps": [0.1, 0.5, 0.2], "blocks": 3, "norm": "inf"}, {"blocks": 3, "order": np.inf}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("arguments", "how"), CASES, ids=[f"case{i}" for i in range(len(CASES))])
def test_dithering_is_the_oracle(arguments, how, key, seed):
    x = vector(seed)
    steps = arguments.get("steps", 1 / arguments.get("levels", 1))
    if np.ndim(steps) and len(steps) == 3:
        edges = oracles.block_edges(1000, blocks=3)
        steps = np.repeat(steps, np.diff(edges))
    uniforms = np.asarray(random_uniform(key, 1000), np.float64)
    want = oracles.dithering(x, steps, uniforms, **how)
    payload, got = compressed(jc.dithering(**arguments), x, key)
    # What a level is worth is rounded up to 25 - w bits, which may move an entry that sits on an
    # edge by one level.
    width = payload.words.shape[0]
    rounding = 2.0 ** (width - 24) + 1e-6
    wrong = np.abs(got - want) > rounding * np.abs(want)
    assert wrong.mean() < 0.005
    unit = np.linalg.norm(x, how.get("order", 2)) * np.broadcast_to(steps, x.shape)
    assert np.all(np.abs(got - want) <= (1 + rounding) * unit * wrong + rounding * np.abs(want))
    assert payload.norms.size == len(oracles.block_edges(1000, how.get("blocks"), how.get("block_size"))) - 1


LONG_CASES = [
    ({"levels": 1, "block_size": 32}, {"block_size": 32}),
    ({"levels": 7}, {"block_size": 512}),
    ({"levels": 7, "norm": "inf", "block_size": 1024}, {"order": np.inf, "block_size": 1024}),
    ({"levels": 127, "blocks": 1}, {}),
    ({"levels": 7, "block_size": 96}, {"block_size": 96}),
    ({"levels": 7, "block_size": 100}, {"block_size": 100}),  # words that two blocks share: the other way
    ({"steps": np.geomspace(0.01, 0.9, 3072)}, {}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("arguments", "how"), LONG_CASES, ids=[f"case{i}" for i in range(len(LONG_CASES))])
def test_dithering_in_the_order_of_words_is_the_oracle(arguments, how, key, seed):
    """Entries whose number is a multiple of 1024, and some that are not finite or huge."""
    x = vector(seed, 3072)
    x[:3] = np.nan, np.inf, -np.inf
    given = np.where(np.isfinite(x), x, 0)
    compressor = jc.dithering(**arguments)
    payload, got = compressed(compressor, x, key)
    count, width = 32 // payload.words.shape[0], payload.words.shape[0]
    in_words = 32 % width == 0 and how.get("block_size", 32) % 32 == 0
    if in_words:
        slices = np.stack(halves(key, (3072 // 1024, width, 32), count), 2)
        uniforms = np.asarray(as_uniform(slices.reshape(-1)), np.float64)
    else:
        uniforms = np.asarray(random_uniform(key, 3072), np.float64)
    steps = arguments.get("steps", 1 / arguments.get("levels", 1))
    want = oracles.dithering(given, steps, uniforms, **how)
    rounding = 2.0 ** (width - 24) + 1e-6
    assert np.mean(np.abs(got - want) > rounding * np.abs(want)) < 0.005
    _, huge = compressed(compressor, np.float32(1e38) * np.sign(given), key)
    assert np.all(np.isfinite(huge))
    assert np.any(huge)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments", [{"levels": 7}, {"levels": 100, "blocks": 1}, {"levels": 1, "norm": "inf"}], ids=str
)
def test_dithering_is_decoded_in_the_order_of_words_as_entry_by_entry(arguments, key, seed):
    """Levels times units, bit for bit: of one message, of rows under vmap, and of sums with and without weights."""
    size, workers, options = 3072, ONE_PASS + 3, dict(arguments)
    levels = options.pop("levels")
    compressor, like = jc.dithering(levels, **options), jax.ShapeDtypeStruct((size,), jnp.float32)
    x = np.random.default_rng(seed).standard_t(3, (workers, size)).astype(np.float32)
    x[0, :600] = 0
    compress = jax.vmap(lambda key, x: compressor.compress(key, x, compressor.init(key, like))[0])
    payloads = jax.jit(compress)(jax.random.split(key, workers), jnp.asarray(x))
    codes = np.stack([np.asarray(unpack(words, size)) for words in payloads.words]).astype(np.int64)
    signed = np.where(codes % 2, (codes + 1) // 2, -codes // 2)
    spare = np.uint32((1 << ((2 * levels).bit_length() - 1)) - 1)
    raw = np.asarray(payloads.norms) * np.float32(1 / levels)
    units = ((raw.view(np.uint32) + spare) & ~spare).view(np.float32)
    want = signed.astype(np.float32) * np.repeat(units, size // units.shape[1], axis=1)

    decode = lambda payload: compressor.decompress(payload, (), like)
    np.testing.assert_array_equal(jax.jit(decode)(jax.tree.map(lambda a: a[0], payloads)), want[0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(decode))(payloads), want)
    start = np.random.default_rng([seed, 1]).standard_normal(size).astype(np.float32)
    for count in (1, 2, ONE_PASS, workers):
        some = jax.tree.map(lambda a: a[:count], payloads)  # noqa: B023
        for total in (like, start):
            begun = jnp.asarray(total) if total is start else total
            added = jax.jit(lambda p, t=begun: accumulate(compressor, t, p, None, ()))(some)
            expected = np.zeros(size, np.float32) if total is like else total
            for row in want[:count]:
                expected = expected + row
            np.testing.assert_array_equal(added, expected)
        weights = np.linspace(0.5, 1.5, count, dtype=np.float32)
        added = jax.jit(lambda p, w: accumulate(compressor, like, p, w, ()))(some, weights)
        exact = np.float64(weights) @ np.float64(want[:count])
        bound = 2 * count * 2.0**-24 * (np.abs(weights) @ np.abs(np.float64(want[:count])))
        assert np.all(np.abs(np.asarray(added) - exact) <= bound)


def test_dithering_in_the_order_of_words_is_unbiased(key, seed):
    x = jnp.asarray(vector(seed, 1024))
    run = jax.jit(jax.vmap(lambda k: jc.roundtrip(jc.dithering(3, block_size=128), x, key=k)[0]))
    mean, error = monte_carlo(run, key, 4096)
    z = np.abs(mean - np.asarray(x, np.float64)) / np.maximum(error, 1e-12)
    assert z.max() < z_bound(1e-6, x.size)


@pytest.mark.sampled
@pytest.mark.parametrize(("levels", "width"), [(1, 2), (2, 3), (3, 3), (7, 4), (8, 5), (127, 8), (2**15, 17)])
def test_dithering_packs_levels_to_the_bits_they_need(levels, width, key):
    payload, _ = compressed(jc.dithering(levels), np.ones(64, np.float32), key)
    assert payload.words.shape == (width, 2)
    assert jc.code_bits(payload) == 32 + 64 * width


def test_dithering_variance_is_the_formula(key, seed):
    """Mean squared error over draws against sum h^2 |x|^2 r (1 - r), within 5 standard errors."""
    x = vector(seed, 200)
    run = jax.jit(jax.vmap(lambda k: jnp.sum(jnp.square(jc.roundtrip(jc.dithering(5), x, key=k)[0] - x))))
    errors = np.asarray(run(jax.random.split(key, 4000)), np.float64)
    want = oracles.dithering_variance(np.float64(x), 1 / 5)
    assert abs(errors.mean() - want) < 5 * errors.std() / np.sqrt(len(errors))


@pytest.mark.sampled
@pytest.mark.parametrize("norm", [2, "inf"])
@pytest.mark.parametrize("scale", [1e-34, 1e-30, 1.0, 1e30, 3e37])
def test_dithering_is_scale_free(scale, norm, key, seed):
    x = vector(seed)
    x, compressor = x / np.abs(x).max(), jc.dithering(7, norm=norm)
    _, one = compressed(compressor, x, key)
    _, other = compressed(compressor, np.float32(scale) * x, key)
    close = np.isclose(other / scale, one, rtol=1e-4, atol=1e-6)
    assert (~close).sum() <= 2


def test_natural_rounds_to_a_neighbouring_power_of_two(key, seed):
    x = np.concatenate([vector(seed), [0.0, 1.0, -2.0, 2.0**-126, -(2.0**126), 3.0]]).astype(np.float32)
    payload, x_hat = compressed(jc.natural(), x, key)
    assert payload.words.shape[0] == 9
    for value, got in zip(x, x_hat, strict=True):
        low, high, chance = oracles.natural_choices(float(value))
        assert got in (low, high)
        if chance == 0:
            assert got == value


def test_natural_saturates_and_flushes(key):
    x = np.array([3e38, -3e38, 1e-39, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(compressed(jc.natural(), x, key)[1], [2.0**127, -(2.0**127), 0, 0, 0])


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_cast_rounds_to_nearest(name, scale, key, seed):
    x = np.float32(scale) * vector(seed)
    payload, x_hat = compressed(jc.cast(name), x, key)
    scale = np.float64(payload.scale) if hasattr(payload, "scale") else np.ones(2)
    factor = np.repeat(scale, 512)[: x.size]
    np.testing.assert_array_equal(np.log2(factor), np.rint(np.log2(factor)))
    # ml_dtypes, in which the oracle rounds, is NumPy's own implementation of these types.
    want = (np.float64(x) / factor).astype(jnp.dtype(name)).astype(np.float64) * factor
    np.testing.assert_allclose(x_hat, want, rtol=1e-6)


@pytest.mark.parametrize("blocks", [None, 1])
@pytest.mark.parametrize("magnitude", [9e37, 3.4e38, 1 / 3, 1e-37])
def test_terngrad_sends_every_entry_of_the_largest_magnitude(magnitude, blocks, key):
    x = np.where(np.arange(5000) % 3 == 0, -magnitude, magnitude).astype(np.float32)
    np.testing.assert_array_equal(compressed(jc.terngrad(blocks=blocks), x, key)[1], x)


def test_unscaled_f16_saturates(key):
    _, x_hat = compressed(jc.cast("float16", scaled=False), np.array([1e6, -1e6, 1.0], np.float32), key)
    np.testing.assert_array_equal(x_hat, [65504, -65504, 1])


BAD = [
    (lambda: jc.top_k(), "give exactly one of ratio and k"),
    (lambda: jc.top_k(0.1, peak=0.2), "peak is for a ratio that follows a schedule"),
    (lambda: jc.top_k(lambda count: 0.1, k=3), "give exactly one of ratio and k; got a schedule and k=3"),
    (lambda: jc.top_k(lambda count: 2.0), r"ratio must be in \(0, 1\]; got 2"),
    (lambda: jc.rand_k(lambda count: 0.1), "a schedule needs least="),
    (
        lambda: jc.rand_k(lambda count: 0.1, least=0.2),
        r"least must be in \(0, 0.1\], the peak of the schedule; got 0.2",
    ),
    (lambda: jc.rand_k(0.1, least=0.1), "least is for a ratio that follows a schedule"),
    (lambda: jc.cast("float16", block_size=0), "cast: block_size must be an integer of at least 1; got 0"),
    (lambda: jc.contrib.hard_threshold(1.0, room=0), r"hard_threshold: room must be in \(0, 1\]; got 0"),
    (lambda: jc.top_k(float("nan")), r"ratio must be in \(0, 1\]; got nan"),
    (lambda: jc.rand_k(k=0), "k must be an integer of at least 1; got 0"),
    (lambda: jc.rand_k(k=2.5), "k must be an integer of at least 1; got 2.5"),
    (lambda: jc.bernoulli(0.0), r"probabilities must be in \(0, 1\]"),
    (lambda: jc.bernoulli([0.5, float("nan")]), r"probabilities must be in \(0, 1\]"),
    (lambda: jc.dithering(), "give exactly one of levels and steps"),
    (lambda: jc.dithering(0), "levels must be an integer in 1"),
    (lambda: jc.dithering(3, norm=1), 'norm must be 2 or "inf"; got 1'),
    (lambda: jc.dithering(3, blocks=0), "blocks must be an integer of at least 1"),
    (lambda: jc.dithering(3, blocks=2, block_size=2), "at most one of blocks and block_size"),
    (lambda: jc.dithering(steps=-0.5), "steps must be finite and at least"),
    (lambda: jc.dithering(steps=[]), "steps must be finite and at least"),
    (lambda: jc.cast("int8"), "dtype must be bfloat16, float16 or a float8 type; got int8"),
    (lambda: jc.cast("nonsense"), "dtype must be bfloat16, float16 or a float8 type; got nonsense"),
    (lambda: jc.contract(jc.top_k(0.1)), "contract needs an unbiased compressor"),
    (lambda: jc.compose(jc.dithering(3), jc.natural()).init(jax.random.key(0), jnp.zeros(4)), "no array of values"),
    (lambda: jc.compose(jc.per_leaf(jc.top_k(0.1)), jc.natural()), "compressors of one array"),
    (lambda: jc.per_leaf(jc.flat(jc.top_k(0.1))), "acts on trees already"),
    (lambda: jc.per_leaf(jc.top_k(0.1), dense_below=-1), "dense_below must be"),
    (lambda: jc.flat(jc.per_leaf(jc.top_k(0.1))), "acts on trees already"),
    (lambda: jc.roundtrip(jc.top_k(0.1), {"a": jnp.ones(3)}, key=jax.random.key(0)), "acts on one array; got a dict"),
    (
        lambda: jc.roundtrip(jc.top_k(0.1), jnp.arange(3), key=jax.random.key(0)),
        "only real floating point is compressed",
    ),
    (lambda: jc.roundtrip(jc.bernoulli([0.1, 0.2]), jnp.ones(3), key=jax.random.key(0)), "2 probabilities for an"),
    (lambda: jc.roundtrip(jc.dithering(steps=[0.1, 0.2]), jnp.ones(3), key=jax.random.key(0)), "2 steps for an array"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_compose_takes_the_bounds_at_the_number_of_values():
    omega = jc.dithering(7).spec.omega
    composed = jc.compose(jc.rand_k(0.2), jc.dithering(7)).spec.omega
    assert composed(300) == pytest.approx(5 * (1 + omega(60)) - 1)
    alpha = jc.compose(jc.top_k(0.2), jc.dithering(7)).spec.alpha
    assert alpha(300) == pytest.approx(0.2 * (1 - omega(60)))


def test_natural_is_worst_where_its_omega_says(key):
    """x = 4/3 of a power of two: the variance is exactly omega |x|^2, within five standard errors."""
    x = jnp.full(2000, 4 / 3)
    run = jax.jit(jax.vmap(lambda k: jnp.sum(jnp.square(jc.roundtrip(jc.natural(), x, key=k)[0] - x))))
    errors = np.asarray(run(jax.random.split(key, 500)), np.float64) / float(jnp.sum(x * x))
    assert abs(errors.mean() - 1 / 8) < 5 * errors.std() / np.sqrt(500)


def test_codes_of_dithering_are_zigzag_levels(key):
    payload, _ = compressed(jc.dithering(1, norm=np.inf), np.array([1, -1, 0], np.float32), key)
    np.testing.assert_array_equal(unpack(payload.words, 3), [1, 2, 0])


# ------------------------------------------------------------------------------------------------
# Sums of decoded messages


def messages_of(compressor, workers, size, key):
    x = jax.random.normal(key, (workers, size))
    compress = lambda key, x: compressor.compress(key, x, compressor.init(jax.random.key(0), x))[0]
    return jax.jit(jax.vmap(compress))(jax.random.split(key, workers), x)


@pytest.mark.parametrize("workers", variants([1, 2, ONE_PASS + 1], {2}))
def test_the_sum_of_messages_is_that_of_one_after_the_other(workers, key):
    compressor, zeros = jc.dithering(7, block_size=64), jnp.zeros(1000)
    payloads = messages_of(compressor, workers, 1000, key)
    want = zeros
    decode = jax.jit(lambda payload: compressor.decompress(payload, None, zeros))
    for i in range(workers):
        want = want + decode(jax.tree.map(lambda a: a[i], payloads))  # noqa: B023
    add = lambda payloads: accumulate(compressor, zeros, payloads, None, None)
    np.testing.assert_array_equal(jax.jit(add)(payloads), want)
    mapped = jax.jit(jax.vmap(add))(jax.tree.map(lambda a: a[None], payloads))
    np.testing.assert_array_equal(mapped[0], want)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [lambda: jc.dithering(7), lambda: jc.rotate(jc.block_scaled("int4"))])
def test_many_messages_of_nothing_add_nothing(make, key):
    compressor, like = make(), jax.ShapeDtypeStruct((0,), jnp.float32)
    payloads = messages_of(compressor, ONE_PASS + 2, 0, key)
    add = jax.jit(lambda payloads: accumulate(compressor, like, payloads, None, compressor.init(key, like).shared))
    assert add(payloads).shape == (0,)


def test_messages_are_decoded_once_however_many_use_their_sum(key):
    compressor, zeros = jc.dithering(7), jnp.zeros(1000)
    payloads = messages_of(compressor, 4, 1000, key)

    def shifts(*users):
        def program(payloads):
            total = accumulate(compressor, zeros, payloads, None, None)
            return [use(total) for use in users]

        return jax.jit(program).lower(payloads).compile().as_text().count("shift-right-logical(")

    assert shifts(jnp.sin) == shifts(jnp.sin, jnp.cos, jnp.exp) > 0


def test_a_gpu_finds_the_same_scales_of_signs(seed):
    """There of two sums at once, of entries made smaller and larger; elsewhere again, where a sum overflows."""
    rows = np.random.default_rng(seed).normal(size=(12, 100)).astype(np.float32)
    rows[:6] *= np.asarray([1e-33, 1e-28, 1e-20, 1e20, 5e37, 1e38], np.float32)[:, None]
    rows[6, 3], rows[7, 3], rows[8], rows[9], rows[10] = np.nan, -np.inf, 0, np.nan, -3e38
    scales = lambda x: jc.sign(block_size=100).compress(jax.random.key(0), x.reshape(-1), jc.State())[0].norms
    sent = np.where(np.isfinite(rows), np.abs(rows), 0).astype(np.float64)
    for name in ("cpu", "gpu", "tpu"):
        np.testing.assert_allclose(made_for(name, scales, jnp.asarray(rows)), sent.mean(axis=1), rtol=1e-6)
