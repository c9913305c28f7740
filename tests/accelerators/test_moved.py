"""What codecs move on an H100, counted in its compiler's text (copies, kernels, waits), and hold on a TPU."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerators.bounds import needs
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.text import TURNS, cases, codec, row_of
from experiments.bench.trees import gpt_like, num_entries
from experiments.lib.kernels import counted
from experiments.lib.targets import compiled, described, donating, mesh_on, shapes_on, state_on, update_on
from jaxcomp import select
from jaxcomp.backend import rows_times, side_by_side
from jaxcomp.base import State, accumulate
from jaxcomp.compressors.hadamard import rotation_of
from jaxcomp.hlo import called, contents_of
from jaxcomp.program import Module

CASES = cases(22)
MATRIX = np.ones((512, 512), np.float32)
# Copies of the vector, kernels, and waits of the host: at most.
MOST = {
    "compress sidco": (0.85, 45, 4),
    "compress top_k": (0.8, 75, 1),
    "compress chunked": (3.2, 70, 4),
    "compress int8": (1.2, 4, 0),
    "compress int4": (1.15, 5, 0),
    "compress mxfp8": (1.25, 5, 0),
    "compress dithering(7)": (1.15, 8, 1),
    "compress eden(4)": (3.95, 13, 0),
    "decompress eden(4)": (2.2, 17, 0),
    "16 workers by vmap, top_k": (0.9, 75, 1),
}


@pytest.mark.parametrize("name", MOST)
def test_a_codec_moves_few_copies(name):
    needs("h100")
    turns = next((turns for word, turns in TURNS.items() if word in name), 0)
    row = row_of(name, CASES[name], described("h100")[0], turns)
    copies, kernels, waits = MOST[name]
    assert row["copies"] <= copies, row["largest"]
    assert row["kernels"] <= kernels
    assert row["waits"] <= waits


# Copies, and vectors held, where no block and no word divides the length. Eden's codes of 8 bits were found by 127
# comparisons, which XLA wrote, 26 vectors; each of many places held a row of counts, 3 vectors for a tenth.
UNEVEN = {
    "eden(4)": (lambda: jc.eden(4), 4.0, 2.1),
    "eden(8)": (lambda: jc.eden(8), 4.1, 2.1),
    "drive": (jc.drive, 4.0, 2.1),
    "top_k(0.1)": (lambda: jc.top_k(0.1), 4.7, 0.6),
    "skcompress()": (jc.skcompress, 16.5, 1.1),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_vectors_of_any_length_are_compressed_in_little_memory_on_a_gpu(name):
    needs("h100")
    make, copies, most = UNEVEN[name]
    row = row_of(name, codec("compress", make, 2**22 + 5330), described("h100")[0], 0)
    assert row["copies"] <= copies, row["largest"]
    assert row["memory"] <= most


def sum_of(messages, compressor, sender=None):
    """The program of a GPU that adds up so many messages of a compressor, or of `sender`, of 2^22 entries."""
    needs("h100")
    like, mesh = jax.ShapeDtypeStruct((2**22,), jnp.float32), mesh_on([described("h100")[0]], {"data": 1})
    payload = lambda key: (sender or compressor).compress(key, jnp.zeros(like.shape), State())[0]
    sent = jax.eval_shape(jax.vmap(payload), jax.random.split(jax.random.key(0), messages))
    add = lambda sent: accumulate(compressor, like, sent, None, None)
    mapped = jax.shard_map(add, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return compiled(jax.jit(mapped), *shapes_on(mesh, (sent,)))


@pytest.mark.parametrize("compressor", [jc.block_scaled("int4"), jc.dithering(7)], ids=["int4", "dithering"])
def test_many_messages_are_added_in_one_pass_on_a_gpu(compressor):
    """64 of 4 bits an entry: 4 copies to read them, half of one to write their sum; a pass for each took 78."""
    assert counted(sum_of(64, compressor).text, 0).bytes / (8 * 2**22) < 5


def test_messages_that_are_not_decoded_by_entry_are_held_one_at_a_time_on_a_gpu():
    """As of a compressor of one's own, which decodes by a product and brings no sum of messages."""
    bf16 = jc.cast(jnp.bfloat16)
    product = lambda payload, shared, like: (payload.values.astype(jnp.float32).reshape(-1, 512) @ MATRIX).reshape(-1)
    own = bf16._replace(decompress=product, accumulate=None, spec=bf16.spec._replace(entrywise=False))
    assert sum_of(16, own, sender=bf16).memory / 4 / 2**22 < 1.6  # 16 at once


