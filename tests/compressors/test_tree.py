"""Compressors of trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip

import jaxcomp as jc
from jaxcomp.base import residual
from jaxcomp.payloads import Leaves, Sparse

TREE = {
    "bias": jnp.arange(1.0, 11),
    "empty": jnp.zeros((0, 3)),
    "kernel": jnp.asarray(np.random.default_rng(0).standard_normal((40, 50)), jnp.float32),
    "scale": jnp.array(2.0),
}


def bitwise(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_small_leaves_go_dense_in_one_message(key):
    x_hat, payload = roundtrip(jc.per_leaf(jc.top_k(0.01)), TREE, key)
    assert isinstance(payload, Leaves)
    np.testing.assert_array_equal(payload.dense.values, [*range(1, 11), 2.0])
    assert [type(leaf) for leaf in payload.leaves] == [Sparse]
    for name in ("bias", "empty", "scale"):
        np.testing.assert_array_equal(x_hat[name], TREE[name])
    assert np.count_nonzero(x_hat["kernel"]) == 20


@pytest.mark.sampled
@pytest.mark.parametrize(("dense_below", "large"), [(0, 4), (1, 3), (11, 1), (2000, 1), (2001, 0)])
def test_dense_below_counts_entries(dense_below, large, key):
    _, payload = roundtrip(jc.per_leaf(jc.top_k(0.1), dense_below=dense_below), TREE, key)
    assert len(payload.leaves) == large


def test_bare_array_is_compressed_whatever_its_size(key):
    _, payload = roundtrip(jc.per_leaf(jc.top_k(k=1)), jnp.ones(5), key)
    assert isinstance(payload, Sparse)
    assert payload.values.shape == (1,)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [jc.dithering, jc.rand_k])
def test_leaves_do_not_share_randomness(make, key):
    """Neither that of the worker nor that of all workers, of which sets of indices are drawn."""
    leaf = make(3) if make is jc.dithering else make(0.1)
    for lift in (jc.per_leaf, jc.flat):
        x_hat, _ = roundtrip(lift(leaf), [jnp.full(2000, 0.37)] * 2, key)
        assert not np.array_equal(x_hat[0], x_hat[1])


def test_flat_is_one_vector_in_leaf_order(key):
    vector = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(TREE)])
    x_hat, payload = roundtrip(jc.flat(jc.top_k(0.01)), TREE, key)
    want, want_payload = roundtrip(jc.top_k(0.01), vector, key)
    assert bitwise(payload, want_payload)
    np.testing.assert_array_equal(jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(x_hat)]), want)


@pytest.mark.parametrize("lift", [jc.per_leaf, jc.flat], ids=["per_leaf", "flat"])
@pytest.mark.parametrize(
    "tree",
    [{}, {"a": jnp.zeros(())}, [jnp.zeros(1), jnp.zeros((0,))], {"a": None, "b": jnp.ones(3)}],
    ids=["empty", "scalar", "tiny", "none"],
)
def test_odd_trees(lift, tree, key):
    x_hat, _ = roundtrip(lift(jc.top_k(0.5)), tree, key)
    assert jax.tree.structure(x_hat) == jax.tree.structure(tree)
    assert all(a.shape == b.shape for a, b in zip(jax.tree.leaves(x_hat), jax.tree.leaves(tree), strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("lift", [jc.per_leaf, jc.flat], ids=["per_leaf", "flat"])
def test_sent_plus_residual_is_x_bitwise(lift, key):
    compressor = lift(jc.sidco(0.05))

    @jax.jit
    def run(tree):
        state = compressor.init(key, tree)
        payload, _ = compressor.compress(key, tree, state)
        sent = compressor.decompress(payload, state.shared, jax.eval_shape(lambda: tree))
        return sent, residual(compressor, tree, payload, state.shared)

    sent, rest = run(TREE)
    assert bitwise(jax.tree.map(lambda s, r: s + r, sent, rest), TREE)


@pytest.mark.sampled
@pytest.mark.parametrize("lift", [jc.per_leaf, jc.flat], ids=["per_leaf", "flat"])
def test_mixed_dtypes_keep_theirs(lift, key):
    tree = {"a": jnp.ones(2000, jnp.bfloat16), "b": jnp.ones(10), "c": jnp.ones(10, jnp.bfloat16), "d": jnp.ones(2000)}
    x_hat, payload = roundtrip(lift(jc.top_k(0.5)), tree, key)
    assert jax.tree.map(lambda x: x.dtype, x_hat) == jax.tree.map(lambda x: x.dtype, tree)
    if isinstance(payload, Leaves):
        assert payload.leaves[0].values.dtype == jnp.bfloat16
        assert payload.dense.values.dtype == jnp.float32


def test_bounds_over_leaves():
    compressor = jc.per_leaf(jc.rand_k(0.1))
    assert compressor.spec.omega((10, 2000)) == pytest.approx(9)
    assert compressor.spec.omega((10,)) == 0
    assert jc.per_leaf(jc.top_k(k=5)).spec.alpha((10, 1024, 2000)) == pytest.approx(5 / 2000)
    assert jc.flat(jc.top_k(k=5)).spec.alpha((500, 500)) == pytest.approx(5 / 1000)


def test_integer_leaf_is_named():
    with pytest.raises(ValueError, match=r"\['n'\] has dtype int32"):
        jc.per_leaf(jc.top_k(0.1)).init(jax.random.key(0), {"n": jnp.zeros(3, jnp.int32)})
