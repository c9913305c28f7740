"""`jc.value_and_grad`: the gradient of plain jit with an exchange between, on meshes cut by hand or by the compiler."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close as close
from worlds import mesh_of, vmap_step

import jaxcomp as jc

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DENSE = jc.direct(jc.identity())
SPARSE = jc.error_feedback(jc.top_k(0.1))
RNG = np.random.default_rng(0)
PARAMS = {
    "w1": jnp.asarray(RNG.normal(size=(40, 64)), jnp.float32),
    "b": jnp.zeros(64),
    "w2": jnp.asarray(RNG.normal(size=(64, 4)), jnp.float32),
}
BATCH = jnp.asarray(RNG.normal(size=(16, 40)), jnp.float32), jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
SPECS = {"w1": P(None, "model"), "b": P("model"), "w2": P("model")}


def loss_of(params, x, y, out=None):
    hidden = jnp.tanh(x @ params["w1"] + params["b"])
    carry, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(()), jnp.zeros(3))  # a loop that begins at zero
    return jnp.mean((jnp.einsum("ij,jk->ik", hidden, params["w2"], out_sharding=out) - y) ** 2) + carry


@functools.cache
def expected():
    return jax.jit(jax.value_and_grad(loss_of))(PARAMS, *BATCH)


def placed(mesh, specs=None):
    specs = specs or {name: P() for name in PARAMS}
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, specs)
    return params, jax.device_put(BATCH, NamedSharding(mesh, P("data")))


# Gradients near one are sums of up to 64 products, which two programs add in other orders.
assert_same = functools.partial(close, rtol=2e-5, atol=5e-6)


def one_step(grad_fn, params, batch, jit=True, **named):
    state = grad_fn.init(params)
    return (jax.jit(grad_fn) if jit else grad_fn)(params, state, *batch, **named)


# ------------------------------------------------------------------------------------------------
# The gradient of plain jit


@pytest.mark.sampled
@pytest.mark.parametrize(("where", "kind"), [("argument", AUTO), ("set_mesh", EXPLICIT), ("arrays", AUTO)])
def test_with_identity_it_is_the_gradient_of_the_whole_batch(where, kind):
    mesh = mesh_of(kind=kind)
    params, batch = (PARAMS, BATCH) if where == "argument" else placed(mesh)
    with jax.set_mesh(mesh) if where == "set_mesh" else contextlib.nullcontext():
        grad_fn = jc.value_and_grad(loss_of, DENSE, mesh if where == "argument" else None)
        loss, grads, state = one_step(grad_fn, params, batch)
    assert_same((loss, grads), expected())
    assert jc.info(state).sent_bytes == 1.5 * 4 * sum(x.size for x in PARAMS.values())


def test_a_single_worker_needs_no_mesh():
    """Silently, where no axis is named; else several devices may have been meant, and one sentence says so."""
    for options in ({}, {"axis_name": None}, {"axis_name": "data"}):
        told = pytest.warns(UserWarning, match="there is a single worker")
        with told if options.get("axis_name") else contextlib.nullcontext():
            loss, grads, state = one_step(jc.value_and_grad(loss_of, DENSE, **options), PARAMS, BATCH, jit=False)
        assert_same((loss, grads), expected())
        assert jc.info(state).sent_bytes == 0


@pytest.mark.parametrize("axis", ["data", ("data",), {"data": DENSE}])
def test_a_single_worker_that_named_an_axis_is_told_of_it(axis, monkeypatch):
    grad_fn = jc.value_and_grad(loss_of, None if isinstance(axis, dict) else DENSE, axis_name=axis)
    state = grad_fn.init(PARAMS)
    step = lambda *args: jax.eval_shape(lambda *args: grad_fn(*args), *args)
    match = r"on one of 4 devices: axis_name=.*jax\.set_mesh\(mesh\), or give mesh="
    with pytest.warns(UserWarning, match=match) as told:
        step(PARAMS, state, *BATCH)
    assert len(told) == 1
    assert told[0].filename == __file__
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    other = jc.value_and_grad(loss_of, None if isinstance(axis, dict) else DENSE, axis_name=axis)
    jax.eval_shape(other, PARAMS, state, *BATCH)


def test_an_axis_that_is_somewhere_is_not_spoken_of():
    """One device of a mesh, and a map of the user's, whose state is made outside."""
    for shape in ((1,), (2, 2)):
        params, batch = placed(mesh_of(shape))
        with jax.set_mesh(mesh_of(shape)):
            grad_fn = jc.value_and_grad(loss_of, DENSE, axis_name="data", gradients="per_worker")
            jax.eval_shape(grad_fn, params, grad_fn.init(params), *batch)
    grad_fn = jc.value_and_grad(loss_of, DENSE, axis_name="data")
    grad_fn.init(PARAMS)
    state, axes = jc.init_state(grad_fn, PARAMS, 2, "data")
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), BATCH)
    step = jax.vmap(grad_fn, in_axes=(None, axes, 0, 0), out_axes=(None, None, axes), axis_name="data")
    jax.eval_shape(step, PARAMS, state, *parts)
    signature = inspect.signature(jc.value_and_grad)
    assert repr(signature.parameters["axis_name"].default) == "'data'"