# Temporary memory of a TPU v5e, in vectors of 2^24 entries. An axis of 32 is padded to 128 lanes there: int4 held 6 and
# 9, top_k 5, mxfp4 5 and 3. Arrays of codes lie in its fast memory, where they do not count.
HELD = {
    "compress int4": 0.05,
    "decompress int4": 0.05,
    "compress int8": 0.05,
    "decompress int8": 0.05,
    "compress dithering(7)": 2.05,
    "decompress dithering(7)": 0.05,
    "compress mxfp4": 2.05,
    "decompress mxfp4": 0.05,
    "compress chunked": 1.1,
}


@pytest.mark.parametrize("name", HELD)
def test_a_codec_holds_few_vectors_on_a_tpu(name):
    needs("v5e:2x2")
    function, args = cases(24)[name].make(mesh_on([described("v5e:2x2")[0]], {"data": 1}))
    assert compiled(function, *args).memory / 4 / 2**24 <= HELD[name]


# The same of a step on four chips, in gradients of 58.8 M entries in 50 leaves: 5.0, 9.3 and 6.0 before marks became
# words, and words codes, by way of their transpose, and before rows were sorted a few thousand at a time.
# And how many kernels XLA writes for it, beside those of `backend_tpu_kernels`: megabytes of program each, so seconds.
STEPS = {
    "top_k": (lambda: jc.error_feedback(jc.top_k(0.001)), 1.15, 295),
    "int4": (lambda: jc.error_feedback(jc.block_scaled("int4")), 1.7, 90),
    "dithering": (lambda: jc.direct(jc.dithering(7)), 0.6, 145),
    "sparse_loco": (lambda: jc.sparse_loco(), 1.15, 215),
    "ef21": (lambda: jc.ef21(jc.top_k(0.001)), 3.2, 280),  # 5.0 where its vectors got the axis of workers leaf by leaf
    "majority_vote": (jc.majority_vote, 1.4, 90),  # 3.5, likewise
    "float8": (lambda: jc.error_feedback(jc.cast("float8_e4m3fn")), 4.0, 105),  # 9.5 with all messages at once
    "eden": (lambda: jc.error_feedback(jc.eden(4)), 5.1, 135),  # 9.0 where blocks were turned to be rotated
    "rotate": (lambda: jc.error_feedback(jc.rotate(jc.block_scaled("int4"))), 3.1, 95),  # 7.0, likewise
    "dct": (lambda: jc.error_feedback(jc.dct(jc.chunked(jc.top_k(k=64), 4096))), 4.1, 185),  # 6.0 in rows of 64
    "bfloat16": (lambda: jc.error_feedback(jc.cast("bfloat16")), 0.4, 195),  # 0.8 where XLA joined lanes
    "skcompress": (lambda: jc.error_feedback(jc.skcompress(jc.top_k(0.01))), 1.1, 325),
    "natural": (lambda: jc.direct(jc.natural()), 6.6, 75),  # 12.8 with each message in a pass of its own
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_many_leaves_holds_few_gradients_on_a_tpu(name):
    make, gradients, kernels = STEPS[name]
    like = gpt_like(4, 1024)
    program = step_on("v5e:2x2", make(), like)
    assert program.memory / 4 / num_entries(like) <= gradients
    assert len(re.findall(r"= [^=]*? (?:fusion|copy|reshape)\(", program.text)) <= kernels
    assert "tpu_custom_call" in program.text
    # XLA's own running sums: of 655,808 counts one took a minute to compile, and a step on 21.0 M parameters 216 s.
    assert " reduce-window(" not in program.text


def test_leaves_of_a_long_vector_get_their_shapes_one_by_one_on_a_tpu():
    """1.7 gradients where all were cut out first. And ranks that ascend are not sorted to be written."""
    like = gpt_like(24, 1024)
    program = step_on("v5e:2x2", jc.error_feedback(jc.top_k(0.01)), like)
    assert program.memory / 4 / num_entries(like) <= 1.2
    assert " sort(" not in program.text


def test_factors_of_low_rank_are_sent_with_their_long_axis_last_on_a_tpu():
    """[1024, 4] as a vector was a program of megabytes, and so were tiny products at full precision."""
    program = step_on("v5e:2x2", jc.power_sgd(4), gpt_like(2, 1024))
    assert not re.search(r"stablehlo.reshape .*tensor<[0-9x]*[0-9]{3}x4xf32>\) -> tensor<[0-9]*xf32>", program.stable)


def equal_leaves(count, size):
    return {f"w{i}": jax.ShapeDtypeStruct((size,), jnp.float32) for i in range(count)}


CODED = {
    "long leaves": (gpt_like(4, 1024), STEPS["int4"][0], 0.6),
    "32 short ones": (equal_leaves(32, 2**17), STEPS["int4"][0], 1.65),
    "10 below 2^18": (equal_leaves(10, 2**18 - 1), STEPS["int4"][0], 0.7),
    "shifts": (gpt_like(4, 1024), lambda: jc.diana(jc.dithering(7)), 0.2),
}


# Stacks, whose rows ran in turn: .96, 2.25 and 1.5 gradients, and 34,000 kernels for 500 leaves.
LONG_LEAF = {"w": jax.ShapeDtypeStruct((32, 4096, 11008), jnp.float32)}
STACKS = {
    "a leaf beyond 2^30 entries": (LONG_LEAF, STEPS["int4"][0], "auto", 0.7, 30),
    "the same, top_k": (LONG_LEAF, STEPS["top_k"][0], "auto", 0.2, 120),
    "chunks of two shots": (gpt_like(4, 1024), STEPS["int4"][0], "two_shot", 0.6, 45),
    "leaf by leaf": (
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8), (8, 4096)) for _ in range(100)],
        lambda: jc.error_feedback(jc.per_leaf(jc.top_k(0.001))),
        "auto",
        3.1,
        120,
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_rows_of_a_stack_are_compressed_at_once_on_a_gpu(name):
    like, make, via, most, kernels = STACKS[name]
    program = step_on("h100", make(), like, via)
    assert program.memory / 4 / num_entries(like) <= most
    assert counted(program.text, 2).launches <= kernels


