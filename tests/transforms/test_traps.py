"""Mistakes that would otherwise train something else without a word: each is refused in one sentence, with the cure."""

import json

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from worlds import AXIS, at, mesh_of, vmap_step

import jaxcomp as jc

PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((4, 3))}
MEAN = jc.compressed_mean(jc.direct(jc.identity()), AXIS)
GRADS = jax.tree.map(lambda p: jnp.stack([p + 1, p + 3]), PARAMS)


def traced(tx, params=PARAMS, grads=GRADS):
    """One step on two workers, typed by `shard_map`, up to its directions' shapes."""
    mesh = mesh_of(2)
    state, specs = jc.init_state(tx, params, mesh, AXIS)
    step = lambda s, g: tx.update(at(g), s, params)[0]
    return jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=P()), state, grads)


@pytest.mark.parametrize("given", [False, True])
def test_a_table_on_the_mesh_in_a_closure(given):
    """JAX does not look up in it inside a shard_map; the message spoke of constraints alone, or was JAX's."""
    mesh, direct = mesh_of(2), jc.direct(jc.identity())
    table, w = jax.device_put((jnp.arange(3.0), jnp.ones(3)), jax.NamedSharding(mesh, P()))
    x, y = jax.device_put((jnp.ones((4, 3)), jnp.arange(4) % 3), jax.NamedSharding(mesh, P(AXIS)))
    inside = jc.value_and_grad(lambda w, x, y: (x @ w * table[y]).mean(), direct, mesh if given else None)
    keyword = jc.value_and_grad(lambda w, x, y, *, table: (x @ w * table[y]).mean(), direct, mesh if given else None)
    with pytest.raises(ValueError, match="a closure holds an array that lies on the mesh: give that array by keyword"):
        jax.jit(inside)(w, inside.init(w), x, y)
    assert jax.jit(keyword)(w, keyword.init(w), x, y, table=table)[0] == 2.25


def test_one_entry_is_not_all_of_them():
    for factory in (jc.top_k, jc.rand_k):
        with pytest.raises(ValueError, match=r"got the integer 1\. Say k=1 .* or ratio=1\.0 for all"):
            factory(1)
    assert jc.top_k(1.0).spec.alpha(7) == 1


def test_a_name_that_is_near_or_of_a_paper():
    for name, said in (
        ("topk", "top_k"),
        ("ErrorFeedback", "error_feedback"),
        ("qsgd", "dithering"),
        ("round", "methods.rounds"),
        ("hard_threshold", "contrib.hard_threshold"),
    ):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean jc\.{said}"):
            getattr(jc, name)
    with pytest.raises(AttributeError, match=r"no attribute 'transformer'$"):
        jc.transformer  # noqa: B018
    for code in jc._KNOWN_AS.values():
        exec(code, {"jc": jc, "levels": 7})


@pytest.mark.parametrize(
    "arguments",
    [
        (PARAMS, MEAN, 2, AXIS),
        (MEAN, PARAMS, AXIS, 2),
        (MEAN, 2, PARAMS, AXIS),
        (jc.direct(jc.identity()), PARAMS, 2, AXIS),
    ],
)
def test_arguments_of_init_state_in_another_order(arguments):
    with pytest.raises(TypeError, match=r"call it as init_state\(tx, params, mesh, axis_name\)"):
        jc.init_state(*arguments)


def test_the_mean_stands_before_the_optimizer():
    """Behind it, moments would be each worker's own, and all but the first worker's lost."""
    for tx in (optax.chain(optax.adam(0.1), MEAN), optax.chain(optax.chain(optax.trace(0.9)), optax.chain(MEAN))):
        with pytest.raises(ValueError, match=r"Put it first: optax\.chain\(jc\.compressed_mean"):
            jc.init_state(tx, PARAMS, 2, AXIS)
        with pytest.raises(ValueError, match=r"Put it first: optax\.chain\(jc\.compressed_mean"):
            jc.init_state(tx, PARAMS, mesh_of(2), AXIS)
    jc.init_state(optax.chain(optax.clip(1.0), optax.scale_by_schedule(lambda t: 1.0), MEAN), PARAMS, 2, AXIS)


def test_a_single_spec_stands_for_all_parameters():
    mesh = mesh_of(2)
    state, specs = jc.init_state(MEAN, PARAMS, mesh, AXIS, P())
    again, whole = jc.init_state(MEAN, PARAMS, mesh, AXIS, jax.tree.map(lambda _: P(), PARAMS))
    assert specs == whole
    assert jax.tree.structure(state) == jax.tree.structure(again)
    with pytest.raises(ValueError, match="specs must be a tree of PartitionSpecs like params, or a prefix of it"):
        jc.init_state(MEAN, PARAMS, mesh, AXIS, {"w": P()})


def test_what_a_mask_leaves_out_stays_each_workers_own():
    tx = optax.masked(MEAN, {"b": False, "w": True})
    with pytest.raises(ValueError, match=r"optax\.masked leaves gradients\['b'\] out.*jc\.by_path"):
        traced(tx)
    labels = {"b": "x", "w": "y"}
    assert traced(optax.multi_transform({"x": MEAN, "y": MEAN}, labels))["b"].shape == (5,)
    assert traced(jc.compressed_mean(jc.by_path({"b": jc.identity(), "w": jc.identity()}), AXIS))["b"].shape == (5,)


