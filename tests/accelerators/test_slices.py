"""What crosses between slices of TPUs, compiled without any: the ledger reads it, and exchanges do not pad it."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from jaxcomp.exchange.collectives import (
    all_to_all,
    gather_bytes,
    gather_tree,
    gathered,
    summed,
)

pytest.importorskip("libtpu")

M = 8192  # entries of a chip: eight whole tiles of 32 bits
TILE = 1024
BOTH = ("dcn", "ici")
WHOLE = P()


@pytest.fixture(autouse=True)
def as_users_compile():
    """The suite switches most of XLA's passes off, and caches programs; compilers of accelerators need neither."""
    names = ("jax_disable_most_optimizations", "jax_enable_compilation_cache")
    before = [jax.config.values[name] for name in names]
    for name in names:
        jax.config.update(name, False)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def slices(topology, number):
    """Devices [number, chips] of so many slices of a topology."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another process may compile, too
    devices = topologies.get_topology_desc(topology, "tpu", num_slices=number).devices
    rows = [[device for device in devices if device.slice_index == i] for i in range(number)]
    return np.array(rows)


def mesh_of(number):
    return Mesh(slices("v5e:2x2", number), BOTH)


def book_of(fn, mesh, *shapes, spec=WHOLE):
    """The ledger of fn at each device, for shapes of (shape, dtype)."""
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype in shapes]
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jc.ledger(jax.jit(mapped), *args)


# What each chip sends to other slices of b bytes, in n slices.
BETWEEN = {
    "all-reduce": (lambda x, n: lax.psum(x, "dcn"), lambda b, n: 2 * (n - 1) / n * b),
    "all-gather": (lambda x, n: lax.all_gather(x, "dcn", tiled=True), lambda b, n: (n - 1) * b),
    "reduce-scatter": (lambda x, n: lax.psum_scatter(x, "dcn", tiled=True), lambda b, n: (n - 1) / n * b),
    "all-to-all": (lambda x, n: lax.all_to_all(x, "dcn", 0, 0, tiled=True), lambda b, n: (n - 1) / n * b),
    "collective-permute": (lambda x, n: lax.ppermute(x, "dcn", [(0, 1)]), lambda b, n: b / n),
}


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("op", BETWEEN)
def test_each_collective_between_slices(op, dtype, number):
    fn, sent = BETWEEN[op]
    mesh = mesh_of(number)
    book = book_of(lambda x: fn(x, number), mesh, ((4 * number * M,), dtype), spec=P(BOTH))
    (row,) = book.rows
    size = jnp.dtype(dtype).itemsize * M
    assert row.op == f"{op} between slices"
    assert row.operand_bytes == size <= row.physical_bytes
    assert row.sent_bytes == book.total_bytes == sent(row.physical_bytes, number)
    assert book.slice_bytes == 4 * row.sent_bytes
    assert row.slices == ((0, 1) if op == "collective-permute" else tuple(range(number)),)
    assert book.by_axes(mesh) == {("dcn",): row.sent_bytes}
    if dtype == jnp.float32:
        assert row.physical_bytes == size
    assert not book.unknown


MIXED = {
    "all-reduce": lambda x: lax.psum(x, BOTH),
    "all-gather": lambda x: lax.all_gather(x, BOTH, tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x, BOTH, 0, 0, tiled=True),
    "reduce-scatter": lambda x: lax.psum_scatter(x, BOTH, tiled=True),
    "collective-permute": lambda x: lax.ppermute(x, BOTH, [(i, (i + 1) % 8) for i in range(8)]),
}
# Of 4 M bytes at each of eight chips: what leaves a slice, where chips of a slice first do their part of the sum.
LEAVES = {
    "all-reduce": M * 4,
    "all-gather": 4 * M * 4,
    "all-to-all": 4 * M * 4 / 2,
    "reduce-scatter": M * 4 / 2,
    "collective-permute": M * 4,
}


@pytest.mark.parametrize("op", MIXED)
def test_a_collective_over_both_axes_is_counted_on_both(op):
    mesh = mesh_of(2)
    book = book_of(MIXED[op], mesh, ((8 * M,), jnp.float32), spec=P(BOTH))
    axes = book.by_axes(mesh)
    assert book.slice_bytes == LEAVES[op]
    assert sum(axes.values()) == book.total_bytes
    if op == "all-to-all":  # the runtime of the hosts does all of it
        assert axes == {BOTH: 7 / 8 * 4 * M}
    elif op == "collective-permute":  # two of eight pairs cross; those within a slice are numbered as in the mesh
        assert axes == {("dcn",): M, ("ici",): 3 * M} or axes == {BOTH: M, ("ici",): 3 * M}
    else:
        assert set(axes) == {("dcn",), ("ici",)}


def reorder(devices, how):
    """(mesh, name of the axis of slices) of 4 slices of 4 chips, in other orders than theirs."""
    return {
        "chips": lambda: Mesh(devices[:, [2, 0, 3, 1]], ("dcn", "ici")),
        "slices": lambda: Mesh(devices[::-1], ("dcn", "ici")),
        "transposed": lambda: Mesh(devices.T, ("ici", "dcn")),
        "two axes": lambda: Mesh(devices.reshape(2, 2, 4), ("pod", "dcn", "ici")),
    }[how]()


@pytest.mark.parametrize("how", ["chips", "slices", "transposed", "two axes"])
def test_axes_in_every_order_of_the_mesh(how):
    mesh = reorder(slices("v5e:2x2", 4), how)
    number = mesh.shape["dcn"]
    along = lambda axis: lambda x: lax.ppermute(x, axis, [(0, 1)])
    for axis in mesh.axis_names:
        for fn in (along(axis), lambda x, axis=axis: lax.psum(x, axis)):
            book = book_of(fn, mesh, ((16 * M,), jnp.float32), spec=P(mesh.axis_names))
            assert set(book.by_axes(mesh)) == {(axis,)}
            assert bool(book.slice_bytes) == (axis != "ici")
    pairs = book_of(along("dcn"), mesh, ((16 * M,), jnp.float32), spec=P(mesh.axis_names))
    assert pairs.total_bytes == 4 * M / number  # of all devices, also those of slices that the text does not name


def test_a_send_in_a_loop_of_unknown_length_says_at_least():
    fn = lambda x: lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: lax.psum(x, "dcn"), x)
    book = book_of(fn, mesh_of(2), ((8 * M,), jnp.float32), spec=P(BOTH))
    assert book.is_bound
    assert book.total_bytes == 4 * M
    assert "at least" in str(book)


# ------------------------------------------------------------------------------------------------
# Tiles


SHAPES = [(32, 43), (7,), (3, 5, 1), (), (136, 32, 16), (64, 256), (256, 8), (3, 300, 4)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_dense_exchanges_fill_tiles(dtype):
    """What is padded is at most a tile for each array, and what the exchange says is what crosses."""
    said = []

    def exchange(*arrays):
        totals, sent_bytes = summed([x * 2 for x in arrays], "dcn")
        said.append(sent_bytes)
        return totals

    book = book_of(exchange, mesh_of(2), *((shape, dtype) for shape in SHAPES))
    entries = sum(int(np.prod(shape)) for shape in SHAPES)
    physical, width = sum(row.physical_bytes for row in book.rows), jnp.dtype(dtype).itemsize
    passes = 1.5 if dtype == jnp.bfloat16 else 1  # an all-to-all of all entries, and a gather of a half
    assert entries <= physical / width / passes < entries + TILE * len(SHAPES)
    assert said[0] <= book.total_bytes <= said[0] + 4 * TILE * width
    assert set(book.by_axes(mesh_of(2))) == {("dcn",)}


@pytest.mark.parametrize("shape", [(32, 11008 // 256), (136, 32, 16), (7,), (3, 5, 1), (256, 8), (300, 4)], ids=str)
def test_a_leaf_of_an_identity_exchange_is_not_padded(shape):
    """XLA moves the reshape to the leaf before the sum where it may: (136, 32, 16) went as eight times its entries."""
    mesh = mesh_of(2)
    tx = jc.compressed_mean(jc.direct(jc.identity()), "dcn")
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    state, specs = jc.init_state(tx, like, mesh.abstract_mesh, "dcn")
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    step = jax.shard_map(lambda g, s: tx.update(g[0], s), mesh=mesh, in_specs=(P("dcn"), specs), out_specs=(P(), specs))
    gradients = placed(jax.ShapeDtypeStruct((2, *shape), jnp.float32), P("dcn"))
    book = jc.ledger(jax.jit(step), gradients, jax.tree.map(placed, state, specs))
    entries = sum(row.physical_bytes for row in book.rows if row.slices) / 4  # not what chips of a slice then share
    assert 0 < entries <= int(np.prod(shape)) + TILE


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("size", [40, 300, 3136, 12_544, 131_200])
def test_words_that_only_move_fill_tiles(dtype, size):
    """[2, m] of 8 bits has four rows in the place of one, and a vector too, unless it is whole tiles."""
    mesh, width = mesh_of(2), jnp.dtype(dtype).itemsize
    said = []

    def gather(x):
        said.append(gather_bytes(x, "dcn"))
        return gather_tree(x * 3, "dcn")

    def exchange(x):
        rows, sent_bytes = all_to_all(x * 3, "dcn")
        said.append(sent_bytes)
        return rows

    gathered = book_of(gather, mesh, ((size,), dtype))
    exchanged = book_of(exchange, mesh, ((2, size), dtype))
    for book, sent in zip((gathered, exchanged), said, strict=True):
        (row,) = book.rows
        assert book.total_bytes == sent
        assert row.physical_bytes < (2 if book is exchanged else 1) * (size + TILE) * width


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("size", [100, 600, 5000])
def test_what_chips_of_a_slice_share_is_counted(dtype, size):
    """They gather the parts of each row by itself, and each row is padded."""
    said = []

    def exchange(x):
        rows, sent_bytes = all_to_all(x * 3, "dcn", ("ici",))
        said.append(sent_bytes)
        return rows

    def gather(x):
        said.append(gather_bytes(x, "dcn", ("ici",)))
        return gathered(x * 3, "dcn", ("ici",))[0]

    for function, shape in ((exchange, (2, size)), (gather, (size,))):
        assert book_of(function, mesh_of(2), (shape, dtype)).total_bytes == said[-1]


# ------------------------------------------------------------------------------------------------
# What exchanges send there: copies, routes, contracts


def exchanged(algorithm, number, axis="dcn", size=2**18, **options):
    """The ledger of an exchange between slices, by axes."""
    mesh = mesh_of(number)
    tx = jc.compressed_mean(algorithm, axis, **options)
    state, specs = jc.init_state(tx, jax.ShapeDtypeStruct((size,), jnp.float32), mesh.abstract_mesh, axis)
    rows = P("dcn") if axis == "dcn" else P(BOTH)
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    step = jax.shard_map(lambda g, s: tx.update(g[0], s), mesh=mesh, in_specs=(rows, specs), out_specs=(P(), specs))
    lead = number if axis == "dcn" else 4 * number
    args = placed(jax.ShapeDtypeStruct((lead, size), jnp.float32), rows), jax.tree.map(placed, state, specs)
    return jc.ledger(jax.jit(step), *args).by_axes(mesh)


@pytest.mark.parametrize("name", ["top_k", "int4", "f32"])
def test_chips_of_a_slice_that_hold_the_same_share_what_crosses(name):
    """Each of four chips sends a quarter over the slow network, and no chip a copy."""
    algorithm = {
        "top_k": jc.error_feedback(jc.top_k(0.01)),
        "int4": jc.error_feedback(jc.block_scaled("int4")),
        "f32": jc.direct(jc.identity()),
    }[name]
    whole = {"top_k": 8 * 2**18 // 100, "int4": 2**17 + 2**13, "f32": 4 * 2**18}[name]
    sent = exchanged(algorithm, 2)
    assert sent["dcn",] <= whole / 4 + 4 * TILE
    assert set(sent) == {("dcn",), ("ici",)}


@pytest.mark.parametrize("number", [2, 3, 4])
def test_bf16_between_slices_takes_what_sends_least(number):
    """Of two slices a gather: an all-to-all would hand over the part that stays, too."""
    plain, exact = (exchanged(method(jc.cast("bfloat16")), number)["dcn",] for method in (jc.direct, jc.error_feedback))
    part, b = 2**18 / 4, 2
    assert plain <= (number - 1 if number == 2 else 2 * (number - 1) / number) * b * part + 8 * TILE
    assert exact <= (number - 1 if number < 4 else 3 * (number - 1) / number) * b * part + 8 * TILE


def test_contracts_hold_for_programs_of_several_slices():
    mesh = mesh_of(2)
    summed = lambda x: lax.psum(lax.psum(x, "ici"), "dcn")
    args = jax.ShapeDtypeStruct((8 * M,), jnp.float32, sharding=NamedSharding(mesh, P(BOTH)))
    step = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P(BOTH), out_specs=P()))
    jc.expect(step, args, dcn="<= 32 KiB", ici={"all-reduce": "<= 48 KiB", "all-gather": "none"})
    with pytest.raises(AssertionError, match=r"(?s)promised '<= 20 kB', and 32.77 kB.*between slices.*over dcn"):
        jc.expect(step, args, dcn="<= 20 kB")
