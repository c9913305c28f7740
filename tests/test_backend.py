"""Leaves that are added to their memory without being joined: as if they had been."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import made_for
from laws import ROWS, WORKERS, D
from variants import variants
from worlds import assert_close, assert_same, at, mesh_step, vmap_step

import jaxcomp as jc
from experiments.bench.trees import temporary, update_of
from jaxcomp import backend, backend_gpu, backend_tpu
from jaxcomp.arrays import bounded, like_of
from jaxcomp.backend import (
    LONG,
    Pieces,
    SparseSum,
    accumulated,
    along_rows,
    cut_apart,
    flattened,
    join_pieces,
    of_short_rows,
    running,
    running_in_rows,
    shared_program,
    to_short_rows,
)
from jaxcomp.backend_cpu import FEW
from jaxcomp.base import State, accumulate, entries, for_worker
from jaxcomp.exchange import collectives, driver
from jaxcomp.groups import Layout, groups_of, split
from jaxcomp.norms import block_norms
from jaxcomp.select import indices_of_words, mask_words

SIZES = [5, 1, 0, 40, 7]


def added(e, g):
    return e + 2 * g.astype(e.dtype)


def between(e, g, other):
    return e + g.astype(e.dtype) * other


def drawn(seed: int, sizes, dtype=np.float32) -> list:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


HOW = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "donated": functools.partial(jax.jit, donate_argnums=0),
    "for GPUs": lambda f: functools.partial(made_for, "gpu", f),
    "for TPUs": lambda f: functools.partial(made_for, "tpu", f),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(("rest", "dtype"), [(0, np.float32), (3, np.float32), (3, jnp.bfloat16)])
def test_pieces_are_added_where_they_belong(how, rest, dtype, seed):
    pieces, size = drawn(seed, SIZES, dtype), sum(SIZES) + rest
    memory, other = drawn(seed + 1, [size, size])
    flat = np.zeros(size, np.float32)
    flat[: sum(SIZES)] = np.concatenate([np.float32(x) for x in pieces])
    run = how(lambda m, *leaves: accumulated(added, m, Pieces(leaves)))
    np.testing.assert_array_equal(run(memory + 0, *pieces), np.asarray(memory) + 2 * flat)
    run = how(lambda m, other, *leaves: accumulated(between, m, Pieces(leaves), other))
    want = np.asarray(memory) + flat * np.asarray(other)
    np.testing.assert_allclose(run(memory + 0, other, *pieces), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("over", ["memory", "pieces", "both"])
def test_under_vmap_they_are_those_of_each_row(over, seed):
    pieces, memory = drawn(seed, SIZES), drawn(seed + 1, [sum(SIZES)])[0]
    rows = lambda x: jnp.stack([x, 2 * x, -x])
    batched = {"memory": (0, None), "pieces": (None, 0), "both": (0, 0)}[over]
    memory = rows(memory) if batched[0] == 0 else memory
    pieces = list(map(rows, pieces)) if batched[1] == 0 else pieces
    run = lambda memory, pieces: accumulated(added, memory, Pieces(tuple(pieces)))
    got = jax.jit(jax.vmap(run, batched))(memory, pieces)
    of = lambda x, i, is_batched: x[i] if is_batched == 0 else x
    for i in range(3):
        want = jax.jit(run)(of(memory, i, batched[0]), [of(x, i, batched[1]) for x in pieces])
        np.testing.assert_array_equal(got[i], want)


def test_split_leaves_them_apart_where_a_vector_has_several(seed):
    tree = {"a": jnp.ones((30, 50)), "b": jnp.ones((1500,)), "c": jnp.ones((40, 30), jnp.bfloat16), "d": jnp.ones((3,))}
    groups = groups_of(Layout(), tree)
    parts, whole = split(groups, tree, pieces=True), split(groups, tree)
    assert [isinstance(x, Pieces) for x in parts] == [False, True, False]  # small ones; the only leaf of its dtype
    np.testing.assert_array_equal(join_pieces(parts[1], groups.like[1]), whole[1])
    for i in (0, 2):
        np.testing.assert_array_equal(parts[i], whole[i])


METHODS = {
    "error_feedback": lambda: jc.error_feedback(jc.top_k(0.01)),
    "momentum": lambda: jc.contrib.momentum_correction(jc.top_k(0.01), momentum=0.9),
    "nesterov": lambda: jc.contrib.momentum_correction(jc.top_k(0.01), momentum=0.9, nesterov=True),
    "clipped": lambda: jc.contrib.momentum_correction(jc.top_k(0.01), momentum=0.9, clip_norm=0.5, workers=2),
    "power_sgd": lambda: jc.power_sgd(2),
    "bidirectional": lambda: jc.methods.bidirectional(jc.error_feedback(jc.top_k(0.01)), jc.dithering(7)),
    "by_path": lambda: jc.by_path({".*[ab]$": jc.top_k(0.01), ".*": jc.dithering(7)}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_method_does_the_same_with_pieces_as_with_vectors(make, seed):
    """Three rounds of two workers. The algorithm without `pieces` is given joined vectors."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (40, 30), "b": (40, 30), "c": (1100,), "d": (50, 40), "e": (3,)}
    rounds = [
        {name: jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    whole = make()
    assert whole.pieces
    got = []
    for algorithm in (whole, whole._replace(pieces=False)):
        state, step = vmap_step(jc.compressed_mean(algorithm, "data", seed=3), params, 2)
        for grads in rounds:
            direction, state = step(state, grads)
            got.append(direction)
        got.append(state)
    assert_close(got[:4], got[4:])


def compiled_step(compressor, size):
    """A step of error feedback, of two workers and 20 leaves of so many entries each. The state is donated."""
    leaves = {f"{i:02}": jax.ShapeDtypeStruct((size,), jnp.float32) for i in range(20)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    tx = jc.compressed_mean(jc.error_feedback(compressor), "data")
    state, specs = jc.init_state(tx, jax.tree.map(lambda x: jnp.zeros(x.shape), leaves), mesh, "data")
    placed, data, whole = jax.NamedSharding(mesh, jax.P("data")), jax.P("data"), jax.P()
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=placed), leaves)
    one = lambda grads, state: tx.update(at(grads), state)[::-1]
    step = jax.shard_map(one, mesh=mesh, in_specs=(data, specs), out_specs=(specs, whole))
    return jax.jit(step, donate_argnums=1).lower(rows, state).compile()


def test_a_step_of_many_leaves_joins_none():
    """On CPU: besides state and result it takes the memory of one gradient, the direction before it is cut apart."""
    program = compiled_step(jc.sidco(0.01), 2**14)
    size = 4 * 20 * 2**14
    assert program.memory_analysis().temp_size_in_bytes < 1.3 * size
    joins = [line for line in program.as_text().splitlines() if f"f32[{size // 4}]" in line and " concatenate(" in line]
    assert not joins


# ------------------------------------------------------------------------------------------------
# Sums of sparse messages, which are made leaf by leaf

LARGE = [LONG + 3, 1100, 5, LONG, 1, 2 * LONG, 7]


def messages(seed, sizes, workers, k):
    """Ascending indices with padding behind them, and values; the first message has hardly more than one piece."""
    rng, size = np.random.default_rng(seed), sum(sizes)
    indices = np.full((workers, k), size, np.int32)
    for row, number in zip(indices, [k, *rng.integers(0, k, workers - 1)], strict=True):
        row[:number] = np.sort(rng.choice(size, number, replace=False))
    indices[0] = np.sort(rng.choice(sizes[0], k, replace=False))
    indices[0, -1] = size - 1  # the last entry of all
    return jnp.asarray(indices), jnp.asarray(rng.normal(size=(workers, k)), jnp.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["cpu", "portable"])
@pytest.mark.parametrize("sizes", [LARGE, [LONG, LONG], [2 * LONG], [1100, 50], [LONG, 3]], ids=str)
def test_a_sum_is_made_leaf_by_leaf(sizes, form, seed):
    indices, values = messages(seed, sizes, 3, 40)
    want = np.zeros(sum(sizes), np.float32)
    for places, numbers in zip(np.asarray(indices), np.asarray(values), strict=True):
        inside = places < want.size
        want[places[inside]] += numbers[inside]
    want *= np.float32(0.75)

    def run(indices, values):
        found = SparseSum(indices, values, jnp.float32(0.5), sum(sizes)) * 1.5
        return cut_apart(found, sizes) if form == "cpu" else found.made_apart(sizes)

    for got in (run(indices, values), jax.jit(run)(indices, values)):
        assert [x.shape for x in got] == [(size,) for size in sizes]
        np.testing.assert_array_equal(np.concatenate(got), want)
    rows = jax.jit(jax.vmap(run))(jnp.stack([indices, indices]), jnp.stack([values, 2 * values]))
    np.testing.assert_array_equal(np.concatenate(rows, 1), np.stack([want, 2 * want]))


@pytest.mark.parametrize("kinds", ["bfloat16", "float16", "float32,bfloat16,float16"])
def test_pieces_of_a_sum_are_rounded_as_leaves_are(kinds, seed):
    """Also what is too large for float16; of some types only where one vector has leaves of several."""
    kinds = kinds.split(",")
    dtypes = [jnp.dtype(kinds[i % len(kinds)]) for i in range(len(LARGE))]
    indices, values = messages(seed, LARGE, 3, 40)
    values = values.at[:, ::3].mul(1e6)
    find = lambda indices, values: SparseSum(indices, values, jnp.float32(0.5), sum(LARGE)) * 1.5
    own = lambda *messages: find(*messages).made_apart(LARGE, dtypes)
    want = [bounded(x, dtype) for x, dtype in zip(cut_apart(find(indices, values).made(), LARGE), dtypes, strict=True)]
    for got in (own(indices, values), jax.jit(own)(indices, values)):
        assert [x.dtype for x in got if x.size >= LONG] == [x.dtype for x in want if x.size >= LONG]
        assert_same([bounded(x, y.dtype) for x, y in zip(got, want, strict=True)], want)
    rows = jax.jit(jax.vmap(own))(jnp.stack([indices, indices]), jnp.stack([values, -values]))
    for row, sign in ((0, 1), (1, -1)):
        got = [bounded(x[row], y.dtype) for x, y in zip(rows, want, strict=True)]
        assert_same(got, [sign * x for x in want])


@pytest.mark.parametrize("row", [row for row in ROWS if row.compressor.entries is not None], ids=lambda row: row.name)
def test_entries_are_what_is_decoded_and_ascend(row, seed):
    """Of a message of each worker, with weights."""
    n, compressor = WORKERS, row.compressor
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(n, D)), jnp.float32)

    @jax.jit
    def run(x):
        state = compressor.init(jax.random.key(seed), like_of(x[0]))
        mine = lambda i: State(state.local, for_worker(compressor, state.shared, i, n))
        payloads = [compressor.compress(jax.random.key(i), x[i], mine(i))[0] for i in range(n)]
        stacked, weights = jax.tree.map(lambda *a: jnp.stack(a), *payloads), jnp.arange(1.0, n + 1)
        found = entries(compressor, stacked, weights, state.shared, like_of(x[0]))
        want = accumulate(compressor, jnp.zeros(D), stacked, weights, state.shared)
        return found.made(), want, found.indices

    made, want, indices = run(x)
    np.testing.assert_allclose(made, want, rtol=1e-6, atol=1e-6)
    steps = np.diff(indices, axis=1)
    assert np.all(steps >= 0)  # `chunked` fills up with zeros for the last entry of a chunk


