"""States of `jc.value_and_grad`: specs, info, replicas, checkpoints, other numbers of workers; NNX models in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc

W = jnp.asarray(np.random.default_rng(0).normal(size=(30, 40)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 30)), jnp.float32)
GRAD = jc.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w["w"] + w["b"]) ** 2), jc.error_feedback(jc.top_k(0.1)))


def mesh_of(workers):
    return jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])


def after_one(workers):
    mesh = mesh_of(workers)
    params = jax.device_put({"w": W, "b": jnp.zeros(40)}, NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    return mesh, params, x, jax.jit(GRAD)(params, GRAD.init(params), x)[2]


def memory(state):
    return np.asarray(jax.tree.leaves(state.exchange.local.algorithm.memory)[-1])


def test_tools_know_the_state(tmp_path):
    mesh, params, x, state = after_one(4)
    specs = jc.state_specs(state, "data")
    assert specs.exchange.shared.count == P()
    assert set(jax.tree.leaves(specs.exchange.local.algorithm.memory)) == {P("data")}
    assert jc.info(state, each=True).lane_bytes.shape == (4,)
    marks = jax.shard_map(lambda s, w: jc.fingerprints((s, w), "data"), mesh=mesh, in_specs=(specs, P()), out_specs=P())
    jc.check_replicas(jax.jit(marks)(state, params))
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as keeper:
        keeper.save(tmp_path / "state", state)
        keeper.wait_until_finished()
        back = keeper.restore(tmp_path / "state", GRAD.init(params))
    step = jax.jit(GRAD)
    for a, b in zip(*(jax.tree.leaves(step(params, s, x)[1:]) for s in (state, back)), strict=True):
        np.testing.assert_array_equal(a, b)
    _, fewer, fewer_x, fresh = after_one(2)
    new = jc.redistribute(state, GRAD.init(fewer))
    np.testing.assert_allclose(memory(new).sum(0), memory(state).sum(0), rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(step(fewer, new, fewer_x)[2]) == jax.tree.structure(fresh)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(30, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def test_an_nnx_model_in_place():
    """Statistics are the mean over the workers, counters move, workers drop other entries, nothing is traced twice."""
    mesh, model = mesh_of(4), Net(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    x = jax.device_put(jnp.tile(X[:2], (4, 1)), NamedSharding(mesh, P("data")))  # the same for all workers
    with jax.numpy_dtype_promotion("standard"):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    traced = []

    def loss_fn(model, x):
        traced.append(None)
        out = model(x)
        return jnp.mean(out**2), jnp.mean(out == 0)

    grad_fn = jc.value_and_grad(
        loss_fn, jc.direct(jc.identity()), axis_name="data", wrt=nnx.Param, has_aux=True, aux="each"
    )
    optimizer.exchange = nnx.data(grad_fn.init(model))

    @nnx.jit
    def step(model, optimizer, x):
        (loss, dropped), grads, optimizer.exchange = grad_fn(model, optimizer.exchange, x)
        optimizer.update(model, grads)
        return loss, dropped

    hidden = np.asarray(x[:2] @ model.dense.kernel[...] + model.dense.bias[...], np.float64)
    before = np.asarray(jax.random.key_data(model.dropout.rngs.key[...]))
    for number in range(3):
        _, dropped = step(model, optimizer, x)
        if number == 0:
            np.testing.assert_allclose(model.norm.mean[...], 0.01 * hidden.mean(0), rtol=1e-3, atol=1e-6)
            assert len(set(np.asarray(dropped).tolist())) > 1
    assert int(model.dropout.rngs.count[...]) == 3
    assert np.array_equal(np.asarray(jax.random.key_data(model.dropout.rngs.key[...])), before)
    assert int(optimizer.exchange.exchange.shared.count) == 3
    assert len(traced) == 1
