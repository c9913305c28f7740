"""Buckets in the order in which gradients are ready are exchanged beside the backward pass: in the text for H100s."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib import targets
from experiments.sharded.dependencies import exchanges

TARGET, BLOCKS, WIDTH = "h100:2x2", 4, 512
BLOCK = 4 * WIDTH * WIDTH  # bytes
WHOLE = P()


def loss(params, tokens):
    h = params["wte"][tokens]  # its gradient is the last, and its name the last of the tree
    for i in range(BLOCKS):
        h = h + jnp.tanh(h @ params[f"block_{i}"])
    return jnp.mean(h**2)


def exchanges_of(algorithm, bucket_bytes):
    """What the exchanges of a training step wait for, and are hidden behind; without those of scales."""
    devices = targets.described(TARGET)
    mesh = targets.mesh_on(devices, {"data": len(devices)})
    matrix, table = (jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (WIDTH, 4 * WIDTH))
    like = {f"block_{i}": matrix for i in range(BLOCKS)} | {"wte": table}
    tokens = jax.ShapeDtypeStruct((64 * len(devices),), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    if bucket_bytes == "ready":
        bucket_bytes = jc.buckets(BLOCK, loss, like, jax.ShapeDtypeStruct((64,), jnp.int32))
    tx = jc.compressed_mean(algorithm, "data", bucket_bytes=bucket_bytes)
    state, specs = targets.state_on(mesh, tx, like)

    def step(params, state, tokens):
        grads = jax.grad(loss)(jc.per_worker(params, "data"), tokens)
        direction, state = tx.update(grads, state)
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, direction), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, specs, P("data")), out_specs=(WHOLE, specs))
    program = targets.compiled(jax.jit(mapped, donate_argnums=(0, 1)), targets.shapes_on(mesh, like), state, tokens)
    found = exchanges(program.text, mesh, "data")
    most = max(exchange.operand_bytes for exchange in found)
    return [exchange for exchange in found if exchange.operand_bytes >= most / 8]


@pytest.mark.skipif(targets.lacks("h100") is not None, reason="compiling for H100s needs their compiler")
def test_buckets_in_order_are_exchanged_beside_the_backward_pass():
    algorithm = jc.error_feedback(jc.block_scaled("int4"))
    hidden = lambda found: sum(exchange.hidden_behind for exchange in found)
    by_name, ready = (exchanges_of(algorithm, each) for each in (BLOCK, "ready"))
    assert by_name[0].waits_for >= 0.5  # for all that the gradient of the table waits for
    assert ready[0].waits_for < 0.3
    assert hidden(ready) > 1.3 * hidden(by_name)
    assert hidden(ready) >= 0.5
