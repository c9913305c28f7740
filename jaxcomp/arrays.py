"""Shapes, dtypes, bits, keys and stacks of arrays: what every part of the library needs. It imports none of it."""

import contextlib
import functools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

__all__ = [
    "as_words",
    "bit_length",
    "bounded",
    "check_decoded",
    "constants",
    "decayed_sum",
    "exponent_of",
    "finite",
    "is_array",
    "is_host",
    "is_left_out",
    "is_shapes",
    "key_data",
    "like_of",
    "loses",
    "namespace",
    "one_row",
    "power_of_two",
    "reshaped",
    "root_key",
    "rounded_to",
    "row_of",
    "size_of",
    "stored",
    "sum_rows",
    "weighted",
    "wide",
    "wide_like",
    "wrap_key",
    "zeros_like",
]

Array = jax.Array
Tree = Any


def wide(*dtypes: Any) -> Any:
    """The floating type to compute in: f64 if any of the dtypes is f64, else f32.

    >>> wide(jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32)


COMPLEX = (
    "Compress real and imaginary parts apart: optax.contrib.split_real_and_imaginary(jc.compressed_mean(...)), chained "
    "before the optimizer"
)


def like_of(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree of arrays, as `jax.ShapeDtypeStruct`.

    Args:
        tree: arrays, scalars or ShapeDtypeStructs.

    Raises:
        ValueError: a leaf is not a real floating-point array (named with its path).

    >>> like_of({"w": jnp.zeros((2, 3))})
    {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    like = []
    for path, leaf in leaves:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            where = jax.tree_util.keystr(path) or "the array"
            raise ValueError(
                f"only real floating point is compressed; {where} has dtype {dtype}. {COMPLEX}"
                if jnp.issubdtype(dtype, jnp.complexfloating)
                else f"only real floating point is compressed; {where} has dtype {dtype}. "
                "Integers of a model are not trained: differentiate with respect to the other leaves alone, and give "
                "these to the loss by keyword; a Flax NNX model is split before, nnx.split(model, nnx.Param, ...)."
            )
        like.append(jax.ShapeDtypeStruct(shape, dtype))
    return structure.unflatten(like)


def check_decoded(name: str, x_hat: Any, like: Any) -> None:
    """Raises ValueError unless `decompress` of the compressor `name` made what has the shapes and dtypes of `like`."""
    got, expected = (
        [f"{getattr(x, 'dtype', type(x).__name__)}{[*jnp.shape(x)]}" for x in jax.tree.leaves(tree)]
        for tree in (x_hat, like)
    )
    if jax.tree.structure(x_hat) != jax.tree.structure(like):
        got = [f"a {type(x_hat).__name__}"]
    if got != expected:
        words = lambda found: found[0] if len(found) == 1 else f"({', '.join(found)})"
        raise ValueError(
            f"{name}: decompress returns an array with the shape and dtype of like, {words(expected)}; got "
            f"{words(got)}. Cut padding off, x_hat[: like.size], and end with .reshape(like.shape).astype(like.dtype)"
        )


def wide_like(tree: Tree) -> Tree:
    """The same with each dtype replaced by the one that sums and memories are kept in."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype)), like_of(tree))


def is_array(tree: Tree) -> bool:
    """True for a bare array (or its ShapeDtypeStruct), False for a tree of arrays."""
    return jax.tree.structure(tree) == jax.tree.structure(0)


