"""Gradients of all workers as rows: nothing mixes them before the mean, and `before` is each worker's own transform."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of, mesh_step, vmap_step

import jaxcomp as jc

N = 4
PARAMS = {"b": jnp.linspace(0.1, 1.0, 5), "w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)}
DENSE = jc.direct(jc.identity())
MEAN = jc.compressed_mean(DENSE, AXIS)
BATCH = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
is_matrix = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
centered = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g - g.mean(0), grads))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_of(params, x):
    y = jnp.tanh(x @ params["w"]) @ jnp.arange(1.0, 4.0) + jnp.sum(params["b"]) * x[:, 0]
    return jnp.mean(jnp.square(y))


GRADIENT = jax.jit(jax.grad(loss_of))


def on_mesh(kind=AxisType.Auto):
    mesh = mesh_of(kind=kind)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    return mesh, put(PARAMS, P()), put(BATCH, P(AXIS))


def own_gradients():
    return [GRADIENT(PARAMS, x) for x in BATCH.reshape(N, 2, 4)]


# What mixes rows, or takes them for arrays of another shape.
TRANSFORMS = {
    "clip_by_global_norm": optax.clip_by_global_norm(0.3),
    "inject_hyperparams": optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=0.3),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "own": centered,
    "decay of matrices": optax.add_decayed_weights(0.5, mask=is_matrix),
    "zero_nans": optax.zero_nans(),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.05),
    "masked": optax.masked(optax.clip_by_global_norm(0.3), is_matrix),
    "trace": optax.trace(0.9),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformation_before_the_mean_is_refused_or_each_workers_own(name):
    """In the chain the rows refuse it; as `before` it gives the mean of what each worker's transform gives."""
    transform = TRANSFORMS[name]
    _, params, batch = on_mesh()
    _, grads = jc.worker_value_and_grad(loss_of)(params, batch)
    chain = optax.chain(transform, MEAN)
    state = chain.init(params)
    with pytest.raises((ValueError, AttributeError), match=r"before=transformation"):
        jax.eval_shape(lambda s: chain.update(grads, s, params), state)

    want, update = [], jax.jit(transform.update)
    for g in own_gradients():
        state, found = transform.init(PARAMS), None
        for _ in range(2):
            found, state = update(g, state, PARAMS)
        want.append(found)
    tx = jc.compressed_mean(DENSE, AXIS, before=transform)

    @jax.jit
    def step(state):
        _, grads = jc.worker_value_and_grad(loss_of)(params, batch)
        return tx.update(grads, state, params)

    _, state = step(tx.init(params))
    got, _ = step(state)
    jax.tree.map(lambda x, *each: np.testing.assert_allclose(x, np.mean(each, 0), rtol=2e-5, atol=1e-6), got, *want)


@pytest.mark.parametrize("way", ["shard_map", "vmap"])
def test_before_is_the_same_where_the_axis_is_bound(way):
    transform = optax.chain(TRANSFORMS["inject_hyperparams"], optax.trace(0.9), optax.add_decayed_weights(0.1))
    tx = optax.chain(jc.compressed_mean(DENSE, AXIS, before=transform), optax.sgd(1.0))
    grads = jax.tree.map(lambda *each: jnp.stack(each), *own_gradients())
    state, run = mesh_step(tx, PARAMS, mesh_of()) if way == "shard_map" else vmap_step(tx, PARAMS)
    _, state = run(state, grads)
    got, state = run(state, grads)
    total = jax.tree.map(jnp.zeros_like, PARAMS)
    for g in own_gradients():
        own = transform.init(PARAMS)
        _, own = transform.update(g, own, PARAMS)
        found, _ = transform.update(g, own, PARAMS)
        total = jax.tree.map(lambda t, u: t - u / N, total, found)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7), got, total)
    if way == "shard_map":
        return
    fewer, _ = jc.init_state(tx, PARAMS, 2, AXIS)
    moved = jc.redistribute(state, fewer)
    assert [x.shape[0] for x in jax.tree.leaves(moved[0].own)] == [2] * len(jax.tree.leaves(moved[0].own))


