"""The protocols that everything else is made of, and the laws they obey.

One gradient travels like this::

    tree --layout--> vectors --algorithm.update--> message --compressor.compress--> payload --route--> payloads
    of all workers --compressor.accumulate--> mean message --algorithm.update--> direction --layout--> tree

Laws
----
1. `State.local` may differ between workers, `State.shared` is bitwise equal on all of them.
2. Shared randomness (hash seeds, common index sets) enters through `init`, moves on through `advance` and costs no
   bits. Private randomness (dithering, sampling) enters through `compress`.
3. A payload holds exactly what crosses the wire: no shape, no k, no seed.
4. `spec.omega`: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2.  `spec.alpha`: E|C(x) - x|^2 <= (1 - alpha) |x|^2.
   None means "not known". The norm is Euclidean unless `spec.norm` says otherwise.
5. Non-finite entries count as zero: C(x) = C(where(isfinite(x), x, 0)).
6. Where workers have different plans (smoothness matrices, probabilities, ratios), shared state holds the plans of all
   of them, stacked, so law 1 stands. `for_worker` picks one. Compressing and decompressing take the state of one
   worker; `accumulate` takes the stack, and message j is decoded with plan j.
7. Special cases are declared, never recognised: what a part of an algorithm's state means stands in `Algorithm.roles`,
   and a part that is not declared is refused where it would have to be handled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, is_array, key_data, like_of, weighted, wide, wide_like, wrap_key, zeros_like
from jaxcomp.backend import add_each, fold

__all__ = [
    "ROLES",
    "Algorithm",
    "Compressor",
    "Exchange",
    "Lengths",
    "Lifted",
    "Sent",
    "Spec",
    "State",
    "accumulate",
    "add_own",
    "advance",
    "bounded",
    "check_algorithm",
    "check_compressor",
    "entries",
    "finite",
    "fold",
    "for_worker",
    "is_array",
    "key_data",
    "lengths",
    "like_of",
    "overflow",
    "residual",
    "weighted",
    "wide",
    "wide_like",
    "wrap_key",
    "zeros_like",
]

Array = jax.Array
Tree = Any


class State(NamedTuple):
    """What a compressor, an algorithm or a transformation remembers between rounds.

    local: differs from worker to worker (memories, shifts, counters).
    shared: bitwise equal on all workers (seeds, round counts, plans).

    From these two follow the specs of `shard_map` (`P(axis)`, `P()`), the axes of vmap (0, None), and which arrays must
    be equal on all replicas.
    """

    local: Tree = ()
    shared: Tree = ()

    def part(self, name: str) -> "State":
        """The fields called `name` of local and of shared, as a `State`; () where there is none."""
        return State(getattr(self.local, name, ()), getattr(self.shared, name, ()))

    def replace(self, **parts: Tree) -> "State":
        """Other values for some fields; a `State` goes to the fields of that name in local and in shared.

        >>> class Local(NamedTuple):
        ...     memory: int
        >>> State(Local(1)).replace(memory=2)
        State(local=Local(memory=2), shared=())
        """
        local, shared = self
        for name, value in parts.items():
            both = value if isinstance(value, State) else State(value, value)
            local = local._replace(**{name: both.local}) if hasattr(local, name) else local
            shared = shared._replace(**{name: both.shared}) if hasattr(shared, name) else shared
        return State(local, shared)


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
    lifted: for a compressor of trees: how it lays them out, and what compresses each vector.
    layout: the `jaxcomp.layout.Layout` in which it serves trees best; None for the default.
    weights: share of each worker in the mean, where the compressor brings them (`dagc`).
    norm: (x, shared) -> |x|^2 in the norm in which omega and alpha hold; None: Euclidean.
    vote: C(x) is no estimate of x; only the sign of the mean is of use, so nothing remembers what is lost.
    remedy: what to take instead where theory asks for more than is known, for error messages.
    """

    name: str
    omega: Callable[[Any], float] | None
    alpha: Callable[[Any], float] | None
    linear: bool
    selects: bool = False
    lifted: "Lifted | None" = None
    layout: Any = None
    weights: tuple[float, ...] | None = None
    norm: Callable[[Any, Any], Any] | None = None
    remedy: str | None = None
    vote: bool = False


