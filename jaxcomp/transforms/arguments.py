"""The arguments of a loss: which leaves of the parameters are trained, which arguments are batch, what is no array.

loss(params, *batch, **named)
     params   trained | the rest: statistics, counters, keys | fixed: functions, say
     batch    cut along the leading axis, one part for each worker
     named    whole and equal on all workers | random keys | variables of Flax NNX | fixed: True, "sum", 3
"""

import contextlib
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxcomp.exchange.axes import axis_names

__all__ = [
    "Call",
    "Fixed",
    "Trained",
    "call_of",
    "check_all_trained",
    "check_cut",
    "check_wrt",
    "is_key",
    "like_params",
    "names_whole_arrays",
    "trained_of",
    "weight_of",
    "write_back",
]


class Fixed:
    """A value that is no array, as a part of what is static: equal by value where it has a hash, else by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fixed) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or (hash(self.value), self.value) == (hash(other.value), other.value)
        except TypeError:
            return False


def is_key(x: Any) -> bool:
    """Whether its dtype says that it holds random keys."""
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _is_variable(node: Any) -> bool:
    """Whether it is a variable of Flax NNX. The type is asked, since `nnx.Rngs` answers to any name."""
    return hasattr(type(node), "set_value")


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# ------------------------------------------------------------------------------------------------
# Parameters


class Trained(NamedTuple):
    """Choice of the leaves of a tree of parameters that are trained. Static.

    structure: of the tree. names: for each leaf its path if it is trained, `Fixed` if it is no array, else None; ()
    where all are trained. Where several paths lead to one variable, which is differentiated once, firsts and nodes are
    for each leaf, and for each variable or leaf that may become None, the number of the first of the same variable;
    else ().
    """

    structure: Any
    names: tuple[Any, ...]
    firsts: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    def join(self, trained: Any, rest: list[Any]) -> Any:
        """The tree of parameters with these leaves."""
        if not self.names:
            return trained
        others, leaves = iter(rest), []
        for i, name in enumerate(self.names):
            if not self.is_own(i):
                leaves.append(leaves[self.firsts[i]])
            elif isinstance(name, Fixed):
                leaves.append(name.value)
            else:
                leaves.append(next(others) if name is None else trained[name])
        tree = jax.tree.unflatten(self.structure, leaves)
        if not self.nodes:
            return tree
        # One object, as in the model: what the loss changes in a variable at one path is changed at all of them.
        nodes, outside = jax.tree.flatten(tree, is_leaf=_is_apart)
        return jax.tree.unflatten(outside, [nodes[first] for first in self.nodes])

    def part(self, params: Any) -> tuple[Any, list[Any]]:
        """The trained leaves, by their paths (or the tree itself where all are trained), and the other arrays."""
        if not self.names:
            return params, []
        pairs = [pair for i, pair in enumerate(zip(self.names, jax.tree.leaves(params), strict=True)) if self.is_own(i)]
        return {n: leaf for n, leaf in pairs if isinstance(n, str)}, [leaf for n, leaf in pairs if n is None]

    def is_own(self, i: int) -> bool:
        """Whether leaf i is none that an earlier path leads to, too."""
        return not self.firsts or self.firsts[i] == i


def check_wrt(name: str, wrt: Any) -> None:
    """Raises TypeError unless it says which leaves are trained."""
    each = wrt if isinstance(wrt, (tuple, list)) else [wrt]
    wrong = [one for one in each if not (one is None or one is ... or isinstance(one, bool) or callable(one))]
    if wrong or (isinstance(wrt, (tuple, list)) and None in each):
        raise TypeError(
            f"{name}: wrt must be a type of nodes of the parameters, say nnx.Param, a function of a leaf, say "
            f"eqx.is_inexact_array, a filter of Flax NNX, or a tuple of these; got {wrt!r}"
        )


def _chooses(wrt: Any) -> Callable[[Any, Any, Any], bool]:
    """(path, node, leaf) -> whether it is trained. A node is a variable, of a type that `wrt` names, or a leaf."""
    if isinstance(wrt, (tuple, list)):
        each = [_chooses(one) for one in wrt]
        return lambda *of: any(one(*of) for one in each)
    if isinstance(wrt, type):
        return lambda path, node, leaf: isinstance(node, wrt)
    if wrt is ... or isinstance(wrt, bool):
        return lambda *of: bool(wrt)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in inspect.signature(wrt).parameters.values() if p.kind in positional and p.default is p.empty]
    if len(given) == 1:
        return lambda path, node, leaf: bool(wrt(leaf))
    return lambda path, node, leaf: bool(wrt(tuple(map(_entry, path)), node))


def _entry(key: Any) -> Any:
    """A key of a path as NNX writes it: a name or a number."""
    return next((getattr(key, each) for each in ("name", "key", "idx") if hasattr(key, each)), key)


def trained_of(params: Any, wrt: Any, name: str = "value_and_grad", cure: str = "Say wrt=nnx.Param") -> Trained:
    """The leaves that `wrt` chooses; all where it is None.

    Flax NNX variables that stand at several paths (tied weights, a module that is used twice) are one, as in
    `nnx.grad`: each is differentiated once, with the sum of what its paths give, and is one variable in the gradient,
    too. Arguments of `jax.jit` are copies, one for each path, so there the model has to come by `nnx.jit`, or as a
    state of `nnx.split`.
    """
    if wrt is None:
        _check_kinds(name, params, cure)
        if not _repeated(params):
            return Trained(None, ())
    types = tuple(each for each in (wrt if isinstance(wrt, (tuple, list)) else [wrt]) if isinstance(each, type))
    is_node = lambda node: _is_variable(node) or isinstance(node, types)
    chooses = (lambda *of: True) if wrt is None else _chooses(wrt)
    names: list[Any] = []
    firsts: list[int] = []
    seen: dict[int, int] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_node):
        start = seen.setdefault(id(node), len(names)) if _is_variable(node) else len(names)
        own: list[Any] = []
        for inside, leaf in jax.tree_util.tree_leaves_with_path(node):
            is_value = _is_array(leaf) or (isinstance(leaf, numbers.Number) and not isinstance(leaf, bool))
            chosen = is_value and chooses(path, node, leaf)
            own.append(_path((*path, *inside)) if chosen else None if _is_array(leaf) else Fixed(leaf))
        firsts += range(start, start + len(own))
        names += own if start == len(names) else names[start : start + len(own)]
    if wrt is not None and not any(isinstance(each, str) for each in names):
        what = getattr(wrt, "__name__", repr(wrt))
        raise ValueError(f"{name}: wrt must choose some of the parameters; there is no {what} in them")
    what = Trained(jax.tree.structure(params), tuple(names))
    if firsts == list(range(len(names))):
        return what
    first_of: dict[Any, int] = {}
    nodes = [
        first_of.setdefault(id(node) if _is_variable(node) else -1 - i, i)
        for i, node in enumerate(jax.tree.leaves(params, is_leaf=_is_apart))
    ]
    return what._replace(firsts=tuple(firsts), nodes=tuple(nodes))


def check_all_trained(name: str, params: Any, cure: str) -> None:
    """Refuses Flax NNX variables other than parameters, and those at several paths, whose gradient would be split."""
    _check_kinds(name, params, cure)
    repeated = _repeated(params)
    if repeated:
        first, other = repeated[0]
        raise TypeError(
            f"{name}: {first} and {other} are one variable of the model, and its gradient would be split between them. "
            f"{cure}, or differentiate a state: graph, state = nnx.split(model), with nnx.merge(graph, state) in the "
            "loss"
        )


def _is_apart(node: Any) -> bool:
    """Whether it counts among `Trained.nodes`."""
    return node is None or _is_variable(node)


def _check_kinds(name: str, params: Any, cure: str) -> None:
    """Refuses Flax NNX variables other than parameters: what the loss changes in them would be lost; and no arrays."""
    leaves = jax.tree.leaves(params, is_leaf=_is_variable)
    nodes = [node for node in leaves if _is_variable(node)]
    kinds = [type(node) for node in nodes if not any(kind.__name__ == "Param" for kind in type(node).__mro__)]
    if kinds:
        raise TypeError(
            f"{name}: the model has variables of type {kinds[0].__name__}, which are not trained and would never move. "
            f"{cure}"
        )
    others = [x for x in leaves if not (_is_variable(x) or _is_array(x) or isinstance(x, numbers.Number))]
    if others:
        raise TypeError(
            f"{name}: parameters must be arrays; got {others[0]!r}. Of a model with other leaves say which are "
            "trained, wrt=eqx.is_inexact_array"
        )


def _repeated(params: Any) -> list[tuple[str, str]]:
    """Paths of variables that stand at an earlier path, too, each with that path before it."""
    found, seen = [], {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable):
        if _is_variable(node):
            name = _path(path)
            first = seen.setdefault(id(node), name)
            found += [(first, name)] if first != name else []
    return found


def like_params(what: Trained, grads: Any) -> Any:
    """Gradients as a tree like the parameters, with None for what is not trained."""
    if not what.names:
        return grads
    bare = what._replace(names=tuple(None if isinstance(name, Fixed) else name for name in what.names))
    return bare.join(grads, [None] * len(what.names))


def write_back(tree: Any, rest: Sequence[bool], old: list[Any], new: list[Any]) -> None:
    """New values of variables that are not trained, into the model that was given.

    rest: whether each leaf of it is one of `old`. old, new: values before and after; None for what did not change.
    """
    if not any(leaf is not None for leaf in new):
        return
    values, places = iter(zip(old, new, strict=True)), iter(rest)
    for node in jax.tree.leaves(tree, is_leaf=_is_variable):
        for _ in jax.tree.leaves(node):
            if next(places):
                before, value = next(values)
                if value is not None and value is not before and _is_variable(node):
                    node.set_value(value)


# ------------------------------------------------------------------------------------------------
# Batch and keywords


class Call(NamedTuple):
    """How the arguments of a loss are put together again. Static.

    structure: of (batch, named). places: where each leaf is: "cut" (of the batch), "whole" (equal on all workers),
    "key" (among these, another one for each worker), "state" (of variables of Flax NNX), or `Fixed`.
    """

    structure: Any
    places: tuple[Any, ...]

    def join(self, cut: list[Any], whole: list[Any], state: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(batch, named) with these arrays."""
        of = {"cut": iter(cut), "whole": iter(whole), "state": iter(state)}
        of["key"] = of["whole"]
        leaves = [place.value if isinstance(place, Fixed) else next(of[place]) for place in self.places]
        return jax.tree.unflatten(self.structure, leaves)

    def pick(self, arguments: Any, *places: str) -> list[Any]:
        """Leaves of (batch, named) at some of the places."""
        pairs = zip(self.places, jax.tree.leaves(arguments), strict=True)
        return [leaf for place, leaf in pairs if not isinstance(place, Fixed) and place in places]

    @property
    def are_keys(self) -> list[bool]:
        """Whether each of the whole arrays is split."""
        return [place == "key" for place in self.places if place in ("whole", "key")]

    @property
    def num_states(self) -> int:
        """Number of arrays of variables of Flax NNX."""
        return self.places.count("state")


