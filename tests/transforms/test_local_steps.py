"""`jc.local_steps`: what `local_updates` does under vmap, inside plain jit, on meshes of every kind."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import assert_close, mesh_of

import jaxcomp as jc

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
PARAMS = {
    "b": jnp.zeros(32),
    "w1": jnp.asarray(RNG.normal(size=(12, 32)), jnp.float32),
    "w2": jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32),
}
SPECS = {"b": P("model"), "w1": P(None, "model"), "w2": P("model")}
X, Y = (jnp.asarray(RNG.normal(size=(5, 16, n)), jnp.float32) for n in (12, 4))
INNER, OUTER = optax.adam(0.01), optax.sgd(0.7, momentum=0.9, nesterov=True)
DENSE = jc.direct(jc.identity())
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def loss_of(params, x, y, scale=1.0, out=None):
    hidden = jnp.tanh(x @ params["w1"] + params["b"])
    return scale * jnp.mean((jnp.einsum("ij,jk->ik", hidden, params["w2"], out_sharding=out) - y) ** 2)


def by_vmap(workers, algorithm, **options):
    """Losses, points and the shared point of `local_updates` under vmap."""
    tx = jc.local_updates(INNER, OUTER, algorithm, "data", **options)
    state, axes = jc.init_state(tx, PARAMS, workers, "data")
    own = jax.tree.map(lambda p: jnp.stack([p] * workers), PARAMS)

    def one(own, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(own, x, y)
        updates, state = tx.update(grads, state, own)
        return loss, optax.apply_updates(own, updates), state

    step = jax.jit(jax.vmap(one, in_axes=(0, axes, 0, 0), out_axes=(0, 0, axes), axis_name="data"))
    losses = []
    for x, y in zip(X, Y, strict=True):
        loss, own, state = step(own, state, *(z.reshape(workers, -1, z.shape[-1]) for z in (x, y)))
        losses.append(np.asarray(loss))
    return losses, own, state.point


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("kind", variants(KINDS, {"explicit"}))
def test_on_a_mesh_with_sharded_parameters(kind):
    mesh = mesh_of((2, 2), kind=KINDS[kind])
    options = {"every": 3, "fragments": 2, "delay": 1, "mixing": 0.5}
    loss = functools.partial(loss_of, out=P(None, None) if kind == "explicit" else None)
    step = jc.local_steps(loss, INNER, OUTER, DENSE, mesh, **options)
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS)
    own, state = step.init(params)
    compiled = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for x, y in zip(X, Y, strict=True):
        batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
        loss, own, state = jax.block_until_ready(compiled(own, state, *batch))
        losses.append(np.asarray(loss))
    want = by_vmap(2, DENSE, **options)
    assert_close((losses, own, state.point), want, **CLOSE)
    assert own["w1"].sharding.spec == P(("data",), None, "model") or kind == "auto"
    assert compiled._cache_size() == 1


def test_nothing_crosses_in_a_step_without_an_exchange():
    mesh = mesh_of()
    step = jc.local_steps(loss_of, INNER, OUTER, jc.error_feedback(jc.flat(jc.top_k(k=9))), mesh, every=2)
    own, state = step.init(PARAMS)
    batch = jax.device_put((X[0], Y[0]), NamedSharding(mesh, P("data")))
    rows = [row for row in jc.ledger(jax.jit(step), own, state, *batch).rows if row.sent_bytes]
    assert rows
    assert all(row.branch for row in rows)
    assert sum(row.sent_bytes for row in rows) == 3 * 9 * 8


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_small_leaves_are_told_of_once(fragments):
    """Not once for each fragment and each time that the state is traced; and not beside leaves that are compressed."""
    sparse, mesh = jc.error_feedback(jc.top_k(0.1)), mesh_of()
    step = jc.local_steps(loss_of, INNER, OUTER, sparse, mesh, every=6, fragments=fragments)
    tx = jc.local_updates(INNER, OUTER, sparse, "data", every=6, fragments=fragments)
    small, large = ({"a": jnp.zeros(9), "b": jnp.zeros(9), "c": jnp.zeros(size)} for size in (9, 4096))
    for init in (step.init, lambda p: jc.init_state(tx, p, mesh, "data"), lambda p: jc.init_state(tx, p, 4, "data")):
        with pytest.warns(UserWarning, match="local_updates: nothing is compressed: 3 leaves with 27 entries") as told:
            init(small)
        assert len(told) == 1
        init(large)  # warnings are errors here


def test_a_single_worker_that_named_an_axis_is_told_of_it():
    for options, count in (({"axis_name": "data"}, 1), ({}, 0), ({"axis_name": None}, 0)):
        step = jc.local_steps(loss_of, INNER, optax.sgd(1.0), DENSE, every=2, **options)
        own, state = step.init(PARAMS)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            jax.eval_shape(lambda *args, step=step: step(*args), own, state, X[0], Y[0])
        assert [str(one.message)[:37] for one in told] == ["local_steps: there is a single worker"] * count


def test_a_single_worker_auxiliary_values_and_keywords():
    loss = lambda params, x, y, scale: (loss_of(params, x, y, scale), jnp.sum(x))
    step = jc.local_steps(loss, INNER, optax.sgd(1.0), DENSE, axis_name=None, every=2, has_aux=True)
    own, state = step.init(PARAMS)
    (value, aux), own, state = jax.jit(step)(own, state, X[0], Y[0], scale=2.0)
    assert value.shape == aux.shape == (1,)
    np.testing.assert_allclose(value[0], 2 * loss_of(PARAMS, X[0], Y[0]), rtol=1e-6)
    assert jc.info(state).sent_bytes == 0


@pytest.mark.slow
def test_a_hierarchy():
    levels = {"ici": DENSE, "dcn": DENSE}
    mesh = mesh_of((2, 2), ("dcn", "ici"))
    step = jc.local_steps(loss_of, INNER, OUTER, mesh=mesh, axis_name=levels, every=2)
    own, state = step.init(PARAMS)
    assert own["b"].shape == (2, 32)
    for x, y in zip(X, Y, strict=True):
        # The batch is cut over ("ici", "dcn"), in the order of the levels.
        rows = [jnp.concatenate([z[0:4], z[8:12], z[4:8], z[12:16]]) for z in (x, y)]
        _, own, state = jax.block_until_ready(jax.jit(step)(own, state, *rows))
    _, want, point = by_vmap(2, DENSE, every=2)
    assert_close((own, state.point), (want, point), **CLOSE)


def test_errors_name_what_is_wrong():
    step = jc.local_steps(loss_of, INNER, OUTER, DENSE, mesh_of(), every=2)
    own, state = step.init(PARAMS)
    for given, said in (
        ((own, own, X[0], Y[0]), r"call it as step\(own, state, \*batch\)"),
        ((PARAMS, state, X[0], Y[0]), r"a leading axis of 4 workers; got .* Take own from step\.init"),
        ((own, state, X[0][:3], Y[0][:3]), r"that 4 workers can share evenly; got shape \(3, 12\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            step(*given)
    with pytest.raises(TypeError, match="loss must be a function"):
        jc.local_steps(None, INNER, OUTER, DENSE, every=2)


@pytest.mark.parametrize("extra", [{"s": jnp.zeros(())}, {"e": jnp.zeros((0, 2))}], ids=["scalar", "empty"])
def test_scalars_and_empty_leaves_compile_nothing_anew(extra):
    mesh = mesh_of()
    params = jax.device_put({"w": jnp.ones((30, 40)), **extra}, NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((8, 30)), NamedSharding(mesh, P("data")))
    make = jc.local_steps(lambda p, x: jnp.mean((x @ p["w"]) ** 2), INNER, OUTER, DENSE, every=2)
    own, state = make.init(params)
    step = jax.jit(make)
    for _ in range(3):
        _, own, state = step(own, state, x)
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("model"), P()], ids=str)
def test_a_state_that_is_made_in_a_mesh_that_is_set(kind, spec):
    mesh = mesh_of((2, 2), kind=kind)
    w = jax.device_put(jnp.ones(8), NamedSharding(mesh, spec))
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data")))
    step = jc.local_steps(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.01), optax.sgd(1.0), jc.direct(jc.identity()), every=2
    )
    with jax.set_mesh(mesh):
        own, state = step.init(w)
        one = jax.jit(step)
        for _ in range(2):
            loss, own, state = one(own, state, x)
        assert one._cache_size() == 1
    np.testing.assert_allclose(loss, (8 - 8 * 0.16) ** 2, rtol=1e-6)


def test_no_parameters_at_all():
    mesh = mesh_of()
    step = jc.local_steps(
        lambda _, x: jnp.mean(x), optax.sgd(0.1), optax.sgd(1.0), jc.direct(jc.identity()), mesh, every=2
    )
    own, state = step.init({})
    np.testing.assert_allclose(jax.jit(step)(own, state, jnp.ones((4, 8)))[0], 1)