@pytest.mark.parametrize("name", CODED)
def test_leaves_of_any_length_are_decoded_in_little_memory_on_a_gpu(name):
    """At most as one vector: gathered entry by entry, short leaves held two to four gradients more."""
    like, make, most = CODED[name]
    assert step_on("h100", make(), like).memory / 4 / num_entries(like) <= most


# In bytes of the tree, where leaves have half the bytes of a sum: all sums were held to the end, 2 each.
@pytest.mark.parametrize(("name", "most"), [("top_k", 0.35), ("int4", 0.6)])
def test_leaves_of_16_bits_are_made_one_after_the_other_on_a_gpu(name, most):
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), gpt_like(4, 1024))
    assert step_on("h100", STEPS[name][0](), like).memory / 2 / num_entries(like) <= most


def test_equal_leaves_are_read_by_the_same_few_kernels():
    """Of 16 leaves of three sizes: cut out at places that XLA knew, each had kernels of its own, and copies before."""
    program = step_on("h100", jc.diana(jc.dithering(7)), gpt_like(4, 1024))
    assert counted(program.text, 0).launches <= 120  # 146
    assert program.memory / 4 / num_entries(gpt_like(4, 1024)) <= 0.15  # .17


# Bytes a parameter that a device holds between steps: a row of 8 bits would be padded to four rows.
@pytest.mark.parametrize(("kind", "most"), [("int8", 1.1), ("bfloat16", 2.1), ("float32", 4.1)])
def test_a_narrow_memory_is_narrow_on_a_tpu(kind, most):
    like = gpt_like(2, 256)
    program = step_on("v5e:2x2", jc.error_feedback(jc.block_scaled("int4"), memory=kind), like)
    assert most - 0.2 < program.aliased / num_entries(like) <= most


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("error_feedback", 12, 13.2), ("loco, 8 bits", 13, 13.7), ("error_feedback, 8 bits", 13, 13.7)],
)
def test_what_a_step_with_int4_holds_at_its_peak_on_a_gpu(name, least, most):
    """Bytes a parameter. In f32 the message lies in the place of the memory; with 8 bits it was an array more, and with
    loco two. Sections of the messages are held: all of them took one byte more."""
    like, int4 = gpt_like(2, 1024), jc.block_scaled("int4")  # few leaves: decoded as one, they held 1.4 gradients more
    method = jc.loco if "loco" in name else jc.error_feedback
    algorithm = method(int4, memory="int8") if "8 bits" in name else method(int4)
    assert least < step_on("h100", algorithm, like).peak / num_entries(like) < most