def call_of(
    name: str,
    chosen: tuple[Any, ...] | None,
    keys: tuple[str, ...] | None,
    batch: tuple[Any, ...],
    named: Mapping[str, Any],
) -> tuple[Call, list[Any], list[Any], list[Any]]:
    """Sorts the arguments of a loss: how they are put together again, and the arrays that are cut, whole, and states.

    chosen: numbers of positional and names of keyword arguments that are cut; None: all positional ones. keys: names of
    keyword arguments with random keys; None: by their dtype.
    """
    for one in chosen or ():
        if not (one in named if isinstance(one, str) else 0 <= one < len(batch)):
            raise TypeError(f"{name}: batch names the argument {one!r}, which was not given")
    for one in keys or ():
        if one not in named:
            raise TypeError(f"{name}: keys names the keyword argument {one!r}, which was not given")
    arguments = (batch, dict(named))
    variables = {
        id(leaf)
        for node in jax.tree.leaves(arguments, is_leaf=_is_variable)
        if _is_variable(node)
        for leaf in jax.tree.leaves(node)
    }

    def place(path: Any, leaf: Any) -> Any:
        which = _entry(path[1])
        if not _is_array(leaf):
            return Fixed(leaf)
        if id(leaf) in variables:
            return "state"
        if which in chosen if chosen is not None else not isinstance(which, str):
            return "cut"
        if not isinstance(which, str):
            return "whole"
        if keys is not None:
            return "key" if which in keys else "whole"
        if leaf.dtype == np.uint32 and leaf.shape in ((2,), (4,)):
            raise TypeError(
                f"{name}: the keyword argument {which!r} looks like a random key, with which all workers would draw "
                f"the same. keys={which!r} gives each worker its own; keys=() says that it is no key, or to be the same"
            )
        return "key" if is_key(leaf) else "whole"

    leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
    call = Call(structure, tuple(place(path, leaf) for path, leaf in leaves))
    pick = lambda *places: call.pick(arguments, *places)
    return call, pick("cut"), pick("whole", "key"), pick("state")