def test_padding_alone_makes_zeros():
    indices, values = jnp.full((2, 9), 2 * LONG, jnp.int32), jnp.ones((2, 9))
    run = jax.jit(lambda i, v: cut_apart(SparseSum(i, v, jnp.ones(()), 2 * LONG), [LONG, LONG]))
    assert not any(np.any(x) for x in run(indices, values))


FEW_ENTRIES = {
    "top_k": lambda: jc.error_feedback(jc.top_k(1e-3)),
    "sidco": lambda: jc.error_feedback(jc.sidco(1e-3)),
    "narrow": lambda: jc.error_feedback(jc.narrow(jc.sidco(1e-3), values="bfloat16", indices="uint16")),
    "composed": lambda: jc.error_feedback(jc.compose(jc.top_k(1e-3), jc.dithering(127))),
    "skcompress": lambda: jc.error_feedback(jc.skcompress(jc.top_k(1e-3))),
    "skcompress in lists": lambda: jc.error_feedback(jc.skcompress(jc.top_k(1e-3), mode="recentred")),
    "dagc": lambda: jc.error_feedback(jc.dagc([3, 1, 2], 1e-3)),
    "contract": lambda: jc.error_feedback(jc.contract(jc.bernoulli(1e-3))),
    "flat": lambda: jc.error_feedback(jc.flat(jc.top_k(1e-3))),
    "momentum": lambda: jc.contrib.momentum_correction(jc.top_k(1e-3)),
    "by_path": lambda: jc.by_path({".*0": jc.top_k(1e-3), ".*": jc.sidco(1e-3)}),
    "int4": lambda: jc.error_feedback(jc.block_scaled("int4")),
    "natural": lambda: jc.direct(jc.natural()),
    "diana": lambda: jc.diana(jc.dithering(7)),
    "by_path, dense": lambda: jc.by_path({".*0": jc.top_k(1e-3), ".*": jc.dithering(7)}),
    "bidirectional": lambda: jc.methods.bidirectional(jc.error_feedback(jc.top_k(1e-3)), jc.natural()),
    "ladder": lambda: jc.error_feedback(jc.top_k(1e-3)),
    "top_k, bf16": lambda: jc.error_feedback(jc.top_k(1e-3)),
    "int4, bf16": lambda: jc.error_feedback(jc.block_scaled("int4")),
}


