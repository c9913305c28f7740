"""What `compressed_mean` is given, and what it gives back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, PARAMS, run_vmap

import jaxcomp as jc

EF = jc.error_feedback(jc.top_k(0.05))

pytestmark = pytest.mark.usefixtures("standard_promotion")


NO_ALGORITHM = [
    (lambda: jc.compressed_mean(jc.top_k(0.01), AXIS), r"got the compressor top_k\(0.01\). Wrap it in error_feedback"),
    (lambda: jc.direct(jc.top_k), "call it first"),
    (lambda: jc.error_feedback(jc.power_sgd(2)), "got an algorithm, which needs no other around it"),
    (lambda: jc.compressed_mean(AXIS, EF), "give algorithm before axis_name; got <algorithm"),  # pyright: ignore
    (lambda: jc.roundtrip(jc.top_k(0.1), jnp.ones(3), key=0), r"a key of jax\.random is needed"),
    (lambda: jc.local_updates(None, None, EF, AXIS, every=2), "inner must be an optax optimizer"),  # pyright: ignore
]


@pytest.mark.parametrize(("call", "said"), NO_ALGORITHM, ids=[said for _, said in NO_ALGORITHM])
def test_what_is_not_an_algorithm_is_named(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_compressors_and_algorithms_say_what_they_are():
    assert (repr(jc.top_k(0.05)), repr(EF)) == ("<compressor top_k(0.05)>", "<algorithm error_feedback of top_k(0.05)>")


@pytest.mark.parametrize(
    "link", [3, None, jc.Link(-1.0, 1e9), jc.Link(1e-3, 0.0), jc.Link(1e-3, -1e7), jc.Link(float("nan"), 1e9)]
)
def test_a_link_that_cannot_be_is_refused_when_built(link):
    for build in (jc.compressed_mean, lambda algorithm, axis, **o: jc.value_and_grad(jnp.sum, algorithm, **o)):
        with pytest.raises((TypeError, ValueError), match=r"compressed_mean: link must .* got"):
            build(EF, AXIS, link=link)


def test_seeds_and_numbers_of_rounds_are_in_range():
    for seed in (2**70, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"seed must be in \[-2\^63, 2\^63\)"):
            jc.compressed_mean(EF, AXIS, seed=seed)
    with pytest.raises(TypeError, match="seed must be an integer or a key"):
        jc.compressed_mean(EF, AXIS, seed=jnp.float32(0.5))
    for measure in (-1, 2**31):
        with pytest.raises(ValueError, match=rf"measure must be True, False or an integer in .*; got {measure}"):
            jc.compressed_mean(EF, AXIS, measure=measure)
    with pytest.raises(ValueError, match="a number of workers must be at least 1; got 0"):
        jc.init_state(jc.compressed_mean(EF, AXIS), PARAMS, 0, AXIS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_directions_too_large_for_the_gradients_are_cut(dtype):
    """What was kept back goes out with what is new: twice the largest gradient is no number of its dtype."""
    largest = float(jnp.finfo(dtype).max)
    grads = {"x": jnp.full((3, 2, 2), largest, dtype)}
    directions, state = run_vmap(
        jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), AXIS), {"x": grads["x"][0, 0]}, grads
    )
    np.testing.assert_array_equal(np.max(np.asarray(directions["x"], np.float64), axis=1), largest)
    assert np.all(np.isfinite(np.asarray(state.local.algorithm.memory[0])))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2**26 + 1,), (20, 2**27)], ids=["vector", "rows"])
@pytest.mark.parametrize(
    "algorithm",
    [jc.direct(jc.identity()), jc.direct(jc.dithering(7)), jc.error_feedback(jc.sidco(1e-3))],
    ids=["identity", "dithering", "sidco"],
)
def test_more_bits_than_an_integer_holds(algorithm, shape):
    """Of large models: shapes alone are traced, no array is made."""
    tx = jc.compressed_mean(algorithm, None)
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    direction, _ = jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, grads))
    assert direction["w"].shape == shape
