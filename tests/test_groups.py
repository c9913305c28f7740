"""Layouts: trees as few groups of leaves, and back."""

import collections
import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec as P
from jitted import roundtrip
from worlds import AXIS, assert_same, at, mesh_of, mesh_step

import jaxcomp as jc
from jaxcomp import backend_cpu, groups
from jaxcomp.compressors.tree import layout_of
from jaxcomp.groups import FILLED_IF_LONG, Layout, groups_of, join, split

_rng = np.random.default_rng(0)
_array = lambda *shape, dtype=jnp.float32: jnp.asarray(_rng.standard_normal(shape), dtype)
TREE = {
    "a": _array(40, 30),
    "b": _array(40, 30),
    "bias": _array(5),
    "empty": _array(0, 3),
    "h": _array(50, 30, dtype=jnp.bfloat16),
    "i": _array(1500, dtype=jnp.bfloat16),
    "scalar": _array(),
    "t": _array(4, 20, 20),
    "v": _array(1200),
}
LAYOUTS = {
    "tree": Layout(),
    "single": Layout("tree", 0, single=True),
    "leaf": Layout("leaf"),
    "apart": Layout("apart"),
    "shape": Layout("shape"),
    "chunks": Layout("chunks", chunks=4),
    "all-large": Layout("leaf", 0),
    "square": Layout("square"),
    "buckets": Layout(bucket_bytes=5000),
    "alone": Layout(alone=2),
    "together": Layout(alone=2).together(),
    "rows": Layout(longest=1000),
    "runs": Layout(longest=3000),
    "runs-single": Layout("tree", 0, single=True, longest=5000),
    "rows-single": Layout("tree", 0, single=True, longest=97),
    "rows-leaf": Layout("leaf", longest=1000),
    "rows-apart": Layout("apart", longest=1000),
}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.fixture(autouse=True)
def small_leaves_count_as_large(monkeypatch):
    monkeypatch.setattr(groups, "LARGE", 1300)


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "tree", [TREE, {}, {"only": jnp.zeros((0,))}, _array(1205)], ids=["mixed", "none", "empty", "bare"]
)
def test_join_is_the_inverse_of_split(name, tree):
    plan = groups_of(LAYOUTS[name], tree)
    parts = jax.jit(lambda tree: split(plan, tree))(tree)
    like = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(like, parts) == jax.tree.map(like, plan.like)
    same(jax.jit(lambda parts: join(plan, parts))(parts), tree)
    same(join(plan, split(plan, tree)), tree)
    assert hash(plan) == hash(groups_of(LAYOUTS[name], tree))
    entries = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert sum(x.size for x in jax.tree.leaves(parts)) >= entries


SHAPES = {
    "tree": [(3 * 1200 + 1600,), (3000,)],
    "single": [(8206,)],
    "square": [(1, 91, 91)],
    "leaf": [(3, 1200), (2, 1500), (1600,)],
    "runs": [(2400,), (2800,), (3000,)],
    "runs-single": [(3905,), (4301,)],
    "alone": [(1200 + 1200 + 1200,), (1500,), (1500,), (1600,)],
    "together": [(3 * 1200 + 1600,), (3000,)],
    "apart": [(1200,), (1200,), (1500,), (1500,), (1600,), (1200,)],
    "shape": [(2, 40, 30), (1, 50, 30), (1, 4, 20, 20)],
}


def large(groups):
    return [group for group in groups if not group.small]


@pytest.mark.parametrize("name", SHAPES)
def test_which_groups_there_are(name):
    found = groups_of(LAYOUTS[name], TREE).groups
    assert sorted(x.shape for x in large(found)) == sorted(SHAPES[name])
    if "single" not in name and name != "square":
        assert found[0].small
        assert found[0].shape == ({"shape": 6 + 1500 + 1200}.get(name, 6),)
        assert all(group.dtype in (jnp.float32, jnp.bfloat16) for group in large(found))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("rows")])
def test_long_vectors_are_cut_into_rows(name):
    vectors = large(groups_of(LAYOUTS[name], TREE).groups)
    rounded = LAYOUTS[name].longest + 32  # rows are whole words
    assert all(vector.shape[-1] <= rounded for vector in vectors)
    assert any(len(vector.shape) == 2 for vector in vectors)


