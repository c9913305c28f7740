"""The protocols that everything else is made of, and the laws they obey.

One gradient travels like this::

    tree --groups--> arrays --algorithm.update--> message --compressor.compress--> payload --route--> payloads of all
    workers --compressor.accumulate--> mean message --algorithm.update--> direction --groups--> tree

Between the two ends everything is a tuple with one item for each group of leaves (`jaxcomp.groups`).

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
7. Special cases are declared, never recognised: what a part of an algorithm's state means, and so where it is, stands
   in `Algorithm.roles`, and a part that is not declared is refused where it would have to be handled.
"""

import math
import numbers
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, check_decoded, is_array, like_of, wide
from jaxcomp.backend import add_each, cut_apart, for_each_row, form, materialized, of_entries
from jaxcomp.checks import is_whole

MOST = 2**31 - 1  # entries of an array: indices are i32, and d stands for padding
FEW = 4  # keys that are made one by one: each is a hundred operations to compile

__all__ = [
    "MOST",
    "ROLES",
    "Algorithm",
    "Compressor",
    "Cond",
    "Left",
    "Lengths",
    "Lifted",
    "Mean",
    "Round",
    "Sent",
    "Spec",
    "State",
    "Sum",
    "TooLong",
    "accumulate",
    "add_own",
    "advance",
    "alpha_of",
    "answered",
    "check_compressor",
    "check_pair",
    "count_of",
    "entries",
    "for_worker",
    "has_role",
    "keys_of",
    "left",
    "left_of",
    "lengths",
    "omega_of",
    "on_vectors",
    "require_algorithm",
    "residual",
    "sides",
    "stepped",
    "whole",
]

Array = jax.Array
Tree = Any


class State(NamedTuple):
    """Memory between rounds of a compressor, or of a field of an algorithm's state with two sides.

    local: differs from worker to worker (memories, shifts, counters).
    shared: bitwise equal on all workers (seeds, round counts, plans).

    From these two follow the specs of `shard_map` (`P(axis)`, `P()`), the axes of vmap (0, None), and which arrays must
    be equal on all replicas.
    """

    local: Tree = ()
    shared: Tree = ()


class TooLong(ValueError):
    """A vector has more entries than its indices can number: other messages can still be sent."""


class Lengths(NamedTuple):
    """How many entries of a message each worker may fill; what follows is padding and need not travel.

    counts: one static number for each worker.
    size: number of entries d of what was compressed, also the index of padding.
    """

    counts: tuple[int, ...]
    size: int


class Spec(NamedTuple):
    """Facts about a compressor C on R^d.

    name: how it calls itself in errors and tables.
    omega: d -> omega with E C(x) = x and E|C(x) - x|^2 <= omega |x|^2, or None.
    alpha: d -> alpha with E|C(x) - x|^2 <= (1 - alpha) |x|^2, or None.
    linear: payloads may be added: decompress(p + q) = decompress(p) + decompress(q).
    entrywise: an entry is decoded by arithmetic from few numbers of the payload; and of arrays that stand in the order
        of the vector and are as long (`payloads.per_tile`) only from those of its own tile of 1024 entries: others need
        not be there. Not of one that rotates, permutes, or writes into a vector (`.at[...].set`). So GPUs decode each
        leaf by itself, from sections of the messages, add messages by a reduction, code equal vectors (without a state)
        and the rows of a stack together (under vmap), and code again what a narrow memory would have to keep.
    selects: C(x) copies some entries of x and zeroes the rest (an orthogonal projection), and
        its payload has a field `values` with the copied entries.
    lifted: for a compressor of trees: how it lays them out, and what compresses each array.
    rows: for a compressor of stacks: what compresses each row.
    layout: the `jaxcomp.groups.Layout` in which it serves trees best; None for the default.
    weights: share of each worker in the mean, where the compressor brings them (`dagc`).
    norm: (x, shared) -> |x|^2 in the norm in which omega and alpha hold; None: Euclidean.
    vote: C(x) is no estimate of x; only the sign of the mean is of use, so nothing remembers what is lost.
    remedy: what to take instead where theory asks for more than is known, for error messages.
    made: by which factory and with which options (`jaxcomp.factories.factory`).
    """

    name: str
    omega: Callable[[Any], float] | None
    alpha: Callable[[Any], float] | None
    linear: bool
    selects: bool = False
    lifted: "Lifted | None" = None
    rows: "Compressor | None" = None
    layout: Any = None
    weights: tuple[float, ...] | None = None
    norm: Callable[[Any, Any], Any] | None = None
    remedy: str | None = None
    vote: bool = False
    entrywise: bool = False
    made: Any = None


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
    overflow(local) -> i32[], how many chosen entries of the last round found no place in the capacity; or a `Left`.
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
    overflow: "Callable[[Tree], Array | Left] | None" = None
    entries: Callable[[Tree, Tree, Tree, Tree], Tree] | None = None

    def __repr__(self) -> str:
        return f"<compressor {self.spec.name}>"


