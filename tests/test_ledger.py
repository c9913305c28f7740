"""The ledger reads what really crosses, and payloads say the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from laws import ROWS, D
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.exchange.collectives import FEW_BYTES, gather_tree, summed
from jaxcomp.ledger import read
from jaxcomp.program import PACKAGE

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
    fn = jax.shard_map(
        lambda x: lax.psum(x, "model"), mesh=mesh_of((2, 2)), in_specs=P("data", "model"), out_specs=P("data")
    )
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


def test_every_way_to_write_groups():
    for groups, size in GROUPS.items():
        text = one_reduction(groups).replace("num_partitions=4", "num_partitions=8").replace("f32", "bf16")
        (row,) = read(text).rows
        assert (row.group_size, row.dtype, row.shape, row.operand_bytes) == (size, "bf16", (10,), 20), groups


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
    collective = {"all_gather": gather_tree, "all_sum": lambda tree, axis: summed(tree, axis)[0]}[name]

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
            lambda i, which=which: gather_tree(jax.tree.map(lambda a: a * i[0].astype(a.dtype), which), AXIS)
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
    loop = lambda x: lax.while_loop(lambda c: jnp.sum(lax.psum(c, AXIS)) < 100, lambda c: c + 1, x)
    (row,) = jc.ledger(mapped(loop, out_specs=SPLIT), X).rows
    assert (row.op, row.times) == ("all-reduce", None)


def test_a_total_with_a_loop_of_unknown_length_says_at_least():
    ring = [(i, (i + 1) % N) for i in range(N)]
    loop = lambda x: lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: lax.ppermute(c + 1, AXIS, ring), x)
    unknown = jc.ledger(mapped(loop, out_specs=SPLIT), X)
    assert unknown.is_bound
    assert unknown.total_bytes == 4000
    assert str(unknown).endswith("total: at least 4,000 bytes sent per device")
    known = jc.ledger(mapped(lambda x: lax.psum(x, AXIS)), X)
    assert not known.is_bound
    assert "at least" not in str(known)


def test_a_loop_of_at_most_one_turn_is_an_arm_of_a_conditional():
    """As `backend.either` has it on GPUs."""

    def step(x):
        now = lax.psum(x[0, 0], AXIS) > 0
        turn = lambda c: (c[0] & False, lax.pcast(lax.psum(c[1], AXIS), AXIS, to="varying"))
        return lax.while_loop(lambda c: c[0], turn, (now, x))[1]

    book = jc.ledger(mapped(step, out_specs=P(AXIS)), X)
    assert sorted((row.times, row.branch[-3:]) for row in book.rows) == [(1, ""), (1, "[1]")]
    assert book.total_bytes == 6 + 6000
    assert not book.is_bound


COUNTED = """HloModule m, num_partitions=4, is_scheduled=true

