"""What exchanges run beside, in scheduled texts: buckets beside the backward pass, fragments beside the next step."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
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


def exchanges_of(algorithm, bucket_bytes, target=TARGET, slices=1):
    """What the exchanges of a training step wait for, and are hidden behind; without those of scales."""
    devices = targets.described(target, slices=slices)
    of_slice = lambda i: [device for device in devices if device.slice_index == i]
    mesh = (
        targets.mesh_on(devices, {"data": len(devices)})
        if slices == 1
        else Mesh([of_slice(i) for i in range(slices)], ("data", "same"))
    )
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


@pytest.mark.skipif(targets.lacks("v5e:2x2") is not None, reason="compiling for TPUs needs libtpu")
def test_buckets_cross_between_slices_beside_the_backward_pass():
    """Each begins when its gradients are ready, and ends with the step; in one piece all waits for all."""
    algorithm = jc.error_feedback(jc.block_scaled("int4"))
    whole, ready = (exchanges_of(algorithm, each, "v5e:2x2", slices=2) for each in (None, "ready"))
    assert [exchange.waits_for for exchange in whole] == [1]
    assert len(ready) == BLOCKS + 1
    assert min(exchange.waits_for for exchange in ready) < 0.2
    assert max(exchange.hidden_behind for exchange in ready) >= 0.5
    assert sum(exchange.hidden_behind > 0 for exchange in ready) >= BLOCKS  # all but that of the table


@pytest.mark.skipif(targets.lacks("v5e:2x2") is not None, reason="compiling for TPUs needs libtpu")
def test_fragments_with_delay_are_exchanged_beside_the_next_step():
    """Between two slices of four chips, in a round of two steps that say their numbers; else each exchange lies in
    an arm of a conditional, and no step beside it."""
    devices = targets.described("v5e:2x2", slices=2)
    mesh = Mesh([[device for device in devices if device.slice_index == i] for i in range(2)], ("dcn", "ici"))
    outer, rows = optax.sgd(0.7, momentum=0.9), P("dcn")
    tx = jc.local_updates(
        optax.sgd(0.1), outer, jc.direct(jc.identity()), "dcn", every=2, fragments=2, delay=1, mixing=0.5
    )
    like = {f"block_{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(2)}
    state, specs = jc.init_state(tx, like, mesh.abstract_mesh, "dcn")

    def loss(params, x):
        for block in params.values():
            x = x + jnp.tanh(x @ block)
        return jnp.mean(x**2)

    def steps(known, params, state, batches):
        params = jax.tree.map(lambda x: x[0], params)
        for i, x in enumerate(batches):
            updates, state = tx.update(jax.grad(loss)(params, x), state, params, at=3 + i if known else None)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], params), state

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), like)
    batches = [jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)] * 2
    args = (
        targets.shapes_on(mesh, params, rows),
        targets.shapes_on(mesh, state, specs),
        targets.shapes_on(mesh, batches, rows),
    )
    books = [
        targets.compiled(
            jax.shard_map(partial(steps, known), mesh=mesh, in_specs=(rows, specs, rows), out_specs=(rows, specs)),
            *args,
        ).ledger
        for known in (True, False)
    ]
    between = [[row for row in book.rows if "dcn" in "".join(row.axes(mesh))] for book in books]
    assert [row.branch for row in between[0]] == ["", ""]
    assert max(row.beside or 0 for row in between[0]) >= 5
    assert len(between[1]) == 4  # an arm for each fragment in each step
    assert all(row.branch and not row.beside for row in between[1])