class Lifted(NamedTuple):
    """layout: how a compressor of trees cuts them into vectors; compressor: of one such vector."""

    layout: Any
    compressor: Compressor


# ------------------------------------------------------------------------------------------------
# Algorithms: generators that ask for exchanges


class Mean(NamedTuple):
    """Asks for the mean of the messages of all workers; the answer is a `Sent`. Made by `Round.mean`.

    keys: of each group, private. route_key: private, for a route that compresses once more. compressors, message,
    states, groups: one for each group.
    """

    route_key: Array
    keys: tuple[Any, ...]
    compressors: "tuple[Compressor, ...]"
    message: tuple[Any, ...]
    states: tuple[State, ...]
    groups: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        answer = f"write sent = yield here.mean(...), then sent.{name}"
        raise AttributeError(f"a request for a mean, not its answer, has no {name!r}: {answer}")


class Sum(NamedTuple):
    """Asks for the sum over the workers of each array of a tree, uncompressed.

    With weights w_i of the workers (which add up to one) it is sum_i n w_i x_i, so that sum / size is their mean.
    """

    x: Tree


class Cond(NamedTuple):
    """Asks for `lax.cond`, whose branches are functions of the operands and may ask, too, where they are generators.

    The predicate is equal on all workers.
    """

    predicate: Array
    yes: Callable[..., Any]
    no: Callable[..., Any]
    operands: tuple[Any, ...] = ()


class Sent(Protocol):
    """Outcome of one message, for the algorithm that sent it. What is not asked for is not computed.

    Long messages may cross only when mean or direction is asked for. So ask for these where the message was sent, not
    within a branch or a loop, which other workers may not take, and whose arrays are not those outside.

    mean: of what all workers sent, as they see it, equal on all; in f32 (f64 for f64 messages).
    direction: the same, for handing on: a `backend.SparseSum` or `backend.Pieces` may stand for a long array.
    own: what this worker sent, as the others see it.
    residual: message - own, bitwise so where C copies entries.
    states: of the compressors, for the next round.
    add_to(total, weight): total + weight own, saturated, in the place of total.
    read_by(compressors): (mean, own) as other compressors with the same payloads decode them.
    payloads: what was sent, of each group. again(message, payloads): the same, with both as they are computed anew.
    """

    @property
    def mean(self) -> tuple[Any, ...]: ...
    @property
    def direction(self) -> tuple[Any, ...]: ...
    @property
    def own(self) -> tuple[Any, ...]: ...
    @property
    def residual(self) -> tuple[Any, ...]: ...
    @property
    def states(self) -> tuple[State, ...]: ...
    def add_to(self, total: tuple[Any, ...], weight: Any) -> tuple[Any, ...]: ...
    def read_by(self, compressors: "tuple[Compressor, ...]") -> tuple[Any, Any]: ...
    @property
    def payloads(self) -> tuple[Any, ...]: ...
    def again(self, message: tuple[Any, ...], payloads: tuple[Any, ...]) -> "Sent": ...


