"""A run under each flag of JAX is a run like any other: every method by every flag."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jitted import traced_for
from laws import AXIS, FACTORIES, METHODS, params_of
from variants import variants
from worlds import assert_same, at, mesh_of

import jaxcomp as jc
from jaxcomp import select_cpu
from jaxcomp.base import accumulate

N = 2


@contextlib.contextmanager
def strict():
    """All that says no while a program is traced, at once."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
        jax.debug_key_reuse(True),
        jax.enable_custom_prng(True),
    ):
        yield


@contextlib.contextmanager
def watched():
    """All that says no, while a program is traced and while it runs: what passes under all passes under each."""
    with strict(), jax.debug_nans(True), jax.transfer_guard("disallow"):
        yield


FLAGS = {
    "watched": watched,
    "x64": lambda: jax.enable_x64(True),
    "old threefry": lambda: jax.threefry_partitionable(False),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "no jit": jax.disable_jit,
}


def made(name, world):
    """A method among two workers: init() -> state, step(state, gradients [n, ...]) -> (direction, state), gradients."""
    tx, params = METHODS[name](), params_of(name)
    where, specs = mesh_of(N) if world == "shard_map" else N, []

    def init():
        state, found = jc.init_state(tx, params, where, AXIS)
        specs.append(found)
        return state

    def update(state, grads):
        if isinstance(tx, jc.methods.RoundFunctions):
            state, _ = tx.step(state, lambda x: jax.tree.map(jnp.add, x, grads))
            return tx.point(state), state
        # Parameters that a method of local steps moves are each worker's own.
        return tx.update(grads, state, jc.per_worker(params, AXIS))

    def at_device(state, grads):
        out, state = update(state, at(grads))
        return jax.tree.map(lambda x: jc.per_worker(x, AXIS)[None], out), state

    def step(state, grads):
        if world == "vmap":
            run = jax.vmap(update, in_axes=(specs[-1], 0), out_axes=(0, specs[-1]), axis_name=AXIS)
        else:
            ins, outs = (specs[-1], P(AXIS)), (P(AXIS), specs[-1])
            run = jax.shard_map(at_device, mesh=where, in_specs=ins, out_specs=outs)
        return run(state, grads)

    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.standard_normal((N, *p.shape)).astype(p.dtype), params)
    return init, jax.jit(step), grads


def test_every_method_has_a_row():
    algorithms = {"by_path", "diana", "direct", "ef21", "error_feedback", "fetch_sgd", "loco", "majority_vote"}
    algorithms |= {"power_sgd", "sparse_loco", "demo", "local_updates", "onebit_adam", "zero_one_adam", "flat"}
    algorithms |= {"momentum_correction", "per_leaf", *jc.methods.__all__} - {"RoundFunctions", "rounds"}
    assert set(FACTORIES) | algorithms == set(METHODS)


@pytest.mark.parametrize("world", variants(["shard_map", "vmap"], {"shard_map"}))
@pytest.mark.parametrize("name", METHODS)
def test_what_says_no_while_tracing_says_nothing(name, world):
    """Implied ranks and dtypes, tracers that stay, keys that are used twice, in the first state and in a step.

    Nor has the first state a NaN, which would end a run under jax_debug_nans.
    """
    with strict():
        init, step, grads = made(name, world)
        state = jax.eval_shape(init)
        direction, after = jax.eval_shape(step, state, grads)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert jax.tree.structure(direction) == jax.tree.structure(params_of(name))
    with jax.debug_nans(True):
        assert jc.info(METHODS[name]().init(params_of(name))).rounds == 0