# Copies of the tree on one device: adding 1.5, what is remembered 1, codes and the direction .5 each, words .2. A pass
# for the largest entries alone would be .5 more.
@pytest.mark.parametrize(
    ("name", "most"),
    [("int4", 3.8), ("int8", 4.2), ("nvfp4", 4.2), ("sign", 3.7), ("top_k", 3.0), ("top_k, 16 bits", 3.5)],
)
def test_a_step_with_error_feedback_moves_few_copies_on_a_gpu(name, most):
    needs("h100")
    make = {"top_k": lambda: jc.top_k(0.001), "sign": jc.sign}.get(name.split(",")[0], lambda: jc.block_scaled(name))
    algorithm = jc.error_feedback(make(), memory="bfloat16" if "16 bits" in name else "float32")
    like = gpt_like(2, 1024)
    mesh = mesh_on([described("h100")[0]], {"data": 1})
    step, args = update_on(mesh, jc.compressed_mean(algorithm, "data"), like)
    found = counted(compiled(step, *args).text, 0).bytes / (8 * num_entries(like))
    assert most - 0.3 < found < most


@pytest.mark.parametrize(("layers", "width"), [(4, 1024), (24, 512)])
def test_long_messages_cross_in_sections_on_a_gpu(layers, width):
    """Four messages of int4 are half a gradient, sixteen were two."""
    like = gpt_like(layers, width)
    program = step_on("h100", jc.error_feedback(jc.block_scaled("int4")), like)
    assert program.memory / 4 / num_entries(like) < 0.3
    assert 6 < len(re.findall(r" all-gather-start\(", program.text)) < 30


def step_on(target, algorithm, like, via="auto"):
    """One step, compiled for four devices; its state is donated."""
    needs(target)
    mesh = mesh_on(list(described(target))[:4], {"data": 4})
    tx = jc.compressed_mean(algorithm, "data", via=via)
    step, args = update_on(mesh, tx, like)
    return compiled(step, *args)


