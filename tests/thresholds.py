"""What the tests of compressors by a threshold share: vectors with known laws, and compressors that are run on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from jaxcomp.base import State, advance

SIZE = 20_000
DATA = {
    "laplace": lambda rng, d: rng.laplace(size=d),
    "gamma": lambda rng, d: rng.gamma(0.5, size=d) * rng.choice([-1, 1], d),
    "student": lambda rng, d: rng.standard_t(3, d),
    "zeros": lambda rng, d: np.where(rng.random(d) < 0.5, 0, rng.laplace(size=d)),
}


@functools.cache
def jitted(compressor):
    return jax.jit(lambda x, key: jc.roundtrip(compressor, x, key=key))


def compressed(compressor, x, key):
    x_hat, payload = jitted(compressor)(jnp.asarray(x), key)
    return payload, np.asarray(x_hat)


def run(compressor, xs, key):
    """Payloads and states over several rounds of one compiled function."""
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(1)
        payload, local = compressor.compress(key, x, state)
        return payload, State(local, advance(compressor, state.shared))

    state, out = compressor.init(key, jax.ShapeDtypeStruct(xs[0].shape, jnp.float32)), []
    for x in xs:
        payload, state = step(jnp.asarray(x, jnp.float32), state)
        out.append((payload, state))
    assert len(traces) == 1
    return out