ON_GPU = {"top_k", "int4", "natural", "diana", "by_path, dense", "top_k, bf16", "int4, bf16"}


KEPT = {"top_k", "int4", "by_path, dense", "bidirectional", "dagc", "top_k, bf16"}  # of the others, all with -m ""


@pytest.mark.parametrize("name", variants(FEW_ENTRIES, KEPT))
def test_a_direction_is_the_same_made_leaf_by_leaf(name, seed, monkeypatch):
    """Two rounds of three workers, as where the mean is made as a vector; also in the forms of GPUs. Those in bf16 have
    weights."""
    rng = np.random.default_rng(seed)
    dtype, weights = (jnp.bfloat16, [1, 2, 3]) if "bf16" in name else (jnp.float32, None)
    shapes = {"w0": (LONG // 512, 512), "b": (3,), "w1": (1100,), "w2": (LONG + 1,), "w3": (2, LONG)}
    rounds = [{k: jnp.asarray(rng.normal(size=(3, *s)), dtype) for k, s in shapes.items()} for _ in range(2)]
    params = {k: jnp.zeros(s, dtype) for k, s in shapes.items()}
    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])
    found = []
    is_lazy = backend.is_lazy
    forms = [(is_lazy, "cpu"), (lambda x: False, "cpu"), (is_lazy, "gpu")]
    for lazy, kind in forms[: 3 if name in ON_GPU else 2]:
        monkeypatch.setattr(driver, "is_lazy", lazy)
        for module in (backend, collectives):
            monkeypatch.setattr(module, "platform", lambda mesh=None, kind=kind: kind)
        tx = jc.compressed_mean(FEW_ENTRIES[name](), "data", "ladder" if name == "ladder" else "auto", weights)
        state, step = mesh_step(tx, params, mesh)
        for grads in rounds:
            direction, state = step(state, jax.device_put(grads, jax.NamedSharding(mesh, jax.P("data"))))
            found.append(direction)
        found.append(state)
    # XLA may contract a product and a sum, of the momentum or a shift, in one of the programs.
    near = 1e-6 if name in ("momentum", "diana") else 0
    same = functools.partial(np.testing.assert_allclose, rtol=near, atol=near)
    jax.tree.map(same, found[:3], found[3:6])
    jax.tree.map(same, found[:3], found[6:] or found[:3])


