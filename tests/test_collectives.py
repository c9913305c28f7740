"""The drop-in collectives: those of `lax`, within the rounding of the wire, differentiable, for their bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, at, mesh_of

from jaxcomp.base import State
from jaxcomp.collectives import all_gather, pmean, psum_scatter
from jaxcomp.compressors.block_scaled import block_scaled
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.tree import per_leaf
from jaxcomp.ledger import ledger

N = 4


def shard(fn, out, check_vma=True):
    spec = P(AXIS)
    return jax.jit(jax.shard_map(fn, mesh=mesh_of(N), in_specs=spec, out_specs=out, check_vma=check_vma))


WIRES = [None, "bfloat16", cast("float8_e4m3fn"), natural()]


@pytest.mark.sampled
@pytest.mark.parametrize("wire", WIRES, ids=["plain", "bf16", "fp8", "natural"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_pmean_and_its_gradient(wire, check_vma, seed, key):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((N, 6, 64)), jnp.float32)

    def both(mean):
        def run(x):
            gradient = jax.grad(lambda x: jnp.sum(jnp.sin(mean(x))))(x[0])
            return mean(x[0]), gradient

        step = shard(run, (P(), P(AXIS)), check_vma)
        one = shard(lambda x: mean(x[0]), P(), check_vma)
        return jax.block_until_ready(step(x)), ledger(one, x).total_bytes

    (want, gradient), dense = both(lambda x: lax.pmean(x, AXIS))
    (got, back), sent = both(lambda x: pmean(x, AXIS, wire=wire, key=key))
    # the error of one rounding, for each of the two: relative to the norm, mean over entries
    error = {"plain": 1e-6, "bf16": 2**-9, "fp8": 2**-4, "natural": 8**-0.5}
    name = "plain" if wire is None else wire if isinstance(wire, str) else wire.spec.name
    allowed = 2 * error[{"bfloat16": "bf16", "natural": "natural", "plain": "plain"}.get(name, "fp8")]
    norm = lambda a: float(np.linalg.norm(np.asarray(a, np.float64)))
    assert norm(got - want) <= allowed * norm(np.asarray(x)) / np.sqrt(N)
    assert norm(back - gradient) <= 2 * allowed * norm(gradient)
    assert norm(got) > 0.5 * norm(want)
    expected = {"plain": 1, "bfloat16": 1 / 2, "natural": 9 / 32}.get(name, 1 / 4)
    assert sent / dense == pytest.approx(expected, rel=0.07)


def test_what_is_not_finite_is_seen_as_in_lax():
    x = jnp.array([[1.0, jnp.nan, jnp.inf], [1.0, 2.0, 3.0]])
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(jax.vmap(lambda x: pmean(x, AXIS), axis_name=AXIS, out_axes=None))(x.astype(dtype))
        np.testing.assert_array_equal(got.astype(jnp.float32), [1, np.nan, np.inf])


CASES = [(dimension, tiled) for dimension in (0, 1, -1) for tiled in (False, True)]


SHARDED = {
    "psum_scatter": (lax.psum_scatter, psum_scatter, "scatter_dimension", {"wire": "bfloat16"}),
    "all_gather": (lax.all_gather, all_gather, "axis", {"gradient": "bfloat16", "wire": "bfloat16"}),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("case", variants(CASES, [(0, False), (1, True)]))
def test_collectives_of_shards_are_those_of_lax(case, name, seed):
    (dimension, tiled), (of_lax, own, keyword, formats) = case, SHARDED[name]
    shape = [5, 6, 7]
    if name == "psum_scatter":
        shape[dimension] = 8 if tiled else N
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((N, *shape)), jnp.float32)

    def both(collective):
        def run(x):
            loss = lambda x: jnp.sum(jnp.cos(collective(x)) * (1.0 + lax.axis_index(AXIS).astype(jnp.float32)))
            return collective(x), jax.grad(loss)(x)

        return run

    place = dimension % (4 if name == "all_gather" and not tiled else 3)
    mapped = lambda run: jax.jit(jax.vmap(run, axis_name=AXIS))(x)
    want = mapped(both(functools.partial(of_lax, axis_name=AXIS, tiled=tiled, **{keyword: place})))
    for options, tolerance in (({}, 1e-5), (formats, 0.2)):
        mine = both(functools.partial(own, axis_name=AXIS, tiled=tiled, **{keyword: dimension}, **options))
        for got in (mapped(mine), shard(functools.partial(_row, mine), P(AXIS))(x)):
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, atol=tolerance)


def test_one_layer_at_a_time_is_gathered(key):
    """Fully sharded: of 8 layers about two are whole at once, and a byte an entry crosses each way."""
    layers, width = 8, 128
    weights = jax.random.normal(key, (layers, width, width)) / width
    x = jnp.ones((N, 4, width))

    def loss(shards, x, gather):
        layer = jax.checkpoint(lambda h, shard: (h + jnp.tanh(h @ gather(shard)), None))
        return jnp.mean(lax.scan(layer, x, shards)[0] ** 2)

    def program(gather):
        step = jax.value_and_grad(lambda shards, x: lax.pmean(loss(shards, x[0], gather), AXIS))
        specs = P(None, None, AXIS)
        run = jax.shard_map(step, mesh=mesh_of(N), in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
        return jax.jit(run).lower(weights, x).compile()

    plain = program(lambda w: lax.all_gather(w, AXIS, axis=1, tiled=True))
    codes = {"wire": block_scaled("int8"), "gradient": block_scaled("int8")}
    small = program(lambda w: all_gather(w, AXIS, axis=1, tiled=True, key=key, **codes))
    assert small.memory_analysis().temp_size_in_bytes < 6 * 4 * width**2
    (one, gradient), (two, back) = plain(weights, x), small(weights, x)
    np.testing.assert_allclose(one, two, rtol=1e-3)
    assert np.linalg.norm(back - gradient) < 0.02 * np.linalg.norm(gradient)
    sent = ledger(small).total_bytes
    whole = layers * width**2 * (N - 1) / N  # entries that a worker sends in one gather, or in one sum
    assert 3 * whole < sent < 3 * whole * 1.2


def _row(run, x):
    """One worker of shard_map: its row, and its results as rows."""
    return jax.tree.map(lambda a: a[None], run(x[0]))


def test_trees_of_several_dtypes_cross_in_their_own(seed):
    rng = np.random.default_rng(seed)
    kinds = {"a": (100, jnp.bfloat16), "b": (64, jnp.float32), "c": (3, jnp.bfloat16)}
    x = {name: jnp.asarray(rng.standard_normal((N, size)), dtype) for name, (size, dtype) in kinds.items()}
    step = shard(lambda x: pmean(at(x), AXIS), P())
    for (name, got), digits in zip(step(x).items(), (8, 22, 8), strict=True):
        assert got.dtype == kinds[name][1]
        exact = np.asarray(x[name], np.float64).mean(0)
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-digits, atol=1e-7)  # rounded once
    assert ledger(step, x).total_bytes == 2 * 3 / 4 * (2 * 104 + 4 * 64)  # 103 entries in four parts


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["bf16", dithering(127)], ids=["bf16", "dithering"])
def test_one_axis_of_a_mesh_of_two(wire, key):
    """Along the other axis arrays differ, too, which types tell."""
    mesh = mesh_of((2, 2), ("a", "b"))
    x = jax.random.normal(key, (4, 1, 64))

    def mean(x):
        return pmean(x[0], "a", wire=wire, key=key)

    def part(x):
        return psum_scatter(x[0], "a", scatter_dimension=1, wire=wire, key=key, tiled=True)

    on = lambda fn, out: jax.shard_map(fn, mesh=mesh, in_specs=P(("b", "a")), out_specs=out)
    norm = lambda fn, out: lambda x: jnp.sum(on(fn, out)(x) ** 2)
    pairs = np.asarray(x).reshape(2, 2, 64)
    got, back = jax.jit(on(mean, P("b"))), jax.jit(jax.grad(norm(mean, P("b"))))
    sums, gradient = jax.jit(on(part, P("b", "a"))), jax.jit(jax.grad(norm(part, P("b", "a"))))
    near = lambda a, b: np.linalg.norm(np.asarray(a) - b) < (2**-7 if wire == "bf16" else 1 / 4) * np.linalg.norm(b)
    assert near(got(x), pairs.mean(1))
    assert near(sums(x), pairs.sum(1))
    assert near(back(x), np.repeat(pairs.mean(1), 2, 0).reshape(4, 1, 64))
    assert near(gradient(x), 2 * np.repeat(pairs.sum(1), 2, 0).reshape(4, 1, 64))


def test_parts_without_entries():
    part = lambda x: psum_scatter(x, AXIS, wire="bf16", tiled=True)
    assert jax.jit(jax.vmap(part, axis_name=AXIS))(jnp.ones((8, 8, 0))).shape == (8, 1, 0)


@pytest.mark.sampled
@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_short_names_of_a_wire(short, long, key):
    x = jax.random.normal(key, (4, 33))
    mean = lambda wire: jax.jit(jax.vmap(lambda x: pmean(x, AXIS, wire=wire), axis_name=AXIS))(x)
    np.testing.assert_array_equal(mean(short), mean(long))
    assert np.any(np.asarray(mean(short)) != np.asarray(mean(None)))


SEEDED = identity()._replace(init=lambda key, like: State((), jax.random.uniform(key)))
NEEDS = [
    (lambda x, key: pmean(x, AXIS, wire=dithering(7)), "may be random; give key="),
    (lambda x, key: pmean(x, AXIS, wire=SEEDED), "may be random; give key="),
    (lambda x, key: pmean(x, AXIS, wire=per_leaf(identity()), key=key), "a compressor of one array; got per_leaf"),
    (lambda x, key: pmean(x, AXIS, accumulate="bf16"), 'accumulate must be "f32" or "f64"'),
    (lambda x, key: pmean(x, AXIS, accumulate="f64"), "needs 64-bit mode"),
    (lambda x, key: pmean(x, AXIS, wire="int8"), "pmean: wire must be bfloat16, float16 or a float8 type; got int8"),
    (lambda x, key: psum_scatter(x[:3], AXIS, tiled=True), "must be a multiple of 2"),
    (lambda x, key: psum_scatter(x, AXIS), "must be 2, or give tiled=True"),
    (lambda x, key: pmean(x.astype(jnp.int32), AXIS), "real floating point"),
]


@pytest.mark.parametrize(("fn", "said"), NEEDS, ids=range(len(NEEDS)))
def test_the_collectives_say_what_they_need(fn, said, key):
    with pytest.raises(ValueError, match=said):
        jax.vmap(lambda x: fn(x, key), axis_name=AXIS)(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="no axis named 'data' is bound"):
        pmean(jnp.ones(3), AXIS)


def test_sums_in_double_precision():
    with jax.enable_x64(True):
        x = jnp.asarray([[1.0, 1e-12], [1e-12, 1.0]], jnp.float64)
        for options in ({}, {"wire": identity()}):
            got = jax.jit(jax.vmap(lambda x: pmean(x, AXIS, **options), axis_name=AXIS, out_axes=None))(x)  # noqa: B023
            np.testing.assert_allclose(got, [0.5 + 0.5e-12] * 2, rtol=1e-15)
            part = jax.jit(jax.vmap(lambda x: psum_scatter(x, AXIS, **options), axis_name=AXIS))(x)  # noqa: B023
            np.testing.assert_allclose(part, [1 + 1e-12] * 2, rtol=1e-15)


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "world"), [("float8_e4m3fn", "shard_map"), (dithering(127), "vmap")])
def test_each_leaf_has_a_scale_of_its_own(wire, world, seed, key):
    """A leaf of 1e-3 beside one of 1e4: with one scale for both it came out as exactly zero."""
    rng = np.random.default_rng(seed)
    scales = {"large": 1e4, "none": 0.0, "small": 1e-3, "tiny": 1e-30}
    x = {name: jnp.asarray(scale * rng.uniform(1, 2, (N, 37)), jnp.float32) for name, scale in scales.items()}
    mean = functools.partial(pmean, axis_name=AXIS, wire=wire, key=key)
    if world == "vmap":
        got = jax.jit(jax.vmap(mean, axis_name=AXIS, out_axes=None))(x)
    else:
        got = shard(lambda x: mean(at(x)), P())(x)
    for name in scales:
        np.testing.assert_allclose(got[name], np.asarray(x[name], np.float64).mean(0), rtol=0.3)
        assert (np.asarray(got[name]) != 0).all() == (name != "none")