def weight_of(weight: Callable[..., Any], batch: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """weight(*batch, **named), of what the loss is called with beside the parameters.

    Raises:
        TypeError: it does not take all of that.
    """
    try:
        inspect.signature(weight).bind(*batch, **named)
    except TypeError as error:
        raise TypeError(
            f"value_and_grad: weight is called with all that the loss is, but the parameters: {error}. Let it take the "
            "rest, weight=lambda *batch, **named: ..."
        ) from None
    except ValueError:  # it does not say what it takes
        pass
    return weight(*batch, **named)


BESIDE = (
    "The loss was called with {} of the {} examples of the batch, and with all of the argument {!r}, which is whole on "
    "every worker. If it goes with the examples, say so: {}; in a shard_map or vmap of your own cut it as the batch is"
)
ONE = (
    "value_and_grad: the loss is called with one of the {} examples of the batch, and with all of the argument {!r}, "
    "which has as many entries: one will be spread over the other. If the argument goes with the examples, say {}; if "
    "it does not, batch={}"
)


@contextlib.contextmanager
def names_whole_arrays(chosen: Any, batch: Sequence[Any], named: Mapping[str, Any], pieces: int) -> Iterator[None]:
    """A call of the loss: adds a note to an error on shapes, where an array given whole is as long as the batch was.

    Warns of such an array beside a single example, with which shapes fit, unless it is said what is batch.

    chosen: as for `call_of`. pieces: into how many the batch is cut, over workers and micro-batches.
    """
    given = {**dict(enumerate(batch)), **named}
    cut = tuple(range(len(batch))) if chosen is None else tuple(chosen)
    arrays = [x for name in cut for x in jax.tree.leaves(given[name]) if isinstance(x, jax.Array)]
    lengths = {x.shape[0] if x.ndim else 0 for x in arrays}
    length = lengths.pop() if len(lengths) == 1 and pieces > 1 else 0
    as_long = lambda x: isinstance(x, jax.Array) and not is_key(x) and x.shape[:1] == (length * pieces,)
    whole = [name for name, x in given.items() if name not in cut and length and as_long(x)]
    cure = f"batch={(*cut, *whole)}"
    if whole and length == 1 and chosen is None:
        warnings.warn(ONE.format(pieces, whole[0], cure, cut), stacklevel=4)
    try:
        yield
    except (TypeError, ValueError) as error:
        if whole and any(word in str(error).lower() for word in ("shape", "dimension", "broadcast")):
            error.add_note(BESIDE.format(length, length * pieces, whole[0], cure))
        raise


def check_cut(
    name: str, chosen: Any, batch: Any, named: Mapping[str, Any], call: Call, mesh: Any, workers: tuple[str, ...]
) -> None:
    """Raises ValueError unless it is clear which arguments are batch, and each can be cut evenly."""
    count = int(np.prod([mesh.shape[axis] for axis in workers]))
    leaves = jax.tree_util.tree_leaves_with_path((batch, dict(named)))
    label = lambda path: f"{'batch' if _entry(path[0]) == 0 else 'named'}{jax.tree_util.keystr(path[1:])}"
    cut = []
    for place, (path, leaf) in zip(call.places, leaves, strict=True):
        which = _entry(path[1])
        is_batch = which in chosen if chosen is not None else not isinstance(which, str)
        shape = np.shape(leaf)
        if is_batch and place != "state" and (not shape or shape[0] % count):
            raise ValueError(
                f"{name}: {label(path)} must have a leading axis that {count} workers can share "
                f"evenly; got shape {shape}. What is equal on all workers is given by keyword."
            )
        if place == "cut":
            cut.append((label(path), leaf))
    if chosen is not None or not cut:
        drawn = "key" in call.places or any(is_key(x) for x in call.pick((batch, dict(named)), "state"))
        if not cut and count > 1 and chosen is None and not drawn:
            raise ValueError(
                f"{name}: no argument of the loss is cut, so each of the {count} workers would compute the same. Give "
                "the batch by position, or name the keyword arguments that are batch: batch=('tokens', 'mask'); "
                "batch=() if there is none"
            )
        return
    cure = (
        "What is equal on all workers is given by keyword or in a closure; or say which arguments are batch, "
        "batch=(0, 1) for the first two"
    )
    lengths: dict[int, str] = {}  # the first argument of each
    for path, leaf in cut:
        lengths.setdefault(np.shape(leaf)[0], path)
    if len(lengths) > 1:
        (one, first), (other, second), *_ = lengths.items()
        raise ValueError(
            f"{name}: positional arguments are batch, and are cut along their leading axis. It is {one} in {first} and "
            f"{other} in {second}, so one of them is no batch. {cure}"
        )
    known = [(path, _is_cut(leaf, mesh, workers)) for path, leaf in cut]
    whole, parts = ([path for path, is_cut in known if is_cut is wanted] for wanted in (False, True))
    if whole and parts:
        raise ValueError(
            f"{name}: {whole[0]} lies whole on every worker, and {parts[0]} is cut over {workers}; positional "
            f"arguments are batch, and are cut. {cure}"
        )


def _is_cut(x: Any, mesh: Any, workers: tuple[str, ...]) -> bool | None:
    """Whether an array is cut over the workers along its leading axis; None where that is not known."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        sharding = x.sharding
        if not (isinstance(sharding, NamedSharding) and set(workers) <= set(sharding.mesh.shape)):
            return None
    else:
        sharding = getattr(jax.typeof(x), "sharding", None) if isinstance(x, Tracer) else None
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if sharding is None or any(kinds[axis] != jax.sharding.AxisType.Explicit for axis in workers):
            return None
    spec = sharding.spec
    return bool(len(spec)) and bool(set(axis_names(spec[0])) & set(workers))
