"""Drop-in collectives: `lax.pmean`, `lax.psum_scatter`, `lax.all_gather` with a chosen format on the wire.

Sums are in f32.

A backend adds bf16 in bf16, or widens it to f32 on the wire (XLA on CPU does). Here what crosses is exactly what the
wire format says, as unsigned words, and is added in f32 (or f64). Nothing is remembered between calls: for formats that
lose much take `compressed_mean`, which has error feedback.

A wire with scales has one for each block of entries, and blocks know no leaves. So each of several leaves is brought to
the same magnitude first, by a power of two that is equal on all workers: none is rounded to zero beside a larger one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, exponent_of, finite, like_of, power_of_two, root_key, rounded_to, wrap_key
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.compressors.dense import cast, narrow_type
from jaxcomp.compressors.rows import rows
from jaxcomp.exchange.axes import Axis, axis_index, axis_size, is_bound, types_tell, varying, varying_axes
from jaxcomp.exchange.collectives import all_max, sum_scatter, summed
from jaxcomp.exchange.collectives import gather_tree as gathered
from jaxcomp.exchange.routes.route import Way
from jaxcomp.exchange.routes.two_shot import first_shot, second_shot
from jaxcomp.groups import Layout, groups_of, join, split
from jaxcomp.payloads import Dense

__all__ = ["all_gather", "pmean", "psum_scatter"]

Array = jax.Array


class CollectiveOptions(NamedTuple):
    """Facts that both directions of a collective need, apart from arrays."""

    axis: Axis
    wire: Compressor | None
    dtype: Any
    equal: bool  # types tell that a mean is equal everywhere, so its cotangent is, too
    dimension: int = 0
    tiled: bool = False


def pmean(x: Any, axis_name: Axis, *, wire: Any = None, accumulate: str = "f32", key: Array | None = None) -> Any:
    """Mean over the workers, as `lax.pmean`, with a chosen format on the wire.

    y = C((1/n) sum_i C(x_i)): each worker adds up one n-th of the entries in `accumulate` and sends it to all, so that
    2 (n - 1) / n times the lane bytes of C leave it, whatever n.

    Differentiable (in reverse): the cotangent of x_i is that of y over n. Where `shard_map` knows y to be equal on all
    workers nothing crosses for that; elsewhere (vmap, pmap, check_vma=False) it is the `pmean` of the cotangents, in
    the same format, as for `lax.pmean`.

    Args:
        x: array or tree of arrays, real floating point.
        axis_name: mapped axis, or a tuple of them.
        wire: a dtype ("bf16", "f16", a float8 type, which gets a scale) or a compressor of one array with a known
            error bound, say jc.dithering(7, block_size=512). None: the dtype of each array. With 16 bits what is not
            finite stays so; float8 and compressors take it as zero, and of several arrays the largest magnitudes cross
            first, in 32 bits each, so that each array has a scale of its own.
        accumulate: "f32" or "f64" (in 64-bit mode; without a wire f64 then crosses): in which to add. f64 for f64.
        key: for compressors, which may be random; equal on all workers, new in each call.

    Returns:
        Like x, equal on all workers.

    Raises:
        ValueError: unbound axis, unknown accumulate, a wire without an error bound, a compressor without a key.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> print(jax.vmap(lambda x: jc.collectives.pmean(x, "data", wire="bfloat16"), axis_name="data", out_axes=None)(x))
    [2. 3.]
    """
    leaves, structure = jax.tree.flatten(x)
    dtypes = list(dict.fromkeys(jnp.result_type(leaf) for leaf in leaves))
    if wire is None and len(dtypes) > 1:  # each in its own
        groups = [[leaf for leaf in leaves if jnp.result_type(leaf) == dtype] for dtype in dtypes]
        means = [iter(pmean(group, axis_name, accumulate=accumulate)) for group in groups]
        return jax.tree.unflatten(structure, [next(means[dtypes.index(jnp.result_type(leaf))]) for leaf in leaves])
    options, words = _options_of("pmean", x, axis_name, wire, accumulate, key)
    return _pmean(options, varying(x, axis_name), words)


def psum_scatter(
    x: Array,
    axis_name: Axis,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    wire: Any = None,
    accumulate: str = "f32",
    key: Array | None = None,
) -> Array:
    """Sum over the workers, one part to each, as `lax.psum_scatter`, with a chosen format on the wire.

    y_j = sum_i C(x_ij), for part j of x at worker j. (n - 1) / n times the lane bytes of C leave each worker.

    Differentiable (in reverse): the cotangents of all parts are gathered, in the same format.

    Args:
        x: array, real floating point.
        axis_name: mapped axis, or a tuple of them.
        scatter_dimension: along which x is cut.
        tiled: parts keep the dimension, whose length is a multiple of n; else its length is n and it vanishes.
        wire, accumulate, key: as for `pmean`.

    Returns:
        This worker's part.

    Raises:
        ValueError: as for `pmean`, or x cannot be cut so.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> print(jax.vmap(lambda x: jc.collectives.psum_scatter(x, "data", wire="bfloat16"), axis_name="data")(x))
    [4. 6.]
    """
    options, words = _options_of("psum_scatter", x, axis_name, wire, accumulate, key)
    x = jnp.asarray(x)
    workers = axis_size(axis_name)
    dimension = _dimension("psum_scatter: scatter_dimension", scatter_dimension, x.ndim, x.shape)
    length = x.shape[dimension]
    if (length % workers if tiled else length != workers) != 0:
        needed = f"a multiple of {workers}" if tiled else f"{workers}, or give tiled=True"
        raise ValueError(f"psum_scatter: dimension {dimension} of {x.shape} must be {needed}, the number of workers")
    return _psum_scatter(options._replace(dimension=dimension, tiled=tiled), varying(x, axis_name), words)


def all_gather(
    x: Array,
    axis_name: Axis,
    *,
    axis: int = 0,
    tiled: bool = False,
    wire: Any = None,
    gradient: Any = None,
    accumulate: str = "f32",
    key: Array | None = None,
) -> Array:
    """Gathers the parts of all workers, as `lax.all_gather`, with chosen formats on the wire both ways.

    y = [C(x_1), ..., C(x_n)]; backwards, the cotangent of x_j is sum_i C'(ybar_ij), the `psum_scatter` of those of y.
    (n - 1) times the lane bytes of a part leave each worker forward, and (n - 1) / n of those of y backward.

    For parameters that are cut over the workers (FSDP), in the body of a `lax.scan` over layers under `jax.checkpoint`:
    one layer at a time is whole, and neither a gradient nor a memory of it is kept. Formats for the gradient that lose
    much want error feedback, which is a memory of the whole gradient: `compressed_mean`.

    Args:
        x: this worker's part, real floating point.
        axis_name: mapped axis, or a tuple of them.
        axis: dimension along which parts are put together.
        tiled: parts are joined along that dimension; else it is a new one, of length n.
        wire: of the parts, as for `pmean`. None: their dtype.
        gradient: of the cotangents, as for `pmean`. None: their dtype.
        accumulate, key: as for `pmean`; in a loop over layers another key for each.

    Returns:
        The whole array, of the dtype of x.

    Raises:
        ValueError: as for `pmean`, or no such dimension.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> print(jax.vmap(lambda x: jc.collectives.all_gather(x, "data", wire="bfloat16"), axis_name="data")(x)[0])
    [[1. 2.]
     [3. 4.]]
    """
    options, words = _options_of("all_gather", x, axis_name, wire, accumulate, key)
    back, _ = _options_of("all_gather", x, axis_name, gradient, accumulate, key)
    x = jnp.asarray(x)
    there = {"dimension": _dimension("all_gather: axis", axis, x.ndim + (not tiled), x.shape), "tiled": tiled}
    return _all_gather((options._replace(**there), back._replace(**there)), varying(x, axis_name), words)


def _dimension(name: str, given: int, ndim: int, shape: tuple[int, ...]) -> int:
    """The number of a dimension, counted from the first."""
    dimension = given + ndim if given < 0 else given
    if not 0 <= dimension < ndim:
        raise ValueError(f"{name} {given} of an array of shape {shape}")
    return dimension


def _options_of(
    name: str, x: Any, axis: Axis, wire: Any, accumulate: str, key: Array | None
) -> tuple[CollectiveOptions, Array]:
    if axis is None or not is_bound(axis):
        raise ValueError(f"{name}: no axis named {axis!r} is bound here; call it inside jax.shard_map, pmap or vmap")
    if accumulate not in ("f32", "f64"):
        raise ValueError(f'{name}: accumulate must be "f32" or "f64"; got {accumulate!r}')
    if accumulate == "f64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f'{name}: accumulate="f64" needs 64-bit mode (jax_enable_x64)')
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(like_of(x))}
    dtype = jnp.dtype(jnp.float64 if accumulate == "f64" or jnp.dtype(jnp.float64) in dtypes else jnp.float32)
    if wire is None:
        narrow = [kind for kind in dtypes if kind.itemsize < 4]
        wire = _narrow(narrow[0]) if len(dtypes) == 1 and narrow else None
    elif isinstance(wire, Compressor):
        spec = wire.spec
        if spec.lifted is not None:
            raise ValueError(f"{name}: wire must be a dtype or a compressor of one array; got {spec.name}")
        if spec.omega is None and spec.alpha is None:
            raise ValueError(f"{name}: wire must be a dtype or a compressor with a known error bound; got {spec.name}")
        if wire.lengths is not None or wire.for_worker is not None:
            raise ValueError(f"{name}: wire must be one compressor for all workers; {spec.name} has a plan for each")
        if key is None and _may_draw(wire):
            raise ValueError(
                f"{name}: wire={spec.name} may be random; give key=, equal on all workers, new in each call"
            )
    else:
        kind = narrow_type(f"{name}: wire", wire)
        rounded = cast(kind)
        wire = _narrow(kind) if rounded.spec.linear or kind == jnp.float16 else rounded
    key = jax.random.key(0) if key is None else root_key(key)
    return CollectiveOptions(axis, wire, dtype, types_tell(axis)), jax.random.key_data(key)


def _may_draw(wire: Compressor) -> bool:
    """Whether one of its keys goes into anything."""
    like = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def both(shared, private, x):
        state = wire.init(shared, like)
        return wire.compress(private, x, state)[0], state

    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.make_jaxpr(both)(key, key, like).jaxpr
    read = [var for equation in program.eqns for var in equation.invars] + program.outvars
    return any(var is one for var in read for one in program.invars[:2])


def _narrow(dtype: Any) -> Compressor:
    """Rounds to a type of 16 bits; what is not finite stays so, as in `lax.pmean`."""
    return on_vectors(
        compress=lambda key, x, state: (Dense(rounded_to(x, dtype)), state.local),
        decompress=lambda payload, shared, like: payload.values.astype(like.dtype),
        spec=Spec(f"rounding to {jnp.dtype(dtype).name}", omega=None, alpha=lambda d: 0.0, linear=True),
    )


def _keys(options: CollectiveOptions, words: Array) -> list[tuple[Array, Array]]:
    """For each of two compressions a key that is equal on all workers, and one of this worker."""
    shared, private = jax.random.split(wrap_key(words))
    both = jax.random.split(shared), jax.random.split(jax.random.fold_in(private, axis_index(options.axis)))
    return list(zip(*both, strict=True))


def _later(words: Array) -> Array:
    """The words of a key for the cotangents."""
    return jax.random.key_data(jax.random.fold_in(wrap_key(words), 2))


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, leaf: rounded_to(x, leaf.dtype), tree, like)


def _mean(options: CollectiveOptions, x: Any, words: Array) -> Any:
    axis, way = options.axis, _way(options)
    workers, share = way.workers, way.share
    wide = jax.tree.map(lambda leaf: leaf.astype(options.dtype), x)
    if options.wire is None:
        total, _ = summed(wide, axis, wide=options.dtype, share=share)
        return _cast_like(jax.tree.map(lambda t: t / (workers * share), total), x)
    exponents = _exponents(options, wide)
    wide = _scaled(wide, exponents, -1)
    cut = groups_of(Layout("chunks", chunks=workers), wide)
    first, second = _keys(options, words)
    chunk = _owners_sum(options, split(cut, wide)[0], *first) / (workers * share)
    whole = _to_all(options, chunk, *second)
    return _cast_like(_scaled(join(cut, (whole,)), exponents, 1), x)


def _exponents(options: CollectiveOptions, wide: Any) -> Array | None:
    """e with |x| < 2^e for the finite entries x of a leaf on all workers, i32[leaves]; None where no leaf needs it."""
    leaves = jax.tree.leaves(wide)
    if len(leaves) < 2 or options.wire is None or options.wire.spec.linear:
        return None
    largest = jnp.stack([jnp.max(jnp.abs(finite(leaf)), initial=0) for leaf in leaves])
    info = jnp.finfo(options.dtype)
    return all_max(jnp.clip(exponent_of(largest), info.minexp, -info.minexp), options.axis)


def _scaled(tree: Any, exponents: Array | None, sign: int) -> Any:
    """Each leaf times 2^(sign e)."""
    if exponents is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    units = power_of_two(sign * exponents, leaves[0].dtype)
    return jax.tree.unflatten(structure, [bounded(leaf * unit) for leaf, unit in zip(leaves, units, strict=True)])


def _owners_sum(options: CollectiveOptions, stack: Array, shared_key: Array, private: Array) -> Array:
    """The sum over the workers of row j of each one's [n, m], times `Way.share`, at worker j."""
    whole = rows(options.wire)  # pyright: ignore[reportArgumentType]
    like = like_of(stack)
    state = whole.init(shared_key, like)
    outer = varying_axes(stack)
    payload, _ = whole.compress(private, stack, State(varying(state.local, outer), state.shared))
    row = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
    return first_shot(payload, whole, state.shared, row, _way(options)._replace(outer=outer))[0]