def is_shapes(tree: Tree) -> bool:
    """Whether there are shapes in a tree instead of arrays."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def is_left_out(node: Tree) -> bool:
    """Whether there is nothing in this place of a tree: ()."""
    return type(node) is tuple and not node


def size_of(like: Tree) -> int | tuple[int, ...]:
    """Number of entries of a bare array; tuple of them for the leaves of a tree.

    >>> size_of(jnp.zeros((2, 3))), size_of({"a": jnp.zeros(2), "b": jnp.zeros(())})
    (6, (2, 1))
    """
    sizes = tuple(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(like))
    return sizes[0] if is_array(like) else sizes


def is_host(x: Any) -> bool:
    """True for NumPy arrays and scalars, with which a code runs on the host."""
    return isinstance(x, np.ndarray | np.generic)


def namespace(x: Any) -> Any:
    """numpy or jax.numpy."""
    return np if is_host(x) else jnp


def bit_length(x: Any) -> Any:
    """Number of binary digits of each uint32, 0 for 0: i32.

    >>> bit_length(np.array([0, 1, 255, 256, 2**32 - 1], np.uint32))
    array([ 0,  1,  8,  9, 32], dtype=int32)
    """
    if is_host(x):
        return np.frexp(x.astype(np.float64))[1].astype(np.int32)
    return 32 - lax.clz(x.astype(jnp.uint32)).astype(jnp.int32)


def as_words(x: Array) -> Array:
    """The bits of x as unsigned integers of the same width."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def finite(x: Array) -> Array:
    """x, with NaN and infinities replaced by zero (law 5)."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def bounded(x: Array, dtype: Any = None) -> Array:
    """x, with what overflowed cut to the largest number of its dtype; rounded to `dtype` where one is given, with what
    is beyond that type cut to its largest number.
    """
    if dtype is not None and (loses(x.dtype, dtype) or jnp.dtype(dtype).itemsize < 4):
        largest = float(jnp.finfo(dtype).max)
        return rounded_to(jnp.clip(x.astype(wide(x.dtype)), -largest, largest), dtype)
    x = x if dtype is None else x.astype(dtype)
    info = jnp.finfo(x.dtype)
    return jnp.clip(x, jnp.asarray(info.min, x.dtype), jnp.asarray(info.max, x.dtype))


@functools.cache
def decayed_sum(decay: float) -> Callable[[Array, Array], Array]:
    """(e, g) -> decay e + g of finite g, saturated."""

    def added(e: Array, g: Array) -> Array:
        g = finite(g).astype(e.dtype)
        return bounded(g + (e if decay == 1 else decay * e))

    return added


# ------------------------------------------------------------------------------------------------
# Floating-point numbers by their bits: exponents, powers of two, and roundings that every backend keeps. Within one
# program XLA may leave out a conversion to a narrower type and back (`xla_allow_excess_precision`, on by default):
# compiled for a GPU, x - f32(bf16(x)) is zero. A worker that so computes what its message lost remembers nothing of it.
# Here a number is rounded by arithmetic before it is converted: the compiler may remove the conversion, the value is
# already rounded.


def exponent_of(x: Array) -> Array:
    """e with 2^(e-1) <= x < 2^e for positive normal numbers; the least exponent for what is smaller.

    Read from the bits: `jnp.frexp` loses the types of shard_map under vmap (JAX 0.12.0).

    >>> print(exponent_of(jnp.array([1.0, 0.75, 8.0])))
    [1 0 4]
    """
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.int64 if info.bits == 64 else jnp.int32)
    return ((bits >> info.nmant) + (info.minexp)).astype(jnp.int32)


def power_of_two(exponent: Array, dtype: Any) -> Array:
    """2^exponent for exponents of normal numbers, exactly (exp2 is not, on every backend).

    >>> print(power_of_two(jnp.array([-1, 3]), jnp.float32))
    [0.5 8. ]
    """
    info = jnp.finfo(dtype)
    integer = jnp.int64 if info.bits == 64 else jnp.int32
    bits = (exponent.astype(integer) + (1 - info.minexp)) << info.nmant
    return lax.bitcast_convert_type(bits, dtype)


def loses(source: Any, target: Any) -> bool:
    """Whether some numbers of one floating type are none of another.

    >>> loses(jnp.float32, jnp.bfloat16), loses(jnp.bfloat16, jnp.float32), loses(jnp.bfloat16, jnp.float16)
    (True, False, True)
    """
    a, b = jnp.finfo(source), jnp.finfo(target)
    return a.nmant > b.nmant or a.minexp < b.minexp or a.maxexp > b.maxexp or float(a.max) > float(b.max)


def rounded_to(x: Array, dtype: Any) -> Array:
    """x in another floating type, to nearest, ties to even: `x.astype(dtype)`, also where a compiler removes that
    conversion and the one back.

    Beyond the largest number of the type (after rounding) stand infinities, or NaN where the type has none. Where the
    backend takes subnormal numbers for zero, so are results that are subnormal. The derivative is that of `astype`.

    Reference: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.1 and theorem 2.2.

    >>> print(rounded_to(jnp.array([1.0, 1.001, 3.3e4]), jnp.float16))
    [1.000e+00 1.001e+00 3.299e+04]
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype or not loses(x.dtype, dtype):
        return x.astype(dtype)
    return _to_nearest(x, dtype)


def stored(x: Array) -> Array:
    """x, rounded to its own narrow type now. XLA may compute sums and products of narrow floats in f32, and round only
    what it stores: what is computed on from such a result would not be what the next step finds.

    >>> print(stored(jnp.bfloat16(1) + jnp.bfloat16(0.001)))
    1
    """
    return x if x.dtype.itemsize >= 4 else _to_nearest(x, x.dtype)


