"""What `compressed_mean` is given, and what it gives back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, run_vmap

import jaxcomp as jc

N = 4
PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((40, 30))}
EF = jc.error_feedback(jc.top_k(0.05))
SIDCO, REDSYNC = jc.sidco(0.1), jc.redsync(0.1)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_what_is_not_an_algorithm_is_named():
    with pytest.raises(TypeError, match=r"got the compressor top_k\(0.01\). Wrap it in error_feedback"):
        jc.compressed_mean(jc.top_k(0.01), AXIS)
    with pytest.raises(TypeError, match="call it first"):
        jc.direct(jc.top_k)
    with pytest.raises(TypeError, match=r"got an algorithm, which needs no other around it"):
        jc.error_feedback(jc.power_sgd(2))
    with pytest.raises(TypeError, match=r"call it as compressed_mean\(algorithm, axis_name\)"):
        jc.compressed_mean(AXIS, EF)  # pyright: ignore[reportArgumentType]
    assert (repr(jc.top_k(0.05)), repr(EF)) == ("<compressor top_k(0.05)>", "<algorithm error_feedback of top_k(0.05)>")
    with pytest.raises(TypeError, match=r"a key of jax\.random is needed"):
        jc.roundtrip(jc.top_k(0.1), jnp.ones(3), key=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_directions_too_large_for_the_gradients_are_cut(dtype):
    """What was kept back goes out with what is new: twice the largest gradient is no number of its dtype."""
    largest = float(jnp.finfo(dtype).max)
    grads = {"x": jnp.full((3, 2, 2), largest, dtype)}
    directions, state = run_vmap(
        jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), AXIS), {"x": grads["x"][0, 0]}, grads
    )
    np.testing.assert_array_equal(np.max(np.asarray(directions["x"], np.float64), axis=1), largest)
    assert np.all(np.isfinite(np.asarray(state.local.algorithm.memory.dense)))


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
