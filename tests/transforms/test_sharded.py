"""Sharded models and buckets: what crosses which mesh axis, and what an exchange waits for."""

import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import run, run_to

import jaxcomp as jc
from experiments import sharded
from experiments.lib.cli import UserError
from experiments.lib.text import read_characters, text_of
from experiments.lib.transformer import DATA, LAYOUTS, Sizes, initial, mean_loss
from experiments.sharded.dependencies import exchanges
from experiments.sharded.step import Program, mesh_for, sizes_of
from jaxcomp.ledger import read

SIZES = Sizes(characters=20, length=8, width=32, heads=2, layers=1)
SHAPE = (2, 2)
BATCH = 8
DENSE = jc.direct(jc.identity())
SPARSE = jc.error_feedback(jc.top_k(0.05))
ALGORITHMS = {"dense": DENSE, "sparse": SPARSE}


@functools.cache
def program(layout, kind=AxisType.Auto, method="dense"):
    return Program(
        layout, mesh_for(layout, SHAPE, kind), ALGORITHMS[method], SIZES, BATCH, optax.sgd(0.1), measure=False
    )


def losses(program, steps=4):
    sizes, rng = program.sizes, np.random.default_rng(0)
    params, state = program.start(0)
    found = []
    for _ in range(steps):
        tokens = rng.integers(0, sizes.characters, (BATCH, sizes.length + 1)).astype(np.int32)
        tokens = jax.device_put(tokens, NamedSharding(program.mesh, program.layout.batch))
        params, state, loss = jax.block_until_ready(program.compiled(params, state, tokens))
        found.append(float(loss))
    return found, state


# ------------------------------------------------------------------------------------------------
# The ledger knows which axes of a mesh a collective crosses


MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ("model",),
    "{{0,4},{1,5},{2,6},{3,7}}": ("data",),
    "{{0,1,2,3,4,5,6,7}}": ("data", "model"),
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": (),
    "{}": ("data", "model"),
    "[2,4]<=[8]": ("model",),
    "[4,2]<=[2,4]T(1,0)": ("data",),
    "[4,2]<=[8]": ("model",),
    "mesh['data'=2,'model'=4] {'model'}": ("model",),
    "mesh['data'=2,'model'=4] {'data'}": ("data",),
    "mesh['data'=2,'model'=4] {'data','model'}": ("data", "model"),
    "mesh['all'=8] {'all':(1)2}": ("data",),
    "mesh['all'=8] {'all':(2)4}": ("model",),
    "mesh['model'=4,'data'=2], device_ids=([4,2]<=[2,4]T(1,0)) {'data'}": ("data",),
}


def one_row(groups, size=10):
    text = f"""HloModule m, num_partitions=8

ENTRY %main (x: f32[{size}]) -> f32[{size}] {{
  %x = f32[{size}]{{0}} parameter(0)
  ROOT %r = f32[{size}]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true
}}
"""
    (row,) = read(text).rows
    return row


@pytest.mark.parametrize("groups", GROUPS)
def test_axes_that_groups_cross(groups):
    row = one_row(groups)
    assert row.axes(MESH) == GROUPS[groups]
    assert sorted(device for group in row.groups for device in group) == list(range(8))
    assert len({len(group) for group in row.groups}) == 1
    assert row.group_size == len(row.groups[0])


def test_a_mesh_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="device 7 of the program is not in a mesh of 4"):
        one_row("[2,4]<=[8]").axes(jax.sharding.AbstractMesh((2, 2), ("data", "model")))


def test_pairs_of_a_permutation_cross_axes_too():
    mesh = mesh_for("fsdp", SHAPE)

    def fn(x):
        return jax.lax.ppermute(x, DATA, [(0, 1)]) + jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])

    fn = jax.shard_map(fn, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(("data", "fsdp")))
    book = jc.ledger(fn, jnp.zeros(4000))
    assert book.by_axes(mesh) == {("data",): 2000.0, ("fsdp",): 4000.0}
    assert sum(book.by_axes(mesh).values()) == book.total_bytes