def test_inside_a_map_of_the_users():
    """64 workers on one device, and a shard_map by hand."""
    grad_fn = jc.value_and_grad(loss_of, DENSE)
    state, axes = jc.init_state(grad_fn, PARAMS, 8, "data")
    parts = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), BATCH)
    step = jax.vmap(grad_fn, in_axes=(None, axes, 0, 0), out_axes=(None, None, axes), axis_name="data")
    assert_same(jax.jit(step)(PARAMS, state, *parts)[:2], expected())
    mesh = mesh_of()
    state, specs = jc.init_state(grad_fn, PARAMS, mesh, "data")
    grad_fn = jc.value_and_grad(lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w1"] + p["b"]) @ p["w2"] - y) ** 2), DENSE)
    step = jax.shard_map(grad_fn, mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), P(), specs))
    assert_same(jax.jit(step)(PARAMS, state, *BATCH)[:2], expected())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_models_that_the_compiler_shards(kind):
    """The gradient of plain jit; each device sends the half that it holds, and nothing else crosses "data"."""
    mesh = mesh_of((2, 2), kind=kind)
    params, batch = placed(mesh, SPECS)
    loss_fn = functools.partial(loss_of, out=P() if kind is EXPLICIT else None)
    grad_fn = jc.value_and_grad(loss_fn, DENSE, gradients="per_worker")  # where out=P() is a worker's part
    state = grad_fn.init(params)
    step = jax.jit(grad_fn).lower(params, state, *batch).compile()
    loss, grads, state = step(params, state, *batch)
    assert_same((loss, grads), expected())
    for name, x in grads.items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
    shard = sum(x.size for x in PARAMS.values()) // 2
    assert jc.info(state).sent_bytes == 4 * shard
    book = jc.ledger(step).by_axes(mesh)
    assert set(book) == {("data",), ("model",)}
    assert book["data",] == 4 * shard + 4
    if kind is AUTO:
        plain = jc.ledger(jax.jit(jax.value_and_grad(loss_fn)), params, *batch).by_axes(mesh)
        assert book["model",] == plain["model",]


@pytest.mark.parametrize(("kind", "jit"), [(AUTO, False), (EXPLICIT, True), (EXPLICIT, False)])
def test_a_state_of_whole_parameters_is_told_of_for_cut_ones(kind, jit):
    """Each step gathered the gradients without a word. Inside jit the compiler alone knows of automatic axes."""
    mesh = mesh_of((2, 2), kind=kind)
    (whole, batch), (params, _) = placed(mesh), placed(mesh, SPECS)
    loss = functools.partial(loss_of, out=P() if kind is EXPLICIT else None)
    grad_fn = jc.value_and_grad(loss, DENSE, gradients="per_worker")
    step = (lambda *args: jax.eval_shape(lambda *args: grad_fn(*args), *args)) if jit else grad_fn
    state, own = grad_fn.init(whole), grad_fn.init(params)
    with pytest.warns(UserWarning, match=r"params\['b'\] is cut over 'model', and the state .* Make the state of the"):
        step(params, state, *batch)
    step(params, own, *batch)  # warnings are errors here
    step(whole, state, *batch)
    step(whole, own, *batch)