def test_a_condition_stands_behind_the_mean():
    every_second = lambda step: step % 2 == 0
    for condition in (optax.conditionally_transform, optax.conditionally_mask):
        with pytest.raises(ValueError, match=r"conditionally_.* Put the condition behind the mean"):
            traced(condition(MEAN, every_second))
    behind = optax.chain(MEAN, optax.conditionally_mask(optax.sgd(0.1), every_second))
    assert traced(behind)["b"].shape == (5,)


def test_sums_over_micro_batches_start_as_each_workers_own():
    """A scan from plain zeros is refused by JAX, which names the type; the text of `per_worker` has the cure."""
    xs = jnp.arange(8.0).reshape(4, 2)

    def step(start):
        def run(x):
            params = jc.per_worker(jnp.ones(()), AXIS)
            add = lambda total, one: (total + jax.grad(lambda w: w * one)(params), None)
            total, _ = jax.lax.scan(add, start(jnp.zeros(())), x[0])
            tx = jc.compressed_mean(jc.direct(jc.identity()), AXIS)
            return tx.update({"w": total}, tx.init({"w": jnp.ones(())}))[0]["w"]

        return jax.jit(jax.shard_map(run, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P()))

    with pytest.raises(TypeError, match=r"pcast\(.*'data'"):
        step(lambda zeros: zeros).lower(xs)
    np.testing.assert_allclose(step(lambda zeros: jc.per_worker(zeros, AXIS))(xs), xs.sum(1).mean())
    assert "jc.per_worker(zeros, axis_name)" in jc.per_worker.__doc__


def test_a_state_of_other_workers_is_handed_on():
    """Saved by four, restored to two: the rows of two workers at each."""
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), AXIS)
    saved, _ = jc.init_state(tx, PARAMS, 4, AXIS)
    new, specs = jc.init_state(tx, PARAMS, mesh_of(2), AXIS)
    step = lambda s, g: tx.update(at(g), s)[0]
    step = jax.shard_map(step, mesh=mesh_of(2), in_specs=(specs, P(AXIS)), out_specs=P())
    with pytest.raises(ValueError, match=r"hand one that other workers saved on by jc\.redistribute\(old, new\)"):
        jax.eval_shape(step, saved, GRADS)
    assert jax.eval_shape(step, jc.redistribute(saved, new), GRADS)["b"].shape == (5,)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


def test_a_model_is_not_copied():
    """Statistics that the loss changes in a copy never move; of a model that is split they are an output."""
    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"copy of Model .*nnx\.split.*jc\.value_and_grad\(loss, algorithm, wrt="):
        jc.per_worker(model, AXIS)
    with pytest.raises(TypeError, match="copy of Model"):
        jc.per_worker({"model": model}, AXIS)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    merged = nnx.merge(graph, jc.per_worker(params, None), rest)
    merged(jnp.ones((4, 3)))
    assert float(jnp.max(jnp.abs(nnx.split(merged, nnx.Param, ...)[2]["norm"]["mean"][...]))) > 0


def test_what_a_round_cost_is_a_table():
    tx = jc.compressed_mean(jc.direct(jc.top_k(k=1)), AXIS)
    state, step = vmap_step(tx, PARAMS, 2)
    _, state = step(state, GRADS)
    found, each = jc.info(state), jc.info(state, each=True)
    lines = str(found).splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(found._fields[:-3])  # of the last round, not of all
    assert repr(found) == str(found)
    assert lines[3].endswith("not measured")
    assert str(each).splitlines()[0].split() == ["worker", "0", "1"]
    assert len(jax.tree.leaves(found)) == 13
    assert jax.jit(lambda s: str(jc.info(s)).startswith("Info(lane_bytes=") + 0)(state) == 1
    plain = json.loads(json.dumps(found.as_dict()))
    assert (plain["relative_error"], plain["route"], plain["dense"]) == (None, "sum", 17)
    assert plain["lane_bytes"] == float(found.lane_bytes)
    assert each.as_dict()["route"] == ["sum", "sum"]


REFUSED = {
    "axis": (lambda: jc.compressed_mean(jc.direct(jc.identity()), 3), r"axis_name must be the name .* got 3"),
    "axes": (lambda: jc.compressed_mean(jc.direct(jc.identity()), (AXIS, 3)), r"axis_name must be the name .*, 3\)"),
    "complex": (
        lambda: MEAN.init({"w": jnp.ones(3, jnp.complex64)}),
        r"\['w'\] has dtype complex64.*optax\.contrib\.split_real_and_imaginary",
    ),
    "has_aux": (
        lambda: jc.worker_value_and_grad(lambda w, x: (jnp.sum(w * x), x), mesh_of(2))(jnp.ones(3), jnp.ones((2, 3))),
        "the loss must return a number; got a tuple.*[Ss]ay has_aux=True",
    ),
    "sam": (
        lambda: traced(optax.contrib.sam(optax.chain(MEAN, optax.sgd(0.1)), optax.sgd(0.1))),
        r"optax\.contrib\.sam around an exchange",
    ),
    "zero_nans": (lambda: traced(optax.chain(optax.zero_nans(), MEAN)), r"ZeroNansState.*before=transformation"),
    "fetch_sgd": (
        lambda: jax.eval_shape(
            jc.compressed_mean(jc.fetch_sgd(0.01), None).init, jax.ShapeDtypeStruct((2**31 + 5,), jnp.float32)
        ),
        r"at most 2\^31 - 1 entries share a sketch.*got 2147\d*.*jc\.by_path",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_refused_by_something_else_is_named(name):
    call, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=said):
        call()