class Compressor(NamedTuple):
    """A compressor of one array (or, when lifted, of a tree), as pure functions.

    init(shared_key, like) -> State
        like: `jax.ShapeDtypeStruct` of what will be compressed.
    compress(key, x, state) -> (payload, local)
        key: private to this worker and round. state: as one worker uses it (`for_worker`).
    decompress(payload, shared, like) -> x_hat
        shape and dtype of `like`.
    spec: Spec

    The others may be None: the functions of the same names then do the usual thing.

    accumulate(total, payloads, weights, shared) -> total + sum_j weights_j x_hat_j, in the order of j
        total: an array, or its shape for zeros (`arrays.started`). payloads: stacked; weights: [n], None for all ones,
        or a prefix tree of the payload with either for each part.
    advance(shared) -> shared of the next round.
    lengths(like) -> `Lengths` in the place of each payload whose length depends on the worker, None in that of others.
    for_worker(shared, worker, workers) -> shared as one worker uses it (law 6). Built with `row_of`.
    overflow(local) -> i32[], how many chosen entries of the last round found no place in the capacity.
    entries(payloads, weights, shared, like) -> what `accumulate` adds to zeros like `like`, as a `backend.SparseSum`
        that is not made yet. A wrapper that has another `accumulate` has other entries, too, or none.
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
    entries: Callable[[Tree, Tree, Tree, Tree], Tree] | None = None

    def __repr__(self) -> str:
        return f"<compressor {self.spec.name}>"


class Lifted(NamedTuple):
    """layout: how a compressor of trees cuts them into vectors; compressor: of one such vector."""

    layout: Any
    compressor: Compressor


class Sent(Protocol):
    """What came of one message, for the algorithm that sent it. What is not asked for is not computed.

    mean: of what all workers sent, as they see it, equal on all; in f32 (f64 for f64 messages).
    own: what this worker sent, as the others see it.
    residual: message - own, bitwise so where C copies entries.
    state: of the compressor, for the next round.
    add_to(total, weight): total + weight own, saturated, in the place of total.
    read_by(compressor): (mean, own) as another compressor with the same payloads decodes them.
    """

    @property
    def mean(self) -> Tree: ...
    @property
    def own(self) -> Tree: ...
    @property
    def residual(self) -> Tree: ...
    @property
    def state(self) -> State: ...
    def add_to(self, total: Tree, weight: Any) -> Tree: ...
    def read_by(self, compressor: Compressor) -> tuple[Tree, Tree]: ...


class Exchange(Protocol):
    """What a worker may do with the others in a round; handed to `Algorithm.update`.

    index i32[], size int: number of this worker, and how many there are.
    mean(key, compressor, message, state): compresses and exchanges a message, by whatever route the user chose.
    means(messages): the same of several messages at once, each with these four arguments: a list of `Sent`. What can
        share a collective does.
    sum(x): sum over the workers of each array of a tree, uncompressed. With weights w_i of the workers (which add up to
        one) it is sum_i n w_i x_i, so that sum(x) / size is their mean.
    cond(predicate, yes, no, *operands): `lax.cond` for branches that exchange; the predicate is equal on all workers.
    """

    @property
    def index(self) -> Array: ...
    @property
    def size(self) -> int: ...
    def mean(self, key: Array, compressor: Compressor, message: Tree, state: State) -> Sent: ...
    def means(self, messages: Sequence[tuple[Array, Compressor, Tree, State]]) -> Sequence[Sent]: ...
    def sum(self, x: Tree) -> Tree: ...
    def cond(self, predicate: Array, yes: Callable[..., Tree], no: Callable[..., Tree], *operands: Tree) -> Tree: ...


# What a field of an algorithm's state is, and so what becomes of it when the number of workers changes.
ROLES = {
    "memory": "local: what was not sent yet; its sum over the workers is kept",
    "narrow memory": "the same as `jaxcomp.algorithms.loco.Narrow`: in 8 bits, with scales",
    "shift": "local h_i, shared their mean h: in step with the means as they were sent; workers start from h",
    "average": "local: a running average of this worker's gradients; other workers start from the mean of all",
    "momentum": "shared: an average of directions; kept",
    "iterate": "shared: points of the method; kept",
    "coin": "shared: keys and counts of shared randomness; kept",
    "gradient": "local: of this worker alone, and so of no use to another one; refused",
    "compressor": "local and shared: of the compressor; new workers take over that of worker i mod n",
}


class Algorithm(NamedTuple):
    """A distributed method: what one worker does in a round.

    init(shared_key, like) -> State
        like: shapes of the vectors that the layout makes of a tree (`jaxcomp.layout`). Local and shared state are
        NamedTuples, whose fields `roles` names.
    update(key, grads, state, exchange) -> (direction, State)
        key: private to this worker and round. grads: vectors; or, where the method has a `point`, a function from
        points to this worker's gradient there. exchange: an `Exchange`; may be used once, more often, or not at all.
        direction: vectors, equal on all workers; where the method has a `point`, anything.
    roles: field of the state -> one of ROLES, or the roles of an algorithm inside; or {i: roles of part i}, for a field
        that is a tuple with the states of `parts`.
    compressor: lifted (`compressors.vector.lift`); None for a method that only sums.
    layout: how trees are laid out; None: as the compressor says.
    point(shared) -> the iterate of a method that chooses where gradients are taken (run it with `jc.methods.rounds`);
        None for one whose gradients are taken at the caller's parameters (run it with `jc.compressed_mean`).
    parts: algorithms of parts of the tree, in the order of `layout.parts` (`by_path`); () for one that has it whole.
    pieces: gradients may come as `jaxcomp.backend.Pieces` where a vector has several leaves, and are not joined before;
        for each of `parts`, where there are any.
    sparse: vectors of the direction are those of a `Sent.mean`, untouched, so they may be `jaxcomp.backend.SparseSum`.
    """

    init: Callable[[Array, Tree], State]
    update: Callable[[Array, Any, State, Exchange], tuple[Tree, State]]
    roles: Mapping[Any, Any]
    compressor: Compressor | None = None
    layout: Any = None
    point: Callable[[Tree], Tree] | None = None
    parts: tuple["Algorithm", ...] = ()
    pieces: bool | tuple[bool, ...] = False
    sparse: bool = False

    def __repr__(self) -> str:
        made = getattr(self.update, "__qualname__", "").partition(".")[0]
        return f"<algorithm {made}{f' of {self.compressor.spec.name}' if self.compressor else ''}>"

    def __hash__(self) -> int:
        return hash((self.init, self.update, *self[3:]))  # roles may be a dict


def check_compressor(name: str, value: Any) -> Spec:
    """The spec of a compressor; TypeError for anything else, named after the function `name`."""
    if isinstance(value, Compressor):
        return value.spec
    if callable(value) and not isinstance(value, Algorithm):
        got = f"the function {getattr(value, '__name__', value)}; call it first: jc.top_k(0.01), not jc.top_k"
    elif isinstance(value, Algorithm):
        got = "an algorithm, which needs no other around it: take it as it is (in by_path wrap each compressor)"
    else:
        got = repr(value)
    raise TypeError(f"{name} needs a compressor; got {got}")


def check_algorithm(name: str, value: Any) -> Algorithm:
    """An algorithm whose gradients are taken at the caller's parameters; TypeError for anything else."""
    if isinstance(value, Algorithm) and value.point is None:
        return value
    if isinstance(value, Algorithm):
        got = "a method that keeps its own iterate. Run that with jc.methods.rounds"
    elif isinstance(value, Compressor):
        got = f"the compressor {value.spec.name}. Wrap it in error_feedback(...), diana(...) or direct(...)"
    else:
        got = repr(value)
    raise TypeError(f"{name} needs an algorithm; got {got}")


