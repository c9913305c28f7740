"""Equal vectors that are compressed together send what each would send by itself; norms up to the order of a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants

import jaxcomp as jc
from jaxcomp import backend
from jaxcomp.compressors.rows import compress_together
from jaxcomp.exchange import collectives, driver
from jaxcomp.groups import LARGE

WORKERS = 3
SHAPES = {
    **{f"w{i}": (LARGE // 512, 512) for i in range(3)},
    **{f"v{i}": (LARGE + 1024,) for i in range(2)},
    "b": (7,),
}
ALGORITHMS = {
    "direct": lambda: jc.direct(jc.dithering(7)),
    "largest": lambda: jc.direct(jc.dithering(9, norm="inf", norm_dtype="bfloat16")),
    "diana": lambda: jc.diana(jc.dithering(7)),
    "memory": lambda: jc.error_feedback(jc.dithering(15)),
    "by_path": lambda: jc.by_path({".*w.*": jc.direct(jc.dithering(7)), ".*": jc.diana(jc.dithering(7))}),
}


def rounds_of(algorithm, monkeypatch, most, dtype=jnp.float32, under=None, **options):
    """Directions of two rounds and the state afterwards, as traced for GPUs; at most so many vectors together."""
    for module in (backend, collectives):
        monkeypatch.setattr(module, "platform", lambda mesh=None: "gpu")
    monkeypatch.setattr(driver, "rows_at_once", lambda: most)
    stacks = []  # of how many vectors
    together = lambda c, keys, xs, state: stacks.append(len(xs)) or compress_together(c, keys, xs, state)
    monkeypatch.setattr(driver, "compress_together", together)
    rng = np.random.default_rng(0)
    tx = jc.compressed_mean(algorithm(), "data", **options)
    params = {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}
    grads = [
        {k: jnp.asarray(rng.normal(size=(WORKERS, *s)), dtype).at[:, 0].set(jnp.nan) for k, s in SHAPES.items()}
        for _ in range(2)
    ]
    found = []
    if under == "vmap":
        state = jax.vmap(lambda _: tx.init(params), axis_name="data", axis_size=WORKERS)(jnp.arange(WORKERS))
        step = jax.jit(jax.vmap(tx.update, axis_name="data"))
    else:
        mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
        state, specs = jc.init_state(tx, params, mesh, "data")
        update = lambda g, state: tx.update(jax.tree.map(lambda x: x[0], g), state)
        step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(jax.P("data"), specs), out_specs=(jax.P(), specs)))
        grads = [jax.device_put(g, jax.NamedSharding(mesh, jax.P("data"))) for g in grads]
    for g in grads:
        direction, state = step(g, state)
        found.append(direction)
    assert bool(stacks) == (most > 1)
    assert all(1 < count <= most for count in stacks)
    return jax.tree.leaves((found, state))


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"largest", "diana", "memory"}))
def test_vectors_are_compressed_as_each_by_itself(name, monkeypatch):
    """Of these shapes bit for bit: norms are added up in the same order. XLA may contract a shift's product and sum."""
    each, together = (rounds_of(ALGORITHMS[name], monkeypatch, most) for most in (1, 16))
    near = 1e-6 if name in ("diana", "by_path") else 0
    for x, y in zip(each, together, strict=True):
        np.testing.assert_allclose(x, y, rtol=near, atol=near)


@pytest.mark.parametrize("case", ["two weighted", "buckets", "vmap in bfloat16"])
def test_together_in_other_ways(case, monkeypatch):
    options = {
        "two weighted": {"weights": [1, 2, 3]},
        "buckets": {"bucket_bytes": 8 * LARGE},
        "vmap in bfloat16": {"under": "vmap", "dtype": jnp.bfloat16},
    }
    of = lambda most: rounds_of(ALGORITHMS["memory"], monkeypatch, most, **options[case])
    for x, y in zip(of(1), of(2 if case == "two weighted" else 16), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("under", [None, "vmap"])
def test_keys_are_used_once(under, monkeypatch):
    """Where that is checked no error is raised, and the numbers are those without the check."""
    of = lambda: rounds_of(ALGORITHMS["direct"], monkeypatch, 16, under=under)
    with jax.debug_key_reuse(True):
        checked = of()
    for x, y in zip(checked, of(), strict=True):
        np.testing.assert_array_equal(x, y)


def test_only_on_gpus():
    assert backend.rows_at_once() == 1


STACKED = {
    "top_k": jc.top_k(0.05),
    "sidco": jc.sidco(0.05),
    "skcompress": jc.skcompress(jc.top_k(0.05)),
    "dithering": jc.dithering(15),
    "int4": jc.block_scaled("int4"),
}


@pytest.mark.parametrize("name", STACKED)
def test_rows_of_a_stack_at_once_are_those_of_a_cpu_in_turn(name, monkeypatch):
    """Also where types tell what differs between workers: there JAX cannot map a `lax.cond` whose operands do not
    differ while its condition does."""
    tx = jc.compressed_mean(jc.error_feedback(jc.per_leaf(STACKED[name])), "data")
    like = {f"w{i}": jnp.zeros((64, 64)) for i in range(3)}
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    drawn = np.round(32 * np.random.default_rng(0).normal(size=(WORKERS, 64, 64)))  # sums of squares are exact
    grads = {leaf: ((i + 1) * drawn).astype(np.float32) for i, leaf in enumerate(like)}
    found = []
    for target in ("cpu", "gpu"):
        monkeypatch.setattr(backend, "platform", lambda mesh=None: target)  # noqa: B023
        state, specs = jc.init_state(tx, like, mesh, "data")
        update = lambda g, state: tx.update(jax.tree.map(lambda x: x[0], g), state)
        step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(jax.P("data"), specs), out_specs=(jax.P(), specs)))
        out, state = step(jax.device_put(grads, jax.NamedSharding(mesh, jax.P("data"))), state)
        found.append((out, state.local))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("how", ["vmap", "stack"])
def test_dagc_with_sidco_is_mapped_on_a_gpu(how, monkeypatch):
    """Its ratio differs between workers, and so between rows that are mapped."""
    compressor = jc.dagc([1, 2, 3], 0.05, sparsifier=jc.sidco)
    compressor = jc.per_leaf(compressor) if how == "stack" else compressor
    tx = jc.compressed_mean(jc.error_feedback(compressor), "data")
    like = {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 64))}
    draw = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=(3, *x.shape)), x.dtype), like)
    found = []
    for target in ("cpu", "gpu"):
        monkeypatch.setattr(backend, "platform", lambda mesh=None: target)  # noqa: B023
        state, axes = jc.init_state(tx, like, 3, "data")
        step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
        found.append(jax.jit(step)(grads, state)[0])
    jax.tree.map(np.testing.assert_array_equal, *found)