class Round(NamedTuple):
    """The round that an algorithm is in, as far as it knows it.

    key: private to this worker and round; in `init`, shared by all workers. groups: of the tree (`groups.Group`).
    compressors: one for each of them. index i32[], size int: number of this worker, and how many there are; in `init`
    0 and 1.
    """

    key: Array
    groups: tuple[Any, ...]
    compressors: "tuple[Compressor, ...]"
    index: Array | int = 0
    size: int = 1

    def start(self, like: tuple[Any, ...], compressors: "tuple[Compressor, ...] | None" = None) -> tuple[State, ...]:
        """The first states of the compressors, for messages of these shapes."""
        keys = keys_of(self.key, self.groups)
        pairs = zip(self.compressors if compressors is None else compressors, keys, like, strict=True)
        return tuple(compressor.init(key, x) for compressor, key, x in pairs)

    def mean(self, message: tuple[Any, ...], states: tuple[State, ...], key: Array | None = None) -> Mean:
        """The request for the mean of a message. Give other keys, split from `key`, to several in one round."""
        route_key, own = jax.random.split(self.key if key is None else key)
        return Mean(route_key, keys_of(own, self.groups), self.compressors, message, states, self.groups)


def keys_of(key: Array, groups: tuple[Any, ...]) -> tuple[Array, ...]:
    """A key for each group: fold_in(key, its number); for a group without a number, the small leaves or an only group,
    the key itself."""
    numbers = [group.number or 0 for group in groups]
    if max(numbers, default=0) < FEW:
        words = [jax.random.key_data(jax.random.fold_in(key, number)) for number in numbers]
    else:  # as one array, which is cut
        folded = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(max(numbers) + 1))
        every = jax.random.key_data(folded)
        pieces = cut_apart(every.reshape(-1), [every.shape[1]] * every.shape[0])
        words = [pieces[number] for number in numbers]
    # Or kernels of groups of one shape, which read one array of keys, would become one. As words, since
    # jax_debug_key_reuse takes a key behind a barrier for a used one.
    each = materialized(words)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        each = [jax.random.wrap_key_data(own, impl=jax.random.key_impl(key)) for own in each]
    return tuple(key if group.number is None else own for group, own in zip(groups, each, strict=True))


NO_REQUEST = (
    "an algorithm yields requests, one or a list: yield here.mean(...), yield Sum(...), yield Cond(...), not by "
    "yield from; got {}"
)


def answered(steps: Any, answer: Callable[[list[Any]], list[Any]]) -> Any:
    """Runs an algorithm to its end: what a generator asks for is answered, and what it returns is returned.

    Args:
        steps: generator, which yields a request, or a list of requests to be answered together; or what is no
            generator, and is returned as it is.
        answer: requests -> their answers.
    """
    if not isinstance(steps, Generator):
        return steps
    reply: Any = None
    while True:
        try:
            asked = steps.send(reply)
        except StopIteration as end:
            return end.value
        several = asked if isinstance(asked, list) else [asked]
        if wrong := [type(request).__name__ for request in several if not isinstance(request, Mean | Sum | Cond)]:
            raise TypeError(NO_REQUEST.format(wrong[0]))
        replies = answer(several)
        reply = replies if isinstance(asked, list) else replies[0]


def stepped(steps: Any) -> Generator[Any, Any, Any]:
    """For `yield from` in an algorithm around another: what the update of that returns, generator or not."""
    return (yield from steps) if isinstance(steps, Generator) else steps


# What a field of an algorithm's state is: so where it is, and what becomes of it when the number of workers changes.
ROLES = {
    "memory": "local: what was not sent yet; its sum over the workers is kept",
    "narrow memory": "the same as `jaxcomp.algorithms.narrow.Narrow`: in bfloat16, or in 8 bits with scales",
    "shift": "`State`, local h_i, shared their mean h: in step with the means as they were sent; workers start from h",
    "average": "local: a running average of this worker's gradients; other workers start from the mean of all",
    "momentum": "shared: an average of directions; kept",
    "iterate": "shared: points of the method; kept",
    "coin": "shared: keys and counts of shared randomness; kept",
    "gradient": "local: of this worker alone, and so of no use to another one; refused",
    "compressor": "a `State` for each group: of the compressor; new workers take over that of worker i mod n",
}
LOCAL, SHARED = ("memory", "narrow memory", "average", "gradient"), ("momentum", "iterate", "coin")


