"""The four types that everything else is made of, and the laws they obey.

One gradient travels like this (`send`, `compress`, exchange, `decompress`, `receive`)::

    grads --algorithm.send--> message --compressor.compress--> payload --exchange-->
    payloads of all workers --accumulate--> mean message --algorithm.receive--> direction

Laws
----
1. `State.local` may differ between workers, `State.shared` is bitwise equal on all of them.
2. Shared randomness (hash seeds, common index sets) enters through `init`, moves on through
   `advance` and costs no bits. Private randomness (dithering, sampling) enters through `compress`.
3. A payload holds exactly what crosses the wire: no shape, no k, no seed.
4. `spec.omega`: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2.  `spec.alpha`:
   E|C(x) - x|^2 <= (1 - alpha) |x|^2.  None means "not known". The norm is Euclidean unless
   `spec.norm` says otherwise.
5. Non-finite entries count as zero: C(x) = C(where(isfinite(x), x, 0)).
6. Where workers have different plans (smoothness matrices, probabilities, steps), shared state holds
   the plans of all of them, stacked, so law 1 stands. `for_worker` picks one. Compressing and
   decompressing take the state of one worker; `accumulate` takes the stack, and message j is decoded
   with plan j.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.packing import as_words

__all__ = [
    "Algorithm",
    "Compressor",
    "Lengths",
    "Spec",
    "State",
    "accumulate",
    "advance",
    "bounded",
    "check_compressor",
    "finite",
    "for_worker",
    "key_data",
    "lengths",
    "like_of",
    "one_row",
    "overflow",
    "residual",
    "root_key",
    "roundtrip",
    "row_of",
    "size_of",
    "weighted",
    "wide",
    "wide_like",
    "wrap_key",
]

Array = jax.Array
Tree = Any


class State(NamedTuple):
    """What a compressor, an algorithm or a transformation remembers between rounds.

    local: differs from worker to worker (memories, shifts, counters).
    shared: bitwise equal on all workers (seeds, round counts, plans).

    The split gives the `shard_map` specs (`P(axis)`, `P()`), the vmap axes (0, None), the
    checkpoint layout and the test "shared is equal on every device" all at once.
    """

    local: Tree = ()
    shared: Tree = ()


class Lengths(NamedTuple):
    """How many entries of a message each worker may fill; what follows is padding and need not travel.

    counts: one static number for each worker.
    size: number of entries d of what was compressed, also the index of padding.
    """

    counts: tuple[int, ...]
    size: int


class Spec(NamedTuple):
    """What is known about a compressor C on R^d.

    name: how it calls itself in errors and tables.
    omega: d -> omega with E C(x) = x and E|C(x) - x|^2 <= omega |x|^2, or None.
    alpha: d -> alpha with E|C(x) - x|^2 <= (1 - alpha) |x|^2, or None.
    linear: payloads may be added: decompress(p + q) = decompress(p) + decompress(q).
    selects: C(x) copies some entries of x and zeroes the rest (an orthogonal projection), and
        its payload has a field `values` with the copied entries.
    lifted: acts on a tree of arrays; omega and alpha then also accept a tuple of leaf sizes.
    dense_below: when lifted, leaves of a tree with fewer entries are sent as they are.
    weights: share of each worker in the mean, where the compressor brings them (`dagc`).
    norm: (x, shared) -> |x|^2 in the norm in which omega and alpha hold; None: Euclidean.
    remedy: what to take instead where theory asks for more than is known, for error messages.
    """

    name: str
    omega: Callable[[Any], float] | None
    alpha: Callable[[Any], float] | None
    linear: bool
    selects: bool = False
    lifted: bool = False
    dense_below: int = 0
    weights: tuple[float, ...] | None = None
    norm: Callable[[Any, Any], Any] | None = None
    remedy: str | None = None


class Compressor(NamedTuple):
    """A compressor of one array (or, when lifted, of a tree), as pure functions.

    init(shared_key, like) -> State
        like: `jax.ShapeDtypeStruct` of what will be compressed.
    compress(key, x, state) -> (payload, local)
        key: private to this worker and round.
    decompress(payload, shared, like) -> x_hat
        shape and dtype of `like`.
    spec: Spec

    The others may be None: the functions of the same names then do the usual thing.

    accumulate(total, payloads, weights, shared) -> total + sum_j weights_j x_hat_j
        payloads: stacked on a leading axis; weights: [n], None for all ones, or a prefix tree of
        the payload with either for each part. Folds in the order of j.
    advance(shared) -> shared of the next round.
    lengths(like) -> `Lengths` in the place of each payload whose length depends on the worker, None
        in the place of the others.
    for_worker(shared, worker, workers) -> shared as one worker uses it (law 6). Built with `row_of`.
    overflow(local) -> i32[]: chosen entries of the last round that found no place in the static capacity.
    """

    init: Callable[[Array, Tree], State]
    compress: Callable[[Array, Tree, State], tuple[Tree, Tree]]
    decompress: Callable[[Tree, Tree, Tree], Tree]
    spec: Spec
    accumulate: Callable[[Tree, Tree, Tree, Tree], Tree] | None = None
    advance: Callable[[Tree], Tree] | None = None
    lengths: Callable[[Tree], Tree] | None = None
    for_worker: Callable[[Tree, Array | int, int | None], Tree] | None = None
    overflow: Callable[[Tree], Array] | None = None


class Algorithm(NamedTuple):
    """A distributed method: what is sent, and what is made of the mean of what was sent.

    init(shared_key, like) -> State
        `state.shared.compressor` is the shared state of the compressor.
    send(key, grads, state) -> (payload, local)
    receive(mean, shared) -> (direction, shared)
    compressor: lifted to trees.
    message(grads, local) -> what `send` compresses, for diagnostics.
    over(wrap) -> the same algorithm with wrap(compressor) in place of the compressor it was given; None where the
        mean must reach `receive` as it was sent.
    """

    init: Callable[[Array, Tree], State]
    send: Callable[[Array, Tree, State], tuple[Tree, Tree]]
    receive: Callable[[Tree, Tree], tuple[Tree, Tree]]
    compressor: Compressor
    message: Callable[[Tree, Tree], Tree] = lambda grads, local: grads
    over: Callable[[Callable[[Compressor], Compressor]], "Algorithm"] | None = None


def check_compressor(name: str, value: Any) -> Spec:
    """The spec of a compressor; TypeError for anything else, named after the function `name`."""
    if isinstance(value, Compressor):
        return value.spec
    if callable(value):
        got = f"the function {getattr(value, '__name__', value)}; call it first: jc.top_k(0.01), not jc.top_k"
    else:
        got = f"{value!r}" if not isinstance(value, Algorithm) else "an algorithm"
    raise TypeError(f"{name} needs a compressor; got {got}")


# ------------------------------------------------------------------------------------------------
# Shapes


def wide(*dtypes: Any) -> Any:
    """The floating type to compute in: f64 if any of the dtypes is f64, else f32.

    >>> wide(jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32)


