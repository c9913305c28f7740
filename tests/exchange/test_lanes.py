"""Lanes: what shares a collective, that it arrives, and that the bytes are those of the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import route_worlds as rw
from jax.sharding import PartitionSpec as P
from route_worlds import LIKES, messages, uneven
from worlds import AXIS, assert_same, at, mesh_of

from jaxcomp import backend_cpu
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.exchange import collectives
from jaxcomp.exchange import collectives as lanes
from jaxcomp.exchange.axes import varying, varying_axes
from jaxcomp.exchange.routes import Parcel, Way
from jaxcomp.exchange.routes.route import LAST
from jaxcomp.ledger import ledger
from jaxcomp.payloads import Dense

N = 4
MIXED = {
    "bytes": jnp.arange(10, dtype=jnp.uint8),
    "empty": jnp.zeros((0, 3)),
    "floats": jnp.arange(6.0).reshape(2, 3),
    "halves": jnp.arange(5, dtype=jnp.bfloat16),
    "scalar": jnp.float32(7),
}


def test_few_wide_entries_join_a_narrow_lane():
    (lane,) = lanes.word_lanes(MIXED)
    assert (lane.dtype, lane.size) == (jnp.uint8, 10 + 4 * 6 + 2 * 5 + 4)
    many = MIXED | {"many": jnp.zeros(lanes.FEW_BYTES // 4 + 1)}
    assert [lane.dtype.itemsize for lane in lanes.word_lanes(many)] == [1, 4]
    assert [(lane.dtype, lane.size) for lane in lanes.sum_lanes(MIXED)] == [
        (jnp.uint8, 10),
        (jnp.float32, 7),
        (jnp.bfloat16, 5),
    ]


def test_a_very_long_array_has_a_lane_of_its_own():
    long = jax.ShapeDtypeStruct((lanes.ALONE_BYTES // 4,), jnp.uint32)
    short = jax.ShapeDtypeStruct((lanes.ALONE_BYTES // 4 - 1,), jnp.uint32)
    few = jax.ShapeDtypeStruct((3,), jnp.float32)
    places = lambda *arrays: [lane.places for lane in lanes.word_lanes(arrays)]
    assert places(few, long, few) == [(0, 2), (1,)]
    assert places(few, short) == [(0, 1)]
    assert places(long) == [(0,)]


def test_buckets_have_lanes_of_their_own_and_small_leaves_go_last():
    payloads = (Dense(jnp.zeros(3)), Dense(jnp.zeros(2)), (jnp.zeros(1), jnp.zeros(1, jnp.int32)))
    parcels = [Parcel(identity(), x, (), None, bucket) for x, bucket in zip(payloads, (0, 2, 1), strict=True)]
    buckets = Way(AXIS, N, buckets=True).buckets_of(parcels)
    assert buckets == [LAST, 2, 1, 1]
    assert [lane.places for lane in lanes.word_lanes(payloads, buckets)] == [(2, 3), (1,), (0,)]
    assert [lane.places for lane in lanes.sum_lanes(payloads, buckets)] == [(2,), (3,), (1,), (0,)]
    assert Way(AXIS, N).buckets_of(parcels) is None


@pytest.mark.sampled
@pytest.mark.parametrize("on_a_mesh", [False, True])
@pytest.mark.parametrize(("long", "alone"), [(backend_cpu.LONG, lanes.ALONE_BYTES), (1, lanes.ALONE_BYTES), (1, 8)])
def test_everything_arrives(long, alone, on_a_mesh, seed, monkeypatch):
    monkeypatch.setattr(backend_cpu, "LONG", long)
    monkeypatch.setattr(lanes, "ALONE_BYTES", alone)
    rng = np.random.default_rng(seed)
    given = {name: jnp.asarray(rng.integers(0, 99, (N, N, *x.shape)), x.dtype) for name, x in MIXED.items()}
    both = lambda x: (lanes.gather_tree(x, AXIS), lanes.all_to_all(x, AXIS)[0])
    if on_a_mesh:
        rows_of = lambda tree: jax.tree.map(lambda x: x[None], tree)
        one = lambda tree: (lambda rows, parts: (rows, rows_of(parts)))(*both(at(tree)))
        run = jax.jit(jax.shard_map(one, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=(P(), P(AXIS))))
    else:
        run = jax.jit(jax.vmap(both, axis_name=AXIS, out_axes=(None, 0)))
    rows, parts = run(given)
    for name, x in given.items():
        np.testing.assert_array_equal(rows[name], x)
        np.testing.assert_array_equal(parts[name], np.swapaxes(x, 0, 1))


@pytest.mark.parametrize("on_a_mesh", [False, True])
def test_shapes_that_fill_tiles_of_tpus_change_no_value(on_a_mesh, seed, monkeypatch):
    monkeypatch.setattr(collectives, "SMALL", 100)
    rng = np.random.default_rng(seed)
    shapes = {"a": (3, 4), "empty": (0, 2), "scalar": (), "long": (10, 12), "whole": (16, 128), "vector": (1024,)}
    given = {name: jnp.asarray(rng.integers(0, 99, (N, *shape)), jnp.float32) for name, shape in shapes.items()}
    given |= {"half": given["long"].astype(jnp.bfloat16), "bytes": given["a"].astype(jnp.uint8)}
    rows = {name: jnp.asarray(rng.integers(0, 99, (N, N, *x.shape[1:])), x.dtype) for name, x in given.items()}
    floats = [name for name in given if name != "bytes"]

    def every(tree, rows):
        summed = lanes.summed({name: tree[name] for name in floats}, AXIS, exact=True)[0]
        return (summed, lanes.gather_tree(tree, AXIS)), lanes.all_to_all(rows, AXIS)[0]

    def run(form):
        monkeypatch.setattr(collectives, "platform", lambda: form)
        if not on_a_mesh:
            return jax.jit(jax.vmap(every, axis_name=AXIS, out_axes=((None, None), 0)))(given, rows)
        every_row = lambda x: x[None]
        one = lambda *trees: (lambda same, own: (same, jax.tree.map(every_row, own)))(*every(*at(trees)))
        step = jax.shard_map(one, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=(P(), P(AXIS)))
        return jax.jit(step)(given, rows)

    assert_same(run("tpu"), run("cpu"))


def test_bytes_of_a_sum_on_tpus_are_those_of_whole_tiles(monkeypatch):
    monkeypatch.setattr(collectives, "platform", lambda: "tpu")
    shapes = [(3, 4), (7,), (136, 32, 16), (64, 256)]  # the first two cross together; the last one fills tiles
    arrays = [jnp.zeros(shape) for shape in shapes]
    said = []

    def summed(*arrays):
        totals, sent_bytes = lanes.summed(arrays, AXIS)
        said.append(sent_bytes)
        return totals

    book = ledger(jax.shard_map(summed, mesh=mesh_of(N), in_specs=P(), out_specs=P(), check_vma=False), *arrays)
    assert book.total_bytes == said[0] == 2 * (N - 1) / N * 4 * (1024 + 69 * 1024 + 16 * 1024)


def test_small_arrays_are_summed_as_one(seed, monkeypatch):
    """Of one dtype and one type: what differs over another axis of the mesh, too, stays apart."""
    monkeypatch.setattr(collectives, "SMALL", 100)
    monkeypatch.setattr(collectives.jax, "process_count", lambda: 2)
    rng = np.random.default_rng(seed)
    shapes = {"a": (3, 4), "empty": (0, 2), "scalar": (), "long": (10, 12), "b": (7,)}
    given = {name: jnp.asarray(rng.integers(0, 99, (2, 2, *shape)), jnp.float32) for name, shape in shapes.items()}
    given["count"] = jnp.arange(8).reshape(2, 2, 2)

    def mine(tree, b):
        tree = at(tree, (0, 0)) | {"b": b[0]}
        return dict(zip(tree, collectives.sum_arrays(list(tree.values()), AXIS), strict=True))

    sharded = P(AXIS, "model")
    run = jax.shard_map(
        lambda tree, b: jax.tree.map(lambda x: x[None], mine(tree, b)) | {"b": mine(tree, b)["b"]},
        mesh=mesh_of((2, 2)),
        in_specs=(sharded, P(AXIS)),
        out_specs={name: P("model") for name in given} | {"b": P()},
    )
    out = jax.jit(run)({k: v for k, v in given.items() if k != "b"}, given["b"][:, 0])
    for name, x in given.items():
        want = np.asarray(x).sum(0) if name != "b" else np.asarray(x)[:, 0].sum(0)
        np.testing.assert_array_equal(out[name], want)
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    summed = jax.shard_map(
        lambda x: collectives.sum_arrays(jax.tree.leaves(varying(x, AXIS)), AXIS),
        mesh=mesh_of(2),
        in_specs=P(),
        out_specs=P(),
    )
    assert {row.shape for row in ledger(summed, tree).rows} == {(12 + 0 + 1 + 7,), (10, 12)}


@pytest.mark.parametrize("processes", [1, 2])
def test_long_sums_are_added_in_turn(seed, monkeypatch, processes):
    """Each in the memory of the one before, whatever numbers stand there, and whatever else they differ over."""
    size = 2**14
    monkeypatch.setattr(collectives, "IN_TURN", 2 * size)
    monkeypatch.setattr(collectives, "SMALL", 100)
    monkeypatch.setattr(collectives.jax, "process_count", lambda: processes)
    rng = np.random.default_rng(seed)
    given = {f"x{i}": jnp.asarray(rng.integers(-99, 99, (2, 2, size)), jnp.float32) for i in range(8)}
    given["x1"] = given["x1"].at[0, 0, 0].set(jnp.nan).at[0, 1, 0].set(-jnp.inf)
    given["x3"] = given["x3"].at[0, 0, 0].set(jnp.inf)
    given |= {"x4": given["x4"].astype(jnp.int32), "x5": given["x5"][..., :0]}
    alike = P(AXIS, None)  # x6 differs over the workers alone, after others that differ over both axes

    def run(tree):
        mine = {name: 2 * x[0, 0] for name, x in tree.items()}
        sums = dict(zip(mine, collectives.sum_arrays(list(mine.values()), AXIS), strict=True))
        return {name: x if name == "x6" else x[None] for name, x in sums.items()}

    ins = {name: alike if name == "x6" else P(AXIS, "model") for name in given}
    outs = {name: P() if name == "x6" else P("model") for name in given}
    given["x6"] = jnp.broadcast_to(given["x6"][:, :1], given["x6"].shape)
    program = jax.jit(jax.shard_map(run, mesh=mesh_of((2, 2)), in_specs=(ins,), out_specs=outs)).lower(given).compile()
    assert len(ledger(program).rows) >= 4
    assert program.memory_analysis().temp_size_in_bytes < 5 * 4 * size  # all eight at once are 8
    out = program(given)
    for name, x in given.items():
        want = 2 * np.asarray(x).sum(0)
        np.testing.assert_array_equal(out[name], want[0] if name == "x6" else want)


def test_narrow_sums_are_added_in_single_precision():
    """256 + 1 + 1 + 1 in bf16 would stay at 256; added in f32 and rounded once it is 260."""
    x = jnp.array([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    total = lambda exact: jax.jit(
        jax.vmap(lambda x: lanes.summed(x, AXIS, exact=exact)[0], axis_name=AXIS, out_axes=None)
    )(x)
    assert (total(False), total(True)) == (260, 259)


def test_many_narrow_numbers_are_summed_in_parts(monkeypatch):
    monkeypatch.setattr(lanes, "SOME_ENTRIES", 100)
    sizes = (60, 40, 1, 300, 99)
    for dtype, places in ((jnp.bfloat16, [(0, 1), (2,), (3,), (4,)]), (jnp.float32, [(0, 1, 2, 3, 4)])):
        arrays = [jax.ShapeDtypeStruct((size,), dtype) for size in sizes]
        assert [lane.places for lane in lanes.sum_lanes(arrays)] == places
    given = [jnp.arange(2.0 * size, dtype=jnp.bfloat16).reshape(2, size) for size in sizes]
    both = jax.jit(jax.vmap(lambda x: lanes.summed(x, AXIS, exact=True)[0], axis_name=AXIS, out_axes=None))(given)
    for total, rows in zip(both, given, strict=True):
        np.testing.assert_array_equal(total, np.asarray(rows, np.float32).sum(0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_of_buckets_wait_for_each_other(dtype):
    total = lambda tree: lanes.summed(tree, AXIS, buckets=(1, 2, 3))[0]
    rows = [jnp.ones((2, 8), dtype)] * 3
    text = jax.jit(jax.vmap(total, axis_name=AXIS, out_axes=None)).lower(rows).as_text()
    assert text.count("optimization_barrier") == 2


# ------------------------------------------------------------------------------------------------
# Bytes


def counted(via, compressor, like, given, world, **options):
    """Bytes of the compiled program, and what the route says."""
    said = []

    def step(message, way):
        result = rw.send(via, compressor, like, message, way._replace(**options))
        said.append(result.carried.sent_bytes)
        return result.mean

    mesh, way, spec = {
        "mesh": (mesh_of(N), Way(AXIS, N), P(AXIS)),
        "replicas": (mesh_of((2, 2), (AXIS, "replica")), Way(AXIS, N, replicas=("replica",)), P(AXIS)),
    }[world]
    program = jax.jit(jax.shard_map(lambda x: step(at(x), way), mesh=mesh, in_specs=spec, out_specs=P()))
    return ledger(program, given).total_bytes, said[0]


BUCKETS = {"buckets": True}
CASES = {
    "gather": ("gather", natural(), "small", {}),
    "gather-narrow": ("gather", cast("float8_e4m3fn"), "small", {}),
    "gather-buckets": ("gather", natural(), "small", BUCKETS),
    "sum": ("sum", identity(), "small", {}),
    "sum-narrow": ("sum", cast("bfloat16"), "small", {}),
    "sum-exact": ("sum", cast("bfloat16"), "small", {"exact": True}),
    "sum-buckets": ("sum", identity(), "small", BUCKETS),
    "auto": ("auto", natural(), "small", {}),
    "auto-buckets": ("auto", natural(), "small", BUCKETS),
    "auto-dense": ("auto", natural(), "dense", {}),
    "concat": ("concat", uneven((40, 3, 11, 60)), "vector", {}),
    "ring": ("ring", uneven((40, 3, 11, 60)), "vector", {}),
}


PLACES = [(name, "mesh") for name in CASES] + [(name, "replicas") for name in CASES if name not in ("concat", "ring")]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "world"), PLACES)
def test_bytes_are_those_of_the_compiled_program(name, world, seed):
    via, compressor, like, options = CASES[name]
    workers = N if world == "mesh" else 2
    given = messages(seed, LIKES[like], (workers,))
    compiled, said = counted(via, compressor, LIKES[like], given, world, **options)
    assert said == pytest.approx(compiled, rel=1e-6)
    assert said > 0


@pytest.mark.sampled
@pytest.mark.parametrize("compressor", [identity(), natural(), cast("float8_e4m3fn")], ids=lambda c: c.spec.name)
def test_two_shots_send_what_the_compiled_program_does(compressor, seed):
    given = messages(seed, rw.shape(N, 96), (N,))
    compiled, said = counted("two_shot", compressor, rw.shape(N, 96), given, "mesh")
    assert said == compiled


def test_a_bucket_does_not_wait_for_the_others(seed):
    """Each has a collective of its own, which XLA does not join with the next."""
    given = messages(seed, LIKES["small"], (N,))
    ways = {}
    for buckets in (False, True):
        way = Way(AXIS, N, buckets=buckets)
        step = lambda x: rw.send("gather", natural(), LIKES["small"], at(x), way).mean  # noqa: B023
        program = jax.jit(jax.shard_map(step, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=P()))
        ways[buckets] = len([row for row in ledger(program, given).rows if row.op == "all-gather"])
    assert ways == {False: 1, True: 3}


# ------------------------------------------------------------------------------------------------
# The schedule of permutations


@pytest.mark.parametrize("workers", range(2, 9))
def test_permutations_bring_every_part_once_and_pair_nobody_up_where_it_can_be_helped(workers):
    schedule, parts = collectives.permutation_schedule(workers)
    sent = [(i, target, part) for step in schedule for i, (target, part) in enumerate(zip(*step, strict=True))]
    pairs = [(i, j) for i in range(workers) for j in range(workers) if i != j]
    assert sorted(sent) == [(*pair, part) for pair in pairs for part in range(parts)]
    assert all(sorted(step.targets) == list(range(workers)) for step in schedule)
    paired = [step for step in schedule if any(step.targets[step.targets[i]] == i for i in range(workers))]
    assert len(paired) == (0 if workers % 2 or workers == 4 else 1)


@pytest.mark.parametrize("workers", [3, 4])
def test_permutations_are_an_all_to_all(workers):
    rows = jnp.arange(workers * workers * 7, dtype=jnp.uint32).reshape(workers * workers, 7)
    run = lambda fn: jax.jit(jax.shard_map(fn, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(AXIS)))(rows)
    want = run(lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True))
    np.testing.assert_array_equal(run(lambda x: collectives._all_to_all_by_permutations(x, AXIS)), want)


def test_ragged_lowers_for_accelerators():
    fn = lambda words: varying(collectives.ragged_all_to_all(words[0], (3, 1, 0, 2), AXIS), AXIS)
    fn = jax.jit(jax.shard_map(fn, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=P(AXIS)))
    text = fn.trace(jnp.zeros((N, 3), jnp.uint32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text


def test_gathers_of_nothing_have_the_types_of_full_ones(seed):
    """In a conditional, the branches of a gather of something and of nothing have equal types."""
    like = rw.shape(0)

    def step(message, call):
        full, none = varying((jnp.ones(3), message), (AXIS, "shard"))
        assert varying_axes(lanes.gather_tree(full, AXIS)) == varying_axes(lanes.gather_tree(none, AXIS)) == ("shard",)
        return jnp.float32(1)

    np.testing.assert_array_equal(rw.on_shards(step, messages(seed, like, (2, 2))), 1)