class Algorithm(NamedTuple):
    """A distributed method: what one worker does in a round.

    init(round, like) -> state
        round: a `Round` whose key all workers share. like: shapes of the arrays that stand for a tree; for a method
        that has a `point`, the arrays themselves. state: one NamedTuple, whose fields `roles` names.
    update(round, grads, state) -> (direction, state)
        A generator, which yields requests (`Round.mean`, `Sum`, `Cond`) and is sent their answers; or a function, of a
        method that asks for nothing. grads: arrays; or, where the method has a `point`, a function from points to this
        worker's gradient there. direction: arrays, equal on all workers; where the method has a `point`, anything.
    roles: field of the state -> one of ROLES, or the roles of an algorithm inside; or {i: roles of part i}, for a field
        that is a tuple with the states of `parts`.
    compressor: of each large group, with the layout that it serves best; None for a method that only sums.
    layout: how trees are laid out; None: as the compressor says.
    point(state) -> the iterate of a method that chooses where gradients are taken (run it with `jc.methods.rounds`),
        from its shared fields; None for one whose gradients are taken at the caller's parameters (run it with
        `jc.compressed_mean`).
    parts: algorithms of parts of the tree, in the order of `layout.parts` (`by_path`); () for one that has it whole.
    pieces: gradients may come as `backend.Pieces` where a group has several leaves, and are not joined before; for each
        of `parts`, where there are any.
    rereads: whether it calls `Sent.read_by`, and so needs the payloads of all workers.
    made: by which factory and with which options (`jaxcomp.factories.factory`).
    """

    init: Callable[[Round, Any], Any]
    update: Callable[[Round, Any, Any], Any]
    roles: Mapping[Any, Any]
    compressor: Compressor | None = None
    layout: Any = None
    point: Callable[[Tree], Tree] | None = None
    parts: tuple["Algorithm", ...] = ()
    pieces: bool | tuple[bool, ...] = False
    rereads: bool = False
    made: Any = None

    def __repr__(self) -> str:
        made = self.made.name if self.made else getattr(self.update, "__qualname__", "").partition(".")[0]
        return f"<algorithm {made}{f' of {self.compressor.spec.name}' if self.compressor else ''}>"

    def __hash__(self) -> int:
        return hash((self.init, self.update, *self[3:]))  # roles may be a dict


def has_role(roles: Any, role: str) -> bool:
    """Whether a field has this role, also in an algorithm inside.

    >>> has_role({"rounds": "coin", "algorithm": {"memory": "memory"}}, "memory")
    True
    """
    values = roles.values() if isinstance(roles, Mapping) else [roles]
    return any(has_role(value, role) if isinstance(value, Mapping) else value == role for value in values)