%cond (p: (s32[], f32[10])) -> pred[] {{
  %p = (s32[], f32[10]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({stop})
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (q: (s32[], f32[10])) -> (s32[], f32[10]) {{
  %q = (s32[], f32[10]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = f32[10] get-tuple-element(%q), index=1
  %s = (f32[10], f32[10]) all-reduce-start(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  %f = f32[10] fusion(%x), kind=kLoop, calls=%other
  %d = f32[10] all-reduce-done(%s)
  %one = s32[] constant({step})
  %k = s32[] copy(%j)
  %next = s32[] add(%k, {by})
  ROOT %t = (s32[], f32[10]) tuple(%next, %d)
}}

ENTRY %main (x: f32[10]) -> f32[10] {{
  %x = f32[10] parameter(0)
  %zero = s32[] constant(1)
  %start = s32[] copy(%zero)
  %tuple = (s32[], f32[10]) tuple(%start, %x)
  %w = (s32[], f32[10]) while(%tuple), condition=%cond, body=%body
  ROOT %r = f32[10] get-tuple-element(%w), index=1
}}
"""


@pytest.mark.parametrize(
    ("stop", "step", "by", "times"), [(5, 1, "%one", 4), (6, 2, "%one", 3), (1, 1, "%one", 0), (5, 1, "%j", None)]
)
def test_a_counter_says_how_often_a_loop_runs(stop, step, by, times):
    """XLA for TPU does not."""
    book = read(COUNTED.format(stop=stop, step=step, by=by))
    (row,) = book.rows
    assert row.times == times
    assert row.beside == 1
    assert book.total_bytes == 60 * (1 if times is None else times)
    assert "beside" in str(book)


SOURCES = """FileNames
1 "/home/me/train.py"
2 "PACKAGE/transforms/compressed_mean.py"

FunctionNames
1 "train"
2 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=8 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=6 end_line=6 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def test_a_row_has_the_line_that_it_comes_from():
    """That of the caller, of the library's own."""
    text = with_instruction("all-reduce(%x), replica_groups={{0,1}}", ', metadata={op_name="a" stack_frame_id=2}')
    head, _, rest = text.partition("\n")
    for package, source in (
        (PACKAGE[:-1], "/home/me/train.py:7 (train)"),
        ("/a", "/a/transforms/compressed_mean.py:6 (update)"),
    ):
        (row,) = read(f"{head}\n\n{SOURCES.replace('PACKAGE', package)}{rest}").rows
        assert row.source == source
    older = with_instruction("all-reduce(%x), replica_groups={{0,1}}", ', metadata={source_file="a.py" source_line=3}')
    assert read(older).rows[0].source == "a.py:3"
    assert read(text).rows[0].source == ""


def test_what_xla_puts_behind_an_argument_has_the_line_that_reads_it():
    text = with_instruction("all-gather(%x), replica_groups={{0,1}}", ', metadata={op_name="w"}')
    text = text.replace("copy(%x)", 'copy(%c), metadata={op_name="y" source_file="b.py" source_line=5}')
    assert read(text).rows[0].source == "b.py:5"


# ------------------------------------------------------------------------------------------------
# Between slices of TPUs, and what the ledger does not know. Programs for slices: tests/accelerators/test_slices.py.

MEGASCALE = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}",'
    '_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
)


def between_slices(kind, target, chips=2, times=""):
    """A program of two slices of `chips` chips: f32[3,5] padded to f32[1,8,128], sent in a loop if `times` is given."""
    how = MEGASCALE.format(kind=kind, target=target, name="a")
    text = f"""HloModule m, num_partitions={chips}

%body (x: f32[3,5]) -> f32[3,5] {{
  %x = f32[3,5]{{1,0:T(8,128)}} parameter(0)
  %t = token[] after-all()
  %b = f32[1,8,128]{{2,1,0:T(8,128)}} bitcast(%x)
  %send = (f32[1,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) send(%b, %t), channel_id=2, {how}
  %recv = (f32[1,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) recv(%t), channel_id=1, {how}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[1,8,128]{{2,1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %r = f32[3,5]{{1,0:T(8,128)}} bitcast(%x)
}}
"""
    if not times:
        return text.replace("%body", "ENTRY %body")
    return (
        text
        + f"""
%some (x: f32[3,5]) -> pred[] {{
  %x = f32[3,5]{{1,0}} parameter(0)
  ROOT %p = pred[] constant(true)
}}

ENTRY %main (x: f32[3,5]) -> f32[3,5] {{
  %x = f32[3,5]{{1,0}} parameter(0)
  ROOT %w = f32[3,5]{{1,0}} while(%x), condition=%some, body=%body{times}
}}
"""
    )


EVERY_CHIP = '"{1,2}x{0:1}"'
IN_GROUPS = "{{100000,200000},{100001,200001}}"
ALL_CHIPS = "{{100000,100001,200000,200001}}"
SENDS = {  # bytes with padding that a chip sends, and a slice
    ("ALL_REDUCE", EVERY_CHIP): ("all-reduce", 4096, 8192),
    ("ALL_GATHER", IN_GROUPS): ("all-gather", 4096, 8192),
    ("REDUCE_SCATTER", EVERY_CHIP): ("reduce-scatter", 2048, 4096),
    ("ALL_TO_ALL", IN_GROUPS): ("all-to-all", 2048, 4096),
    ("ALL_TO_ALL", ALL_CHIPS): ("all-to-all", 3072, 4096),
    ("ONE_TO_ONE", "{{100000->200000},{200000->100000},{100001->200001}}"): ("collective-permute", 3072, 6144),
}


@pytest.mark.parametrize("transfer", SENDS, ids=lambda transfer: "-".join(transfer))
def test_what_is_sent_between_slices(transfer):
    op, chip, slice_ = SENDS[transfer]
    book = read(between_slices(*transfer))
    (row,) = book.rows  # what is received was counted where it was sent
    assert (row.op, row.dtype, row.shape) == (f"{op} between slices", "f32", (3, 5))
    assert (row.operand_bytes, row.physical_bytes) == (60, 4096)
    assert (row.sent_bytes, book.slice_bytes) == (chip, slice_)
    mesh = jax.sharding.AbstractMesh((2, 2), ("dcn", "ici"))
    assert book.by_axes(mesh) == {("dcn", "ici") if transfer[1] == ALL_CHIPS else ("dcn",): chip}
    assert {number for pair in row.slices for number in pair} == {0, 1}
    assert not book.unknown
    assert "a slice sends" in str(book)


def test_sends_in_loops_are_multiplied_by_known_trips():
    known = read(between_slices("ALL_REDUCE", EVERY_CHIP, times=', backend_config={"known_trip_count":{"n":"3"}}'))
    assert (known.total_bytes, known.slice_bytes, known.is_bound) == (3 * 4096, 3 * 8192, False)
    unknown = read(between_slices("ALL_REDUCE", EVERY_CHIP, times=", sharding={replicated}"))
    assert (unknown.total_bytes, unknown.is_bound) == (4096, True)


ODD_TARGETS = [
    '"{1:2}x{0:3000000000}"',
    '"{1:}x{:3}"',
    "{{100000,99999999900000}}",
    "{{0,1}}",
    "{{->}}",
    '"{}x{}"',
]


@pytest.mark.parametrize("target", ODD_TARGETS)
def test_a_target_that_names_no_chips_is_unknown(target):
    """Neither an error nor a loop without end."""
    for kind in ("ALL_REDUCE", "ONE_TO_ONE"):
        (row,) = (row for row in read(between_slices(kind, target)).rows if row.sent_bytes)
        assert row.is_unknown
        assert row.sent_bytes == 4096


def test_a_permutation_between_slices_has_pairs():
    for group in ("{{100000}}", "{{100000,200000,100001}}"):
        assert all(row.is_unknown for row in read(between_slices("ONE_TO_ONE", group)).rows)


def test_a_send_that_says_nothing_of_what_it_sends_is_unknown():
    text = between_slices("ALL_REDUCE", EVERY_CHIP)
    for given in ("send(%nothing, %t)", "send()"):
        assert any(row.is_unknown for row in read(text.replace("send(%b, %t)", given)).rows)


def test_texts_that_are_cut_off_or_go_in_circles_end():
    circle = between_slices("ALL_REDUCE", EVERY_CHIP).replace("bitcast(%x)", "copy(%b)")
    assert [row.sent_bytes for row in read(circle).rows] == [4096]
    whole = between_slices("ALL_REDUCE", EVERY_CHIP, times=", sharding={replicated}")
    for end in range(0, len(whole), 7):
        read(whole[:end])
    read(whole.replace("condition=%some, body=%body", ""))


@pytest.mark.parametrize("groups", ["[1,100000000000]<=[100000000000]", "[2,4]<=[3,4]", "[2,2]<=[2,2]T(0,0)"])
def test_devices_that_cannot_be_are_named(groups):
    with pytest.raises(ValueError, match="ledger: cannot read the devices"):
        read(one_reduction(groups))


def one_reduction(groups):
    return with_instruction(f"all-reduce(%x), replica_groups={groups}, to_apply=%add")


CUSTOM = 'custom-call(%x), custom_call_target="{}"'
MEGASCALE_OF_TOMORROW = MEGASCALE.format(kind="MANY_TO_ONE", target=EVERY_CHIP, name="b")
UNKNOWN = {
    'send(%x, %t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="a"}': "host transfer",
    "send(%x, %t), channel_id=3": "send",
    f"send(%x, %t), {MEGASCALE_OF_TOMORROW}": "send between slices",
    f"send(%x, %t), {MEGASCALE_OF_TOMORROW}".replace("_target", "_somewhere").replace("MANY_TO_ONE", "ALL_REDUCE"): (
        "send between slices"
    ),
    "outfeed(%x, %t)": "host transfer",
    "collective-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add": "collective-reduce",
    "all-something-start(%x), channel_id=1": "all-something",
    "strange(%x), replica_groups={{0,1,2,3}}": "strange",
    CUSTOM.format("__nccl_all_reduce"): "__nccl_all_reduce",
    CUSTOM.format("nvshmemx_put"): "nvshmemx_put",
    CUSTOM.format("xla.gpu.ragged_all_to_all"): "xla.gpu.ragged_all_to_all",
    CUSTOM.format("QuantizedAllReduce"): "QuantizedAllReduce",
    CUSTOM.format("xla_ffi_python_cpu_callback"): "xla_ffi_python_cpu_callback",
    CUSTOM.format("mine") + ", replica_groups={{0,1},{2,3}}": "mine",
    CUSTOM.format("mine") + ", channel_id=7": "mine",
    CUSTOM.format("tpu_custom_call")
    + ', backend_config={"custom_call_config":{"body":"QQ==","has_communication":true,"collective_id":"0"}}': (
        "tpu_custom_call"
    ),
    CUSTOM.format("mosaic_gpu_v2") + ", backend_config={uses_xla_collective_metadata = true}": "mosaic_gpu_v2",
    'all-reduce(%x), replica_groups={{0,1},{2,3}}, backend_config={"quantized_all_reduce_config":{"type":"INT8"}}': (
        "quantized all-reduce"
    ),
}


def with_instruction(instruction, metadata=""):
    return f"""HloModule m, num_partitions=4

ENTRY %main (x: f32[10]) -> f32[10] {{
  %x = f32[10]{{0}} parameter(0)
  %t = token[] after-all()
  %c = f32[10]{{0}} {instruction}{metadata}
  ROOT %r = f32[10]{{0}} copy(%x)
}}
"""


def test_what_begins_and_ends_a_collective_of_a_tpu_is_none():
    """The collective inside is listed itself."""
    for target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
        assert not read(with_instruction(CUSTOM.format(target))).rows


@pytest.mark.parametrize("instruction", UNKNOWN, ids=UNKNOWN.values())
def test_what_communicates_is_never_left_out(instruction):
    book = read(with_instruction(instruction))
    (row,) = book.unknown
    assert row.op == f"unknown: {UNKNOWN[instruction]}"
    assert row.operand_bytes == row.physical_bytes == row.sent_bytes == book.unknown_bytes == book.total_bytes == 40
    mesh = jax.sharding.AbstractMesh((2, 2), ("dcn", "ici"))
    groups = "replica_groups" in instruction
    everybody = ("dcn", "ici") if "{0,1,2,3}" in instruction else ("ici",)
    assert book.by_axes(mesh) == {everybody if groups else ("unknown",): 40}
    assert "unknown: 1 row with 40 bytes of the total" in str(book)


RECEIVED = ["recv(%t), channel_id=3", 'recv(%t), is_host_transfer=true, frontend_attributes={a="b"}', "infeed(%t)"]


@pytest.mark.parametrize("instruction", RECEIVED)
def test_what_is_received_from_elsewhere_is_listed_and_counts_nothing(instruction):
    book = read(with_instruction(instruction))
    (row,) = book.unknown
    assert (row.shape, row.sent_bytes, book.total_bytes) == ((10,), 0, 0)


def test_halves_of_a_permutation_are_one():
    """XLA for GPU takes some permutations apart."""
    pairs = 'channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{2,3}}"}'
    halves = with_instruction(f"send(%x, %t), {pairs}\n  %d = (f32[10], u32[], token[]) recv(%t), {pairs}")
    book = read(halves)
    (row,) = book.rows
    assert (row.op, row.groups, row.sent_bytes) == ("send", ((0, 1), (2, 3)), 20)
    assert not book.unknown


LOCAL = """
TopK __gpu$TopK ApproxTopK PartialReduce Sharding SPMDFullToShardShape SliceId ZeroCrop __cublas$gemm
__cublas$lt$matmul$f8 __cudnn$convForward cu_threefry2x32 lapack_sgetrf_ffi cusolver_syevd_ffi ducc_fft
__cub$DeviceRadixSort annotate_device_placement ragged_paged_attention quantize_rows
"""


def test_local_calls_are_no_communication():
    assert [target for target in LOCAL.split() if read(with_instruction(CUSTOM.format(target))).rows] == []


@pytest.mark.parametrize(
    "instruction",
    [
        "add(%x, %x)",
        CUSTOM.format("tpu_custom_call") + ', backend_config={"custom_call_config":{"has_communication":false}}',
        "ragged-dot(%x, %x)",
        "all-reduce-done(%x)",
    ],
)
def test_names_that_a_user_gave_say_nothing(instruction):
    metadata = ', metadata={op_name="jit(quantized_all_reduce)/send" source_file="nccl.py" source_line=1}'
    assert read(with_instruction(instruction, metadata)).rows == ()
    (row,) = read(with_instruction("all-reduce(%x), replica_groups={{0,1}}", metadata)).rows
    assert not row.is_unknown


def test_of_a_ragged_exchange_the_offsets_are_not_sent():
    inside = "ragged-all-to-all-start(%x, %x, %x, %x, %x, /*index=5*/%x), channel_id=1, replica_groups={{0,1},{2,3}}"
    (row,) = read(with_instruction(inside)).rows
    assert (row.op, row.sent_bytes) == ("ragged-all-to-all", 20)


def test_padding_is_shown_beside_what_is_padded():
    text = with_instruction("all-reduce(%x), replica_groups={{0,1},{2,3}}").replace("f32[10]{0}", "f32[10]{0:T(128)}")
    book = read(text)
    (row,) = book.rows
    assert (row.operand_bytes, row.physical_bytes, row.sent_bytes) == (40, 512, 40)
    assert "physical B" in str(book)
    plain = read(with_instruction("all-reduce(%x), replica_groups={{0,1},{2,3}}"))
    assert "physical B" not in str(plain)