def test_it_is_compressed_mean():
    """The directions of `compressed_mean` on the same gradients, for three steps of error feedback."""
    params, batch = placed(mesh_of())
    grad_fn = jc.value_and_grad(loss_of, SPARSE)
    tx = jc.compressed_mean(SPARSE, "data")
    rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCH)
    own = jax.jit(jax.vmap(jax.grad(loss_of), in_axes=(None, 0, 0)))(PARAMS, *rows)
    state, (other, update) = grad_fn.init(params), vmap_step(tx, PARAMS)
    step = jax.jit(grad_fn)
    for _ in range(3):
        _, grads, state = step(params, state, *batch)
        direction, other = update(other, own)
        assert_same(grads, direction)
    for mine, others in zip(*(jax.tree.leaves(s.local.algorithm.memory) for s in (state.exchange, other)), strict=True):
        # Of three gradients with entries up to 9, each within 9e-6 of the same in float64, in either program.
        assert_same(mine, others.reshape(mine.shape), atol=3e-5)


# ------------------------------------------------------------------------------------------------
# A training loop


def test_a_loop_traces_once_and_donates():
    mesh = mesh_of((2, 2))
    params, batch = placed(mesh, SPECS)
    traced = []

    @jax.checkpoint
    def loss(params, x, y):
        traced.append(None)
        return loss_of(params, x, y)

    grad_fn, optimizer = jc.value_and_grad(loss, SPARSE), optax.sgd(1e-2, momentum=0.9)
    state, moments = grad_fn.init(params), optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, moments, x, y):
        loss, grads, state = grad_fn(params, state, x, y)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    losses = []
    for _ in range(8):
        params, state, moments, value = step(params, state, moments, *batch)
        losses.append(float(value))
    assert len(traced) == 1
    assert losses[-1] < losses[0]
    assert jc.info(state).achieved_ratio < 0.3


# ------------------------------------------------------------------------------------------------
# Auxiliary values, micro-batches, keys


def test_auxiliary_values_of_every_kind():
    params, batch = placed(mesh_of())

    def loss(params, x, y, shift):
        value = loss_of(params, x, y) + shift
        return value, {"mean": jnp.mean(x), "each": jnp.sum(x, 0), "count": jnp.sum(y > 0)}

    kinds = {"mean": "mean", "each": "each", "count": "sum"}
    for parts in (1, 2):
        grad_fn = jc.value_and_grad(loss, DENSE, has_aux=True, aux=kinds, micro_batches=parts)
        (value, aux), grads, _ = one_step(grad_fn, params, batch, shift=1.0)
        assert_same((value - 1, grads), expected())
        np.testing.assert_allclose(aux["mean"], jnp.mean(BATCH[0]), rtol=1e-5)
        assert int(aux["count"]) == int(jnp.sum(BATCH[1] > 0))
        rows = aux["each"].reshape(4, parts, 40).sum(1)
        np.testing.assert_allclose(rows, BATCH[0].reshape(4, 4, 40).sum(1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="have no mean"):
        one_step(jc.value_and_grad(loss, DENSE, has_aux=True), params, batch, shift=1.0)


def test_micro_batches_weights_and_loss_scale():
    params, batch = placed(mesh_of())
    weights = [1.0, 2.0, 3.0, 2.0]
    grad_fn = jc.value_and_grad(loss_of, DENSE, micro_batches=4, weights=weights, loss_scale=2.0**20)
    found = one_step(grad_fn, params, batch)[:2]
    rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCH)
    each = jax.jit(jax.vmap(jax.value_and_grad(loss_of), in_axes=(None, 0, 0)))(PARAMS, *rows)
    share = jnp.asarray(weights) / 8
    assert_same(found, jax.tree.map(lambda x: jnp.tensordot(share, x, 1), each))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wide = lambda params, x, y: loss_of(jax.tree.map(lambda w: w.astype(jnp.float32), params), x, y)
    grads = one_step(jc.value_and_grad(wide, DENSE, micro_batches=2), half, batch)[1]
    assert {x.dtype for x in grads.values()} == {jnp.dtype(jnp.bfloat16)}