def like_of(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree of arrays, as `jax.ShapeDtypeStruct`.

    Args:
        tree: arrays, scalars or ShapeDtypeStructs.

    Raises:
        ValueError: a leaf is not a real floating-point array (named with its path).

    >>> like_of({"w": jnp.zeros((2, 3))})
    {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """

    def one(path, leaf):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            where = jax.tree_util.keystr(path) or "the array"
            raise ValueError(
                f"only real floating point is compressed; {where} has dtype {dtype}. "
                "Leave such leaves of a gradient out with optax.masked."
            )
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def wide_like(tree: Tree) -> Tree:
    """The same with each dtype replaced by the one that sums and memories are kept in."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype)), like_of(tree))


def is_array(tree: Tree) -> bool:
    """True for a bare array (or its ShapeDtypeStruct), False for a tree of arrays."""
    return jax.tree.structure(tree) == jax.tree.structure(0)


def size_of(like: Tree) -> int | tuple[int, ...]:
    """Number of entries of a bare array; tuple of them for the leaves of a tree.

    >>> size_of(jnp.zeros((2, 3))), size_of({"a": jnp.zeros(2), "b": jnp.zeros(())})
    (6, (2, 1))
    """
    sizes = tuple(_prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(like))
    return sizes[0] if is_array(like) else sizes


def _prod(shape: Sequence[int]) -> int:
    result = 1
    for length in shape:
        result *= int(length)
    return result


def finite(tree: Tree) -> Tree:
    """NaN and infinities replaced by zero (law 5)."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)), tree)


def bounded(x: Array) -> Array:
    """x, with what overflowed to infinity cut to the largest number of its dtype."""
    info = jnp.finfo(x.dtype)
    return jnp.clip(x, jnp.asarray(info.min, x.dtype), jnp.asarray(info.max, x.dtype))


# ------------------------------------------------------------------------------------------------
# Keys are kept in states as plain uint32 words, so that every optimizer wrapper, donation and
# checkpoint treats them like any other array.


def key_data(key: Array) -> Array:
    """The uint32 words of a typed or raw key."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def root_key(seed: Any) -> Array:
    """A typed key of the default kind from an integer, or from a key of any kind."""
    if isinstance(seed, numbers.Integral):
        return jax.random.key(int(seed))
    data = key_data(wrap_key(seed)).reshape(-1)
    if data.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(data)
    return functools.reduce(jax.random.fold_in, data, jax.random.key(0))


def wrap_key(data: Array) -> Array:
    """The typed key of uint32 words."""
    if not hasattr(data, "dtype"):
        raise TypeError(f"a key of jax.random is needed, for instance jax.random.key(0); got {data!r}")
    return data if jnp.issubdtype(data.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(data)


# ------------------------------------------------------------------------------------------------
# What every compressor can do, whether or not it brings its own fast form


def accumulate(compressor: Compressor, total: Tree, payloads: Tree, weights: Tree, shared: Tree) -> Tree:
    """total + sum_j weights_j decompress(payload_j), in the order of j, in memory O(d).

    Without weights there are no products, and the result is the same bit for bit wherever it is
    compiled. With weights a compiler may contract a product and the addition that follows into
    one rounding, so it is the same up to the last place.

    Args:
        total: array or tree, shape of what is decompressed, in the dtype to add in.
        payloads: payload with a leading axis of n messages on each array.
        weights: [n], None for all ones, or a prefix tree of the payload.
        shared: the compressor's shared state; with plans of several workers, those of all n, in
            the order of the messages.

    Returns:
        Like `total`.
    """
    if compressor.accumulate is not None:
        return compressor.accumulate(total, payloads, weights, shared)
    like = like_of(total)
    workers = jax.tree.leaves(payloads)[0].shape[0]

    def add(total, message):
        payload, weight, worker = message
        x_hat = compressor.decompress(payload, for_worker(compressor, shared, worker, workers), like)
        return jax.tree.map(lambda t, x: t + weighted(x.astype(t.dtype), weight), total, x_hat)

    return fold_in_one_pass(add, total, (payloads, weights, jnp.arange(workers)))


def fold(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`lax.scan` of `add` over stacked messages; no loop is built for a single one."""
    add, messages = _in_slices(add, messages)
    if jax.tree.leaves(messages)[0].shape[0] == 1:
        return add(total, jax.tree.map(lambda a: a[0], messages))
    total, _ = lax.scan(lambda t, m: (add(t, m), None), total, messages)
    return total


# So many messages of dense codes are added in one pass over the total, on CPU in about half the time of a pass for each
# (`python -m experiments bench compressors --log2-size 20`: "add" against so many times "decompress"). With 20 bf16
# and f32 lose, and compiling takes a second.
ONE_PASS = 8


def fold_in_one_pass(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`fold` for messages that are decoded entry by entry."""
    first = next((a for a in jax.tree.leaves(messages) if a.size), None)
    count = jax.tree.leaves(messages)[0].shape[0]
    if first is None or not 1 < count <= ONE_PASS:
        return fold(add, total, messages)

    add, messages = _in_slices(add, messages)

    def add_all(total):
        for j in range(count):
            total = add(total, jax.tree.map(lambda a: a[j], messages))  # noqa: B023
        return total

    # It must end in an array: each user of the total would else decode all messages for itself.
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier(add_all(total))
    # XLA for CPU drops that before it fuses. It keeps a condition that it does not know to hold always, as this does.
    value = first.reshape(-1)[0].astype(jnp.float32)
    return lax.cond((value <= jnp.inf) | jnp.isnan(value), add_all, lambda total: total, total)


def _in_slices(add: Callable[[Tree, Tree], Tree], messages: Tree) -> tuple[Callable[[Tree, Tree], Tree], Tree]:
    """Both for messages with 8-bit floats as words: XLA for CPU slices such floats more slowly."""
    narrow = lambda a: jnp.issubdtype(a.dtype, jnp.floating) and jnp.finfo(a.dtype).bits == 8
    kinds = jax.tree.map(lambda a: a.dtype, messages)
    back = lambda a, kind: a if a.dtype == kind else lax.bitcast_convert_type(a, kind)
    words = jax.tree.map(lambda a: as_words(a) if narrow(a) else a, messages)
    return lambda total, message: add(total, jax.tree.map(back, message, kinds)), words


def weighted(x: Array, weight: Array | None) -> Array:
    """weight * x; x for no weight."""
    return x if weight is None else x * weight.astype(x.dtype)


def residual(compressor: Compressor, message: Tree, payload: Tree, shared: Tree) -> Tree:
    """message - decompress(payload): what was not sent.

    Bitwise, `message = sent + residual` for compressors that copy entries.
    """
    if compressor.accumulate is None:
        x_hat = compressor.decompress(payload, shared, like_of(message))
        return jax.tree.map(lambda m, x: m - x, message, x_hat)
    stacked = jax.tree.map(lambda a: a[None], payload)
    return compressor.accumulate(message, stacked, jnp.full((1,), -1, jnp.float32), shared)


def advance(compressor: Compressor, shared: Tree) -> Tree:
    """The compressor's shared state of the next round."""
    return shared if compressor.advance is None else compressor.advance(shared)


def lengths(compressor: Compressor, like: Tree) -> Tree:
    """How long each worker's message of `like` may be (see `Compressor`); None: all equally."""
    return None if compressor.lengths is None else compressor.lengths(like)


def for_worker(compressor: Compressor, shared: Tree, worker: Array | int, workers: int | None = None) -> Tree:
    """The compressor's shared state as one worker uses it: with its own plan where plans differ.

    Args:
        compressor: any compressor.
        shared: its shared state.
        worker: number of the worker, may be traced.
        workers: how many there are; None if it is not known.

    Raises:
        ValueError: the plans are those of another number of workers.
    """
    return shared if compressor.for_worker is None else compressor.for_worker(shared, worker, workers)


def overflow(compressor: Compressor, local: Tree) -> Array:
    """Chosen entries of the last round that found no place in the compressor's static capacity: i32[].

    Args:
        compressor: any compressor.
        local: its local state after the round.
    """
    return jnp.zeros((), jnp.int32) if compressor.overflow is None else compressor.overflow(local)


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


def roundtrip(compressor: Compressor, x: Tree, *, key: Array, worker: Array | int = 0) -> tuple[Tree, Tree]:
    """Compresses and decompresses once: x_hat = C(x).

    Both kinds of randomness, shared and private, are drawn from `key`. May be jit-compiled and
    mapped (over keys for Monte Carlo, over x for many vectors).

    Args:
        compressor: any compressor.
        x: floating array of any shape (a tree if the compressor is lifted).
        key: typed key or raw uint32[2].
        worker: whose plan to use, where plans differ between workers.

    Returns:
        x_hat with the shape and dtype of x, and the payload.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.top_k(k=1), jnp.array([1.0, -3.0]), key=jax.random.key(0))
    >>> print(x_hat, payload.indices)
    [ 0. -3.] [1]
    """
    check_compressor("roundtrip", compressor)
    x = jax.tree.map(jnp.asarray, x)
    shared_key, private_key = jax.random.split(root_key(key) if hasattr(key, "dtype") else wrap_key(key))
    like = like_of(x)
    state = compressor.init(shared_key, like)
    shared = for_worker(compressor, state.shared, worker)
    payload, _ = compressor.compress(private_key, x, State(state.local, shared))
    return compressor.decompress(payload, shared, like), payload
