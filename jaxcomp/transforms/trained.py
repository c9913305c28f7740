"""Which leaves of a tree of parameters are trained, and how what is not goes back into the model."""

from typing import Any

import jax

from jaxcomp.transforms.worker_gradients import Trained

__all__ = ["check_all_trained", "like_params", "trained_of", "write_back"]


def trained_of(params: Any, wrt: Any) -> Trained:
    """The leaves in nodes of a type; all where it is None."""
    if wrt is None:
        check_all_trained("value_and_grad", params, "Say wrt=nnx.Param")
        return Trained(None, ())
    nodes, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, wrt))
    del structure
    names: list[str | None] = []
    for path, node in nodes:
        inside = jax.tree_util.tree_leaves_with_path(node)
        name = lambda p, path=path: jax.tree_util.keystr((*path, *p), simple=True, separator="/")
        names += [name(p) if isinstance(node, wrt) else None for p, _ in inside]
    if not any(names):
        raise ValueError(
            f"value_and_grad: wrt must be a type of nodes of the parameters; there is no {wrt.__name__} in them"
        )
    return Trained(jax.tree.structure(params), tuple(names))


def check_all_trained(name: str, params: Any, cure: str) -> None:
    """Refuses Flax NNX variables other than parameters: what the loss changes in them would be lost."""
    is_variable = lambda node: hasattr(node, "set_value")
    nodes = [node for node in jax.tree.leaves(params, is_leaf=is_variable) if is_variable(node)]
    kinds = [type(node) for node in nodes if not any(kind.__name__ == "Param" for kind in type(node).__mro__)]
    if kinds:
        raise TypeError(
            f"{name}: the model has variables of type {kinds[0].__name__}, which are not trained and would never move. "
            f"{cure}"
        )


def like_params(params: Any, what: Trained, grads: Any) -> Any:
    """Gradients as a tree like the parameters, with None for what is not trained."""
    return what.join(grads, [None] * sum(name is None for name in what.names)) if what.names else grads


def write_back(params: Any, what: Trained, wrt: Any, rest: list[Any], new: list[Any]) -> None:
    """New values of variables that are not trained, into the model that was given."""
    if not any(leaf is not None for leaf in new):
        return
    family = _family(wrt)
    values = iter(zip(rest, new, strict=True))
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, family)):
        if isinstance(node, wrt):
            continue
        for _ in jax.tree.leaves(node):
            old, value = next(values)
            if value is not None and value is not old:
                node.set_value(value)


def _family(wrt: Any) -> Any:
    """The most general type above a type of variables that can be written."""
    return [kind for kind in wrt.__mro__ if hasattr(kind, "set_value")][-1]