def test_only_the_dearest_arm_of_a_conditional_counts_by_axis():
    mesh = mesh_for("fsdp", SHAPE)

    def fn(x):
        along = lambda axis: lambda x: jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")
        return jax.lax.cond(
            jax.lax.psum(x[0], ("data", "fsdp")) > 0, along("data"), lambda x: along("fsdp")(2 * x[:9])[0] + x, x
        )

    book = jc.ledger(
        jax.shard_map(fn, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)), jnp.zeros(4000)
    )
    assert book.by_axes(mesh) == {("data", "fsdp"): 6.0, ("data",): 4000.0}
    assert sum(book.by_axes(mesh).values()) == book.total_bytes
    assert [row.sent_bytes for row in book.rows if not row.counted] == [36.0]


def test_comments_among_operands_are_no_names():
    text = """HloModule m, num_partitions=2

ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %t = (f32[10]{0}, /*index=1*/f32[10]{0}) all-reduce(%x, /*index=1*/%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %r = f32[10]{0} get-tuple-element(%t), index=0
}
"""
    assert [row.sent_bytes for row in read(text).rows] == [40.0, 40.0]


# ------------------------------------------------------------------------------------------------
# Layouts


def test_dense_training_is_the_same_in_every_layout():
    expected, _ = losses(program("data"))
    assert expected[-1] < expected[0]
    for layout in ("fsdp", "tensor"):
        np.testing.assert_allclose(losses(program(layout))[0], expected, rtol=2e-5)


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.slow) for layout in ("fsdp", "tensor")])
def test_explicit_axes_work_as_automatic_ones_do(layout):
    automatic, explicit = program(layout, method="sparse"), program(layout, AxisType.Explicit, "sparse")
    assert losses(automatic)[0] == losses(explicit)[0]
    assert explicit.ledger.by_axes(explicit.mesh) == automatic.ledger.by_axes(automatic.mesh)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
@pytest.mark.parametrize("method", ALGORITHMS)
def test_only_payloads_of_shards_cross_the_data_axis(layout, method):
    p = program(layout, method=method)
    _, state = losses(p, steps=1)
    over_data = [row for row in p.ledger.rows if DATA in row.axes(p.mesh)]
    assert {row.axes(p.mesh) for row in over_data} == {(DATA,)}  # nothing crosses both axes at once
    info = jc.info(state)
    assert p.over_data() == info.sent_bytes > 0
    # Half of each parameter lies here; the payload of a shard is all that this device contributes.
    shard_bytes = 4 * p.num_params // SHAPE[1]
    assert sum(row.operand_bytes for row in over_data) == info.lane_bytes + 4
    assert info.lane_bytes == shard_bytes if method == "dense" else info.lane_bytes < shard_bytes / 3
    assert all(row.operand_bytes <= shard_bytes for row in over_data)  # small arrays may cross as one


def test_shards_are_half_of_whole_gradients():
    """What each device sends over data is half of what plain data parallelism sends."""
    assert program("fsdp").over_data() == program("tensor").over_data() == program("data").over_data() / 2


def test_the_state_lies_like_the_parameters():
    """Adam's moments as the parameters do, the memory of each device on that device. Nothing is compiled."""
    p = Program("fsdp", mesh_for("fsdp", SHAPE), SPARSE, SIZES, BATCH, optax.adam(1e-2))
    params, state = p.start(0)
    places = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(tree)]
    for place, moment in zip(places(params), places(state[1][0].mu), strict=True):
        assert place.is_equivalent_to(moment, len(place.spec))
    for leaf in jax.tree.leaves(state[0].local.algorithm):
        assert leaf.shape[0] == 4
        assert leaf.sharding.shard_shape(leaf.shape)[0] == 1
    assert "compiled" not in vars(p)