def test_every_worker_and_micro_batch_has_a_key_of_its_own():
    params, batch = placed(mesh_of())

    def loss(params, x, y, rng):
        return loss_of(params, x, y), jax.random.uniform(rng["dropout"])

    grad_fn = jc.value_and_grad(loss, DENSE, has_aux=True, aux="each", micro_batches=2, keys="rng")
    (_, draws), *_ = one_step(grad_fn, params, batch, rng={"dropout": jax.random.key(1)})
    assert len(set(np.asarray(draws).tolist())) == 8


# ------------------------------------------------------------------------------------------------
# What does not fit says so


def test_what_does_not_fit_is_refused():
    grad_fn = jc.value_and_grad(loss_of, DENSE)
    params, (x, y) = placed(mesh_of())
    state = grad_fn.init(params)
    made = lambda **options: jc.value_and_grad(loss_of, DENSE, **options)
    cases = [
        (lambda: grad_fn(params, state, x[:3], y[:3]), r"batch\[0\] must have a leading axis that 4 workers can share"),
        (lambda: grad_fn(params, state, x, y, 1.0), "What is equal on all workers is given by keyword"),
        (lambda: grad_fn(state, params, x, y), r"grad_fn\(params, state, \*batch\)"),
        (lambda: made(axis_name="batch").init(params), r"the mesh, which has|of the mesh, which has .* got 'batch'"),
        (lambda: made(micro_batches=0), "micro_batches must be an integer"),
        (lambda: one_step(made(micro_batches=3), params, (x, y)), "micro_batches must divide the 4 examples"),
        (lambda: made(aux="max"), 'aux must be "mean", "unweighted", "sum", "each", "concat" or "equal"'),
        (lambda: made(keys="rng")(params, state, x, y), "'rng', which was not given"),
        (lambda: jax.jit(grad_fn.init)(placed(mesh_of((2, 2)), SPECS)[0]), "inside jit, how parameters are cut"),
        (
            lambda: jax.eval_shape(grad_fn, params, grad_fn.init(PARAMS), x, y),
            "made for 1 device.* the mesh has 4",
        ),
        (lambda: jax.eval_shape(made(has_aux=True), params, state, x, y), "with has_aux=True the loss must return"),
        (lambda: made(wrt="w"), "wrt must be a type of nodes"),
        (lambda: made(param_specs=P("rows")).init(params), "value_and_grad: param_specs must be"),
        (lambda: made(keys=3), "value_and_grad: keys must be names of keyword arguments; got 3"),
        (lambda: made(loss_scale="a"), "value_and_grad: loss_scale must be a number > 0 .* got 'a'"),
    ]
    for call, said in cases:
        with pytest.raises((TypeError, ValueError), match=said):
            call()
    with jax.set_mesh(mesh_of((2, 2))), pytest.raises(ValueError, match="do not lie on the mesh yet"):
        grad_fn.init(PARAMS)


def test_the_state_may_be_made_inside_jit():
    params, _ = placed(mesh_of())
    grad_fn = jc.value_and_grad(loss_of, jc.error_feedback(jc.flat(jc.top_k(0.1))))
    state, made = grad_fn.init(params), jax.jit(grad_fn.init)(params)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


def test_gradients_of_each_worker_for_a_loop_that_keeps_all_state_in_optax():
    for shape, specs in (((4,), None), ((2, 2), SPECS)):
        params, batch = placed(mesh_of(shape), specs)
        grad_fn = jc.worker_value_and_grad(loss_of)
        tx = optax.chain(jc.compressed_mean(DENSE, "data", sharded=specs), optax.sgd(1.0))
        state = tx.init(params)
        traced = []

        @jax.jit
        def step(params, state, *batch):
            traced.append(None)  # noqa: B023
            loss, grads = grad_fn(params, *batch)  # noqa: B023
            updates, state = tx.update(grads, state, params)  # noqa: B023
            return loss, jax.tree.map(jnp.negative, updates), state

        loss, grads, state = step(params, state, *batch)
        assert_same((loss, grads), expected())
        jax.block_until_ready(step(params, state, *batch))
        assert len(traced) == 1
        for name, x in grads.items():
            assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
        assert jc.info(state).sent_bytes > 0
    with pytest.raises(ValueError, match=r"or give it the gradients of jc\.worker_value_and_grad"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="there is no mesh"):
        jc.worker_value_and_grad(loss_of)(PARAMS, *BATCH)


