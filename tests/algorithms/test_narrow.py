"""Memories in bfloat16 and in 8 bits, of every method that has one."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jitted import made_for, traced_for
from variants import variants
from worlds import assert_same, at, mesh_of, run_shard_map, run_vmap, vmap_step

import jaxcomp as jc
from jaxcomp.algorithms.narrow import BLOCK, MEMORIES, Narrow, remembered_in
from jaxcomp.base import Algorithm, Sum

AXIS = "data"
TREE = {"b": jnp.zeros(5), "w": jnp.zeros((48, 96))}
NARROW = MEMORIES[1:]
# memory -> transformation; fields of the state that are kept in it; rounds before they are rounded for the first time
METHODS = {
    "error_feedback": (lambda m: mean(jc.error_feedback(jc.top_k(0.1), memory=m)), ["memory"], 1),
    "sparse_loco": (lambda m: mean(jc.sparse_loco(k=8, chunk=256, memory=m)), ["memory"], 1),
    "power_sgd": (lambda m: mean(jc.power_sgd(2, memory=m)), ["memory"], 1),
    "ef21": (lambda m: mean(jc.ef21(jc.top_k(0.1), momentum=0.5, whole_start=False, memory=m)), ["memory"], 1),
    "error_feedback(int4)": (lambda m: mean(jc.error_feedback(jc.block_scaled("int4"), memory=m)), ["memory"], 1),
    "loco": (lambda m: mean(jc.loco(jc.block_scaled("int4"), memory=m)), ["memory"], 1),
    "momentum_correction": (
        lambda m: mean(jc.contrib.momentum_correction(jc.top_k(0.1), memory=m)),
        ["velocity", "momentum"],
        1,
    ),
    "demo": (lambda m: jc.demo(0.1, AXIS, k=8, chunk=16, memory=m), ["memory"], 1),
    "onebit_adam": (lambda m: jc.onebit_adam(0.1, AXIS, freeze_step=1, memory=m), ["memory"], 2),
    "zero_one_adam": (lambda m: jc.zero_one_adam(0.1, AXIS, freeze_step=1, memory=m), ["memory"], 1),
}


def mean(algorithm):
    return jc.compressed_mean(algorithm, AXIS)


@functools.cache
def made(method, memory):
    """One transformation for all tests, whose step is compiled once."""
    return METHODS[method][0](memory)


def gradients(seed, rounds, dtype=np.float32):
    rng = np.random.default_rng(seed)
    make = lambda x: rng.standard_normal((rounds, 2, *x.shape)) * np.exp(rng.standard_normal(x.shape))
    return jax.tree.map(lambda x: jnp.asarray(make(x), dtype), TREE)


def of_workers(method, tx, grads):
    """Directions and the state after rounds among two workers."""
    if method != "zero_one_adam":
        return run_vmap(tx, TREE, grads)
    state, axes = jc.init_state(tx, TREE, 2, AXIS)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), TREE)
    run = jax.vmap(lambda s, g, x: tx.update(g, s, x), (axes, 0, 0), (0, axes), axis_name=AXIS)
    found, step = [], jax.jit(run)
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        out, state = step(state, at(grads, t), rows)
        found.append(out)
    return jax.tree.map(lambda *each: jnp.stack(each), *found), state


def fields_of(state, fields):
    """Their arrays, as numbers."""
    if not hasattr(state, "local"):
        (state,) = [
            one for one in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "local")) if hasattr(one, "local")
        ]
    is_narrow = lambda node: isinstance(node, Narrow)
    found = [x for field in fields for x in getattr(state.local.algorithm, field)]
    assert found
    return [(x.values() if is_narrow(x) else x, x) for x in jax.tree.leaves(found, is_leaf=is_narrow)]


def steps_of(values, kind):
    """How far the two numbers are apart between which one is rounded."""
    values = np.abs(np.asarray(values, np.float64))
    if kind == "bfloat16":
        return np.exp2(np.floor(np.log2(np.maximum(values, 2.0**-126))) - 7)
    *lead, d = values.shape
    rows = np.pad(values, [(0, 0)] * len(lead) + [(0, -d % BLOCK)]).reshape(*lead, -1, BLOCK)
    return np.repeat(rows.max(-1) / 127, BLOCK, axis=-1)[..., :d]


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("method", variants(list(METHODS), {"error_feedback", "power_sgd", "onebit_adam"}))
def test_what_is_remembered_is_what_was_not_sent_rounded_up_or_down(method, kind, seed):
    """A first message finds empty memories, so all is equal but for the rounding at the end of its round."""
    _, fields, rounds = METHODS[method]
    grads = gradients(seed, rounds)
    check_first_round(fields, *(of_workers(method, made(method, memory), grads) for memory in ("float32", kind)), kind)


def on_gpu(method, memory, grads):
    """`of_workers`, each step of it in the form for GPUs."""
    first, step = for_gpu(method, memory)
    state, found = first(), []
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        out, state = step(at(grads, t), state)
        found.append(out)
    return jax.tree.map(lambda *each: jnp.stack(each), *found), state


@functools.cache
def for_gpu(method, memory):
    """What makes a first state, and a step, as a program for GPUs has them."""
    tx, shapes = made(method, memory), at(gradients(0, 1))
    with traced_for("gpu"):
        first = jax.jit(lambda: jc.init_state(tx, TREE, 2, AXIS)[0]).lower().compile()
        _, axes = jc.init_state(tx, TREE, 2, AXIS)
        run = jax.vmap(lambda g, s: tx.update(g, s, TREE), in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
        step = jax.jit(run).lower(shapes, jax.eval_shape(lambda: jc.init_state(tx, TREE, 2, AXIS)[0])).compile()
    return first, step


# On GPUs the numbers that are remembered are computed anew by those who read them.
@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("method", ["error_feedback(int4)", "loco"])
def test_the_form_for_gpus_remembers_the_same(method, kind, seed):
    _, fields, rounds = METHODS[method]
    check_first_round(fields, *(on_gpu(method, memory, gradients(seed, rounds)) for memory in ("float32", kind)), kind)
    several = gradients(seed + 1, 3)
    (_, here), (_, there) = (
        each(several)
        for each in (functools.partial(of_workers, method, made(method, kind)), functools.partial(on_gpu, method, kind))
    )
    for (a, _), (b, _) in zip(fields_of(here, fields), fields_of(there, fields), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert (np.abs(a - b) <= 1.001 * steps_of(a, kind)).all()
        assert np.mean(a != b) < 0.01


class TwoFields(NamedTuple):
    velocity: tuple
    momentum: tuple


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", NARROW)
def test_each_field_has_scales_of_its_own(kind, platform, seed):
    """Of two fields whose names are not in the order of the alphabet, and whose sizes are far apart."""

    def init(here, like):
        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in like)
        return TwoFields(zeros, zeros)

    def update(here, grads, state):
        total = yield Sum(grads)
        return total, TwoFields(tuple(1000 * g for g in grads), tuple(grads))

    inside = Algorithm(init, update, {"velocity": "memory", "momentum": "memory"}, jc.block_scaled("int4"))
    tx, grads = mean(remembered_in(kind, inside, "velocity", "momentum")), gradients(seed, 1)
    run = functools.partial(of_workers, "error_feedback", tx)
    _, state = made_for("gpu", run, grads) if platform == "gpu" else run(grads)
    large, small = ([x for x, _ in fields_of(state, [field])] for field in ("velocity", "momentum"))
    for a, b in zip(large, small, strict=True):
        assert np.max(np.abs(b)) > 0
        error = np.abs(np.asarray(a, np.float64) / 1000 - np.asarray(b, np.float64))
        assert (error <= 2.002 * steps_of(b, kind)).all()


def test_on_gpus_a_dense_code_is_run_again_and_a_sparse_one_is_not():
    def runs(compressor):
        algorithm, count = jc.error_feedback(compressor), 0

        def update(here, grads, state):
            nonlocal count
            count += 1
            return (yield from algorithm.update(here, grads, state))

        tx = mean(remembered_in("int8", algorithm._replace(update=update)))
        made_for("gpu", functools.partial(of_workers, "error_feedback", tx), gradients(0, 1))
        return count

    once = runs(jc.top_k(0.1))
    assert runs(jc.block_scaled("int4")) == 3 * once


def check_first_round(fields, wide, narrow, kind):
    assert_same(wide[0], narrow[0])
    pairs = zip(fields_of(wide[1], fields), fields_of(narrow[1], fields), strict=True)
    largest = 0.0
    for (exact, _), (rounded, stored) in pairs:
        exact = np.reshape(exact, (*rounded.shape[:-1], -1))  # of each group a vector
        bytes_of = sum(x.nbytes for x in jax.tree.leaves(stored))
        assert bytes_of <= {"bfloat16": 2, "int8": 1 + 4 / BLOCK}[kind] * rounded.size
        assert not np.any(rounded[..., exact.shape[-1] :])
        rounded = rounded[..., : exact.shape[-1]]
        assert isinstance(stored, Narrow)
        assert stored.kind == kind
        error = np.abs(np.asarray(rounded, np.float64) - np.asarray(exact, np.float64))
        assert (error <= 1.001 * steps_of(exact, kind)).all()
        largest = max(largest, error.max())
    assert largest > 0


@pytest.mark.parametrize("kind", NARROW)
def test_in_the_mean_nothing_is_lost(kind, seed):
    """Sent + remembered = what came, but for the roundings of all rounds: none is off by more than a step, with a
    variance of at most a quarter of its square.
    """
    grads, tx = gradients(seed, 30), mean(jc.error_feedback(jc.top_k(0.1), memory=kind))
    state, step = vmap_step(tx, TREE, 2)
    sent, variance = 0.0, 0.0
    for t in range(30):
        direction, state = step(state, at(grads, t))
        ((memory, _),) = [pair for pair in fields_of(state, ["memory"]) if pair[0].shape[-1] == 48 * 96]
        memory = np.asarray(memory, np.float64).reshape(2, -1)
        sent = sent + np.asarray(direction["w"], np.float64).ravel()
        variance = variance + (steps_of(memory, kind) ** 2).sum(0) / 4 / 2**2
    error = sent + memory.mean(0) - np.asarray(grads["w"], np.float64).sum((0, 1)).ravel() / 2
    deviations = error / np.sqrt(variance)
    assert 0.2 < np.sqrt(np.mean(deviations**2)) < 1.1
    assert abs(deviations.mean()) < 5 / np.sqrt(error.size)


@pytest.mark.parametrize("kind", NARROW)
def test_rounding_has_no_bias_and_stays_finite(kind, key, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 300)), jnp.float32)
    draws = jax.jit(jax.vmap(lambda key: Narrow.of(x, key, kind).values(300)))(jax.random.split(key, 4000))
    error = np.abs(np.asarray(draws, np.float64).mean(0) - np.asarray(x, np.float64))
    assert (error < 6 * steps_of(x, kind) / 2 / np.sqrt(4000) + 1e-12).all()
    largest = float(jnp.finfo(jnp.float32).max)
    edge = jnp.asarray([[largest, -largest, 0.0, 1e-45, largest / 3]], jnp.float32)
    found = np.asarray(Narrow.of(edge, key, kind).values())
    assert np.isfinite(found).all()
    assert found[0, 0] > 0.99 * largest
    assert found[0, 2] == 0
    np.testing.assert_allclose(Narrow.of(np.asarray(x), kind=kind).values(300), x, atol=4 / 127)


def test_f64_gradients_are_remembered_in_few_bits_too(seed):
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float64), TREE)
        for kind in NARROW:
            tx = mean(jc.error_feedback(jc.top_k(0.1), memory=kind))
            directions, state = run_vmap(tx, tree, gradients(seed, 2, np.float64))
            assert directions["w"].dtype == jnp.float64
            assert all(values.dtype == jnp.float64 for values, _ in fields_of(state, ["memory"]))


def test_training_goes_on(seed):
    """A memory in few bits in value_and_grad."""
    x = jax.random.normal(jax.random.key(seed), (8, 48))
    params, loss = {"w": jnp.zeros((48, 96))}, lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
    mesh = jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2])
    step = jc.value_and_grad(loss, jc.error_feedback(jc.top_k(0.1), memory="bfloat16"), mesh, AXIS)
    opt, run = optax.sgd(0.5), jax.jit(step)
    state, inner, values = step.init(params), opt.init(params), []
    for _ in range(30):
        value, grads, state = run(params, state, x)
        updates, inner = opt.update(grads, inner)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    assert values[-1] < 0.2 * values[0]


@pytest.mark.parametrize("kind", NARROW)
def test_short_axes_cost_no_more(kind):
    """Blocks of 128 go over the whole group: kernels of 3 x 3 are not filled up to 128 along each row."""
    params = {"k": jnp.zeros((64, 32, 3, 3)), "c": jnp.zeros((4096, 1))}
    tx = jc.compressed_mean(jc.power_sgd(2, dense_below=0, min_ratio=1, memory=kind), None)
    state = jax.eval_shape(tx.init, params)
    memory = state.local.algorithm.memory
    entries = sum(x.size for x in jax.tree.leaves(params))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory))
    assert held <= {"bfloat16": 2.0, "int8": 1.04}[kind] * entries
    by_leaf = jax.eval_shape(lambda state: jc.state.by_leaf(state, state.local.algorithm.memory), state)
    assert jax.tree.map(lambda x: x.shape, by_leaf) == {"c": (1, 4096, 1), "k": (1, 64, 32, 3, 3)}


@pytest.mark.parametrize("kind", NARROW)
def test_the_same_bits_in_every_world(kind, seed):
    """Products of codes and scales are exact, so no compiler contracts them into another sum."""
    grads, tx = gradients(seed, 3), mean(jc.error_feedback(jc.top_k(0.1), memory=kind))
    assert_same(*(run(tx, TREE, grads)[0] for run in (run_vmap, run_shard_map)))


@pytest.mark.parametrize(("axes", "spec"), [((4,), P(AXIS)), ((2, 2), P(None, "model"))], ids=["fsdp", "tensor"])
def test_parameters_that_are_cut(axes, spec, key):
    """Over four workers themselves, a memory of 8 bits for each of them is as large as a shard in f32."""
    mesh = mesh_of(axes)
    params = {"w": jax.device_put(jax.random.normal(key, (64, 64)) / 8, NamedSharding(mesh, spec))}
    x, loss = jax.random.normal(key, (16, 64)), lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
    step = jc.value_and_grad(loss, jc.error_feedback(jc.dithering(127), memory="int8"), mesh, AXIS)
    state, run, values = step.init(params), jax.jit(step), []
    for _ in range(20):
        value, grads, state = run(params, state, x)
        params = jax.tree.map(lambda p, g: p - 2 * g, params, grads)
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]
    assert params["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / len(jax.devices()[:4])
    assert held < 1.2 * params["w"].nbytes / 4


def test_an_unknown_memory_is_named():
    for make, _, _ in METHODS.values():
        with pytest.raises(ValueError, match="memory must be one of 'float32', 'bfloat16', 'int8'"):
            make("int4")
    with pytest.raises(ValueError, match="without momentum"):
        jc.ef21(jc.top_k(0.1), memory="int8")
    with pytest.raises(ValueError, match="without error feedback"):
        jc.power_sgd(2, error_feedback=False, memory="int8")
    assert repr(jc.error_feedback(jc.top_k(0.1), memory="int8")) == "<algorithm error_feedback of top_k(0.1)>"
