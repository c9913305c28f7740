"""Every row of `laws.ROWS` meets every law (`make test` tries a sample of the pairs)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FACTORIES, ROWS, WORKERS, D
from variants import BETWEEN_WORKERS

import jaxcomp as jc
from jaxcomp.testing import LAWS, LawBroken, Subject


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
TINY, ALSO_TINY = [(), (0,), (1,), (33,)], [(2,), (3,), (31,)]


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
def _subject_of(row):
    return Subject(row.compressor, D, WORKERS, exact=row.exact, any_length=not row.fixed_length)


def broken(law, row, seed, *options):
    """The sentence with which a law of `jc.testing` does not hold for a row, jitted once for all tests; else None."""
    try:
        return LAWS[law](_subject_of(row).at(seed), *options)
    except LawBroken as error:
        return str(error)


def roundtrip_of(row):
    """(x, key) -> x_hat, payload."""

    def run(x, key):
        _, payload, x_hat, _ = _subject_of(row).one_round(x, key)
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
def test_shape_and_dtype_kept(row, seed):
    assert broken("shapes", row, seed, ["float32", "bfloat16"]) is None


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
def test_jit_changes_nothing(row, seed):
    assert broken("jit", row, seed) is None


@pytest.mark.sampled
@rows_with(lambda row: True, kept=BETWEEN_WORKERS)
def test_vmap_equals_loop(row, seed):
    sums = 4 * 2.0**-23 if "rotate" in row.compressor.spec.name else 1e-7  # of entries of order one
    assert broken("vmap", row, seed, sums) is None


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
def test_unbiased(row, seed):
    assert broken("unbiased", row, seed) is None


@pytest.mark.sampled
@unbiased_row
def test_omega_bounds_the_variance(row, seed):
    assert broken("omega", row, seed, ["student", "sparse", "flat", "tiny", "huge"]) is None


@pytest.mark.sampled
@contracting_row
def test_alpha_bounds_the_error(row, seed):
    assert broken("alpha", row, seed, ["student", "sparse", "flat", "one", "tiny", "huge"]) is None


@pytest.mark.sampled
@each_row
def test_sent_plus_residual_is_x(row, seed):
    assert broken("residual", row, seed) is None


@pytest.mark.sampled
@each_row
def test_zero_vector_stays_zero(row, seed):
    assert broken("zeros", row, seed) is None


@each_row
def test_non_finite_entries_count_as_zero(row, seed):
    assert broken("nonfinite", row, seed, [np.nan, np.inf, -np.inf]) is None


@pytest.mark.sampled
@any_length_row
@pytest.mark.parametrize("shapes", [TINY, pytest.param(ALSO_TINY, marks=pytest.mark.slow)], ids=["tiny", "also"])
def test_tiny_arrays(row, shapes, seed):
    assert broken("tiny", row, seed, shapes) is None


@pytest.mark.sampled
@each_row
def test_accumulate_is_weighted_sum_of_decompress(row, seed):
    assert broken("accumulate", row, seed) is None


@pytest.mark.sampled
@rows_with(lambda row: True, kept=BETWEEN_WORKERS)
def test_what_was_decoded_from_bytes_decompresses(row, seed):
    assert broken("wire", row, seed) is None


@pytest.mark.sampled
@linear_row
def test_linear_payloads_may_be_added(row, seed):
    assert broken("linear", row, seed) is None


@each_row
def test_no_retrace_from_round_to_round(row, seed):
    assert broken("traced once", row, seed) is None


@pytest.mark.sampled
@advancing_row
def test_new_round_draws_new_shared_randomness(row, seed):
    assert broken("new rounds", row, seed) is None


@pytest.mark.sampled
@each_row
def test_payload_holds_only_arrays_and_lane_bytes_follow_from_shapes(row, seed):
    assert broken("payload", row, seed) is None


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
