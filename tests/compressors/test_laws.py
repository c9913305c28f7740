"""Every row of `laws.ROWS` meets every law (`make test` tries a sample of the pairs)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FACTORIES, ROWS, WORKERS, D
from montecarlo import monte_carlo, z_bound
from variants import BETWEEN_WORKERS, variants

import jaxcomp as jc
from jaxcomp.base import State, accumulate, advance, for_worker, residual


def rows_with(condition, kept=None):
    """Rows for which the condition holds; of these all but those named in `kept`, if given, are slow variants."""
    marks = lambda row: () if kept is None or row.name in kept else pytest.mark.slow
    rows = [pytest.param(row, marks=marks(row), id=row.name) for row in ROWS if condition(row)]
    return pytest.mark.parametrize("row", rows)


each_row = rows_with(lambda row: True)
unbiased_row = rows_with(lambda row: row.compressor.spec.omega is not None)
contracting_row = rows_with(lambda row: row.compressor.spec.alpha is not None)
linear_row = rows_with(lambda row: row.compressor.spec.linear)
advancing_row = rows_with(lambda row: row.compressor.advance is not None)
any_length_row = rows_with(lambda row: not row.fixed_length)


def vector(seed, d=D, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.standard_t(3, d), jnp.float32)


def same(a, b):
    """Equal trees, bit for bit (so NaN equals NaN and 0 differs from -0)."""
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(np.atleast_1d(x).view(np.uint8), np.atleast_1d(y).view(np.uint8))
        for x, y in zip(map(np.asarray, leaves_a), map(np.asarray, leaves_b), strict=True)
    )


@functools.cache
def draws_of(row):
    """(keys, x) -> C(x) for each key."""
    return jax.jit(jax.vmap(lambda key, x: jc.roundtrip(row.compressor, x, key=key)[0], in_axes=(0, None)))


@functools.cache
def norms_of(row):
    """x [n, d] -> |x|^2 of each, in the norm in which the row's omega holds."""
    if row.compressor.spec.norm is None:
        return lambda x: np.sum(np.square(x), axis=1)

    def norm(x):
        state = row.compressor.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))
        return row.compressor.spec.norm(x, for_worker(row.compressor, state.shared, 0))

    run = jax.jit(jax.vmap(norm))
    return lambda x: run(jnp.asarray(x, jnp.float32))


def squared_error(row, x, key, num_draws):
    """Mean and standard error of |C(x) - x|^2, and |x|^2, all over max|x|^2."""
    exact = np.float64(x)
    largest = np.abs(exact).max()
    error = lambda x_hats: norms_of(row)((np.float64(x_hats) - exact) / largest)
    if row.deterministic:
        mean, spread = error(roundtrip_of(row)(x, key)[0][None])[0], 0.0
    else:
        mean, spread = monte_carlo(lambda keys: error(draws_of(row)(keys, x)), key, num_draws)
    return mean, spread, float(norms_of(row)(exact[None] / largest)[0])


@functools.cache
def one_round_of(row):
    """State, payload, decoded vector and residual, by the functions that make a compressor and with the keys of
    `jc.roundtrip`; jitted once for each row, so that tests share it."""

    def run(x, key):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        shared_key, private_key = jax.random.split(key)
        state = row.compressor.init(shared_key, like)
        state = State(state.local, for_worker(row.compressor, state.shared, 0))
        payload, local = row.compressor.compress(private_key, x, state)
        x_hat = row.compressor.decompress(payload, state.shared, like)
        return State(local, state.shared), payload, x_hat, residual(row.compressor, x, payload, state.shared)

    return jax.jit(run)


def roundtrip_of(row):
    """(x, key) -> x_hat, payload."""

    def run(x, key):
        _, payload, x_hat, _ = one_round_of(row)(x, key)
        return x_hat, payload

    return run


def test_every_factory_has_a_quick_row():
    lifts = {"per_leaf", "flat"}  # rows of their own in test_tree.py
    others = {"warm_up", "refresh", "roundtrip", "set_amounts", "momentum_correction"}
    public = {name: getattr(module, name) for module in (jc, jc.contrib) for name in module.__all__}
    made = {
        name
        for name, value in public.items()
        if callable(value) and getattr(value, "__module__", "").startswith(("jaxcomp.compressors", "jaxcomp.contrib"))
    }
    assert made - lifts - others == set(FACTORIES)
    for name in FACTORIES:
        assert any(row.name.startswith(name) and not row.slow for row in ROWS), name


