"""Estimated curvature of networks against the exact matrices, and operators that change during training."""

import dataclasses

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS

import jaxcomp as jc

_rng = np.random.default_rng(2)
X = jnp.asarray(_rng.standard_normal((7, 5)), jnp.float32)
Y = jnp.asarray(_rng.integers(0, 3, 7))
PARAMS = {
    "a": jnp.asarray(_rng.standard_normal((5, 4)) / 2, jnp.float32),
    "b": jnp.asarray(_rng.standard_normal((4, 3)), jnp.float32),
}


def logits(params):
    return jnp.tanh(X @ params["a"]) @ params["b"]


def loss(params):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(params)), Y[:, None], axis=1))


def flat_of(tree):
    return np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in jax.tree.leaves(tree)])


def test_hutchinson_is_the_diagonal_of_the_hessian(key):
    vector, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    exact = np.diag(jax.jit(jax.hessian(lambda v: loss(unravel(v))))(vector))
    got = flat_of(jax.jit(lambda k: jc.smoothness.hutchinson_diagonal(loss, PARAMS, k, samples=4000))(key))
    np.testing.assert_allclose(got, exact, atol=0.05 * np.abs(exact).max())


def test_ggn_is_the_diagonal_of_gauss_newton(key):
    vector, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    jacobian = np.asarray(jax.jit(jax.jacobian(lambda v: logits(unravel(v))))(vector), np.float64)  # [rows, classes, d]
    p = np.asarray(jax.nn.softmax(logits(PARAMS)), np.float64)
    inner = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    exact = np.einsum("rkd,rkl,rld->d", jacobian, inner, jacobian) / len(X)
    got = flat_of(jax.jit(lambda k: jc.smoothness.ggn_diagonal(logits, PARAMS, k, samples=4000))(key))
    np.testing.assert_allclose(got, exact, atol=0.05 * exact.max())


def test_network_operators():
    diagonal = {"a": jnp.array([1.0, 3.0, -1.0]), "b": jnp.array([8.0])}
    entries = jc.smoothness.network_operator(diagonal, damping=0.5, safety=2.0)
    np.testing.assert_allclose(entries.diag, 2 * (np.array([1, 3, 0, 8]) + 1.5))
    layers = jc.smoothness.network_operator(diagonal, per_layer=True, damping=0.5)
    np.testing.assert_allclose(layers.diag, np.array([4 / 3] * 3 + [8]) + 1.5)
    with pytest.raises(ValueError, match="must be above 0; got 0 and 1"):
        jc.smoothness.network_operator(diagonal, damping=0)
    with pytest.raises(ValueError, match=r"must be above 0; got 0.1 and 'a'"):
        jc.smoothness.network_operator(diagonal, safety="a")  # pyright: ignore
    with pytest.raises(ValueError, match="must be finite"):
        jc.smoothness.network_operator({"a": jnp.array([jnp.nan])})
    for empty in ({}, {"a": jnp.zeros(0)}):
        with pytest.raises(ValueError, match=r"the diagonal must have at least one entry; got \{"):
            jc.smoothness.network_operator(empty)


@pytest.mark.parametrize("samples", [0, -1, 1.5, "a", None])
def test_a_number_of_samples_that_is_none_is_named(samples, key):
    for estimate, function in (
        (jc.smoothness.hutchinson_diagonal, loss),
        (jc.smoothness.ggn_diagonal, logits),
    ):
        with pytest.raises(ValueError, match=f"{estimate.__name__}: samples must be an integer of at least 1; got"):
            estimate(function, PARAMS, key, samples=samples)