def _way(options: CollectiveOptions) -> Way:
    return Way(options.axis, axis_size(options.axis))


def _to_all(options: CollectiveOptions, mine: Array, shared_key: Array, private: Array) -> Array:
    """[n, m]: every worker's [m] on all of them."""
    whole = rows(options.wire)  # pyright: ignore[reportArgumentType]
    like = jax.ShapeDtypeStruct((axis_size(options.axis), *mine.shape), mine.dtype)
    state = whole.init(shared_key, like)
    local = varying(jax.tree.map(lambda a: a[0], state.local.rows), varying_axes(mine))
    return second_shot(private, mine, whole, State(local, state.shared), like, _way(options))[2]


def _differentiable(function: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """function(options, x, words), whose cotangent of x is backward(options, words, that of the result)."""
    both = jax.custom_vjp(function, nondiff_argnums=(0,))
    both.defvjp(lambda options, x, words: (both(options, x, words), words), lambda *args: (backward(*args), None))
    return both


def _mean_backward(options: CollectiveOptions, words: Array, cotangent: Any) -> Any:
    if options.equal:
        return varying(jax.tree.map(lambda c: c / axis_size(options.axis), cotangent), options.axis)
    return _mean(options, cotangent, _later(words))


_pmean = _differentiable(_mean, _mean_backward)


def _parts(options: CollectiveOptions, x: Array) -> Array:
    """[n, ...]: the part of each worker."""
    rows = jnp.moveaxis(x, options.dimension, 0)
    workers = axis_size(options.axis)
    return rows.reshape(workers, rows.shape[0] // workers, *rows.shape[1:]) if options.tiled else rows


def _joined(options: CollectiveOptions, parts: Array) -> Array:
    """Inverse of `_parts`."""
    rows = parts.reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:]) if options.tiled else parts
    return jnp.moveaxis(rows, 0, options.dimension)