# ------------------------------------------------------------------------------------------------
# What every compressor can do, whether or not it brings its own fast form


def accumulate(compressor: Compressor, total: Tree, payloads: Tree, weights: Tree, shared: Tree) -> Tree:
    """total + sum_j weights_j decompress(payload_j), in the order of j, in memory O(d).

    Without weights there are no products, and the result is the same bit for bit wherever it is compiled. With weights
    a compiler may contract a product and the addition that follows into one rounding: the same up to the last place.

    Args:
        total: array or tree, shape of what is decompressed, in the dtype to add in; `jax.ShapeDtypeStruct`s are zeros.
        payloads: payload with a leading axis of n messages on each array.
        weights: [n], None for all ones, or a prefix tree of the payload.
        shared: state of the compressor; with plans of several workers, those of all n, in the order of the messages.
    """
    if compressor.accumulate is not None:
        return compressor.accumulate(total, payloads, weights, shared)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    pick = lambda worker: for_worker(compressor, shared, worker, workers)
    return add_each(compressor.decompress, pick, total, payloads, weights)


def entries(compressor: Compressor, payloads: Tree, weights: Tree, shared: Tree, like: Tree) -> Tree:
    """What `accumulate` adds to zeros like `like`; vectors may be `backend.SparseSum`."""
    if compressor.entries is not None:
        return compressor.entries(payloads, weights, shared, like)
    return accumulate(compressor, like, payloads, weights, shared)


def residual(compressor: Compressor, message: Tree, payload: Tree, shared: Tree) -> Tree:
    """message - decompress(payload): what was not sent of a finite message. Bitwise so where entries are copied."""
    if compressor.accumulate is not None:
        return _added(compressor, message, payload, -1, shared)
    x_hat = compressor.decompress(payload, shared, like_of(message))
    return jax.tree.map(lambda m, x: bounded(m - x), message, x_hat)


def add_own(compressor: Compressor, total: Tree, payload: Tree, weight: Any, shared: Tree) -> Tree:
    """total + weight decompress(payload), saturated, for the payload of one worker, whose plan is in `shared`."""
    return jax.tree.map(bounded, _added(compressor, total, payload, weight, shared))


def _added(compressor: Compressor, total: Tree, payload: Tree, weight: Any, shared: Tree) -> Tree:
    stacked = jax.tree.map(lambda a: a[None], payload)
    dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(total)))
    return accumulate(compressor, total, stacked, jnp.asarray(weight, dtype).reshape(1), shared)


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
        shared: its shared state. worker: number of the worker, may be traced. workers: how many; None: not known.

    Raises:
        ValueError: the plans are those of another number of workers.
    """
    return shared if compressor.for_worker is None else compressor.for_worker(shared, worker, workers)


def overflow(compressor: Compressor, local: Tree) -> Array:
    """How many chosen entries of the last round found no place in the static capacity, i32[]."""
    return jnp.zeros((), jnp.int32) if compressor.overflow is None else compressor.overflow(local)