def test_refresh_changes_the_operator_and_compiles_nothing(key):
    first, second = (jc.smoothness.diagonal_of(np.geomspace(1, top, 6)) for top in (2, 50))
    tx = jc.compressed_mean(jc.direct(jc.flat(jc.precondition(jc.dithering(3), first))), AXIS)
    tree = {"a": jnp.ones(4), "b": jnp.ones(2)}
    axes = jc.state.state_axes(jax.eval_shape(tx.init, tree))
    state = jax.jit(jax.vmap(lambda _: tx.init(tree), axis_name=AXIS, out_axes=axes))(jnp.arange(2))
    traces = 0

    def step(state, scale):
        nonlocal traces
        traces += 1
        return tx.update(jax.tree.map(lambda a: scale * a, tree), state)

    step = jax.jit(jax.vmap(step, in_axes=(axes, 0), out_axes=(None, axes), axis_name=AXIS))
    scales = jnp.array([1.0, 2.0])
    _, state = step(state, scales)
    state = jc.state.refresh(state, second)
    other, _ = step(state, scales)
    assert traces == 1
    fresh = jc.compressed_mean(jc.direct(jc.flat(jc.precondition(jc.dithering(3), second))), AXIS)
    made = jax.jit(jax.vmap(lambda _: fresh.init(tree), axis_name=AXIS, out_axes=axes))(jnp.arange(2))
    made = dataclasses.replace(made, shared=made.shared._replace(count=state.shared.count))
    want, _ = step(made, scales)
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="no preconditioned compressor"):
        jc.state.refresh({"a": jnp.ones(1)}, second)
    with pytest.raises(ValueError, match="operator of shape"):
        jc.state.refresh(state, jc.smoothness.diagonal_of(np.ones(3)))


def stacked(diag):
    return jc.smoothness.stack([jc.smoothness.diagonal_of(np.ones(len(diag))), jc.smoothness.diagonal_of(diag)])


ROTATION = np.array([[0.6, 0.8], [-0.8, 0.6]])
OUT_OF_RANGE = [
    (lambda tiny: jc.smoothness.diagonal_of([1.0, tiny]), "the diagonal"),
    (lambda tiny: jc.smoothness.diagonal_of([1.0, 1 / tiny]), "the diagonal"),
    (lambda tiny: stacked([1.0, tiny]), "the diagonal"),
    (lambda tiny: jc.smoothness.glm(np.eye(2)[:1], loss="squared", l2=tiny, form="low_rank", rank=1), "base"),
    (lambda tiny: jc.smoothness.glm(np.eye(2), l2=tiny, form="diagonal", classes=2, loss="softmax"), "l2"),
    (lambda tiny: jc.smoothness.dense_of(tiny**2 * np.eye(2)), "the inverse root"),
    (lambda tiny: jc.smoothness.dense_of(ROTATION @ np.diag([1, 4]) @ ROTATION.T / tiny**2), "the root"),
    (lambda tiny: jc.smoothness.blocks_of(tiny**2 * np.eye(2), 2), "the inverse root"),
]


@pytest.mark.parametrize(("make", "what"), OUT_OF_RANGE)
def test_operators_that_float32_cannot_hold_are_named(make, what, key):
    """An entry of 1e-39 counted as 0 for ever, one of 1e39 as infinity."""

    def start(tiny, dtype):
        S = make(tiny)
        size = S.diag.shape[-1]
        return jc.precondition(jc.natural(), S).init(key, jax.ShapeDtypeStruct((size,), dtype))

    for dtype in (jnp.float32, jnp.bfloat16):
        with pytest.raises(ValueError, match=rf"precondition: {what} of .* to compute in float32; got \d\S*e[-+]\d\d"):
            start(1e-39, dtype)
        start(1e-18, dtype)
    with jax.enable_x64(True):
        start(1e-39, jnp.float64)


def test_an_entry_of_zero_and_the_ends_of_the_range_are_kept(key):
    ends = np.array([np.finfo(np.float32).tiny, 0.0, 1.0, np.finfo(np.float32).max], np.float64)
    made = jc.precondition(jc.identity(), jc.smoothness.diagonal_of(ends))
    x = jnp.array([1e-10, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(jc.roundtrip(made, x, key=key)[0], np.where(ends > 0, x, 0), rtol=1e-6)
    state = made.init(key, x)
    with pytest.raises(
        ValueError, match=r"refresh: the diagonal of the smoothness operator must be 0 or in .*got 1e-39"
    ):
        jc.state.refresh(state, jc.smoothness.diagonal_of([1.0, 1.0, 1.0, 1e-39]))