def _scattered(options: CollectiveOptions, x: Array, words: Array) -> Array:
    """This worker's part of the sum of the arrays of all."""
    rows = _parts(options, x)
    workers, shape = rows.shape[0], rows.shape[1:]
    rows = rows.astype(options.dtype).reshape(workers, -1)
    if options.wire is None:
        total = sum_scatter(rows, options.axis)
    else:
        total = _owners_sum(options, rows, *_keys(options, words)[0]) / _way(options).share
    total = rounded_to(total.reshape(shape), x.dtype)
    return jnp.moveaxis(total, 0, options.dimension) if options.tiled else total


def _whole(options: CollectiveOptions, part: Array, words: Array) -> Array:
    """The parts of all workers, joined."""
    part = jnp.moveaxis(part, options.dimension, 0) if options.tiled else part
    mine = part.reshape(-1)
    if options.wire is None:
        every = gathered(mine, options.axis)
    else:
        every = _to_all(options, mine.astype(options.dtype), *_keys(options, words)[0])
    every = rounded_to(every.reshape(every.shape[0], *part.shape), part.dtype)
    return varying(_joined(options, every), options.axis)


_psum_scatter = _differentiable(_scattered, lambda options, words, cotangent: _whole(options, cotangent, _later(words)))
_all_gather = _differentiable(
    lambda both_ways, x, words: _whole(both_ways[0], x, words),
    lambda both_ways, words, cotangent: _psum_scatter(both_ways[1], cotangent, _later(words)),
)
