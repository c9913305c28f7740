"""Sizes: lane bytes from shapes, code bits from content, exact against the wire (see test_wire)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.payloads import Dense, Leaves, Quantized, Scaled, Sparse


def test_lane_bytes_of_each_type():
    sparse = Sparse(jnp.zeros(5, jnp.bfloat16), jnp.zeros(5, jnp.int32))
    assert jc.lane_bytes(Dense(jnp.zeros(7))) == 28
    assert jc.lane_bytes(Scaled(jnp.zeros(7, jnp.float8_e5m2), jnp.float32(1))) == 11
    assert jc.lane_bytes(sparse) == 30
    assert jc.lane_bytes(Quantized(jnp.zeros(2), jnp.zeros((3, 4), jnp.uint32))) == 56
    assert jc.lane_bytes(Leaves(Dense(jnp.zeros(1)), (sparse, sparse))) == 64
    assert isinstance(jc.lane_bytes(sparse), int)


@pytest.mark.parametrize(
    ("indices", "values", "bits"),
    [
        ([1, 5, 9, 9, 9], [1, 2, 0, 0, 0], 3 * (32 + 4)),
        ([1, 5, 9, 9, 9], [1, 2, 0, 3, 0], 5 * (32 + 4)),  # not padding: a value
        ([9, 5, 1], [1, 2, 3], 3 * (32 + 4)),
        ([5, 9, 5], [1, 2, 3], 3 * (32 + 4)),  # the last index occurs before: not padding
        ([8, 8, 8], [0, 0, 0], 1 * (32 + 4)),  # nothing but padding
        ([0], [1], 32 + 1),
        ([2**31 - 1], [1], 32 + 31),
        ([], [], 0),
    ],
)
def test_code_bits_of_sparse(indices, values, bits):
    payload = Sparse(jnp.array(values, jnp.float32), jnp.array(indices, jnp.int32))
    assert int(jax.jit(jc.code_bits)(payload)) == bits


def test_code_bits_in_jit_of_a_tree(key):
    tree = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(3000), jnp.float32), "b": jnp.ones(3)}
    compressor = jc.per_leaf(jc.sidco(0.01))

    @jax.jit
    def run(tree):
        payload, _ = compressor.compress(key, tree, compressor.init(key, tree))
        return payload, jc.code_bits(payload)

    payload, bits = run(tree)
    overhead = 8 * len(jc.wire.encode(payload)) - int(bits)
    assert 0 <= overhead <= 8 * 50


def test_large_messages_do_not_overflow():
    payload = jax.eval_shape(lambda: Sparse(jnp.zeros(2**26), jnp.zeros(2**26, jnp.int32)))
    assert jax.eval_shape(jc.code_bits, payload).dtype == jnp.float32
    assert jc.code_bits(jax.eval_shape(lambda: Dense(jnp.zeros(2**28)))) == 2**33


def test_unknown_type():
    with pytest.raises(TypeError, match="unknown payload type tuple"):
        jc.code_bits((jnp.zeros(3),))