@pytest.mark.parametrize("leaves", [1, 4])
def test_what_is_too_long_is_compressed_part_by_part(seed, leaves):
    """Each row of a long leaf has its own k largest entries, and so has each vector of leaves."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(128), jnp.float32)
    compressor = jc.top_k(k=3)
    compressor = compressor._replace(spec=compressor.spec._replace(layout=Layout("tree", 0, longest=32)))
    tx = jc.compressed_mean(jc.error_feedback(compressor), None)
    tree = jnp.split(x, leaves)
    direction, state = jax.jit(tx.update)(tree, tx.init(tree))
    want = np.zeros((4, 32), np.float32)
    for row, values in zip(want, np.asarray(x).reshape(4, 32), strict=True):
        kept = np.argsort(-np.abs(values))[:3]
        row[kept] = values[kept]
    np.testing.assert_array_equal(jnp.concatenate(direction), want.reshape(-1))
    memory = jnp.concatenate([part.reshape(-1) for part in state.local.algorithm.memory])
    np.testing.assert_array_equal(memory, x - want.reshape(-1))


def gpt(blocks, width=32):
    """Leaves of a small transformer: 12 for each block, 4 around them."""
    zeros = jnp.zeros
    block = lambda: {
        "ln1": {"scale": zeros(width), "bias": zeros(width)},
        "attention": {
            "qkv": zeros((width, 3 * width)),
            "qkv_bias": zeros(3 * width),
            "out": zeros((width, width)),
            "out_bias": zeros(width),
        },
        "ln2": {"scale": zeros(width), "bias": zeros(width)},
        "mlp": {
            "up": zeros((width, 4 * width)),
            "up_bias": zeros(4 * width),
            "down": zeros((4 * width, width)),
            "down_bias": zeros(width),
        },
    }
    ends = {"wte": zeros((100, width)), "wpe": zeros((64, width)), "scale": zeros(width), "bias": zeros(width)}
    return ends | {f"block{i}": block() for i in range(blocks)}


def test_a_hundred_leaves_are_one_vector():
    tree = gpt(8)
    leaves = jax.tree.leaves(tree)
    assert len(leaves) == 100
    (vector,) = groups_of(Layout(), tree).groups
    assert vector.shape == (sum(leaf.size for leaf in leaves),)
    assert [group.small for group in groups_of(Layout(), gpt(1)).groups] == [True, False]


def operations(jaxpr, found):
    """How often each primitive stands in a program, however deep."""
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                operations(getattr(value, "jaxpr", value), found)
    return found


SELECTING = ("top_k", "approx_top_k", "sort", "while", "scan", "cumsum", "scatter", "scatter-add", "all_gather")


def selections(compressor, tree):
    tx = jc.compressed_mean(jc.error_feedback(compressor), AXIS)
    state = tx.init(tree)
    specs = jc.state_specs(state, AXIS)
    step = jax.shard_map(tx.update, mesh=mesh_of(1), in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    found = operations(jax.make_jaxpr(step)(tree, state).jaxpr, collections.Counter())
    return {name: found[name] for name in SELECTING if found[name]}


def test_one_selection_whatever_the_number_of_leaves():
    few, many = selections(jc.top_k(0.01), gpt(3)), selections(jc.top_k(0.01), gpt(8))
    assert few == many
    assert few["top_k"] == many["top_k"] == 1
    # Leaf by leaf there is more than one, so this counts what it should.
    each = selections(jc.per_leaf(jc.top_k(0.01)), gpt(1))
    assert sum(each.values()) > sum(few.values())


def test_gradients_of_another_tree_are_named():
    plan = groups_of(Layout(), {"w": jnp.zeros((40, 30))})
    with pytest.raises(ValueError, match=r"gradients\['w'\] have shape \(30, 40\); the state was made for \(40, 30\)"):
        split(plan, {"w": jnp.zeros((30, 40))})
    with pytest.raises(ValueError, match="made for another tree"):
        split(plan, {"v": jnp.zeros((40, 30))})


@pytest.mark.parametrize("how", ["jit", "vmap", "mesh"])
def test_few_long_leaves_are_joined_alike(how, monkeypatch):
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.zeros((0, 4)),
        "c": jnp.full((5,), jnp.nan),
        "d": jnp.float32(7),
    }
    plan = groups_of(Layout("tree", 0), tree)
    want = jax.tree.map(np.asarray, split(plan, tree))
    monkeypatch.setattr(backend_cpu, "LONG", 1)
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    if how == "jit":
        found = jax.jit(lambda tree: split(plan, tree))(tree)
    elif how == "vmap":
        found = at(jax.vmap(lambda tree: split(plan, tree))(rows))
    else:

        def own(some, rest):  # leaves of unlike types: some differ between workers, others do not
            parts = split(plan, {"a": some[0], **rest})
            return jax.tree.map(lambda x: x[None], parts)

        specs = (P("data"), P())
        rest = {name: tree[name] for name in "bcd"}
        found = at(jax.jit(jax.shard_map(own, mesh=mesh_of(2), in_specs=specs, out_specs=P("data")))(rows["a"], rest))
    assert_same(found, want)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "algorithm",
    [
        jc.direct(jc.cast("bfloat16")),
        jc.error_feedback(jc.cast("bfloat16")),
        jc.direct(jc.dithering(127)),
        jc.diana(jc.dithering(127)),
        jc.error_feedback(jc.contract(jc.dithering(127))),
    ],
    ids=["direct-cast", "error_feedback-cast", "direct", "diana", "error_feedback"],
)
def test_leaves_alone_give_the_mean_too(algorithm, monkeypatch, seed):
    """Of entries that the codes send exactly or nearly so, in vectors of their own or in one with others."""
    rng = np.random.default_rng(seed)
    sizes = {"a": (64, 32), "b": (2048,), "c": (2048,), "d": (1500,), "e": (700,), "f": (300,)}
    grads = {name: rng.integers(-8, 9, (2, *shape)).astype(np.float32) for name, shape in sizes.items()}
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)
    tx = jc.compressed_mean(algorithm, AXIS)
    state, step = mesh_step(tx, params, mesh_of(2))
    vectors = jax.tree.leaves(groups_of(layout_of(algorithm), params).like)
    assert len(vectors) == 5  # the dense ones, and four alone
    mean, _ = step(state, grads)
    for name, want in grads.items():
        np.testing.assert_allclose(
            mean[name], want.mean(0), atol=0 if "cast" in algorithm.compressor.spec.name else 2.0
        )
    monkeypatch.setattr(groups, "LARGE", 10**6)
    assert len(jax.tree.leaves(groups_of(layout_of(algorithm), params).like)) == 2


def test_leaves_alone_have_few_sizes():
    tree = [jax.ShapeDtypeStruct((1300 + i // 2,), jnp.float32) for i in range(20)]
    alone = groups_of(Layout(alone=30), tree).like
    assert sorted(x.shape[0] for x in alone)[:-1] == [1306, 1306, 1307, 1307, 1308, 1308, 1309, 1309]
    assert len(groups_of(Layout(alone=3), tree).groups) == 3 + 1
    by_name = Layout("paths", parts=(("a", Layout(alone=3)), (".*", Layout(alone=2))))
    assert [part.alone for _, part in by_name.together().parts] == [0, 0]


@pytest.mark.parametrize("bare", [False, True], ids=["tree", "bare"])
@pytest.mark.parametrize(
    "code",
    [jc.cast("float8_e4m3fn"), jc.block_scaled("mxfp4"), jc.natural(), jc.terngrad(), jc.dithering(7)],
    ids=lambda code: code.spec.name,
)
def test_long_vectors_of_narrow_codes_are_filled_up(code, bare, monkeypatch, seed):
    """To whole words and blocks, by zeros, which change no entry's code and no scale."""
    monkeypatch.setattr(groups, "LONG", 2000)
    monkeypatch.setattr(groups, "LARGE", 10**6)  # none alone
    rng = np.random.default_rng(seed)
    grads = {"a": rng.standard_normal((41, 61)).astype(np.float32), "b": rng.standard_normal(2502).astype(np.float32)}
    x = np.concatenate([grads["a"].ravel(), grads["b"]])  # 5003 entries
    grads = x if bare else grads
    algorithm = jc.direct(code)
    plan = groups_of(layout_of(algorithm), grads)
    assert [vector.shape for vector in jax.tree.leaves(plan.like)] == [(5120,)]
    tx = jc.compressed_mean(algorithm, None)
    mean, _ = jax.jit(tx.update)(grads, jax.jit(tx.init)(grads))
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mean)])
    if code.spec.omega is None:  # nothing is drawn
        np.testing.assert_array_equal(got, roundtrip(code, x, jax.random.key(0))[0])
    else:
        assert 0 < np.linalg.norm(got - x) < 2 * np.sqrt(code.spec.omega(5120)) * np.linalg.norm(x)