def test_a_direction_of_large_leaves_takes_no_memory_besides():
    """Neither the gradient nor the direction is ever one vector."""
    program = compiled_step(jc.top_k(0.001), 2**18)
    assert program.memory_analysis().temp_size_in_bytes < 0.3 * 4 * 20 * 2**18


PIECES = {
    "some large": [5, LONG, 0, 40, LONG + 3, LONG, 7],
    "large alone": [LONG, LONG],
    "none large": [LONG - 1, 1, 0, 2 * LONG // 3],
    "a large one at the end": [0, 3, 2 * LONG],
    "more than are made alone": [LONG + i % 2 for i in range(6)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("case", PIECES)
def test_pieces_are_decoded_where_they_belong(case, mapped, dtype, seed, monkeypatch):
    """Whatever their leaves are rounded to later."""
    monkeypatch.setattr(backend_gpu, "APART", 4)
    monkeypatch.setattr(backend, "platform", lambda mesh=None: "gpu")
    sizes, rest = PIECES[case], 5
    (messages,) = drawn(seed, [3 * (sum(sizes) + rest)])
    messages = messages.reshape(3, -1)
    decode = lambda messages: messages[0] + 2 * messages[2]
    run = lambda messages: backend.made_in_pieces(decode, messages, sizes, dtype).leaves
    run = jax.vmap(run) if mapped else run
    pieces = jax.jit(run)(jnp.stack([messages, -messages]) if mapped else messages)
    for row in range(2) if mapped else [...]:
        whole = np.asarray(decode(-messages if row == 1 else messages))
        got = np.concatenate([piece[row] for piece in pieces])
        np.testing.assert_allclose(got, whole[: sum(sizes)], rtol=1e-6, atol=1e-6)
        assert [piece[row].size for piece in pieces] == sizes


# ------------------------------------------------------------------------------------------------
# What is made where in a compiled program, and how often it is traced and compiled


TABLE = jnp.arange(24.0).reshape(4, 6)


def counting():
    """A function that is called, and the shapes for which it was traced."""
    traced = []

    def both(x, like):
        traced.append(x.shape)
        return {"double": 2 * x, "ones": jnp.ones(like.shape, like.dtype)}

    return shared_program(both), traced


def test_equal_shapes_are_traced_once_and_stay_calls():
    function, traced = counting()
    like = jax.ShapeDtypeStruct((3,), jnp.int32)

    def several(x):
        return [function(row, like) for row in x] + [function(x[0, :2], like)]

    program = jax.jit(several).lower(TABLE).compile()
    assert traced == [(6,), (2,)]
    calls = [line for line in program.as_text().splitlines() if " call(" in line and "inlineable" in line]
    assert len(calls) == 5
    for row, out in zip([*TABLE, TABLE[0, :2]], program(TABLE), strict=True):
        np.testing.assert_array_equal(out["double"], 2 * row)
        assert (out["ones"].shape, out["ones"].dtype) == ((3,), jnp.int32)


@pytest.mark.parametrize(("how", "calls"), [("plain", 2), ("vmap", 2), ("grad", 4)])
def test_what_is_within_a_call_is_none(how, calls):
    """`jnp.where` and the like are functions with calls of their own, which are inlined as ever."""
    inner = shared_program(lambda x: jnp.where(x > 0, jnp.clip(x, 0, 1), x))
    both = lambda x: inner(x) + inner(x + 1)
    run = {"plain": both, "vmap": jax.vmap(both), "grad": jax.grad(lambda x: jnp.sum(both(x)))}[how]
    text = jax.jit(run).lower(TABLE).compile().as_text()
    assert sum("inlineable" in line and " call(" in line for line in text.splitlines()) == calls


@pytest.mark.parametrize("how", ["eager", "vmap", "grad", "scan"])
def test_a_called_function_is_the_function(how):
    plain = lambda x: jnp.sum(jnp.sin(x) * x)
    function = shared_program(plain)
    run = {
        "eager": lambda f: f(TABLE),
        "vmap": lambda f: jax.jit(jax.vmap(f))(TABLE),
        "grad": lambda f: jax.jit(jax.grad(f))(TABLE),
        "scan": lambda f: jax.jit(lambda x: jax.lax.map(f, x))(TABLE),
    }[how]
    np.testing.assert_allclose(run(function), run(plain), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [3, FEW + 2])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_pieces_follow_one_another(count, lead):
    sizes = [1 + i % 4 for i in range(count)]
    x = jnp.arange(float(np.prod((*lead, sum(sizes) + 5)))).reshape(*lead, sum(sizes) + 5)
    for run in (lambda f: f(x), lambda f: jax.jit(f)(x)):
        pieces = run(lambda x: cut_apart(x, sizes))
        assert [piece.shape for piece in pieces] == [(*lead, size) for size in sizes]
        np.testing.assert_array_equal(jnp.concatenate(pieces, -1), x[..., : sum(sizes)])


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [
        (jc.diana(jc.dithering(7)), 0.5),  # four bits an entry: its own, those of two workers, and a vector
        (jc.methods.ef_bv(jc.dithering(7)), 0.5),
        (jc.methods.ef_bv(jc.top_k(0.01)), 2.1),  # the gradient as a vector, and what is sent of it
        (jc.ef21(jc.top_k(0.01), whole_start=False), 2.1),
        (jc.contrib.momentum_correction(jc.contrib.dgc(0.01)), 2.1),  # its own as a vector, and the direction
    ],
    ids=["diana", "ef_bv", "ef_bv top_k", "ef21", "dgc"],
)
def test_states_are_written_in_place(algorithm, gradients):
    """On CPU, where they are donated and come back in the order in which they came."""
    like = {f"{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(12)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    step, shapes = update_of(lambda: algorithm, like, mesh)
    program = step.lower(*shapes).compile()
    assert float(temporary(program, like)) <= gradients
    copies = re.findall(r"f32\[([\d,]+)\]\S* copy\(", program.as_text())
    assert [x for x in copies if np.prod([int(n) for n in x.split(",")]) >= 2**18] == []


@pytest.mark.parametrize("shape", [(0,), (1,), (127,), (129,), (20_000,), (3, 64), (2, 1000), (0, 5), (2, 3, 130)])
def test_running_sums_for_tpus_are_those_of_numpy(shape, seed):
    """Of numbers of both signs, and of others that wrap around."""
    signed = np.random.default_rng(seed).integers(-100, 100, shape).astype(np.int32)
    for x in (signed, np.abs(signed).astype(np.uint32) * np.uint32(40_000_000)):
        made = functools.partial(made_for, "tpu")
        np.testing.assert_array_equal(made(lambda x: running(jnp.add, x), jnp.asarray(x)), np.cumsum(x, -1, x.dtype))
        np.testing.assert_array_equal(
            made(lambda x: running(jnp.maximum, x), jnp.asarray(x)), np.maximum.accumulate(x, -1)
        )


@pytest.mark.parametrize("length", [1, 16, 96, 128, 300])
@pytest.mark.parametrize("count", [0, 7, 129])
@pytest.mark.parametrize("dtype", [np.int32, np.uint16, bool])
def test_rows_that_a_tpu_puts_end_to_end_or_adds_up_are_those_of_numpy(count, length, dtype, seed):
    rows = np.random.default_rng(seed).integers(0, 100, (count, length)).astype(dtype)
    np.testing.assert_array_equal(made_for("tpu", flattened, jnp.asarray(rows)), rows.reshape(-1))
    sums = lambda x: running_in_rows(jnp.add, x, length)
    numbers = rows.astype(np.int32)
    found = made_for("tpu", sums, jnp.asarray(numbers.reshape(-1)))
    np.testing.assert_array_equal(found, np.cumsum(numbers, axis=1).reshape(-1))


@pytest.mark.parametrize("compressor", [jc.dithering(7), jc.block_scaled("int8"), jc.block_scaled("int4")])
@pytest.mark.parametrize("on_chip", [0, 2**24])
def test_messages_that_a_tpu_adds_in_a_loop_are_those_of_a_cpu(compressor, on_chip, seed, monkeypatch):
    """Bit for bit, of a total that is there, of zeros before the messages, and of zeros after them."""
    monkeypatch.setattr(backend_tpu, "ON_CHIP", on_chip)
    rows, like = drawn(seed, [(WORKERS, 4096)])[0], jax.ShapeDtypeStruct((4096,), jnp.float32)

    def run(rows):
        keys = jax.random.split(jax.random.key(seed), WORKERS)
        payloads = jax.vmap(lambda key, x: compressor.compress(key, x, State())[0])(keys, rows)
        of = lambda total: accumulate(compressor, total, payloads, None, ())
        return of(like), of(rows[0])

    assert_same(made_for("tpu", run, rows), jax.jit(run)(rows))


@pytest.mark.parametrize("sizes", [[256, 128, 384], [3, 128, 253, 0, 300], [700]])
def test_columns_that_a_tpu_cuts_out_of_rows_of_lanes(sizes, seed):
    rows = np.random.default_rng(seed).normal(size=(3, 768)).astype(np.float32)
    cut = made_for("tpu", lambda rows: cut_apart(rows, sizes), jnp.asarray(rows))
    assert_same(cut, np.split(rows, np.cumsum(sizes), axis=1)[: len(sizes)])


@pytest.mark.parametrize("length", [2, 4, 8, 64, 96, 128, 384, 512, 16384, 20480])
@pytest.mark.parametrize("count", [0, 3, 300])
def test_numbers_of_rows_on_a_tpu_are_those_of_numpy(count, length, seed):
    """Repeated over the entries of their rows, added up and compared along them; sums of integers are exact."""
    rng = np.random.default_rng(seed)
    each, rows = rng.normal(size=count).astype(np.float32), rng.integers(-9, 9, (count, length)).astype(np.float32)
    both = lambda each, rows: (to_short_rows(each, length), along_rows(jnp.sum, rows), along_rows(jnp.max, rows))
    repeated, sums, most = made_for("tpu", both, jnp.asarray(each), jnp.asarray(rows))
    np.testing.assert_array_equal(repeated, np.repeat(each, length))
    np.testing.assert_array_equal(sums, rows.sum(axis=1))
    np.testing.assert_array_equal(most, rows.max(axis=1, initial=-np.inf))
    norms = made_for(
        "tpu", lambda x: of_short_rows(lambda rows: block_norms(rows, 2), x, length), jnp.asarray(rows.ravel())
    )
    np.testing.assert_array_equal(norms, np.sqrt((rows**2).sum(axis=1)))


@pytest.mark.parametrize("size", [1, 33, 4097, 65_537])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.3, 1.0])
def test_places_of_bits_on_a_tpu_are_those_on_a_cpu(size, share, seed):
    """For few places in blocks of sixteen words, for more in blocks of four, for many word by word."""
    words = mask_words(jnp.asarray(np.random.default_rng(seed).random(size) < share))
    for capacity in sorted({1, -(-size // 600), -(-size // 40), size}):
        found = functools.partial(indices_of_words, capacity=capacity, size=size)
        for here, there in zip(found(words), made_for("tpu", found, words), strict=True):
            np.testing.assert_array_equal(there, here)
