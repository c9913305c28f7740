"""The ledger reads what really crosses, and payloads say the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from laws import ROWS, D
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.exchange.lanes import FEW_BYTES, all_gather, all_sum
from jaxcomp.ledger import read

N = 4


SPLIT, WHOLE = P(AXIS), P()


def mapped(fn, in_specs=SPLIT, out_specs=WHOLE):
    return jax.jit(jax.shard_map(fn, mesh=mesh_of(N), in_specs=in_specs, out_specs=out_specs))


X = jax.ShapeDtypeStruct((N, 1000), jnp.float32)

PLAIN = {
    "all-gather": (lambda x: lax.all_gather(x, AXIS, to="invarying"), P(), 4000, 3 * 4000),
    "all-reduce": (lambda x: lax.psum(x, AXIS), P(), 4000, 6000),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True), P(AXIS), 4000, 3000),
    "all-to-all": (lambda x: lax.all_to_all(x, AXIS, 1, 1, tiled=True), P(AXIS), 4000, 3000),
    "collective-permute": (lambda x: lax.ppermute(x, AXIS, [(0, 1), (2, 3)]), P(AXIS), 4000, 2000),
}


@pytest.mark.parametrize("op", PLAIN)
def test_each_collective_under_its_model(op):
    fn, out, operand, sent = PLAIN[op]
    book = jc.ledger(mapped(fn, out_specs=out), X)
    # On CPU an all-to-all is compiled with one operand for each destination.
    assert len(book.rows) == (N if op == "all-to-all" else 1)
    for row in book.rows:
        assert (row.op, row.dtype, row.group_size) == (op, "f32", 2 if op == "collective-permute" else N)
    assert sum(np.prod(row.shape) for row in book.rows) == 1000
    assert sum(row.operand_bytes for row in book.rows) == operand
    assert sum(row.sent_bytes for row in book.rows) == book.total_bytes == sent
    assert op in str(book)


def test_loops_multiply_and_conditionals_take_the_dearest_arm():
    def loop(x):
        return lax.fori_loop(0, 5, lambda i, x: lax.pcast(lax.psum(x, AXIS), AXIS, to="varying"), x)

    book = jc.ledger(mapped(loop, out_specs=P(AXIS)), X)
    assert book.total_bytes == 5 * 6000
    assert [row.times for row in book.rows] == [5]

    def ladder(x):
        small = lambda x: jnp.sum(lax.all_gather(x[:, :10], AXIS, to="invarying"))
        large = lambda x: jnp.sum(lax.all_gather(x[:, :500], AXIS, to="invarying"))
        return lax.cond(lax.psum(x[0, 0], AXIS) > 0, small, large, x)

    book = jc.ledger(mapped(ladder), X)
    assert book.total_bytes == 6 + 3 * 2000
    assert sorted(row.branch[-3:] for row in book.rows) == ["", "[0]", "[1]"]


def test_groups_of_a_part_of_the_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fn = jax.shard_map(lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"))
    (row,) = jc.ledger(fn, X).rows
    assert row.group_size == 2
    assert row.sent_bytes == 2 * 1000 * 4 / 2  # 2 x 500 floats at each device


GROUPS = {
    "{{0,1,2,3}}": 4,
    "{{0,1},{2,3}}": 2,
    "[1,4]<=[4]": 4,
    "[2,2]<=[2,2]T(1,0)": 2,
    "mesh['data'=4] {'data'}": 4,
    "mesh['data'=2,'model'=3] {'model'}": 3,
    "mesh['data'=2,'model'=3] {'data','model'}": 6,
    "mesh['data'=8] {'data':(2)4}": 4,
    "{}": 8,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_every_way_to_write_groups(groups):
    text = f"""HloModule m, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: bf16[10]) -> bf16[10] {{
  %x = bf16[10]{{0}} parameter(0)
  ROOT %r = bf16[10]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add
}}
"""
    (row,) = read(text).rows
    assert (row.group_size, row.dtype, row.shape, row.operand_bytes) == (GROUPS[groups], "bf16", (10,), 20)


def test_asynchronous_and_tuple_forms():
    text = """HloModule m, num_partitions=4

