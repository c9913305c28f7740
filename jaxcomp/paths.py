"""Assigns the leaves of a tree to patterns, by their paths.

The path of a leaf is its keys with slashes between, say "params/block_3/mlp/kernel" (`jax.tree_util.keystr` in its
simple form). A pattern is a regular expression, which matches wherever in the path it is found, or a function of the
path, which says whether it matches. The first pattern that matches takes the leaf.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

__all__ = ["check_patterns", "numbers_by_path", "paths_of", "same_leaves"]

SHOWN = 6  # paths in an error


def check_patterns(name: str, patterns: Sequence[Any]) -> tuple[Any, ...]:
    """The patterns; ValueError unless there are some, and all of them are regular expressions or functions."""
    if not patterns:
        raise ValueError(f'{name}: there must be at least one pattern, say ".*" for all leaves; got none')
    for pattern in patterns:
        if callable(pattern):
            continue
        if not isinstance(pattern, str):
            raise ValueError(f"{name}: a pattern must be a string, or a function of a path; got {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: a pattern must be a regular expression; got {pattern!r}: {error}") from None
    return tuple(patterns)


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def paths_of(tree: Any) -> list[tuple[str, bool]]:
    """The path of each leaf, and whether it is there: in its place may stand `optax.MaskedNode`.

    >>> paths_of({"mlp": [1, 2], "norm": optax.MaskedNode()})
    [('mlp/0', True), ('mlp/1', True), ('norm', False)]
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_masked)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), not _masked(node)) for path, node in nodes]


def same_leaves(a: Any, b: Any) -> bool:
    """Whether two trees have leaves at the same paths, some of which lie in containers of their own in one of them.

    Such containers are nodes like `flax.nnx.Param`, whose one child is an attribute. Flax gives an optimizer parameters
    with them, and gradients without.

    >>> import collections
    >>> Param = collections.namedtuple("Param", "value")
    >>> same_leaves({"w": Param(1)}, {"w": 2}), same_leaves({"w": {"value": 1}}, {"w": 2})
    (True, False)
    """
    if jax.tree.structure(a, is_leaf=_masked) == jax.tree.structure(b, is_leaf=_masked):
        return True
    both = [[path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_masked)] for tree in (a, b)]
    return len(both[0]) == len(both[1]) and all(map(_same_path, *both))


def _same_path(*paths: tuple[Any, ...]) -> bool:
    short, long = sorted(paths, key=len)
    into = (jax.tree_util.GetAttrKey, jax.tree_util.FlattenedIndexKey)
    return long[: len(short)] == short and all(isinstance(key, into) for key in long[len(short) :])


def numbers_by_path(name: str, patterns: Sequence[Any], tree: Any) -> list[tuple[int, ...]]:
    """The numbers of the leaves that each pattern takes, among those that are there.

    Raises:
        ValueError: no pattern matches a leaf; a pattern matches none, or none that those before it have left. A last
            one that matches every leaf, for the rest, may be left without any.

    >>> numbers_by_path("by_path", ["norm|bias", ".*"], {"bias": 1, "kernel": 2, "norm": 3})
    [(0, 2), (1,)]
    """
    paths = paths_of(tree)
    every = [path for path, _ in paths]
    tests = [pattern if callable(pattern) else re.compile(pattern).search for pattern in patterns]
    matches = [[bool(test(path)) for path in every] for test in tests]
    taken = [next((i for i, match in enumerate(matches) if match[j]), None) for j in range(len(every))]
    if None in taken:
        raise ValueError(
            f"{name}: no pattern matches the leaf {every[taken.index(None)]!r}; patterns are {list(patterns)}. Add one "
            'for it, or ".*" as the last one for all the rest'
        )
    for i, pattern in enumerate(patterns if every else ()):
        if not any(matches[i]):
            shown = ", ".join(map(repr, every[:SHOWN])) + (", ..." if every[SHOWN:] else "")
            raise ValueError(f"{name}: the pattern {pattern!r} matches no leaf; the paths are {shown}")
        rest = i == len(patterns) - 1 and all(matches[i])
        if i not in taken and not rest:
            raise ValueError(
                f"{name}: all leaves that the pattern {pattern!r} matches are taken by earlier ones. Put it before them"
            )
    there = [part for part, (_, is_there) in zip(taken, paths, strict=True) if is_there]
    return [tuple(n for n, part in enumerate(there) if part == i) for i in range(len(patterns))]
