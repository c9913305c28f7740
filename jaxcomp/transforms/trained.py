"""Choice of the leaves of a tree of parameters that are trained; how what is not goes back into the model."""

from typing import Any, NamedTuple

import jax

from jaxcomp.transforms.worker_gradients import Trained

__all__ = ["check_all_trained", "like_params", "trained_of", "write_back"]


class Structure(NamedTuple):
    """tree: of the parameters. leaves, nodes: for each leaf, and for each variable or what is none, the number of the
    first one of the same variable."""

    tree: Any
    leaves: tuple[int, ...]
    nodes: tuple[int, ...]


class Tied(Trained):
    """`Trained` of a model in which several paths lead to one variable, which is differentiated once.

    structure: a `Structure`. names: of each leaf that of the first one of its variable.
    """

    def join(self, trained: Any, rest: list[Any]) -> Any:
        others, leaves = iter(rest), []
        for first, name in zip(self.structure.leaves, self.names, strict=True):
            if first < len(leaves):
                leaves.append(leaves[first])
            else:
                leaves.append(next(others) if name is None else trained[name])
        # One object, as in the model: what the loss changes in a variable at one path is changed at all of them.
        nodes, outside = jax.tree.flatten(jax.tree.unflatten(self.structure.tree, leaves), is_leaf=_is_apart)
        return jax.tree.unflatten(outside, [nodes[first] for first in self.structure.nodes])

    def part(self, params: Any) -> tuple[Any, list[Any]]:
        leaves = jax.tree.leaves(params)
        firsts = [i for i, first in enumerate(self.structure.leaves) if first == i]
        trained = {name: leaves[i] for i in firsts if (name := self.names[i]) is not None}
        return trained, [leaves[i] for i in firsts if self.names[i] is None]


def trained_of(params: Any, wrt: Any) -> Trained:
    """The leaves in nodes of a type; all where it is None.

    Flax NNX variables that stand at several paths (tied weights, a module that is used twice) are one, as in
    `nnx.grad`: each is differentiated once, with the sum of what its paths give, and is one variable in the gradient,
    too. Arguments of `jax.jit` are copies, one for each path, so there the model has to come by `nnx.jit`, or as a
    state of `nnx.split`.
    """
    if wrt is None:
        _check_kinds("value_and_grad", params, "Say wrt=nnx.Param")
        if not _repeated(params):
            return Trained(None, ())
    is_node = lambda node: _is_variable(node) or (wrt is not None and isinstance(node, wrt))
    names: list[str | None] = []
    firsts: list[int] = []
    seen: dict[int, int] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_node):
        inside = jax.tree_util.tree_leaves_with_path(node)
        name = lambda p, path=path: jax.tree_util.keystr((*path, *p), simple=True, separator="/")
        start = seen.setdefault(id(node), len(names)) if _is_variable(node) else len(names)
        own = [name(p) if wrt is None or isinstance(node, wrt) else None for p, _ in inside]
        firsts += range(start, start + len(own))
        names += own if start == len(names) else names[start : start + len(own)]
    if wrt is not None and not any(names):
        raise ValueError(
            f"value_and_grad: wrt must be a type of nodes of the parameters; there is no {wrt.__name__} in them"
        )
    if firsts == list(range(len(names))):
        return Trained(jax.tree.structure(params), tuple(names))
    first_of: dict[Any, int] = {}
    nodes = [
        first_of.setdefault(id(node) if _is_variable(node) else -1 - i, i)
        for i, node in enumerate(jax.tree.leaves(params, is_leaf=_is_apart))
    ]
    return Tied(Structure(jax.tree.structure(params), tuple(firsts), tuple(nodes)), tuple(names))


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


def _is_variable(node: Any) -> bool:
    return hasattr(node, "set_value")


def _is_apart(node: Any) -> bool:
    """Whether it counts among the nodes of a `Structure`: a leaf may become None."""
    return node is None or _is_variable(node)


def _check_kinds(name: str, params: Any, cure: str) -> None:
    """Refuses Flax NNX variables other than parameters: what the loss changes in them would be lost."""
    nodes = [node for node in jax.tree.leaves(params, is_leaf=_is_variable) if _is_variable(node)]
    kinds = [type(node) for node in nodes if not any(kind.__name__ == "Param" for kind in type(node).__mro__)]
    if kinds:
        raise TypeError(
            f"{name}: the model has variables of type {kinds[0].__name__}, which are not trained and would never move. "
            f"{cure}"
        )


def _repeated(params: Any) -> list[tuple[str, str]]:
    """Paths of variables that stand at an earlier path, too, each with that path before it."""
    found, seen = [], {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable):
        if _is_variable(node):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            first = seen.setdefault(id(node), name)
            found += [(first, name)] if first != name else []
    return found


def like_params(params: Any, what: Trained, grads: Any) -> Any:
    """Gradients as a tree like the parameters, with None for what is not trained."""
    return what.join(grads, [None] * len(what.part(params)[1])) if what.names else grads


def write_back(params: Any, what: Trained, wrt: Any, rest: list[Any], new: list[Any]) -> None:
    """New values of variables that are not trained, into the model that was given."""
    if not any(leaf is not None for leaf in new):
        return
    family = _family(wrt)
    values = iter(zip(rest, new, strict=True))
    seen: set[int] = set()
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, family)):
        if isinstance(node, wrt) or id(node) in seen:
            continue
        if isinstance(node, family):
            seen.add(id(node))
        for _ in jax.tree.leaves(node):
            old, value = next(values)
            if value is not None and value is not old:
                node.set_value(value)


def _family(wrt: Any) -> Any:
    """The most general type above a type of variables that can be written."""
    return [kind for kind in wrt.__mro__ if hasattr(kind, "set_value")][-1]
