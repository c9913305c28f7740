"""Kernels for TPUs: entries become words of codes, words entries, and leaves parts of a vector, in one pass each.

XLA for TPUs moves codes between lanes by transposing all of them, in several kernels, and writes a program for each
message of a tree. Here a word goes to the lanes of its codes by rotation, and some rows are worked on at a time, in a
loop. By the bundles of its program a v5e adds a message in fewer cycles than it takes to read and write the entries.

A row of 128 words is four groups, side by side, of 32 words each, which hold 8 / w rows of entries (`packing`). So row
i of the rows of a group holds, in its lanes [32 g, 32 (g + 1)), codes 4 i + g of the words of the group.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxcomp.arrays import is_shapes, weighted
from jaxcomp.hashing import halves_in_lanes, uniform_in_lanes

__all__ = [
    "BlockedRows",
    "Registers",
    "blocks_rotated",
    "coded_rows",
    "each_entry",
    "few_rows_times",
    "fits",
    "fits_blocks",
    "into_vector",
    "joins",
    "laid_end_to_end",
    "multiplies",
    "rotates",
    "rows_of_leaf",
    "running",
    "runs",
    "with_worth",
    "words_of",
]

Array = jax.Array
U32 = jnp.uint32
LANES = 128
GROUPS = 4  # of 32 words, in a row of lanes
ROWS = 256  # of lanes, that are worked on at a time
BLOCK = 8 * ROWS  # rows that are fetched at a time


def fits(size: int, width: int, length: int | None) -> bool:
    """Whether there are kernels for so many entries, coded in so many bits, and blocks of this length (None: one)."""
    if width not in (1, 2, 4, 8) or size < ROWS * LANES or size * width % (32 * LANES):
        return False
    return length is None or (length >= 32 and length.bit_count() == 1)


def fits_blocks(length: int) -> bool:
    """Whether `coded_rows` has kernels for blocks of this length, too."""
    return LANES <= length <= 32 * LANES


class Registers(NamedTuple):
    """`packing.Places` of some rows of entries within a kernel, [rows, 128].

    first: number of the first row. scratch: u32[rows, 128], on the chip.
    """

    width: int
    first: Array
    scratch: Any

    def slices(self, each: Array) -> list[Array]:
        """[1] slice, all entries."""
        return [each]

    def each(self, code: Callable[..., Array], *numbers: Array) -> list[Array]:
        """code(*numbers), once."""
        return [code(*numbers)]

    def halves(self, key: Any) -> list[Array]:
        """The random numbers of `Places.halves`."""
        return [halves_in_lanes(key, self.scratch.shape, self.width, self.first)]

    def uniform(self, key: Any) -> Array:
        """The random numbers of `Places.uniform`."""
        return uniform_in_lanes(key, self.scratch.shape, self.first)

    def unpack(self, words: Array) -> Array:
        """Codes of words [rows w / 32, 128]: each group is turned to all lanes, and every lane takes its bits."""
        width, group, count = self.width, _group(words.shape), 8 // self.width
        turned = [words, *(pltpu.roll(words, 32 * k, 1) for k in range(1, GROUPS))]
        for m in range(GROUPS):
            one = turned[0]
            for k in range(1, GROUPS):
                one = jnp.where((group - m) & (GROUPS - 1) == k, turned[k], one)
            for i in range(count):
                codes = (one >> (width * (GROUPS * i + group)).astype(U32)) & U32((1 << width) - 1)
                self.scratch[pl.ds(m * count + i, words.shape[0], stride=GROUPS * count), :] = codes
        return self.scratch[...]

    def pack(self, codes: list[Array]) -> Array:
        """Inverse of `unpack`, of the only slice."""
        self.scratch[...] = codes[0]
        width, count = self.width, 8 // self.width
        rows = codes[0].shape[0] // (GROUPS * count)
        group = _group((rows, LANES))
        words = jnp.zeros((rows, LANES), U32)
        for m in range(GROUPS):
            one = jnp.zeros((rows, LANES), U32)
            for i in range(count):
                part = self.scratch[pl.ds(m * count + i, rows, stride=GROUPS * count), :]
                one = one | part << (width * (GROUPS * i + group)).astype(U32)
            one = one | pltpu.roll(one, 64, 1)
            one = one | pltpu.roll(one, 32, 1)  # the words of group m, in all groups of lanes
            words = jnp.where(group == m, one, words)
        return words


class BlockedRows(NamedTuple):
    """Some rows of entries in blocks of a power of two, 128 to 4096, within a kernel (`compressors.blocks.BlockSizes`).

    A number of each block is a column, [blocks, 1].
    """

    length: int
    scratch: Any

    def spread(self, each: Array) -> Array:
        """A number of each block at its entries."""
        rows, several = jnp.broadcast_to(each, (len(each), LANES)), self.length // LANES
        for i in range(several):
            self.scratch[pl.ds(i, len(each), stride=several), :] = lax.bitcast_convert_type(rows, U32)
        return lax.bitcast_convert_type(self.scratch[...], jnp.float32)

    def along(self, reduce: Callable[..., Array], x: Array) -> Array:
        """`jnp.sum` or `jnp.max` of each block: of rows of lanes first, and of the lanes of what is left."""
        several, join = self.length // LANES, {jnp.sum: jnp.add, jnp.max: jnp.maximum}[reduce]
        self.scratch[...] = lax.bitcast_convert_type(x, U32)
        rows = [self.scratch[pl.ds(i, len(x) // several, stride=several), :] for i in range(several)]
        together = functools.reduce(join, [lax.bitcast_convert_type(row, jnp.float32) for row in rows])
        return reduce(together, axis=1, keepdims=True)


def _group(shape: tuple[int, ...]) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, 1) >> 5


# ------------------------------------------------------------------------------------------------
# Operands: how they stand in memory, which part of them a block of rows needs, and what some rows read of that


class _Operand(NamedTuple):
    """array: of several messages stacked.  spec: for `pallas_call`.  read(ref, block, c): of the c-th `ROWS` rows of a
    block of rows, one for each entry.
    """

    array: Array
    spec: Any
    read: Callable[..., Any]


def _rows(x: Array, per_entry: int = 1, messages: bool = False) -> _Operand:
    """A number of each entry, or of `per_entry` entries; of each message, where there are several."""
    shape, count = (x.size // LANES, LANES), ROWS // per_entry
    shape = (x.shape[0], shape[0] // x.shape[0], LANES) if messages else shape
    block = (BLOCK // per_entry, LANES)
    spec = (
        pl.BlockSpec((None, *block), lambda i, j: (j, i, 0)) if messages else pl.BlockSpec(block, lambda i, j: (i, 0))
    )
    return _Operand(x.reshape(shape), spec, lambda ref, _, c: ref[pl.ds(c * count, count), :])


def _numbers(each: Array, size: int, messages: bool) -> _Operand:
    """A number of all entries, of each one, or of each block of a power of two: [..., m]. Integers below 2^24 are added
    up as floats.
    """
    dtype, each = each.dtype, each.astype(jnp.float32)
    array, spec, read = _floats(each if messages else each[None], size)
    return _Operand(array, spec, lambda *args: read(*args).astype(dtype))


def _floats(each: Array, size: int) -> _Operand:
    count = each.shape[-1]
    if count == 1:
        spec = pl.BlockSpec((None, 1, 1), lambda i, j: (j, 0, 0))
        return _Operand(each[:, None], spec, lambda ref, *_: jnp.broadcast_to(ref[...], (ROWS, LANES)))
    if count == size:
        return _rows(each, messages=True)
    length = size // count
    lines = max(1, BLOCK // length)  # rows of numbers that a block of rows needs
    lined = jnp.pad(each, ((0, 0), (0, -count % (lines * LANES)))).reshape(len(each), -1, lines, LANES)
    spec = pl.BlockSpec((None, None, lines, LANES), lambda i, j: (j, i * BLOCK // max(length, BLOCK), 0, 0))
    return _Operand(lined, spec, lambda ref, block, c: _spread(ref, length, _first(block, c, length)))


def _spread(numbers: Any, length: int, first: Array) -> Array:
    """Numbers of blocks, as rows of lanes, at the entries of the rows from `first` on: of each row, or of some lanes
    of it, the one number that is not masked, added up. Exact, since the others are zeros.
    """
    rows = min(length, ROWS)  # for which one row of numbers serves
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) + lax.rem(first, jnp.int32(length))
    parts = []
    for k in range(ROWS // rows):
        line = jnp.broadcast_to(numbers[pl.ds(lax.div(first, jnp.int32(length)) + k, 1), :], (rows, LANES))
        one = lambda mask: jnp.sum(jnp.where(mask, line, 0.0), axis=1, keepdims=True)  # noqa: B023
        if length >= LANES:
            each = length // LANES
            part = jnp.broadcast_to(one((lane * each <= row) & (row < lane * each + each)), (rows, LANES))
        else:
            few = LANES // length
            part = jnp.broadcast_to(one(lane == row * few), (rows, LANES))
            for g in range(1, few):
                part = jnp.where(lane < g * length, part, one(lane == row * few + g))
        parts.append(part)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


# ------------------------------------------------------------------------------------------------


def words_of(of: Callable[..., Array], width: int, x: Array, numbers: Sequence[Array], key: Any = None) -> Array:
    """Words, u32[size w / 32], of `of(places, x, numbers, key)`.

    Args:
        of: with `Registers` in place of `packing.Places`, rows of all arrays, and the two words of a key.
        x: f32[size]. numbers: f32, [1], [size], or [m] of m equal blocks. key: words of a key, u32[2]; or None.
    """
    operands = [_rows(x), *(_numbers(each, x.size, messages=False) for each in numbers)]
    body = lambda places, key, parts, *_: [of(places, parts[0], parts[1:], _of_key(key))]
    return _called(body, operands, key, [_words(width)], width, 1, x.size)[0]


def coded_rows(
    numbers: Callable[..., Any], of: Callable[..., Array], width: int, length: int, x: Array, key: Any
) -> tuple[Array, Array]:
    """Numbers of blocks as they are sent, f32[blocks], and words, u32[size w / 32], in one read of the entries.

    Args:
        numbers: (blocks, x) -> a number of each block, to be sent, and others, which `of` needs; with `BlockedRows` in
            place of `compressors.blocks.BlockSizes`.
        of: as for `words_of`.
    """

    def body(places, key, parts, *_):
        blocks = BlockedRows(length, places.scratch)
        sent, others = numbers(blocks, parts[0])
        return [sent, of(places, parts[0], [blocks.spread(each) for each in others], _of_key(key))]

    lines, words = _called(body, [_rows(x)], key, [_lines(length), _words(width)], width, 1, x.size)
    return lines[: x.size // length], words


def with_worth(
    of: Callable[..., Array], total: Any, words: Array, each: Array, weights: Array | None, *, width: int, keep: bool
) -> Array:
    """total + sum_j weights_j of(codes_j, each_j), f32[size]; of(codes_0, each_0) where nothing is to be added.

    Args:
        of: of rows of entries.
        total: f32[size], which may be written into, or its shape for zeros.
        words: u32[n, ...], of codes of w bits. each: f32, [n, 1], [n, size], or [n, m] of m equal blocks.
        weights: [n], or None for all ones. keep: whether a sum is meant, which turns -0 into 0.
    """
    n, size = len(words), total.size
    operands = [_rows(words, 32 // width, messages=True), _numbers(each, size, messages=True)]
    weights = None if weights is None else weights.astype(jnp.float32)

    def body(places, weights, parts, before, message):
        worth = weighted(of(places.unpack(parts[0]), parts[1]), None if weights is None else weights[0, message])
        return [before + worth if keep else worth]

    start = None if is_shapes(total) else total.reshape(-1, LANES)
    return _called(body, operands, weights, [_made(jnp.float32)], width, n, size, start)[0]


def _of_key(key: Any) -> tuple[Array, Array] | None:
    return None if key is None else (key[0, 0], key[0, key.shape[1] - 1])  # as `hashing` takes them


class _Result(NamedTuple):
    """shape(size): for so many entries.  spec: for `pallas_call`.  write(ref, made, block, c): of the c-th `ROWS`
    rows of a block.
    """

    shape: Callable[[int], jax.ShapeDtypeStruct]
    spec: Any
    write: Callable[..., None]


def _made(dtype: Any, per_entry: int = 1) -> _Result:
    count = ROWS // per_entry

    def write(ref, made, _, c):
        ref[pl.ds(c * count, count), :] = made

    spec = pl.BlockSpec((BLOCK // per_entry, LANES), lambda i, _: (i, 0))
    return _Result(lambda size: jax.ShapeDtypeStruct((size // per_entry // LANES, LANES), dtype), spec, write)


def _words(width: int) -> _Result:
    return _made(U32, 32 // width)


def _lines(length: int) -> _Result:
    """Numbers of blocks one after the other in the lanes, of columns."""
    lines, several, rows = max(1, BLOCK // length), length // LANES, min(length, ROWS)
    few = rows // several

    def write(ref, made, block, c):
        first = _first(block, c, length)
        start = lax.div(lax.rem(first, jnp.int32(length)), jnp.int32(several))
        lane = lax.broadcasted_iota(jnp.int32, (few, LANES), 1) - start
        hit = lane == lax.broadcasted_iota(jnp.int32, (few, LANES), 0)
        for k in range(ROWS // rows):
            column = jnp.broadcast_to(made[k * few : (k + 1) * few], (few, LANES))
            line = jnp.sum(jnp.where(hit, column, 0.0), axis=0, keepdims=True)
            at = pl.ds(lax.div(first, jnp.int32(length)) + k, 1)
            ref[at, :] = jnp.where((lane[:1] >= 0) & (lane[:1] < few), line, ref[at, :])

    shape = lambda size: jax.ShapeDtypeStruct((-(-size // length // (lines * LANES)), lines, LANES), jnp.float32)
    spec = pl.BlockSpec((None, lines, LANES), lambda i, _: (i * BLOCK // max(length, BLOCK), 0, 0))
    return _Result(shape, spec, write)


def _first(block: Array, c: Array, length: int) -> Array:
    """The first row, counted from the first line of numbers that its block of rows needs."""
    return c * ROWS if length <= BLOCK else lax.rem(block * BLOCK + c * ROWS, jnp.int32(length))


def _typed(like: Any, *arrays: Array) -> jax.ShapeDtypeStruct:
    """The shape, typed as differing over all mesh axes over which one of the arrays differs."""
    kinds = [jax.typeof(x).manual_axis_type for x in arrays]
    kind = type(kinds[0])(varying=frozenset().union(*(kind.varying for kind in kinds)))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, manual_axis_type=kind)


def _called(
    body: Callable[..., list[Array]],
    operands: list[_Operand],
    scalars: Array | None,
    results: list[_Result],
    width: int,
    messages: int,
    size: int,
    start: Array | None = None,
) -> list[Array]:
    """body(places, scalars, parts, before, message) for some rows after the other, and for each message: what was made
    of those before it, at first of `start`, or zeros, is `before`. Each result as a vector.
    """
    known, given = [] if scalars is None else [scalars[None]], [each.array for each in operands]
    one = lambda x: pl.BlockSpec(x.shape, lambda i, j: (0, 0), memory_space=pltpu.SMEM)
    specs = [*map(one, known), *(each.spec for each in operands)]
    if start is not None:
        given, specs = [*given, start], [*specs, results[0].spec]

    def kernel(*refs):
        *refs, scratch = refs
        made, refs = refs[-len(results) :], refs[: -len(results)]
        block, message = pl.program_id(0), pl.program_id(1)

        def some(c, nothing):
            parts = [each.read(ref, block, c) for each, ref in zip(operands, refs[len(known) :], strict=False)]
            at = pl.ds(c * ROWS, ROWS)
            before = jnp.float32(0) if start is None else refs[-1][at, :]
            if messages > 1:
                before = jnp.where(message == 0, before, made[0][at, :])
            places = Registers(width, block * BLOCK + c * ROWS, scratch)
            found = body(places, refs[0] if known else None, parts, before, message)
            for result, ref, array in zip(results, made, found, strict=True):
                result.write(ref, array, block, c)
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(BLOCK // ROWS), some, jnp.int32(0))

    call = pl.pallas_call(
        kernel,
        out_shape=[_typed(result.shape(size), *known, *given) for result in results],
        grid=(-(-size // (BLOCK * LANES)), messages),
        in_specs=specs,
        out_specs=[result.spec for result in results],
        scratch_shapes=[pltpu.VMEM((ROWS, LANES), U32)],
        input_output_aliases={} if start is None else {len(specs) - 1: 0},
    )
    return [made.reshape(-1) for made in _run(call, *known, *given)]


def _run(call: Callable[..., Any], *arrays: Array) -> Any:
    """call(*arrays), of a kernel: where integers have 32 bits, and with a clear error where it is differentiated."""
    run = jax.custom_jvp(call)
    run.defjvp(_refuse)
    with jax.enable_x64(False):
        return run(*arrays)


def _mapped_by(portable: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, and under vmap what is portable, of arrays with one more axis in front: for kernels whose blocks have
    no axes to spare.
    """
    run = jax.custom_batching.custom_vmap(kernel)

    @run.def_vmap
    def _(size: int, mapped: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        pairs = zip(arrays, mapped, strict=True)
        made = portable(*(x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in pairs))
        return made, jax.tree.map(lambda _: True, made)

    return run


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "jaxcomp: a kernel for TPUs was differentiated, and has no derivative. Give jax.lax.stop_gradient(x) to what "
        "compresses x, or jc.collectives in the loss, which have cotangents of their own"
    )


