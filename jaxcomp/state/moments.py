"""Moments of an inner optimizer that workers share: their places in its state, and what a worker takes of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey

__all__ = [
    "SQUARES",
    "LocalMomentsState",
    "Moment",
    "Places",
    "moment_of",
    "moment_places",
    "own_where_zero",
    "replaced_by",
]

Array = jax.Array
SQUARES = ("e_g", "e_x", "nu", "nu_max", "sum_of_squares", "v")  # of optax: means or sums of squares, never negative
Places = tuple[int | None, ...]  # for each leaf of the parameters: the number of that leaf of the state, None for none


class Moment(NamedTuple):
    """point: like the parameters, in f32 (f64 for f64 moments), equal on all workers; `optax.MaskedNode` where the
    inner optimizer has no such moment. mean: of its exchange."""

    point: Any
    mean: Any


class LocalMomentsState(NamedTuple):
    """Memory of `local_updates` with moments: that of `LocalUpdatesState`, and name -> `Moment`."""

    count: Array
    point: Any
    outer: tuple[Any, ...]
    groups: Any
    means: tuple[Any, ...]
    own: Any
    moments: dict[str, Moment]


def moment_places(name: str, inner: Any, params: Any, wanted: Mapping[str, Any]) -> dict[str, Places]:
    """Finds the leaves of these fields in the state of an optimizer.

    Args:
        name: of the outer form, for errors.
        inner: the state, or its shapes.
        params: likewise.
        wanted: the names are those of fields of a named tuple or dataclass, anywhere in the state.

    Raises:
        ValueError: there is no such field, it is not like the parameters, or there are two for one of these.

    >>> w = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    >>> moment_places("f", optax.adam(0.1).init(w), w, {"nu": 3})  # after the count and two leaves of mu
    {'nu': (3, 4)}
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    numbers = {path: i for i, (path, _) in enumerate(leaves)}
    found: dict[str, list[int | None]] = {each: [None] * len(leaves) for each in wanted}
    fits, misfits = {}, {}  # fields -> whether all their leaves are like those of the parameters
    for place, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(inner)):
        for i, key in enumerate(path):
            if not isinstance(key, GetAttrKey):
                continue
            number = numbers.get(path[i + 1 :])
            alike = number is not None and jnp.shape(x) == jnp.shape(leaves[number][1])
            if number is None or not alike or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                misfits.setdefault(key.name, f"{jnp.result_type(x).name}{list(jnp.shape(x))}")
                continue
            fits[key.name] = True
            if key.name in found:
                if found[key.name][number] is not None:
                    raise ValueError(
                        f"{name}: moments names {key.name!r}, of which the inner optimizer's state has two for the "
                        f"parameter {jax.tree_util.keystr(path[i + 1 :]) or 'that there is'}"
                    )
                found[key.name][number] = place
    there = sorted(key for key in fits if key not in misfits)
    for each, where in found.items():
        if each in misfits and any(place is not None for place in where):
            misfit = f"; {each!r} has a part {misfits[each]}"
        elif each in misfits:
            misfit = f"; {each!r} has {misfits[each]}, which is not"
        elif all(place is None for place in where):
            misfit = ""
        else:
            continue
        raise ValueError(
            f"{name}: moments must name fields of the inner optimizer's state that are floats like the parameters: "
            f"{', '.join(there) or 'there are none'}; got {each!r}{misfit}"
        )
    return {each: tuple(where) for each, where in found.items()}


def moment_of(inner: Any, places: Places, params: Any) -> Any:
    """The moment as a tree like the parameters."""
    leaves = jax.tree.leaves(inner)
    found = [optax.MaskedNode() if place is None else leaves[place] for place in places]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def replaced_by(inner: Any, places: Places, moment: Any) -> Any:
    """The state with this moment in it, the inverse of `moment_of`."""
    leaves, structure = jax.tree.flatten(inner)
    for place, leaf in zip([each for each in places if each is not None], jax.tree.leaves(moment), strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def own_where_zero(name: str, shared: Any, own: Any, xp: Any = jnp) -> Any:
    """The moment that a worker goes on with: the shared one, and of squares its own entry where that is zero.

    A mean of lossy messages may make zero of what no worker has as zero; a step divided by its root would be long.
    shared: as it is stored, in the dtype of `own`.

    >>> print(own_where_zero("nu", jnp.array([0.0, 2.0]), jnp.array([1.0, 1.0])))
    [1. 2.]
    >>> print(own_where_zero("mu", jnp.zeros(1), jnp.ones(1)))
    [0.]
    """
    return xp.where(shared > 0, shared, own) if name in SQUARES else xp.broadcast_to(shared, np.shape(own))
