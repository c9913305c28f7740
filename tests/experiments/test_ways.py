"""Models of several libraries, per worker and unreduced: the gradient is that of plain JAX."""

import jax
import pytest

import jaxcomp as jc
from experiments.ways import WAYS, batch, difference, ways
from experiments.ways.models import MODELS, masked

DENSE = jc.direct(jc.identity())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("standard_promotion")
def test_a_model_needs_what_the_page_says(name):
    model = MODELS[name]()
    if model is None:
        pytest.skip("Equinox is not installed")
    for way in WAYS:
        step, args, dense = ways(model, way, DENSE)
        assert difference(step(*args)[:2], dense) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_fifty_steps_are_those_of_plain_jax():
    """A GPT with a masked loss, by plain descent. With steps of 0.3 in place of 0.1 rounding grows to 3e-4."""
    model, ended = MODELS["GPT of functions"](), []
    for way in WAYS:
        step, (params, state, *data), _ = ways(model, way, DENSE)
        for _ in range(50):
            _, grads, state = jax.block_until_ready(step(params, state, *data))
            params = jax.block_until_ready(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        ended.append(params)
    loss = lambda params, tokens, mask: masked(model.plain(params, tokens[:, :-1]), tokens[:, 1:], mask)
    plain, params = jax.jit(jax.value_and_grad(loss)), model.params
    for _ in range(50):
        value, grads = plain(params, *batch())
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert value < plain(model.params, *batch())[0]
    assert all(difference(each, params) < 1e-4 for each in ended)