@pytest.mark.parametrize(
    "compressor", [jc.top_k(k=50), jc.sidco(0.01), jc.dagc([1], 0.01), jc.skcompress(jc.top_k(k=50))]
)
def test_what_selects_entries_fills_up_only_vectors_to_which_that_adds_next_to_nothing(compressor):
    for codes in (compressor, jc.flat(compressor), jc.compose(jc.top_k(k=50), jc.dithering(7))):
        for size, filled in ((2**22 - 5, 2**22 - 5), (2**22 + 5, 2**22 + 1024)):
            leaf = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
            assert groups_of(layout_of(jc.direct(codes)), leaf).like[0].shape == (filled,)


@pytest.mark.parametrize("compressor", [jc.top_k(k=50), jc.compose(jc.top_k(k=50), jc.cast("bfloat16"))])
def test_of_a_vector_that_is_filled_up_the_same_is_selected(compressor, monkeypatch):
    monkeypatch.setattr(groups, "LONG", 2000)
    monkeypatch.setattr(backend_cpu, "LONG", 2000)
    tree = {"a": jnp.arange(2501.0).reshape(41, 61), "b": jnp.arange(2502.0)}
    layout = dataclasses.replace(FILLED_IF_LONG, filled_from=0)
    filled = compressor._replace(spec=compressor.spec._replace(layout=layout))
    (want, _), (got, state) = (directions_of(jc.error_feedback(c), tree, 4) for c in (compressor, filled))
    assert [x.shape for x in jax.tree.leaves(state.local.algorithm)] == [(1, 5120)]
    assert_same(got, want)