def test_a_shard_that_the_compiler_would_gather_is_refused():
    """With only "data" manual, the gradient of a shard would be made whole before it is compressed."""
    mesh = mesh_for("fsdp", SHAPE)
    layout = LAYOUTS["fsdp"]
    params = initial(SIZES, 0)
    specs = layout.specs(params)
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    tx = jc.compressed_mean(SPARSE, DATA)
    state, state_specs = jc.init_state(tx, params, mesh, DATA)

    def step(params, state, tokens):
        grads = jax.grad(lambda p: mean_loss(p, tokens, LAYOUTS["data"]))(jc.per_worker(params, DATA))
        return tx.update(grads, state)

    step = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), state_specs, P(DATA)), out_specs=(P(), state_specs), axis_names={DATA}
    )
    tokens = jnp.zeros((BATCH, SIZES.length + 1), jnp.int32)
    with pytest.raises(ValueError, match=r"'fsdp' is not manual here.*leave axis_names out.*sharded='fsdp'"):
        jax.jit(step).lower(params, state, tokens)


def test_a_shard_that_nobody_named_is_refused():
    mesh = mesh_for("tensor", SHAPE)
    tx = jc.compressed_mean(SPARSE, DATA)
    like = jnp.zeros((4, 6))
    state, specs = jc.init_state(tx, like, mesh, DATA)
    step = jax.shard_map(tx.update, mesh=mesh, in_specs=(P(DATA, "model"), specs), out_specs=(P(None, "model"), specs))
    with pytest.raises(ValueError, match="sharded='model'"):
        jax.jit(step).lower(like, state)