def sides(state: Any, roles: Any) -> State:
    """The state of an algorithm as it is kept: its local side, and its shared one, with () for what is on the other.

    >>> class Method(NamedTuple):
    ...     memory: int
    ...     rounds: int
    >>> sides(Method(1, 2), {"memory": "memory", "rounds": "coin"})
    State(local=Method(memory=1, rounds=()), shared=Method(memory=(), rounds=2))
    """
    if state == ():  # of a part of the tree that has no leaf
        return State()
    if roles and all(isinstance(name, int) for name in roles):
        return _paired(sides(part, roles[i]) for i, part in enumerate(state))
    if not hasattr(state, "_fields"):
        raise ValueError(
            f"the state of an algorithm must be a NamedTuple; got {type(state).__name__}. Its update returns "
            "(direction, state), in this order"
        )
    unknown = [name for name in state._fields if name not in roles]
    if unknown:
        raise ValueError(
            f"{type(state).__name__}.{unknown[0]} has no role, so nobody knows where it is, nor what becomes of it "
            "with other workers; name it in the roles of the algorithm (jaxcomp.base.ROLES)"
        )
    if nowhere := [name for name in roles if name not in state._fields]:
        raise ValueError(f"the roles name {nowhere[0]!r}, of which {type(state).__name__} has no field")
    local, shared = {}, {}
    for name, value in state._asdict().items():
        role = roles[name]
        if isinstance(role, Mapping):
            pair = sides(value, role)
        elif role in ("shift", "compressor"):
            if not all(isinstance(one, State) for one in ([value] if role == "shift" else value)):
                raise ValueError(f"{name} has the role {role!r}, and is no `State` with a local and a shared side")
            pair = value if role == "shift" else _paired(value)
        elif role in ROLES:
            pair = (value, ()) if role in LOCAL else ((), value)
        else:
            raise ValueError(f"{name} has the unknown role {role!r}; it must be one of {', '.join(ROLES)}")
        local[name], shared[name] = pair
    return State(type(state)(**local), type(state)(**shared))


def _paired(states: Any) -> State:
    states = tuple(states)
    return State(tuple(state.local for state in states), tuple(state.shared for state in states))


def whole(kept: State, roles: Any) -> Any:
    """Inverse of `sides`."""
    local, shared = kept
    if local == () and shared == ():
        return ()
    if roles and all(isinstance(name, int) for name in roles):
        return tuple(whole(State(*pair), roles[i]) for i, pair in enumerate(zip(local, shared, strict=True)))
    fields = {}
    for name in local._fields:
        pair, role = State(getattr(local, name), getattr(shared, name)), roles[name]
        if isinstance(role, Mapping):
            fields[name] = whole(pair, role)
        elif role == "compressor":
            fields[name] = tuple(State(*each) for each in zip(*pair, strict=True))
        else:
            fields[name] = pair if role == "shift" else pair.local if role in LOCAL else pair.shared
    return type(local)(**fields)


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


def require_algorithm(name: str, value: Any) -> Algorithm:
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


def check_pair(name: str, made: Any, before: State) -> None:
    """Raises TypeError unless `compress` of the compressor `name` made a payload and a local state.

    before: state that it was given.
    """
    fields = hasattr(made, "_fields")  # of a payload, which has two as well
    if not isinstance(made, tuple | list) or len(made) != 2 or (fields and is_array(made[0])):
        several = isinstance(made, tuple | list) and not fields
        got = f"a {type(made).__name__}{f' of {len(made)}' if several else ''}"
        raise TypeError(
            f"{name}: compress returns (payload, local), with the local state afterwards; got {got}. A compressor "
            "without a state ends with: return payload, state.local"
        )
    if isinstance(made[1], State) and not isinstance(before.local, State):
        raise TypeError(
            f"{name}: compress returns (payload, local); got the whole state for local. What is shared is the same "
            "afterwards (advance makes that of the next round): return payload, state.local"
        )


# ------------------------------------------------------------------------------------------------
# What every compressor can do, whether or not it brings its own fast form