# ------------------------------------------------------------------------------------------------
# Leaves, and the vectors that they are parts of


LARGE = 2**18  # entries of a leaf that are fetched at a time
TILE = 8 * LANES  # entries, in whole numbers of which a vector is cut


def rows_of_leaf(leaf: Any, dtype: Any) -> int | None:
    """How many rows of a leaf `into_vector` takes at a time; None where a leaf has no such rows."""
    if leaf.ndim < 2 or dtype != jnp.float32 or leaf.dtype not in (jnp.float32, jnp.bfloat16):
        return None
    rows, length, least = leaf.size // max(leaf.shape[-1], 1), leaf.shape[-1], 32 // leaf.dtype.itemsize
    if not leaf.size or length % LANES or rows % least or least * length > LARGE:
        return None
    return max(few for few in range(least, rows + 1, least) if rows % few == 0 and few * length <= LARGE)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced once for leaves of one shape
def into_vector(
    one: Callable[..., Array], few: int, size: int, tile: Array, leaf: Array, vectors: tuple[Array, ...]
) -> Array:
    """The first of some vectors, with one(*parts of the vectors, leaf) in the place of a part of it, written into it;
    without vectors, one of which only this part is there.

    XLA lays a leaf out as a vector first, and adds that to a part which it then copies into the vector.

    Args:
        one: of entries. few: `rows_of_leaf`. size: d, a multiple of 1024.
        tile: i32[], the part begins at entry 1024 tile. vectors: f32[d].
    """
    several, leaf = leaf.shape[-1] // LANES, leaf.reshape(-1, leaf.shape[-1])
    tiles = few * several // 8
    given = [x.reshape(-1, 8, LANES) for x in vectors]

    def kernel(_, leaf, *refs):
        *refs, made, scratch = refs
        for i in range(several):
            part = leaf[:, i * LANES : (i + 1) * LANES].astype(jnp.float32)
            scratch[pl.ds(i, few, stride=several), :] = part
        step = math.gcd(tiles, ROWS // 8)

        def some(c, nothing):
            at = pl.ds(c * step, step)
            entries = scratch[pl.ds(c * step * 8, step * 8), :].reshape(step, 8, LANES)
            first, *others = [ref[at] for ref in refs] or [None]
            made[at] = entries if first is None else one(first, entries, *others)
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(tiles // step), some, jnp.int32(0))

    shape = pl.Element(tiles), pl.Element(8), pl.Element(LANES)
    part = pl.BlockSpec(shape, lambda i, first: (first[0] + i * tiles, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(len(leaf) // few,),
        in_specs=[pl.BlockSpec((few, leaf.shape[1]), lambda i, _: (i, 0)), *[part] * len(given)],
        out_specs=part,
        scratch_shapes=[pltpu.VMEM((tiles * 8, LANES), jnp.float32)],
    )
    whole = jax.ShapeDtypeStruct((size // TILE, 8, LANES), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=_typed(whole, tile, leaf, *given),
        grid_spec=grid,
        input_output_aliases={2: 0} if given else {},
    )
    return _run(call, tile[None], leaf, *given).reshape(-1)


def joins(parts: Sequence[Any]) -> bool:
    """Whether `laid_end_to_end` takes these vectors."""
    return all(part.ndim == 1 and part.size and part.size % TILE == 0 for part in parts)


def laid_end_to_end(parts: Sequence[Array]) -> Array:
    """Vectors of one dtype, end to end, each copied to its place as it stands in memory.

    XLA shifts what it joins, and computes in the same loop what is joined: of 16 bits that is a program of megabytes.
    """
    rows = [part.size // LANES for part in parts]

    def kernel(*refs):
        *parts, whole, arrived = refs  # one semaphore, which counts bytes
        starts = [sum(rows[:i]) for i in range(len(rows))]
        places = [whole.at[pl.ds(start, count), :] for start, count in zip(starts, rows, strict=True)]
        copies = [pltpu.make_async_copy(*each, arrived) for each in zip(parts, places, strict=True)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        out_shape=_typed(jax.ShapeDtypeStruct((sum(rows), LANES), parts[0].dtype), *parts),
        in_specs=[anywhere] * len(parts),
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    run = lambda *parts: _run(call, *(part.reshape(-1, LANES) for part in parts)).reshape(-1)
    return _mapped_by(lambda *parts: jnp.concatenate(parts, axis=-1), run)(*parts)


# ------------------------------------------------------------------------------------------------
# Products of long matrices with a few rows


MOST_ROWS = 40  # whose three parts are rows of one matrix


def multiplies(rows: Any, m: Any, axis: int) -> bool:
    """Whether `few_rows_times` takes them."""
    count, inside = rows.shape[1], (rows.shape[2], m.shape[axis])
    f32 = rows.dtype == m.dtype == jnp.float32
    return (
        f32
        and m.size > 0
        and 0 < count <= MOST_ROWS
        and inside[0] == inside[1]
        and not any(n % LANES for n in m.shape[1:])
    )


@functools.partial(jax.jit, static_argnums=2)  # traced once for each shape
def few_rows_times(rows: Array, m: Array, axis: int) -> Array:
    """Rows [n, k, l] times matrices [n, r, c], along their axis 1 (l = r) or 2 (l = c): f32[n, k, c] or f32[n, k, r].

    Both are cut into three numbers of 16 bits, which hold an f32, and all nine products are added up in f32: the three
    parts of the rows are rows of one matrix, so that this takes no longer than one product.

    XLA for TPUs tries several times how much of such a product fits on the chip, and compiles it each time.
    """
    count, k = rows.shape[:2]
    height = -(-k // 8) * 8  # of one of the three parts
    cut = [max(n for n in range(LANES, 513, LANES) if length % n == 0) for length in m.shape[1:]]
    along, across = m.shape[axis] // cut[axis - 1], m.shape[3 - axis] // cut[2 - axis]

    def kernel(rows, m, made, parts, sums):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            sums[...] = jnp.zeros(sums.shape, jnp.float32)

        for i, part in enumerate(_in_three(rows[...])):
            parts[pl.ds(i * height, k), :] = part
        sums[...] += _products(parts[...], _in_three(m[...]), (((1,), (axis - 1,)), ((), ())))

        @pl.when(step == along - 1)
        def _():
            made[...] = sums[2 * height : 2 * height + k] + sums[height : height + k] + sums[:k]

    of_m = (lambda i, j, s: (i, s, j)) if axis == 1 else (lambda i, j, s: (i, j, s))
    call = pl.pallas_call(
        kernel,
        out_shape=_typed(jax.ShapeDtypeStruct((count, k, m.shape[3 - axis]), jnp.float32), rows, m),
        grid=(count, across, along),
        in_specs=[
            pl.BlockSpec((None, k, cut[axis - 1]), lambda i, j, s: (i, 0, s)),
            pl.BlockSpec((None, *cut), of_m),
        ],
        out_specs=pl.BlockSpec((None, k, cut[2 - axis]), lambda i, j, s: (i, 0, j)),
        scratch_shapes=[
            pltpu.VMEM((3 * height, cut[axis - 1]), jnp.float32),
            pltpu.VMEM((3 * height, cut[2 - axis]), jnp.float32),
        ],
    )
    return _run(call, rows, m)


def _in_three(x: Array) -> list[Array]:
    """f32 that add up to x, each with the upper 16 bits of a number alone."""
    first = _upper(x)
    second = _upper(x - first)
    return [first, second, x - first - second]


def _upper(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, U32) & U32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


# ------------------------------------------------------------------------------------------------
# Rotations


ROTATED = 4096  # entries of a block that `blocks_rotated` takes
SEVERAL = 4  # of which are rows of one matrix
AT_ONCE = 2  # such matrices
FETCHED = 64  # blocks that are fetched at a time


def rotates(x: Any, block: int, count: int) -> bool:
    """Whether `blocks_rotated` takes so many blocks of a vector."""
    return x.dtype == jnp.float32 and block == ROTATED and x.size % LANES == 0 and count >= SEVERAL * AT_ONCE


@functools.partial(jax.jit, static_argnums=2)  # traced once for each length
def blocks_rotated(x: Array, words: Array, forward: bool) -> Array:
    """H X^T H / 64 of each block X [64, 64] with the signs that bits of words say, before it or, backward, behind it:
    those of as many blocks from the beginning of f32[d] as there are words, u32[m 128]. Bit i of word w is of entry
    32 w + i. H: the Walsh-Hadamard matrix.

    H of 4096 entries is one of 128 and one of 32. The rows of lanes of four blocks are a matrix: its product with the
    first is made transposed, so that the second acts on lanes, too. Numbers of 16 bits hold signs, and three of them an
    f32, so all products are exact. Which entries of a row of 128 lanes come from which rows is the same in each block.
    """
    count = words.size * 32 // ROTATED
    few = FETCHED if count >= FETCHED else count // (SEVERAL * AT_ONCE) * SEVERAL * AT_ONCE
    height = ROTATED // LANES
    signs = lambda n: jnp.asarray(_signs_of_walsh(n), jnp.bfloat16)
    own, along = signs(LANES), jnp.kron(jnp.eye(SEVERAL, dtype=jnp.bfloat16), signs(height))

    def kernel(x, words, own, along, made, scratch):
        row, lane = (lax.broadcasted_iota(jnp.int32, (height, LANES), axis) for axis in (0, 1))
        word, bit = SEVERAL * row + (lane >> 5), (lane & 31).astype(U32)  # of each entry of a block
        which = (lane & 1) * 2 + (lane >> 6)  # of four rows that an entry of the result comes from
        start = pl.program_id(0) * few

        def flipped(part, block):
            every = jnp.broadcast_to(words[pl.ds(block, 1), :], (height, LANES))
            odd = jnp.take_along_axis(every, word, axis=1) >> bit << 31
            return lax.bitcast_convert_type(lax.bitcast_convert_type(part, U32) ^ odd, jnp.float32)

        def some(first, scratch):
            parts = [x[pl.ds((first + k) * height, height), :] for k in range(SEVERAL)]
            there = [start + first + k < count for k in range(SEVERAL)]
            unit = jnp.float32(ROTATED**-0.5)  # at first, so that no sum overflows on the way
            parts = [
                jnp.where(own, part * unit, 0.0) for own, part in zip(there, parts, strict=True)
            ]  # no NaN times zero
            parts = [flipped(part, first + k) if forward else part for k, part in enumerate(parts)]
            turned = _products(own[...], _in_three(jnp.concatenate(parts)), (((1,), (1,)), ((), ())))
            inside = (((1,), (0,)), ((), ()))
            scratch[...] = _products(_in_three(turned), along[...], inside)
            rows = [scratch[pl.ds(i // 2 * 64 + i % 2, height, stride=2), :] for i in range(4)]
            for k in range(SEVERAL):
                one, *others = [jnp.take_along_axis(each, height * k + (lane >> 1 & 31), axis=1) for each in rows]
                for i, other in enumerate(others, 1):
                    one = jnp.where(which == i, other, one)
                made[pl.ds((first + k) * height, height), :] = one if forward else flipped(one, first + k)

        def each(c, nothing):
            for i in range(AT_ONCE):
                some((c * AT_ONCE + i) * SEVERAL, scratch.at[i])
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(few // (SEVERAL * AT_ONCE)), each, jnp.int32(0))

    by_rows = lambda rows: pl.BlockSpec((rows, LANES), lambda i: (i, 0))
    whole = pl.BlockSpec((LANES, LANES), lambda i: (0, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=_typed(jax.ShapeDtypeStruct((count * height, LANES), jnp.float32), x, words),
        grid=(-(-count // few),),
        in_specs=[by_rows(few * height), by_rows(few), whole, whole],
        out_specs=by_rows(few * height),
        scratch_shapes=[pltpu.VMEM((AT_ONCE, LANES, LANES), jnp.float32)],
    )
    return _run(call, x.reshape(-1, LANES), words.reshape(-1, LANES), own, along).reshape(-1)


def _signs_of_walsh(size: int) -> np.ndarray:
    i = np.arange(size)
    return 1 - 2 * (np.bitwise_count(i[:, None] & i) & 1).astype(np.int8)


def _products(a: Any, b: Any, inside: Any) -> Array:
    """A product in f32, one of whose factors is given as the parts of `_in_three`; of the least first."""
    pairs = [(part, b) for part in a] if isinstance(a, list) else [(a, part) for part in b]
    narrow = lambda x: x.astype(jnp.bfloat16)
    product = functools.partial(lax.dot_general, dimension_numbers=inside, preferred_element_type=jnp.float32)
    each = [product(narrow(x), narrow(y), precision=lax.Precision.DEFAULT) for x, y in pairs]  # of 16 bits, exact
    return each[2] + each[1] + each[0]


# ------------------------------------------------------------------------------------------------
# Arithmetic of entries, and running sums


def each_entry(function: Callable[..., Any], *vectors: Array) -> Any:
    """function(*vectors), an array or several, of vectors of 32 bits and one length, entry by entry.

    XLA for TPUs writes a long loop of it: where that is much arithmetic, a hundred thousand instructions.
    """
    like, structure = jax.tree.flatten(jax.eval_shape(function, *vectors))
    some, several = ROWS * LANES, BLOCK // ROWS

    def kernel(*refs):
        vectors, made = refs[: -len(like)], refs[-len(like) :]

        def each(c, nothing):
            at = pl.ds(pl.multiple_of(c * some, some), some)
            found = function(*(ref[at].reshape(ROWS, LANES) for ref in vectors))
            for ref, array in zip(made, jax.tree.leaves(found), strict=True):
                ref[at] = array.reshape(some)
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(several), each, jnp.int32(0))

    part = pl.BlockSpec((several * some,), lambda i: (i,))
    call = pl.pallas_call(
        kernel,
        out_shape=[_typed(each, *vectors) for each in like],
        grid=(-(-like[0].size // (several * some)),),
        in_specs=[part] * len(vectors),
        out_specs=[part] * len(like),
    )
    run = lambda *vectors: jax.tree.unflatten(structure, _run(call, *vectors))
    return _mapped_by(function, run)(*vectors)


def runs(x: Array) -> bool:
    """Whether `running` takes it."""
    return x.ndim == 1 and x.dtype in (jnp.int32, jnp.float32) and x.size >= ROWS * LANES


@functools.partial(jax.jit, static_argnums=0)  # traced once for each length
def running(join: Callable[[Array, Array], Array], x: Array) -> Array:
    """Running sums (`jnp.add`) or maxima (`jnp.maximum`) of i32[d] or f32[d]: within rows of lanes and over some rows
    by doubling the distance, and what is before these rows is kept from step to step.
    """
    least = jnp.iinfo(jnp.int32).min if x.dtype == jnp.int32 else -np.inf
    start = x.dtype.type(0 if join is jnp.add else least)

    def doubled(part, place, axis):
        for distance in (1 << i for i in range((part.shape[axis] - 1).bit_length())):
            part = join(part, jnp.where(place >= distance, pltpu.roll(part, distance, axis), start))
        return part

    def kernel(x, made, before):
        row, lane = (lax.broadcasted_iota(jnp.int32, (ROWS, LANES), axis) for axis in (0, 1))

        @pl.when(pl.program_id(0) == 0)
        def _():
            before[...] = jnp.full((1, LANES), start)

        def some(c, nothing):
            at = pl.ds(c * ROWS, ROWS)
            own = doubled(x[at, :], lane, 1)
            ends = doubled(jnp.broadcast_to(own[:, LANES - 1 :], own.shape), row, 0)
            above = jnp.where(row >= 1, pltpu.roll(ends, 1, 0), start)
            made[at, :] = join(join(own, above), jnp.broadcast_to(before[...], own.shape))
            before[...] = join(before[...], ends[ROWS - 1 :])
            return nothing

        lax.fori_loop(jnp.int32(0), jnp.int32(BLOCK // ROWS), some, jnp.int32(0))

    rows = jnp.pad(x, (0, -x.size % LANES)).reshape(-1, LANES)
    spec = pl.BlockSpec((BLOCK, LANES), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=_typed(rows, rows),
        grid=(-(-len(rows) // BLOCK),),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((1, LANES), x.dtype)],
    )
    return _run(call, rows).reshape(-1)[: x.size]