@pytest.mark.parametrize(
    ("change", "shape", "batch", "message"),
    [
        ({"heads": 3}, (2, 2), 8, "--width 32 is not a multiple of --heads 3"),
        ({"heads": 1}, (2, 2), 8, "--heads 1 cannot be cut into 2"),
        ({}, (2, 2), 6, "--batch 6 cannot be split among 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(change, shape, batch, message):
    options = SimpleNamespace(**SIZES._asdict() | change, batch=batch)
    with pytest.raises(UserError, match=message):
        sizes_of(options, SIZES.characters, shape)


# ------------------------------------------------------------------------------------------------
# Buckets

BUCKET = 16384
# Sums in f32 are left out: XLA's CPU backend joins all its all-reduces into one, whatever lies between them.
METHODS = {"sparse": SPARSE, "bf16": jc.direct(jc.cast("bfloat16"))}


@functools.cache
def bucketed(method, bucket_bytes=None):
    sizes, options = SIZES._replace(characters=40, layers=2), {"bucket_bytes": bucket_bytes, "measure": False}
    return Program("data", mesh_for("data", SHAPE), METHODS[method], sizes, BATCH, optax.sgd(0.1), **options)


def waits(program):
    """Shares of the backward pass, in the order of the program; an exchange of bf16 is two collectives."""
    found = exchanges(program.compiled.as_text(), program.mesh, DATA)
    return [e.waits_for for e in found if e.op == "all-gather"]


@pytest.mark.parametrize("method", [pytest.param("sparse", marks=pytest.mark.slow), "bf16"])
def test_a_bucket_waits_only_for_its_part_of_the_backward_pass(method):
    (whole,) = waits(bucketed(method))
    assert whole == 1.0
    shares = waits(bucketed(method, BUCKET))
    assert len(shares) >= 5
    assert shares[0] < 0.2  # the last layer's can start when most of the backward pass is still to come
    assert len(set(shares)) == len(shares)
    assert max(shares) < 1.0  # not even the last one waits for the gradients of other buckets


@pytest.mark.slow
def test_buckets_carry_the_same_bytes_and_train_the_same():
    """But for the share of the entries, which is rounded in each bucket, and for what fills vectors up."""
    plain, cut = bucketed("sparse"), bucketed("sparse", BUCKET)
    entry = 8 * (SHAPE[0] - 1)  # bytes that a device sends for one entry more
    assert abs(cut.over_data() - plain.over_data()) < entry * len(waits(cut))
    assert losses(plain)[0] == losses(cut)[0]


HIDDEN = """HloModule m, is_scheduled=true, num_partitions=2

%fused (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}

ENTRY %main (x: f32[4,8]) -> f32[4,4] {
  %x = f32[4,8]{1,0} parameter(0)
  %forward = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp()/dot_general"}
  %first = f32[4,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %start = (f32[4,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%first), replica_groups={{0,1}}, dimensions={0}
  %second = f32[4,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %third = f32[4,4]{1,0} convolution(%second, %forward), dim_labels=bf_io->bf, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
  %done = f32[8,4]{1,0} all-gather-done(%start)
  ROOT %r = f32[4,4]{1,0} add(%third, %forward)
}
"""  # noqa: E501


def test_what_is_scheduled_between_start_and_done():
    """Backward products: 128, 128 and 64 multiply-adds; one of 128 comes before, the others lie between."""
    (found,) = exchanges(HIDDEN, jax.sharding.AbstractMesh((2,), (DATA,)), DATA)
    assert (found.name, found.op, found.operand_bytes) == ("start", "all-gather", 64)
    assert found.waits_for == pytest.approx(128 / 320)
    assert found.hidden_behind == pytest.approx(192 / 320)


FUSED = """HloModule m, is_scheduled=true, num_partitions=2

%step (p: f32[4,8]) -> f32[8,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %g = f32[8,8]{1,0} all-gather(%p), channel_id=9, replica_groups={{0,1}}, dimensions={0}
}

%both (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %g = f32[8,8]{1,0} all-gather(%p), channel_id=9, replica_groups={{0,1}}, dimensions={0}
  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}

ENTRY %main (x: f32[4,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %async-collective-start.1 = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%step
  %fusion.2 = f32[4,4]{1,0} fusion(%async-collective-start.1), kind=kOutput, calls=%both
  ROOT %async-collective-done.1 = f32[8,8]{1,0} fusion(%fusion.2), kind=kCustom, calls=%step
}
"""  # noqa: E501


def test_a_collective_whose_steps_are_fused_with_products_counts_once():
    """As XLA writes it for TPUs."""
    assert [row.sent_bytes for row in read(FUSED).rows] == [128.0]
    (found,) = exchanges(FUSED, jax.sharding.AbstractMesh((2,), (DATA,)), DATA)
    assert (found.name, found.operand_bytes, found.waits_for) == ("async-collective-start.1", 128, 0.0)
    assert found.hidden_behind == 1.0


# ------------------------------------------------------------------------------------------------
# As a user starts them


def test_without_a_file_the_text_is_the_source_of_the_package():
    text = text_of(None)
    assert text.characters > 60
    assert text.codes.size > 100_000
    assert text.codes.max() == text.characters - 1


def test_texts_that_cannot_be_read(tmp_path):
    (tmp_path / "short.txt").write_text("ab" * 10)
    (tmp_path / "broken.xz").write_bytes(b"no xz")
    for name, message in (("none.txt", "no file"), ("short.txt", "too short"), ("broken.xz", "cannot read")):
        with pytest.raises(UserError, match=message):
            read_characters(tmp_path / name)


SMALL = ["--width", 32, "--layers", 1, "--length", 16, "--batch", 8]


def test_sharded_trains_and_says_what_crosses_the_slow_axis(tmp_path):
    options = ["--steps", 3, "--methods", "top-k", "--layout", "tensor", "--runs", tmp_path]
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a float to an integer power
        assert sharded.main([str(option) for option in (*SMALL, *options)]) == 0
    folder = tmp_path / "sharded-1"
    assert {path.name for path in folder.iterdir()} == {"config.json", "results.json", "table.md", "sharded.png"}
    assert "| tensor | top-k |" in (folder / "table.md").read_text()
    (row,) = json.loads((folder / "results.json").read_text())
    assert row["data_bytes"] == row["payload_bytes"] < 4 * row["parameters"] / 10


def test_sharded_refuses_what_it_cannot_cut(tmp_path):
    result = run("sharded", *SMALL, "--heads", 1, "--runs", tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip() == "error: --heads 1 cannot be cut into 2 equal parts"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_overlap_shows_what_waits(tmp_path):
    options = ["--steps", 2, "--methods", "top-k", "--buckets", 0, 8192, "--runs", tmp_path]
    run_to(0, "overlap", *SMALL, *options)
    lines = (tmp_path / "overlap-1" / "table.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| top-k")]
    assert len(rows) == 2
    free = [int(row.split("|")[4].strip(" %")) for row in rows]
    assert free[0] < free[1]