def accumulate(compressor: Compressor, total: Tree, payloads: Tree, weights: Tree, shared: Tree) -> Tree:
    """total + sum_j weights_j decompress(payload_j), in the order of j, in memory O(d).

    Without weights there are no products, and the result is the same bit for bit wherever it is compiled. With weights
    a compiler may contract a product and the addition that follows into one rounding: the same up to the last place.
    GPUs add 32 messages and more of codes that are decoded entry by entry in an order of their compiler's.

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
    name, entrywise = compressor.spec.name, compressor.spec.entrywise
    return add_each(compressor.decompress, pick, total, payloads, weights, entrywise, name)


def entries(compressor: Compressor, payloads: Tree, weights: Tree, shared: Tree, like: Tree) -> Tree:
    """Sum that `accumulate` adds to zeros like `like`; vectors may be `backend.SparseSum`."""
    if compressor.entries is not None:
        return compressor.entries(payloads, weights, shared, like)
    return accumulate(compressor, like, payloads, weights, shared)


def residual(compressor: Compressor, message: Tree, payload: Tree, shared: Tree) -> Tree:
    """message - decompress(payload): what was not sent of a finite message. Bitwise so where entries are copied."""
    if compressor.accumulate is not None:
        return _added(compressor, message, payload, -1, shared)
    x_hat = compressor.decompress(payload, shared, like_of(message))
    return jax.tree.map(bounded, jax.tree.map(operator.sub, message, x_hat))


def add_own(compressor: Compressor, total: Tree, payload: Tree, weight: Any, shared: Tree) -> Tree:
    """total + weight decompress(payload), saturated, for the payload of one worker, whose plan is in `shared`."""
    return jax.tree.map(bounded, _added(compressor, total, payload, weight, shared))


def _added(compressor: Compressor, total: Tree, payload: Tree, weight: Any, shared: Tree) -> Tree:
    stacked = jax.tree.map(operator.itemgetter(None), payload)
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


class Left(NamedTuple):
    """overflow: i32[], chosen entries of the last round without a place in the capacity. searches: i32[], vectors whose
    threshold no estimate found, so that it was searched for.
    """

    overflow: Array
    searches: Array


def left(compressor: Compressor, local: Tree) -> Left:
    """Asks a compressor for its counts of the last round."""
    zero = jnp.zeros((), jnp.int32)
    found = zero if compressor.overflow is None else compressor.overflow(local)
    return found if isinstance(found, Left) else Left(found, zero)


def left_of(rows: Left) -> Left:
    """The sums over the rows of a stack."""
    return Left(*(jnp.sum(x, dtype=jnp.int32) for x in rows))


def omega_of(compressors: tuple[Compressor, ...], like: tuple[Any, ...]) -> float:
    """The largest omega of the groups of a tree; 0 without any, or where it is not known."""
    known = [(c.spec.omega, x) for c, x in zip(compressors, like, strict=True)]
    return max((omega(_size(x)) for omega, x in known if omega is not None), default=0.0)


def alpha_of(compressors: tuple[Compressor, ...], like: tuple[Any, ...]) -> float:
    """The smallest alpha of the groups of a tree; 1 without any, 0 where it is not known."""
    known = [(c.spec.alpha, x) for c, x in zip(compressors, like, strict=True)]
    return min((0.0 if alpha is None else alpha(_size(x)) for alpha, x in known), default=1.0)


def _size(x: Any) -> int:
    """Entries of an array, or of a row of a stack."""
    return math.prod(x.shape[1:] if len(x.shape) > 1 else x.shape)


# ------------------------------------------------------------------------------------------------
# Compressors that are written for one flat vector


def on_vectors(
    *,
    compress: Callable,
    spec: Spec,
    decompress: Callable | None = None,
    init: Callable | None = None,
    accumulate: Callable[..., Array] | None = None,
    advance: Callable | None = None,
    lengths: Callable | None = None,
    for_worker: Callable | None = None,
    overflow: Callable | None = None,
    entries: Callable[..., tuple[Array, Array]] | None = None,
    ascending: bool = True,
    by_row_from: int = 0,
) -> Compressor:
    """A `Compressor` of arrays of any shape from functions of vectors (see `base.Compressor`).

    entries: (payload, shared, like) -> indices i32[k], behind them padding of `like.size`, and values [k]; takes the
        place of `accumulate`, and of `decompress` where none is given (which an index that stands twice needs). shared:
        of one worker or of all. ascending: whether the indices are.
    by_row_from: under vmap vectors with at least so many entries are compressed one after the other, where the
        compressor selects (`row_by_row`).
    """

    def flat_like(x: Any) -> jax.ShapeDtypeStruct:
        is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        like = x if is_float and x.size <= MOST else _checked(spec.name, x)
        return jax.ShapeDtypeStruct((like.size,), like.dtype)

    def init_(shared_key, like):
        like = flat_like(like)
        return State() if init is None else init(shared_key, like)

    by_row = row_by_row(compress) if spec.selects else compress
    decode: Any = decompress
    add_all, sparse_sum = accumulate, None
    if entries is not None:
        once, add_all, sparse_sum = of_entries(entries, ascending)
        decode = decompress or once

    def compress_(key, x, state):
        each = by_row if flat_like(x).size >= by_row_from else compress
        return each(key, jnp.reshape(x, (-1,)), state)

    def decompress_(payload, shared, like):
        if isinstance(shared, State):
            raise TypeError(
                f"{spec.name}: decompress needs what is shared of a state, state.shared; got the whole state"
            )
        payload = jax.tree.map(jnp.asarray, payload)  # of NumPy, once decoded from bytes
        flat = flat_like(like)
        x_hat = decode(payload, shared, flat)
        check_decoded(spec.name, x_hat, flat)
        return x_hat.reshape(like.shape)

    def accumulate_(total, payloads, weights, shared):
        flat = flat_like(total)
        flat = flat if isinstance(total, jax.ShapeDtypeStruct) else jnp.reshape(total, flat.shape)
        return add_all(flat, payloads, weights, shared).reshape(total.shape)  # pyright: ignore[reportOptionalCall]

    of_flat = None if lengths is None else lambda like: lengths(flat_like(like))
    add = None if add_all is None else accumulate_
    return Compressor(init_, compress_, decompress_, spec, add, advance, of_flat, for_worker, overflow, sparse_sum)


def _checked(name: str, x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what a compressor of one array may take.

    Raises:
        ValueError: not one array, or not of real floating point.
        TooLong: more entries than indices of 32 bits can number.
    """
    if not is_array(x):
        raise ValueError(
            f"{name} acts on one array; got a {type(x).__name__}. "
            "Wrap it: per_leaf(...) compresses each leaf, flat(...) all leaves as one vector."
        )
    (like,) = jax.tree.leaves(like_of(x))
    if like.size > MOST:
        raise TooLong(
            f"{name}: an array of shape {like.shape} has {like.size} entries, and at most {MOST} can be "
            "numbered with 32 bits. Wrap it: flat(...) cuts long arrays into rows."
        )
    return like