%wrapped (p: u8[6]) -> u8[24] {
  %p = u8[6]{0} parameter(0)
  ROOT %g = u8[24]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[10], y: u8[6]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %y = u8[6]{0} parameter(1)
  %s = (f32[10]{0}, f32[40]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %d = f32[40]{0} all-gather-done(%s)
  %a = ((u8[6]{0}), u8[24]{0}) async-start(%y), calls=%wrapped
  %b = u8[24]{0} async-done(%a)
  %t = (f32[10]{0}, u8[6]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %r = f32[10]{0} get-tuple-element(%t), index=0
}
"""
    book = read(text)
    assert [(row.op, row.operand_bytes, row.sent_bytes) for row in book.rows] == [
        ("all-gather", 40, 120),
        ("all-gather", 6, 18),
        ("all-reduce", 40, 40),
        ("all-reduce", 6, 6),
    ]


def test_accepts_functions_jitted_functions_and_programs():
    fn = jax.shard_map(lambda x: lax.psum(x, AXIS), mesh=mesh_of(N), in_specs=P(AXIS), out_specs=P())
    totals = {
        jc.ledger(fn, X).total_bytes,
        jc.ledger(jax.jit(fn), X).total_bytes,
        jc.ledger(jax.jit(fn).lower(X).compile()).total_bytes,
    }
    assert totals == {6000}
    with pytest.raises(TypeError, match=r"call it as ledger\(step, \*arguments\)"):
        jc.ledger(jnp.zeros(3))


# ------------------------------------------------------------------------------------------------
# What payloads say is what programs carry


def exchange_book(compressor, via):
    tx = jc.compressed_mean(jc.direct(compressor), AXIS, via=via)
    like = jnp.zeros(D)
    state, specs = jc.init_state(tx, like, mesh_of(N).abstract_mesh, AXIS)  # shapes
    step = mapped(lambda g, s: tx.update(g[0], s), (P(AXIS), specs), (P(), specs))
    shared = jax.random.key(0)
    payload = jax.eval_shape(lambda x: jc.roundtrip(compressor, x, key=shared)[1], like)
    return jc.ledger(step, jax.ShapeDtypeStruct((N, D), jnp.float32), state), payload


EXCHANGED = [row for row in ROWS if row.compressor.spec.omega is not None or row.compressor.spec.alpha is not None]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:via=.gather. pads")  # said of unequal messages, and true
@pytest.mark.parametrize("row", EXCHANGED, ids=lambda row: row.name)
def test_gather_carries_exactly_the_lane_bytes(row):
    book, payload = exchange_book(row.compressor, "gather")
    assert {r.op for r in book.rows} == {"all-gather"}
    assert sum(r.operand_bytes for r in book.rows) == jc.lane_bytes(payload)
    assert book.total_bytes == (N - 1) * jc.lane_bytes(payload)
    # Narrow arrays travel as words of their own width, not widened; the few wide entries of these payloads beside them.
    width = min(8 * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload) if leaf.size)
    assert {r.dtype for r in book.rows} == {f"u{width}"}


@pytest.mark.sampled
@pytest.mark.parametrize("row", [row for row in EXCHANGED if row.compressor.spec.linear], ids=lambda row: row.name)
def test_sum_carries_exactly_the_lane_bytes(row):
    book, payload = exchange_book(row.compressor, "sum")
    lane = jc.lane_bytes(payload)
    if jax.tree.leaves(payload)[0].dtype.itemsize >= 4:
        assert {r.op for r in book.rows} == {"all-reduce"}
        assert sum(r.operand_bytes for r in book.rows) == lane
        assert book.total_bytes == 2 * (N - 1) / N * lane
    else:
        # 16 bits: all-to-all and all-gather of a padded lane, together what a 16-bit all-reduce sends.
        assert {r.op for r in book.rows} == {"all-to-all", "all-gather"}
        assert {r.dtype for r in book.rows} == {"u16"}
        padded = lane + 2 * (-(lane // 2) % N)
        assert book.total_bytes == 2 * (N - 1) / N * padded


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["all_gather", "all_sum"])
def test_lanes_of_odd_trees(name):
    """Empty arrays, scalars, several dtypes: every worker gets the right thing, in the fewest collectives."""
    tree = {
        "a": jnp.arange(3.0),
        "b": jnp.bfloat16(1.5),
        "c": jnp.zeros((0, 2)),
        "d": jnp.ones((2, 3)),
        "e": jnp.ones(5, jnp.bfloat16),
    }
    if name == "all_gather":
        tree |= {"f": jnp.arange(4, dtype=jnp.int32), "g": jnp.array([7], jnp.uint8)}
    collective = {"all_gather": all_gather, "all_sum": all_sum}[name]

    def fn(i):
        mine = jax.tree.map(lambda a: a * (i[0].astype(a.dtype) + jnp.ones((), a.dtype)), tree)
        return collective(mine, AXIS)

    workers = jnp.arange(N, dtype=jnp.float32)
    got = mapped(fn)(workers)
    simulated = jax.jit(jax.vmap(lambda i: fn(i[None]), axis_name=AXIS, out_axes=None))(workers)
    for a, b, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(simulated), jax.tree.leaves(tree), strict=True):
        rows = np.stack([np.float64(leaf) * (i + 1) for i in range(N)])
        np.testing.assert_array_equal(np.float64(a), rows if name == "all_gather" else rows.sum(0))
        np.testing.assert_array_equal(np.float64(a), np.float64(b))
        # Sums of narrow floats come out in f32.
        assert a.dtype == (leaf.dtype if name == "all_gather" or leaf.dtype.itemsize >= 4 else jnp.float32)
    book = jc.ledger(mapped(fn), workers)
    # A lane for everything, or sums for f32 and two steps for bf16.
    assert len({(r.op, r.dtype) for r in book.rows}) == (1 if name == "all_gather" else 3)


def test_many_wide_entries_have_a_lane_of_their_own():
    words = lambda rng, size, kind: jnp.asarray(rng.integers(0, 2**31, size), jnp.uint32).astype(kind)
    rng = np.random.default_rng(0)
    tree = {
        "bytes": words(rng, (7, 3), jnp.uint8),
        "many": words(rng, (FEW_BYTES // 4 + 1,), jnp.uint32),
        "few": words(rng, (5, 2), jnp.uint16),
        "scale": jnp.float32(0.1),
    }
    one = {name: tree[name] for name in ("bytes", "few", "scale")}
    for which, lanes in ((tree, ["u32", "u8"]), (one, ["u8"])):
        program = mapped(
            lambda i, which=which: all_gather(jax.tree.map(lambda a: a * i[0].astype(a.dtype), which), AXIS)
        )
        workers = jnp.arange(N)
        for got, leaf in zip(jax.tree.leaves(program(workers)), jax.tree.leaves(which), strict=True):
            assert got.dtype == leaf.dtype
            np.testing.assert_array_equal(got, np.stack([leaf * np.asarray(i, leaf.dtype) for i in range(N)]))
        book = jc.ledger(program, workers)
        assert sorted(row.dtype for row in book.rows) == lanes
        assert sum(row.operand_bytes for row in book.rows) == jc.lane_bytes(which)


def test_no_other_collective_is_left_in_a_training_step():
    """Loss and gradients of a small network, compressed, through adam: only the payload and the loss cross."""
    sizes = [64, 256, 10]
    rng = np.random.default_rng(0)
    params = [
        (jnp.asarray(rng.standard_normal((a, b)) / np.sqrt(a), jnp.float32), jnp.zeros(b))
        for a, b in itertools.pairwise(sizes)
    ]
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.sidco(0.01)), AXIS), optax.adam(1e-3))
    mesh = mesh_of(N)
    state, specs = jc.init_state(tx, params, mesh.abstract_mesh, AXIS)  # shapes

    def loss(params, x, y):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1][0] + params[-1][1], y).mean()

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(jc.per_worker(params, AXIS), x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(value, AXIS)

    step = mapped(step, (P(), specs, P(AXIS), P(AXIS)), (P(), specs, P()))
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    y = jax.ShapeDtypeStruct((32,), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a float to an integer power
        book = jc.ledger(step, params, state, x, y)
    # Both matrices are one vector, and both biases go dense.
    vector = jax.ShapeDtypeStruct((64 * 256 + 256 * 10,), jnp.float32)
    payload = jax.eval_shape(lambda x: jc.roundtrip(jc.sidco(0.01), x, key=jax.random.key(0))[1], vector)
    leaves, dense, loss_bytes = jc.lane_bytes(payload), 4 * (256 + 10), 4
    assert sum(r.operand_bytes for r in book.rows if r.op == "all-gather") == leaves
    assert sum(r.operand_bytes for r in book.rows if r.op == "all-reduce") == dense + loss_bytes
    assert {r.op for r in book.rows} == {"all-gather", "all-reduce"}
    gradient = 4 * sum(p.size for p in jax.tree.leaves(params))
    assert max(r.operand_bytes for r in book.rows) < gradient / 15


def test_collectives_in_the_condition_of_a_loop_count():
    mesh = mesh_of(2)

    def loop(x):
        return jax.lax.while_loop(lambda c: jnp.sum(jax.lax.psum(c, AXIS)) < 100, lambda c: c + 1, x)

    rows = jc.ledger(jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), jnp.zeros(64)).rows
    assert [row.op for row in rows] == ["all-reduce"]
    assert rows[0].times is None


def test_a_total_with_a_loop_of_unknown_length_says_at_least():
    mesh = mesh_of(2)

    def loop(x):
        return jax.lax.while_loop(
            lambda c: jnp.max(c) < 100, lambda c: jax.lax.ppermute(c + 1, AXIS, [(0, 1), (1, 0)]), x
        )

    unknown = jc.ledger(jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), jnp.zeros(64))
    assert unknown.is_bound
    assert unknown.total_bytes == 4 * 32
    assert str(unknown).endswith("total: at least 128 bytes sent per device")
    known = jc.ledger(mapped(lambda x: lax.psum(x, AXIS)), X)
    assert not known.is_bound
    assert "at least" not in str(known)