@functools.partial(jax.jit, static_argnums=1)  # by this name a jaxpr shows that what is converted was rounded before
def _to_nearest(x: Array, dtype: Any) -> Array:
    return _by_arithmetic(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _by_arithmetic(x: Array, dtype: Any) -> Array:
    x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:
        return lax.reduce_precision(x, 8, 7).astype(dtype)
    # `reduce_precision` takes subnormal numbers of a type with fewer bits of exponent for zero, and the largest
    # numbers of float8 types without infinities for such.
    info = jnp.finfo(dtype)
    place = jnp.clip(exponent_of(jnp.abs(x)) - 1, info.minexp, info.maxexp) - info.nmant
    x = jnp.round(x * power_of_two(-place, x.dtype)) * power_of_two(place, x.dtype)
    beyond = jnp.asarray(np.asarray(np.inf, dtype), x.dtype)
    x = jnp.where(jnp.abs(x) > jnp.asarray(float(info.max), x.dtype), jnp.copysign(beyond, x), x)
    if dtype.name.endswith("fnuz"):  # whose bits of -0 are NaN
        x = jnp.where(x == 0, jnp.zeros((), x.dtype), x)
    return x.astype(dtype)


@_by_arithmetic.defjvp
def _derivative(dtype: Any, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Derivative of `astype`, which is one; that of `jnp.round` would be zero."""
    return _by_arithmetic(primals[0], dtype), tangents[0].astype(dtype)


# ------------------------------------------------------------------------------------------------
# Keys are kept in states as plain uint32 words, so that every optimizer wrapper, donation and
# checkpoint treats them like any other array.


def key_data(key: Array) -> Array:
    """The uint32 words of a typed or raw key."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def root_key(seed: Any) -> Array:
    """A typed key of the default kind from an integer, or from a key of any kind."""
    if isinstance(seed, numbers.Integral):
        if not -(2**63) <= int(seed) < 2**63:
            raise ValueError(f"seed must be in [-2^63, 2^63), or a key of jax.random; got {seed}")
        return jax.random.key(int(seed))
    if jnp.ndim(seed) == 0 and hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jnp.integer):
        return jax.random.key(seed)
    if not hasattr(seed, "dtype") or jnp.issubdtype(seed.dtype, jnp.floating):
        raise TypeError(f"seed must be an integer or a key of jax.random; got {seed!r}")
    data = key_data(wrap_key(seed)).reshape(-1)
    if data.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(data)
    return functools.reduce(jax.random.fold_in, data, jax.random.key(0))


def wrap_key(data: Array) -> Array:
    """The typed key of uint32 words."""
    if not hasattr(data, "dtype"):
        raise TypeError(f"a key of jax.random is needed, for instance jax.random.key(0); got {data!r}")
    return data if jnp.issubdtype(data.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(data)


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """Inside, arrays are computed while a program is traced, whatever it is, and belong to no mesh."""
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def zeros_like(like: Tree) -> Tree:
    """Zeros with the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


# ------------------------------------------------------------------------------------------------
# Stacks on a leading axis


def reshaped(total: Array | jax.ShapeDtypeStruct, shape: Sequence[int]) -> Array | jax.ShapeDtypeStruct:
    """A total to add messages to, an array or its shape alone, in another shape."""
    if isinstance(total, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(shape), total.dtype)
    return jnp.reshape(total, shape)


def sum_rows(rows: Array) -> Array:
    """Sum over the leading axis of [n, ...], n > 0, half of the rows added to the other half at a time.

    On CPU, XLA hands long sums over a leading axis to a library that takes twenty times as long as these additions
    (0.10.2, two rows of 21 M entries: 1,285 ms against 46 ms).

    >>> print(sum_rows(jnp.arange(6.0).reshape(3, 2)))
    [6. 9.]
    """
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        added = rows[:half] + rows[half : 2 * half]
        rows = jnp.concatenate([added, rows[2 * half :]]) if rows.shape[0] % 2 else added
    return rows[0]


def weighted(x: Array, weight: Array | None) -> Array:
    """weight * x; x for no weight."""
    return x if weight is None else x * weight.astype(x.dtype)


def row_of(name: str, plans: Tree, worker: Array | int, workers: int | None) -> Tree:
    """Plan of one worker from plans stacked on a leading axis, which stays, with length 1.

    A stack of one plan is returned as it is, for every worker: picking twice is picking once.
    """
    rows = jax.tree.leaves(plans)[0].shape[0]
    if rows == 1:
        return plans
    if workers not in (None, rows):
        raise ValueError(f"{name}: plans of {rows} workers for {workers} workers")
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, worker, 0), plans)


def one_row(name: str, plans: Tree) -> Tree:
    """The only plan of a stack of one, without the leading axis."""
    rows = jax.tree.leaves(plans)[0].shape[0]
    if rows != 1:
        raise ValueError(f"{name}: shared state holds the plans of {rows} workers; pick one with base.for_worker")
    return jax.tree.map(lambda a: a[0], plans)