def directions_of(algorithm, tree, rounds=2):
    tx = jc.compressed_mean(algorithm, None)
    state, found = tx.init(tree), []
    for t in range(rounds):
        grads = jax.tree.map(lambda x: jnp.cos(x * (t + 1) + x.size), tree)  # noqa: B023
        direction, state = jax.jit(tx.update)(grads, state)
        found.append(direction)
    return found, state


@pytest.mark.slow
def test_small_leaves_together_are_a_vector():
    """Twenty leaves of 1,000 entries were sent as they are, 80,000 B, by every algorithm."""
    tree = {f"leaf{i:02d}": _array(1000) for i in range(20)}
    (direction, _), state = directions_of(jc.error_feedback(jc.top_k(0.01)), tree)
    assert sum(np.count_nonzero(x) for x in jax.tree.leaves(direction)) == 200
    assert (float(jc.info(state).lane_bytes), float(jc.info(state).dense)) == (1600, 0)
    assert [group.shape for group in state.about.groups.groups] == [(20_000,)]
    matrix = jc.smoothness.diagonal_of(np.geomspace(1, 100, 20_000))
    plain, _ = directions_of(jc.direct(jc.rand_k(0.01)), tree)
    scaled, _ = directions_of(jc.diana(jc.precondition(jc.rand_k(0.01), matrix)), tree)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (plain, scaled)), strict=True))


def test_few_small_leaves_change_nothing_and_many_are_compressed_with_the_others():
    large = {"w": _array(40, 30)}
    few, many = ({f"b{i}": _array(300) for i in range(count)} for count in (3, 4))
    for algorithm in (jc.error_feedback(jc.top_k(0.05)), jc.diana(jc.dithering(7))):
        (alone, few_found, many_found) = (directions_of(algorithm, large | small) for small in ({}, few, many))
        assert [float(jc.info(found[1]).dense) for found in (alone, few_found, many_found)] == [0, 900, 0]
        for got, want in zip(few_found[0], alone[0], strict=True):
            same(got["w"], want["w"])
        assert any(np.any(many_found[0][0][name] != jnp.cos(many[name] + 300)) for name in many)
    by_dtype = large | {"f": _array(1000), "g": _array(900, dtype=jnp.bfloat16), "h": _array(24)}
    made = groups_of(Layout(), by_dtype)
    assert [(group.leaves, group.small) for group in made.groups] == [((1,), True), ((0, 2, 3), False)]


def test_a_compressor_of_one_length_leaves_small_ones_beside_a_large_one():
    tree = {"w": _array(40, 30), "b": _array(1000), "c": _array(1000)}
    for compressor in (jc.bernoulli(np.full(1200, 0.3)), jc.dithering(steps=np.full(1200, 0.1))):
        for each in (compressor, jc.precondition(compressor, jc.smoothness.diagonal_of(np.ones(1200)))):
            _, state = directions_of(jc.diana(each), tree)
            assert float(jc.info(state).dense) == 2000


def test_where_nothing_is_compressed_a_warning_says_so():
    tree = {"w": jnp.ones((10, 10)), "b": jnp.ones(10)}
    with pytest.warns(UserWarning, match=r"nothing is compressed: 2 leaves with 110 entries .* jc\.flat\(compressor\)"):
        _, state = directions_of(jc.error_feedback(jc.top_k(0.05)), tree)
    assert float(jc.info(state).dense) == 110
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        directions_of(jc.error_feedback(jc.flat(jc.top_k(0.05))), tree)
        directions_of(jc.direct(jc.identity()), tree)