def row_by_row(function: Callable) -> Callable:
    """The same function; under vmap it does one row after another, except in programs for GPUs.

    A selection searches, and knows when it may stop. Mapped, its loops go on for all rows until the last is done, and
    its conditionals compute both sides for each. That costs GPUs less than the kernels of a search for each row.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        del size
        each = form(mapped, on_gpu=function)
        leaves, tree = jax.tree.flatten(args)
        is_row = jax.tree.leaves(batched)

        def one(rows):
            rows = iter(rows)
            return each(
                *jax.tree.unflatten(tree, [next(rows) if b else a for a, b in zip(leaves, is_row, strict=True)])
            )

        out = for_each_row(one, [a for a, b in zip(leaves, is_row, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def count_of(name: str, ratio: float | None, k: int | None) -> Callable[[int], int]:
    """Checks that exactly one of ratio and k is given and returns d -> number of entries to keep.

    The count is max(1, floor(ratio d)), never more than d.

    Raises:
        ValueError: both or neither given, ratio outside (0, 1] or an integer, k below 1 or not an integer.
    """
    if (ratio is None) == (k is None):
        raise ValueError(f"{name}: give exactly one of ratio and k; got ratio={ratio}, k={k}")
    if k is not None:
        if not is_whole(k):
            raise ValueError(f"{name}: k must be an integer of at least 1; got {k}")
        return lambda d: min(int(k), d)
    if isinstance(ratio, numbers.Integral) and ratio >= 1:
        raise ValueError(
            f"{name}: ratio must be in (0, 1], a share of the entries; got the integer {ratio}. Say k={ratio} to keep "
            "so many (top_k, rand_k), or ratio=1.0 for all of them"
        )
    if not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1]; got {ratio}")
    return lambda d: min(max(1, int(ratio * d)), d)