LONG = {  # compressors with forms for backends that short vectors do not reach
    "dithering": lambda: jc.dithering(7),
    "many levels": lambda: jc.dithering(300, norm="inf"),
    "natural": jc.natural,
    "terngrad": jc.terngrad,
    "sign": jc.sign,
    "int4": lambda: jc.block_scaled("int4", rounding="stochastic"),
    "mxfp4": lambda: jc.block_scaled("mxfp4"),
    "nvfp4": lambda: jc.block_scaled("nvfp4"),
    "binned": lambda: jc.binned(2),
    "eden": lambda: jc.eden(4),
    "top_k": lambda: jc.top_k(0.01),
    "sidco": lambda: jc.sidco(0.01),
    "rand_k": lambda: jc.rand_k(0.01),
    "rows": lambda: jc.compose(jc.chunked(jc.top_k(k=64), 4096), jc.binned(2, blocks=1)),
    "dct": lambda: jc.dct(jc.top_k(k=8), 64),
    "skcompress": lambda: jc.skcompress(jc.top_k(0.1)),
    "recentred": lambda: jc.skcompress(jc.top_k(0.1), mode="recentred"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("name", LONG)
def test_no_backend_implies_ranks_or_dtypes(name, platform):
    """Of a vector of whole tiles, of two such messages added up, and of one that is longer."""
    compressor = LONG[name]()

    def run(key, x):
        state = compressor.init(key, x)
        message = lambda key, x: compressor.compress(key, x, state)[0]
        both = jax.vmap(message)(jax.random.split(key), jnp.stack([x, -x]))
        one = compressor.decompress(jax.tree.map(lambda a: a[0], both), state.shared, x)
        return one, accumulate(compressor, jax.ShapeDtypeStruct(x.shape, x.dtype), both, jnp.ones(2), state.shared)

    for size in (17 * 4096, 17 * 4096 + 77):
        with traced_for(platform), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            one, total = jax.eval_shape(run, jax.random.key(0), jax.ShapeDtypeStruct((size,), jnp.float32))
        assert one.shape == total.shape == (size,)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["shard_map", "vmap"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", METHODS)
def test_two_rounds(name, flag, world):
    with FLAGS[flag]():
        with jax.transfer_guard("allow"):
            init, step, grads = made(name, world)
            state = init()
            where = jax.NamedSharding(mesh_of(N), P(AXIS)) if world == "shard_map" else jax.devices()[0]
            grads = jax.device_put(grads, where)
        for _ in range(2):
            direction, state = step(state, grads)
        with jax.transfer_guard("allow"):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(direction))
            assert jc.info(state).lane_bytes > 0


@pytest.mark.parametrize("name", ["top_k", "dithering", "bf16", "power_sgd"])
def test_axes_of_one_device_that_jax_leaves_out_of_types(name):
    """As MaxText asks for: workers along (4, 1) exchange as those along (4,) do."""
    algorithms = {
        "top_k": jc.error_feedback(jc.top_k(0.1)),
        "dithering": jc.direct(jc.dithering(7)),
        "bf16": jc.error_feedback(jc.cast("bfloat16")),
        "power_sgd": jc.power_sgd(1),
    }
    params, x = {"w": jnp.ones((64, 64))}, jax.random.normal(jax.random.key(0), (8, 64))
    loss, found = lambda p, x: jnp.mean((x @ p["w"]) ** 2), {}
    before = jax.config.jax_remove_size_one_mesh_axis_from_type
    for flag in (False, True):
        jax.config.update("jax_remove_size_one_mesh_axis_from_type", flag)
        try:
            mesh = mesh_of((4, 1), ("data", "fsdp"))
            step = jc.value_and_grad(loss, algorithms[name], mesh, ("data", "fsdp"))
            found[flag] = jax.jit(step)(params, step.init(params), x)[:2]
        finally:
            jax.config.update("jax_remove_size_one_mesh_axis_from_type", before)
    assert_same(*found.values())


def test_loops_that_are_not_compiled():
    """Without jit the number of a turn is a number of Python: searches in programs for CPUs find the same."""
    words, bits = jnp.array([0b1101, 0b11], jnp.uint32), jnp.arange(40, dtype=jnp.uint32)
    with jax.disable_jit():
        np.testing.assert_array_equal(select_cpu.first_bits(words, jnp.int32(4)), [0b1101, 0b1])
        assert select_cpu.reached_by(bits, jnp.int32(3)) == 37
