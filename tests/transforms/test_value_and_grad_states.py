"""States of `jc.value_and_grad`: specs, info, replicas, checkpoints, other numbers of workers; NNX models in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close, assert_same, mesh_of

import jaxcomp as jc

W = jnp.asarray(np.random.default_rng(0).normal(size=(30, 40)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 30)), jnp.float32)
GRAD = jc.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w["w"] + w["b"]) ** 2), jc.error_feedback(jc.top_k(0.1)))


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
    marks = jax.shard_map(
        lambda s, w: jc.replicas.fingerprints((s, w), "data"), mesh=mesh, in_specs=(specs, P()), out_specs=P()
    )
    jc.check_replicas(jax.jit(marks)(state, params))
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as keeper:
        keeper.save(tmp_path / "state", state)
        keeper.wait_until_finished()
        back = keeper.restore(tmp_path / "state", GRAD.init(params))
    step = jax.jit(GRAD)
    assert_same(*(step(params, s, x)[1:] for s in (state, back)))
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


def test_a_model_without_wrt_is_refused():
    """Its statistics would never move."""
    algorithm = jc.error_feedback(jc.top_k(0.1))
    params = jax.device_put(W, NamedSharding(mesh_of(2), P()))
    with pytest.raises(TypeError, match=r"variables of type BatchStat, which are not trained.*Say wrt=nnx\.Param"):
        jc.value_and_grad(lambda model, x: jnp.mean(model(x)), algorithm).init(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"worker_value_and_grad: .* variables of type BatchStat.*Say wrt=nnx\.Param"):
        jc.worker_value_and_grad(lambda model, x: jnp.mean(model(x)), mesh_of(2))(
            nnx.BatchNorm(8, rngs=nnx.Rngs(0)), params[:2]
        )


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


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(30, 40, rngs=rngs)
        self.norm = nnx.BatchNorm(40, rngs=rngs)
        self.adapted = nnx.LoRA(40, 4, 8, base_module=nnx.Linear(40, 8, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.adapted(nnx.relu(self.norm(self.dense(x))))


def cut_over(axis):
    """Specs in the containers of the parameters, as `nnx.get_partition_spec` gives them."""
    state = nnx.state(Adapted(nnx.Rngs(0)), nnx.Param)
    return jax.tree.map(lambda x: P(None, axis) if x.ndim > 1 and x.size > 1000 else P(), state)


TOP_K = jc.error_feedback(jc.top_k(0.1))
FORMS = {
    "a mean": lambda to: jc.compressed_mean(TOP_K, "data"),
    "before": lambda to: jc.compressed_mean(TOP_K, "data", before=optax.trace(0.9)),
    "paths": lambda to: jc.compressed_mean(jc.by_path({"kernel": TOP_K, ".*": jc.direct(jc.identity())}), "data"),
    "shards": lambda to: jc.compressed_mean(TOP_K, "data", sharded=to(cut_over("model"))),
    "cut over the workers": lambda to: jc.compressed_mean(TOP_K, "data", sharded=to(cut_over("data"))),
}


def test_small_leaves_beside_large_shards_are_no_warning():
    """Leaves of one sharding are laid out by themselves; all of the biases here are small."""
    mesh = mesh_of((2, 2))
    grad_fn = jc.value_and_grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2), TOP_K, mesh)
    placed = lambda size: {
        "w": jax.device_put(jnp.ones((8, size)), NamedSharding(mesh, P(None, "model"))),
        "b": jax.device_put(jnp.zeros(size), NamedSharding(mesh, P())),
    }
    grad_fn.init(placed(1024))
    with pytest.warns(UserWarning, match="nothing is compressed: 2 leaves with 80 entries"):
        grad_fn.init(placed(16))


@pytest.mark.parametrize(
    ("form", "wrt"),
    [(form, nnx.Param) for form in FORMS] + [("a mean", nnx.Any(nnx.LoRAParam, nnx.PathContains("norm")))],
)
@pytest.mark.filterwarnings("ignore:compressed_mean. nothing is compressed")
def test_a_mean_inside_of_an_nnx_optimizer(form, wrt):
    """Flax makes the state of parameters in `nnx.Param`, and gives update gradients without."""
    mesh = mesh_of((2, 2))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    grad_fn = jc.worker_value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), axis_name="data", wrt=wrt)

    def trained(tx):
        model, traced = Adapted(nnx.Rngs(0)), []
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
        with jax.numpy_dtype_promotion("standard"):
            optimizer = nnx.Optimizer(model, optax.chain(tx, optax.sgd(0.1, momentum=0.9)), wrt=wrt)

        @nnx.jit
        def step(model, optimizer, x):
            traced.append(None)
            optimizer.update(model, grad_fn(model, x)[1])

        for _ in range(3):
            step(model, optimizer, x)
        assert len(traced) <= 2  # the second time with all state on the mesh
        return nnx.as_pure(nnx.state(model))

    pure = FORMS[form](nnx.as_pure)
    pure = optax.GradientTransformation(lambda params, init=pure.init: init(nnx.as_pure(params)), pure.update)
    found = trained(FORMS[form](lambda specs: specs)), trained(pure)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
    start = nnx.as_pure(nnx.state(Adapted(nnx.Rngs(0))))
    assert not np.array_equal(found[0]["norm"]["scale"], start["norm"]["scale"])


def scaled_steps(grad_fn, steps, params, *placed_batches):
    """States and directions of a few steps of one compiled program."""
    state, found, traced = grad_fn.init(params), [], []

    @jax.jit
    def step(params, state, x):
        traced.append(None)
        return grad_fn(params, state, x)

    for x in placed_batches[:steps]:
        value, grads, state = step(params, state, x)
        found.append((value, grads, state))
    assert len(traced) == 1
    return found


def test_a_loss_scale_that_follows_overflow():
    """Gradients in true units; a worker that overflows skips the step for all, and memories stay as they are."""
    mesh = mesh_of(4)
    whole, cut = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    params = jax.device_put({"w": W}, whole)
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2)
    bad = X.at[5, 0].set(jnp.inf)  # of the third worker
    algorithm = jc.error_feedback(jc.top_k(0.1))
    dynamic = jc.DynamicScale(initial=2.0**10, interval=2, largest=2.0**11)
    xs = [jax.device_put(x, cut) for x in (X, bad, X, X)]
    found = scaled_steps(jc.value_and_grad(loss, algorithm, loss_scale=dynamic), 4, params, *xs)
    plain = scaled_steps(jc.value_and_grad(loss, algorithm), 3, params, xs[0], xs[2], xs[3])
    states = [state for _, _, state in found]
    assert [bool(s.loss_scale.finite) for s in states] == [True, False, True, True]
    assert [float(s.loss_scale.scale) for s in states] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    assert [int(s.loss_scale.skipped) for s in states] == [0, 1, 1, 1]
    np.testing.assert_array_equal(found[1][1]["w"], 0)
    assert_same(*(s.exchange for s in states[:2]))
    for mine, expected in zip((found[0], found[2], found[3]), plain, strict=True):
        np.testing.assert_allclose(mine[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(mine[1]["w"], expected[1]["w"], rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(memory(mine[2]), memory(expected[2]), rtol=1e-4, atol=1e-7)
    assert states[-1].loss_scale.scale.sharding.is_equivalent_to(whole, 0)


def test_a_loss_scale_for_one_worker_and_for_halves():
    """f16 gradients in true units; then the optimizer skips what overflows."""
    half = {"w": jnp.full((4,), 1e-2, jnp.float16)}
    loss = lambda p, x: jnp.sum(p["w"] * x) * jnp.float16(2.0**-14)  # gradient 2^-14 x
    dynamic = jc.DynamicScale(initial=2.0**14)
    grad_fn = jc.value_and_grad(loss, jc.direct(jc.identity()), loss_scale=dynamic, axis_name=None)
    tx = optax.transforms.conditionally_mask(
        optax.sgd(1.0, momentum=0.9), lambda step, finite, **_: finite, forward_extra_args=True
    )

    @jax.jit
    def step(params, state, opt_state, x):
        _, grads, state = grad_fn(params, state, x)
        updates, opt_state = tx.update(grads, opt_state, params, finite=state.loss_scale.finite)
        return updates, state, opt_state

    x = jnp.full((4,), 2.0, jnp.float16)
    updates, state, opt_state = step(half, grad_fn.init(half), tx.init(half), x)
    np.testing.assert_allclose(np.asarray(updates["w"], np.float32), -(2.0**-13), rtol=1e-3)
    updates, state, after = step(half, state, opt_state, x.at[1].set(jnp.inf))
    np.testing.assert_array_equal(updates["w"], 0)
    np.testing.assert_array_equal(*(jax.tree.leaves(s.inner_state)[0] for s in (after, opt_state)))
    assert float(state.loss_scale.scale) == 2.0**13
    with pytest.raises(ValueError, match=r"must be a number > 0 or a jc\.DynamicScale; got -1"):
        jc.value_and_grad(loss, jc.direct(jc.identity()), loss_scale=-1)
    with pytest.raises(TypeError, match=r"must be that of grad_fn\.init\(params\); got one without an exchange"):
        grad_fn(half, dataclasses.replace(state, exchange=()), x)
    with pytest.raises(TypeError, match="got one without a dynamic scale"):
        grad_fn(half, jc.value_and_grad(loss, jc.direct(jc.identity()), axis_name=None).init(half), x)
    with pytest.raises(TypeError, match="loss_scale must be a number; a dynamic one needs the state"):
        jc.worker_value_and_grad(loss, loss_scale=dynamic)
    for wrong, message in (
        ({"growth": 1.0}, "growth must be > 1"),
        ({"interval": 0}, "interval"),
        ({"backoff": 1}, "backoff"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.DynamicScale(**wrong)


def test_shapes_that_lie_nowhere_are_told_where_to_lie():
    mesh = mesh_of()
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    step = jc.value_and_grad(loss, jc.error_feedback(jc.top_k(0.1)), axis_name="data")
    params = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P()))
    state, shapes = step.init(params), jax.eval_shape(lambda: (jnp.ones((8, 16)), jnp.ones((12, 8))))
    with pytest.raises(ValueError, match="No mesh was found here: give arrays"):
        jax.jit(step).lower(shapes[0], state, shapes[1])


class TwoLayers(nnx.Module):
    """`alike` says what is one in both: a variable, or a whole module, with statistics that both change."""

    def __init__(self, alike, rngs):
        self.first = nnx.Linear(30, 30, rngs=rngs)
        self.norm = nnx.BatchNorm(30, rngs=rngs)
        self.again = nnx.BatchNorm(30, rngs=rngs) if alike == "variable" else self.norm
        self.second = nnx.Linear(30, 30, rngs=rngs) if alike == "variable" else self.first
        if alike == "variable":
            self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.again(self.second(jnp.tanh(self.norm(self.first(x)))))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("alike", ["variable", "module"])
def test_a_variable_at_several_paths_has_one_gradient(alike, workers):
    """As in `nnx.grad`; what the loss changes is changed at all paths, and `nnx.Optimizer` takes the gradient."""
    loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    model, other = TwoLayers(alike, nnx.Rngs(0)), TwoLayers(alike, nnx.Rngs(0))
    x = X[:4]
    with jax.numpy_dtype_promotion("standard"):
        want_loss, want = nnx.value_and_grad(loss)(other, x)
        optimizers = [nnx.Optimizer(each, optax.sgd(0.1), wrt=nnx.Param) for each in (model, other)]
    if workers:  # which all have the same batch
        mesh = mesh_of(workers)
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
        x = jax.device_put(jnp.tile(x, (workers, 1)), NamedSharding(mesh, P("data")))
    axis = "data" if workers else None
    grad_fn = jc.value_and_grad(loss, jc.direct(jc.identity()), axis_name=axis, wrt=nnx.Param)
    state = grad_fn.init(model)
    step = nnx.jit(lambda model, state, x: grad_fn(model, state, x))
    value, grads, state = step(model, state, x)
    np.testing.assert_allclose(value, want_loss, rtol=1e-6)
    found = nnx.state(grads, nnx.Param)
    assert jax.tree.structure(nnx.to_pure_dict(found)) == jax.tree.structure(nnx.to_pure_dict(want))
    close = functools.partial(assert_close, rtol=1e-4)
    close(nnx.to_pure_dict(found), nnx.to_pure_dict(want))
    assert model.first.kernel is model.second.kernel
    with jax.numpy_dtype_promotion("standard"):
        optimizers[0].update(model, grads)
        optimizers[1].update(other, want)
    close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(other)))  # statistics, too


def test_tied_variables_without_wrt():
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(30, 30, rngs=rngs)
            self.second = nnx.Linear(30, 30, rngs=rngs)
            self.second.kernel = self.first.kernel

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    loss, model = lambda model, x: jnp.mean((model(x) - 1) ** 2), Plain(nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        want = nnx.grad(loss)(model, X)
    grad_fn = jc.value_and_grad(loss, jc.direct(jc.identity()), axis_name=None)
    _, grads, _ = grad_fn(model, grad_fn.init(model), X)
    # Two terms of up to 0.1 are added, in f32: what they leave is right to some 1e-8.
    np.testing.assert_allclose(grads.second.kernel[...], want.first.kernel[...], rtol=1e-5, atol=5e-8)
    assert grads.first.kernel is grads.second.kernel
    said = "first/kernel and second/kernel are one variable.*would be split.*nnx.split"
    mesh = mesh_of(2)
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    with pytest.raises(TypeError, match=f"worker_value_and_grad: {said}"):
        jc.worker_value_and_grad(loss, mesh)(model, jax.device_put(X, NamedSharding(mesh, P("data"))))


def test_a_skipped_step_changes_no_statistics():
    """An infinite input at one worker: the running mean and variance of a model are what they were."""

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dense(self.norm(x))

    mesh = mesh_of()
    model, x = Model(), jnp.arange(32.0).reshape(8, 4)
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    algorithm = jc.direct(jc.identity())
    grad_fn = jc.value_and_grad(loss, algorithm, mesh, wrt=nnx.Param, loss_scale=jc.DynamicScale())
    state, step = grad_fn.init(model), nnx.jit(grad_fn)
    _, _, state = step(model, state, x.at[0, 0].set(jnp.inf))
    assert not bool(state.loss_scale.finite)
    np.testing.assert_array_equal(model.norm.var[...], 1)
    _, _, state = step(model, state, x)
    assert bool(state.loss_scale.finite)
    assert np.all(np.isfinite(model.norm.var[...]))
    assert np.all(model.norm.var[...] != 1)