def test_noise_is_another_one_at_each_worker_and_equal_gradients_are_refused():
    noisy = jc.compressed_mean(DENSE, AXIS, before=optax.add_noise(1.0, 0.0, key=jax.random.key(3)))
    _, params, _ = on_mesh()
    keys = jax.random.key_data(noisy.init(params).own.local.transform.rng_key)
    assert len({tuple(key) for key in np.asarray(keys).tolist()}) == N
    state, specs = jc.init_state(noisy, PARAMS, mesh_of(N), AXIS)
    run = lambda s: noisy.update(PARAMS, s, PARAMS)[0]
    with pytest.raises(ValueError, match="typed as equal on all workers"):
        jax.eval_shape(jax.shard_map(run, mesh=mesh_of(N), in_specs=(specs,), out_specs=P()), state)
    with pytest.raises(TypeError, match="before must be an optax transformation; got 3"):
        jc.compressed_mean(DENSE, AXIS, before=3)  # pyright: ignore[reportArgumentType]
    alone = jc.compressed_mean(DENSE, None, before=optax.clip(0.5))
    direction, _ = jax.jit(alone.update)(jnp.ones(3), alone.init(jnp.ones(3)))
    np.testing.assert_array_equal(direction, 0.5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_correct_uses_go_on(kind):
    """Chains, labels and masks by tree, by name and by shape; with parameters that are cut."""
    mesh = mesh_of((2, 2), kind=kind)
    specs = {"b": P(), "w": P("model")}
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), PARAMS, specs)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P(AXIS)))
    halves = [GRADIENT(PARAMS, x) for x in BATCH.reshape(2, 4, 4)]
    mean = jax.tree.map(lambda *each: np.mean(each, 0), *halves)
    clipped = [optax.clip_by_global_norm(0.3).update(g, optax.EmptyState())[0] for g in halves]
    exchange = lambda **o: jc.compressed_mean(DENSE, AXIS, sharded=specs, **o)
    by_shape = lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)
    by_name = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: str(path[0].key), tree)
    clip = optax.clip_by_global_norm(0.3)
    cases = [
        (optax.chain(exchange(), optax.sgd(1.0)), mean),
        (optax.chain(exchange(before=clip), optax.sgd(1.0)), jax.tree.map(lambda *e: np.mean(e, 0), *clipped)),
        (optax.inject_hyperparams(lambda rate: optax.chain(exchange(), optax.sgd(rate)))(rate=1.0), mean),
    ]
    if kind == AxisType.Auto:
        exchange = lambda: jc.compressed_mean(DENSE, AXIS)
        two = {"matrix": MEAN, "vector": MEAN}
        cases += [
            (optax.chain(optax.multi_transform(two, by_shape), optax.sgd(1.0)), mean),
            (optax.chain(optax.multi_transform({"b": exchange(), "w": exchange()}, by_name), optax.sgd(1.0)), mean),
            (optax.chain(optax.masked(exchange(), {"b": True, "w": True}), optax.sgd(1.0)), mean),
        ]
    for tx, want in cases:

        @jax.jit
        def step(params, state, batch):
            _, grads = jc.worker_value_and_grad(loss_of)(params, batch)
            updates, state = tx.update(grads, state, params)  # noqa: B023
            return updates, state

        with jax.set_mesh(mesh):
            updates, state = step(params, tx.init(params), batch)
            updates, _ = step(params, state, batch)
            assert step._cache_size() == 1
        jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -g, rtol=2e-5, atol=1e-6), updates, want)


def test_rows_refuse_arithmetic_and_say_what_to_do():
    grads = jc.WorkerGradients(jnp.ones((N, 4, 3), jnp.bfloat16))
    assert (grads.shape, grads.ndim, grads.size, grads.dtype) == ((4, 3), 2, 12, jnp.bfloat16)
    assert repr(grads) == "WorkerGradients(4 workers, bfloat16[4, 3])"
    for use in (
        lambda g: g * 2,
        lambda g: 1 - g,
        lambda g: np.ones(3) + g,
        lambda g: jnp.ones(3) * g,
        lambda g: g[0],
        lambda g: jnp.square(g),
        lambda g: jnp.where(True, g, 0),
        lambda g: np.asarray(g),
        lambda g: g.mean(0),
        lambda g: jax.lax.psum(g, AXIS),
        lambda g: optax.tree.norm({"w": g}),
    ):
        with pytest.raises((ValueError, AttributeError), match=r"gradients of all workers.*before=transformation"):
            use(grads)
    with pytest.raises(ValueError, match="rows must be an array"):
        jc.WorkerGradients(jnp.ones(()))


@pytest.mark.slow
def test_what_is_no_row_is_named():
    _, params, batch = on_mesh()
    grad_fn = jc.worker_value_and_grad(loss_of)
    grads = jax.jit(lambda *args: jax.tree.map(lambda g: g.rows, grad_fn(*args)[1]))(params, batch)
    with pytest.raises(ValueError, match=r"no result of jax\.jit: take gradient and update in one"):
        jax.jit(grad_fn)(params, batch)
    state = MEAN.init(params)
    with pytest.raises(ValueError, match=r"no axis named 'data' is bound here.*marked as such by jc.WorkerGradients"):
        MEAN.update(grads, state, params)
    marked = jax.tree.map(jc.WorkerGradients, grads)
    direction, _ = MEAN.update(marked, state, params)
    assert direction["w"].shape == (4, 3)
    with pytest.raises(ValueError, match=r"gradients\['b'\] is an array that a transformation before"):
        MEAN.update(marked | {"b": grads["b"]}, state, params)
    with pytest.raises(ValueError, match=r"gradients\['w'\] must hold .* all 4 workers.*got shape \(2, 4"):
        MEAN.update(marked | {"w": jc.WorkerGradients(grads["w"][:2])}, state, params)
    steps = optax.MultiSteps(optax.chain(MEAN, optax.sgd(1.0)), 2)
    with pytest.raises(ValueError, match=r"micro-batches are jc.worker_value_and_grad\(..., micro_batches=k\)"):
        steps.update(marked, steps.init(params), params)