@pytest.mark.sampled
@each_row
@pytest.mark.parametrize("shape", [(D,), (D // 10, 10), (D // 4, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shape_and_dtype_kept(row, shape, dtype, key, seed):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    x_hat, _ = jax.eval_shape(lambda x, key: jc.roundtrip(row.compressor, x, key=key), x, key)
    assert x_hat.shape == shape
    assert x_hat.dtype == x.dtype


@pytest.mark.slow
@rows_with(lambda row: not row.name.startswith("dct"))  # transforms the last two axes
def test_shape_of_the_array_plays_no_part(row, key, seed):
    x = vector(seed)
    matrix = jax.jit(lambda x, key: jc.roundtrip(row.compressor, x, key=key)[0])(x.reshape(D // 10, 5, 2), key)
    np.testing.assert_allclose(matrix.reshape(-1), roundtrip_of(row)(x, key)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.sampled
@rows_with(
    lambda row: True, kept={"cast-bf16", "rand_k-ratio", "dithering-7", "natural", "sidco", "compose-top_k-bf16"}
)
def test_jit_changes_nothing(row, key, seed):
    x = vector(seed)
    plain = jc.roundtrip(row.compressor, x, key=key)
    jitted = roundtrip_of(row)(x, key)
    # Fusion may round a norm differently in the last place; what is copied or packed may not differ.
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=3e-7, atol=1e-7)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.sampled
@rows_with(lambda row: True, kept=BETWEEN_WORKERS)
def test_vmap_equals_loop(row, key, seed):
    xs = jnp.stack([vector(seed + i) for i in range(3)])
    keys = jax.random.split(key, 3)
    mapped = jax.jit(jax.vmap(lambda x, key: jc.roundtrip(row.compressor, x, key=key)[0]))(xs, keys)
    looped = np.stack([roundtrip_of(row)(x, k)[0] for x, k in zip(xs, keys, strict=True)])
    # Products with a matrix are added in another order when mapped.
    atol = 4 * 2.0**-23 if "rotate" in row.compressor.spec.name else 1e-7  # sums of entries of order one
    precise = {"rtol": 1e-6, "atol": atol} if row.compressor.spec.norm is None else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(mapped, looped, **precise)


@pytest.mark.sampled
@each_row
def test_deterministic_rows_ignore_the_key(row, key, seed):
    x = vector(seed)
    a, _ = roundtrip_of(row)(x, key)
    b, _ = roundtrip_of(row)(x, jax.random.fold_in(key, 1))
    again, _ = roundtrip_of(row)(x, key)
    assert same(a, again)
    assert same(a, b) == row.deterministic


@pytest.mark.sampled
@unbiased_row
def test_unbiased(row, key, seed):
    x = vector(seed)
    mean, standard_error = monte_carlo(lambda keys: draws_of(row)(keys, x), key, num_draws=4096)
    z = np.abs(mean - np.asarray(x, np.float64)) / np.maximum(standard_error, 1e-6 * np.abs(x).max())
    assert z.max() < z_bound(false_alarm=1e-6, num_tests=x.size)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["student", "sparse", "flat", "tiny", "huge"])
@unbiased_row
def test_omega_bounds_the_variance(row, kind, key, seed):
    rng = np.random.default_rng(seed)
    x = {
        "student": rng.standard_t(3, D),
        "sparse": np.where(rng.random(D) < 0.05, rng.standard_normal(D), 0),
        "flat": np.ones(D),
        "tiny": 1e-30 * rng.standard_normal(D),
        "huge": 1e30 * rng.standard_normal(D),
    }[kind]
    x = jnp.asarray(x, jnp.float32)
    mean, standard_error, norm = squared_error(row, x, key, num_draws=1024)
    omega = row.compressor.spec.omega(D)
    bound = omega * norm * (1 + 1e-6) + 1e-12 * norm  # float32 rounds the error itself
    assert mean <= bound + z_bound(false_alarm=1e-6, num_tests=1) * standard_error


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["student", "sparse", "flat", "one", "tiny", "huge"])
@contracting_row
def test_alpha_bounds_the_error(row, kind, key, seed):
    rng = np.random.default_rng(seed)
    x = {
        "student": rng.standard_t(3, D),
        "sparse": np.where(rng.random(D) < 0.05, rng.standard_normal(D), 0),
        "flat": np.full(D, -2.0),
        "one": np.eye(1, D, 17)[0],
        "tiny": 1e-30 * rng.standard_normal(D),
        "huge": 1e30 * rng.standard_normal(D),
    }[kind]
    x = jnp.asarray(x, jnp.float32)
    mean, standard_error, norm = squared_error(row, x, key, num_draws=1024)
    alpha = row.compressor.spec.alpha(D)
    assert 0 < alpha <= 1
    assert mean <= (1 - alpha) * norm * (1 + 1e-6) + z_bound(false_alarm=1e-6, num_tests=1) * standard_error


@pytest.mark.sampled
@each_row
def test_sent_plus_residual_is_x(row, key, seed):
    x = vector(seed)
    _, _, x_hat, rest = one_round_of(row)(x, key)
    if row.exact:
        assert same(x_hat + rest, x)
        np.testing.assert_array_equal((np.asarray(x_hat) != 0) & (np.asarray(rest) != 0), False)
    np.testing.assert_allclose(np.float64(x_hat) + np.float64(rest), np.float64(x), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled
@each_row
def test_zero_vector_stays_zero(row, key):
    x_hat, payload = roundtrip_of(row)(jnp.zeros(D), key)
    np.testing.assert_array_equal(x_hat, 0)
    for leaf in jax.tree.leaves(payload):
        assert np.isfinite(np.float64(leaf)).all()


@each_row
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_entries_count_as_zero(row, bad, key, seed):
    x = np.array(vector(seed))
    x[[0, 5, D - 1]] = bad
    clean = np.where(np.isfinite(x), x, 0).astype(np.float32)
    got = roundtrip_of(row)(jnp.asarray(x), key)[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, roundtrip_of(row)(jnp.asarray(clean), key)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.sampled
@any_length_row
@pytest.mark.parametrize("d", variants([0, 1, 2, 3, 31, 33], {0, 1, 33}))
def test_tiny_arrays(row, d, key):
    x = jnp.arange(1.0, d + 1)
    x_hat, payload = roundtrip_of(row)(x, key)
    assert x_hat.shape == (d,)
    assert np.isfinite(x_hat).all()
    assert jc.lane_bytes(payload) <= 4 * d + 256


@pytest.mark.sampled
@any_length_row
def test_scalar_leaf(row, key):
    x_hat, _ = roundtrip_of(row)(jnp.array(3.0), key)
    assert x_hat.shape == ()
    assert np.isfinite(x_hat)


@pytest.mark.sampled
@each_row
def test_accumulate_is_weighted_sum_of_decompress(row, key, seed):
    like = jax.ShapeDtypeStruct((D,), jnp.float32)

    @jax.jit
    def run(xs, keys, weights, total):
        state = row.compressor.init(key, like)

        def one(x, k, worker):
            mine = for_worker(row.compressor, state.shared, worker, WORKERS)
            payload, _ = row.compressor.compress(k, x, State(state.local, mine))
            return payload, row.compressor.decompress(payload, mine, like)

        stacked, decoded = jax.vmap(one)(xs, keys, jnp.arange(WORKERS))
        return (
            accumulate(row.compressor, total, stacked, weights, state.shared),
            accumulate(row.compressor, total, stacked, None, state.shared),
            accumulate(row.compressor, like, stacked, None, state.shared),
            accumulate(row.compressor, jnp.zeros_like(total), stacked, None, state.shared),
            decoded,
        )

    weights, total = np.array([0.5, -1.0, 2.0, 0.25]), vector(seed + 9)
    xs, keys = jnp.stack([vector(seed + i) for i in range(WORKERS)]), jax.random.split(key, WORKERS)
    got, plain, from_shape, from_zeros, decoded = run(xs, keys, jnp.asarray(weights, jnp.float32), total)
    np.testing.assert_allclose(got, np.float64(total) + weights @ np.float64(decoded), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain, np.float64(total) + np.sum(np.float64(decoded), 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(from_shape, from_zeros)


@pytest.mark.sampled
@rows_with(lambda row: True, kept=BETWEEN_WORKERS)
def test_what_was_decoded_from_bytes_decompresses(row, key, seed):
    """Outside jit, on arrays of NumPy, with the shared state of the receiver."""
    state, payload, x_hat, _ = one_round_of(row)(vector(seed), key)
    decoded = jc.wire.decode(jc.wire.encode(payload))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(decoded))
    got = row.compressor.decompress(decoded, state.shared, jax.ShapeDtypeStruct((D,), jnp.float32))
    np.testing.assert_allclose(got, x_hat, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled
@linear_row
def test_linear_payloads_may_be_added(row, key, seed):
    like = jax.ShapeDtypeStruct((D,), jnp.float32)

    @jax.jit
    def run(xs):
        state = row.compressor.init(key, like)
        decompress = lambda payload: row.compressor.decompress(payload, state.shared, like)
        payloads = jax.vmap(lambda x: row.compressor.compress(key, x, state)[0])(xs)
        one, two = (jax.tree.map(lambda a: a[i], payloads) for i in range(2))  # noqa: B023
        return one, jax.vmap(decompress)(payloads), decompress(jax.tree.map(jnp.add, one, two))

    one, parts, summed = run(jnp.stack([vector(seed), vector(seed + 1)]))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(one))
    largest = max(1.0, float(np.max(np.abs(parts))))  # of what is rounded: entries may be differences of such numbers
    np.testing.assert_allclose(summed, parts[0] + parts[1], rtol=4 * eps, atol=4 * eps * largest)


@each_row
def test_no_retrace_from_round_to_round(row, key):
    """All that jit compares, structure, shapes, dtypes and weak types, is the same after a round as before it."""
    like = jax.ShapeDtypeStruct((D,), jnp.float32)

    def first(key):
        state = row.compressor.init(key, like)
        return State(state.local, for_worker(row.compressor, state.shared, 1))

    def step(x, state, key):
        payload, local = row.compressor.compress(key, x, state)
        row.compressor.decompress(payload, state.shared, like)
        return State(local, advance(row.compressor, state.shared))

    state = jax.eval_shape(first, key)
    later = jax.eval_shape(step, like, state, key)
    described = lambda state: jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), state)
    assert described(later) == described(state)


@pytest.mark.sampled
@advancing_row
def test_new_round_draws_new_shared_randomness(row, key, seed):
    x = vector(seed)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = row.compressor.init(key, like)
    later = State(state.local, advance(row.compressor, state.shared))
    sent = lambda state: row.compressor.decompress(row.compressor.compress(key, x, state)[0], state.shared, like)
    sent = jax.jit(sent)
    assert not same(sent(state), sent(later))


@pytest.mark.sampled
@each_row
def test_payload_holds_only_arrays_and_lane_bytes_follow_from_shapes(row, key, seed):
    x = vector(seed)
    _, payload = roundtrip_of(row)(x, key)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(payload))
    shapes = jax.eval_shape(lambda x, k: jc.roundtrip(row.compressor, x, key=k)[1], x, key)
    assert jc.lane_bytes(payload) == jc.lane_bytes(shapes) == sum(a.nbytes for a in jax.tree.leaves(payload))


@pytest.mark.sampled
@each_row
def test_no_array_of_the_state_is_empty(row, key):
    """Orbax does not save empty arrays."""
    state = row.compressor.init(key, jax.ShapeDtypeStruct((D,), jnp.float32))
    assert all(np.size(leaf) for leaf in jax.tree.leaves(state))


@rows_with(lambda row: True, kept=BETWEEN_WORKERS)
def test_double_precision(row, key, seed):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(seed).standard_normal(D))
        run = jax.jit(lambda x, key: jc.roundtrip(row.compressor, x, key=key)[0])
        assert jax.eval_shape(run, x, key).dtype == jnp.float64
        if row.exact:
            x_hat = run(x, key)
            assert x_hat.dtype == jnp.float64
            kept = np.asarray(x_hat) != 0
            assert kept.any()
            np.testing.assert_array_equal(np.asarray(x_hat)[kept], np.asarray(x)[kept])