# Copies of the tree that a step of AdamW with donated parameters moves where nothing is exchanged, and gradients held.
# AdamW alone moves 3.5; its updates, which the exchange may replace, are written and read again with the parameters. In
# conditionals these were 12.5, 13.0 and 20.5 copies, and 6.5, 3.3 and 6.5 gradients.
BETWEEN = {
    "plain": ({}, 5.1, 1.7),
    "streaming": ({"fragments": 2, "delay": 1, "mixing": 0.5}, 5.1, 1.0),
    "moments": ({"moments": {"mu": 8, "nu": 16}}, 5.1, 1.8),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", BETWEEN)
def test_a_local_step_without_an_exchange_moves_few_copies_on_a_gpu(name):
    needs("h100")
    options, copies, most = BETWEEN[name]
    like, rows = equal_leaves(4, 2**20), P("data")
    mesh = mesh_on(list(described("h100")), {"data": 4})
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jc.local_updates(optax.adamw(1e-3), outer, STEPS["int4"][0](), "data", every=4, **options)
    state, specs = state_on(mesh, tx, like)

    def step(params, state, grads):
        params, grads = (jax.tree.map(lambda x: x[0], tree) for tree in (params, grads))
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda x: x[None], optax.apply_updates(params, updates)), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(rows, specs, rows), out_specs=(rows, specs))
    own = shapes_on(mesh, jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), like), rows)
    program = compiled(donating(mapped, mesh, (rows, specs), (0, 1)), own, state, own)
    assert counted(program.text, 0).bytes / (8 * num_entries(like)) <= copies
    assert program.memory / 4 / num_entries(like) <= most
    assert all(row.branch for row in program.ledger.rows)  # no part of an exchange is done before it is known to be due
    assert not program.ledger.is_bound


def test_no_sum_over_neighbours_is_a_tile_that_no_register_holds():
    """Running sums of 64 counts, each compared with all others, were tiles of 2^19 numbers for 256 threads."""
    needs("h100")
    case = cases(29)["compress top_k"]
    function, args = case.make(mesh_on([described("h100")[0]], {"data": 1}))
    module, tiles = Module(compiled(function, *args).text), []
    for each in module.computations[module.entry].values():
        found = re.search(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]', each.attributes)
        for name in called(each.attributes, "calls") if found else ():
            inner = module.computations[name]
            sums = [i for i in inner.values() if i.op == "reduce"]
            summed = [math.prod(contents_of(inner[i.operands.split()[0].strip("%,")].type)[0].shape) for i in sums]
            sizes = [math.prod(contents_of(i.type)[0].shape) for i in sums]
            each_tile = math.prod(int(n) for n in re.findall(r"\d+", found[1]))
            tiles += [each_tile * a // b for a, b in zip(summed, sizes, strict=True)]
    assert tiles
    assert max(tiles) <= 2**17


MAPPED = {
    "places of bits": (lambda w: select.indices_of_words(w, 2**18, 2**23), [((2, 2**18), jnp.uint32)]),
    "words of 16 bits": (lambda a, b: side_by_side([a, b]), [((2, 2048), jnp.uint16), ((2, 1024), jnp.uint16)]),
    "few rows": (lambda r, m: rows_times(r, m, 1), [((2, 2, 4, 256), jnp.float32), ((2, 2, 256, 128), jnp.float32)]),
    "rotations": (rotation_of(9 * 4096, 4096).forward, [((2, 9 * 4096), jnp.float32), ((2,), "keys")]),
}


@pytest.mark.parametrize("name", MAPPED)
def test_kernels_are_mapped_on_a_tpu(name):
    """Compiled, since an interpreter takes blocks that a TPU does not have."""
    needs("v5e:2x2")
    function, shapes = MAPPED[name]
    mesh = mesh_on(described("v5e:2x2"), {"data": 4})
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    like = [keys if dtype == "keys" else jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    mapped = jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert compiled(mapped, *shapes_on(mesh, like)).text


def test_many_vectors_are_joined_on_a_tpu():
    needs("v5e:2x2")
    mesh = mesh_on(described("v5e:2x2"), {"data": 4})
    joined = jax.shard_map(lambda *x: side_by_side(x), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    like = [jax.ShapeDtypeStruct((1024,), jnp.uint16)] * 600
    assert compiled(joined, *shapes_on(mesh, like)).text.count("tpu_custom_call") == 1