def test_the_loss_has_the_weights_that_the_compressor_brings():
    """Of dagc: what is returned is what is minimised; along each axis of a hierarchy its own."""
    loss_of_mean = lambda w, x: jnp.mean(x) + jnp.sum(w) * jnp.mean(x)
    w, x = jnp.zeros(3), jnp.repeat(jnp.arange(4.0), 2)
    dagc = lambda volumes: jc.direct(jc.dagc(volumes, 1.0))
    across, both = ("data",), ("group", "data")
    cases = [
        (across, {"algorithm": dagc([7, 2, 0.8, 0.2])}, 0.42),
        (across, {"algorithm": dagc([7, 2, 0.8, 0.2]), "weights": [1, 1, 1, 1]}, 1.5),
        (across, {"algorithm": jc.direct(jc.identity()), "weights": [7, 2, 0.8, 0.2]}, 0.42),
        (both, {"axis_name": {"group": jc.direct(jc.identity()), "data": dagc([3, 1])}}, 1.25),
    ]
    for names, options, expected in cases:
        mesh = jax.make_mesh((4,) if names == across else (2, 2), names, axis_types=(AxisType.Auto,) * len(names))
        grad_fn = jc.value_and_grad(loss_of_mean, mesh=mesh, **options)
        loss, grads, _ = jax.jit(grad_fn)(w, grad_fn.init(w), x)
        np.testing.assert_allclose([loss, *grads], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="weights must be 4 numbers, one for each worker; got 3"):
        jc.worker_value_and_grad(loss_of_mean, jax.make_mesh((4,), across), weights=[1, 2, 3])(w, x)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(("shape", "spec"), [((2, 2), P("model")), ((4, 1), P("data")), ((4, 1), P())], ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_in_a_mesh_that_is_set(kind, shape, spec, inside):
    """`jax.set_mesh` around a step changes nothing, whether parameters are cut, and wherever the state was made."""
    mesh = mesh_of(shape, kind=kind)
    w = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, spec))
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data")))
    grad_fn = jc.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), DENSE)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        state = grad_fn.init(w)
    with jax.set_mesh(mesh):
        step = jax.jit(grad_fn)
        for _ in range(2):
            loss, grads, state = step(w, state, x)
        assert step._cache_size() == 1
    np.testing.assert_allclose(loss, 28.0**2)
    np.testing.assert_allclose(grads, 56.0)


def test_a_worker_without_a_share_may_have_no_data():
    """Its NaN is in no mean, and no step is skipped for it."""
    mesh = mesh_of()
    x = jnp.ones((4, 8)).at[0].set(jnp.nan)
    for algorithm, weights in ((DENSE, [0, 1, 2, 3]), (jc.error_feedback(jc.dagc([0, 1, 2, 3], 0.5)), None)):
        loss_of_row = lambda w, x: jnp.mean((x @ w) ** 2)
        grad_fn = jc.value_and_grad(loss_of_row, algorithm, mesh, weights=weights, loss_scale=jc.DynamicScale())
        w = jnp.ones(8)
        loss, grads, state = jax.jit(grad_fn)(w, grad_fn.init(w), x)
        assert float(loss) == 64
        assert bool(state.loss_scale.finite)
        assert np.all(np.isfinite(grads))


def test_trees_of_auxiliary_values_of_each_worker_and_losses_that_are_numbers():
    mesh = mesh_of()
    loss_and = lambda w, x: (jnp.mean((x @ w) ** 2), {"n": jnp.sum(x), "first": x[0]})
    grad_fn = jc.worker_value_and_grad(loss_and, mesh, has_aux=True, aux={"n": "sum", "first": "each"})
    loss, aux = jax.jit(lambda *args: grad_fn(*args)[0])(jnp.ones(8), jnp.ones((4, 8)))
    assert (float(loss), float(aux["n"]), aux["first"].shape) == (64, 32, (4, 8))
    with pytest.raises(ValueError, match=r"aux must be .* a tree of them, or a mapping from paths to them; got None"):
        jc.worker_value_and_grad(loss_and, mesh, has_aux=True, aux=None)
    of_number = jc.value_and_grad(lambda w, x: 0.5, DENSE, mesh)
    assert float(jax.jit(of_number)(jnp.ones(8), of_number.init(jnp.ones(8)), jnp.ones((4, 8)))[0]) == 0.5
