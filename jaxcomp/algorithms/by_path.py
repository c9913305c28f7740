"""Other algorithms for other parts of the tree, chosen by the paths of the leaves, in one exchange for all of them."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax

from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.base import Algorithm, Compressor, Round, require_algorithm
from jaxcomp.compressors.tree import layout_of
from jaxcomp.factories import factory
from jaxcomp.groups import Layout
from jaxcomp.paths import check_patterns

__all__ = ["by_path", "together"]

Array = jax.Array


class ByPathState(NamedTuple):
    """parts: the state of the algorithm of each part; () for one that has no leaf."""

    parts: tuple[Any, ...]


@factory
def by_path(parts: Mapping[str | Callable[[str], bool], Algorithm | Compressor]) -> Algorithm:
    """Other algorithms for other parts of the tree.

    direction_j = A_p(g)_j, with p the first pattern that is found in the path of leaf j.

    The path of a leaf is its keys with slashes between, say "params/block_3/mlp/kernel", and a pattern is a regular
    expression that may match anywhere in it (`re.search`), or a function of the path that says whether it matches, say
    lambda path: path.startswith("encoder"). Each algorithm sees the leaves of its part as it would see
    a tree of their own. All parts share the collectives: with via="auto" what is linear crosses in one sum and all the
    rest in one gathering, however many parts there are. Algorithms that exchange more than once a round
    (`power_sgd`) go on together, exchange by exchange.

    With `sharded` parameters there is one such exchange for each group of leaves that are cut alike. Where leaves are
    cut over the workers themselves, each part has one of its own.

    Args:
        parts: pattern -> algorithm, in the order in which they are tried. A compressor stands for `direct` where it is
            unbiased, else for `error_feedback`.

    Raises:
        TypeError: neither an algorithm nor a compressor; one with an iterate of its own.
        ValueError: no pattern, or one that is neither a regular expression nor a function; a part that is made by
            `by_path`; and when the tree is known: a leaf that no pattern matches, a pattern that matches no leaf, or
            none that is left for it (a last ".*" for the rest may be left without any).

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> algorithm = jc.by_path({"norm|bias": jc.direct(jc.identity()), ".*": jc.error_feedback(jc.flat(jc.top_k(k=1)))})
    >>> tx = jc.compressed_mean(algorithm, None)
    >>> grads = {"bias": jnp.array([1.0, 2.0]), "kernel": jnp.array([3.0, 4.0])}
    >>> direction, state = tx.update(grads, tx.init(grads))
    >>> print(direction["bias"], direction["kernel"])
    [1. 2.] [0. 4.]
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f'by_path needs a mapping from patterns to algorithms, say {{".*": ...}}; got {parts!r}')
    patterns = check_patterns("by_path", list(parts))
    algorithms = tuple(_algorithm(*each) for each in parts.items())
    layouts = tuple((pattern, layout_of(each)) for pattern, each in zip(patterns, algorithms, strict=True))

    def init(here, like):
        return ByPathState(
            tuple(
                each.init(_part(here, i), _of_part(here, i, like)) if _of_part(here, i, like) else ()
                for i, each in enumerate(algorithms)
            )
        )

    def update(here, grads, state):
        steps = {
            i: each.update(_part(here, i), _of_part(here, i, grads), state.parts[i])
            for i, each in enumerate(algorithms)
            if _of_part(here, i, grads)
        }
        done = yield from together(steps)
        directions = tuple(x for i in sorted(done) for x in done[i][0])
        return directions, ByPathState(tuple(done[i][1] if i in done else old for i, old in enumerate(state.parts)))

    roles = {"parts": {i: each.roles for i, each in enumerate(algorithms)}}
    pieces = tuple(bool(each.pieces) for each in algorithms)
    return Algorithm(init, update, roles, layout=Layout("paths", parts=layouts), parts=algorithms, pieces=pieces)


def _of_part(here: Round, number: int, each: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x for group, x in zip(here.groups, each, strict=True) if group.part == number)


def _part(here: Round, number: int) -> Round:
    """The round as one part sees it, with a key of its own."""
    groups, compressors = (_of_part(here, number, each) for each in (here.groups, here.compressors))
    return here._replace(key=jax.random.fold_in(here.key, number), groups=groups, compressors=compressors)


def _algorithm(pattern: Any, value: Any) -> Algorithm:
    if isinstance(value, Compressor):
        return direct(value) if value.spec.omega is not None else error_feedback(value)
    algorithm = require_algorithm(f"by_path: pattern {pattern!r}", value)
    if algorithm.parts:
        raise ValueError("by_path: a part must not be made by by_path; put its patterns into the one mapping")
    return algorithm


# ------------------------------------------------------------------------------------------------
# Several algorithms, one exchange


def together(steps: Mapping[Any, Any]) -> Any:
    """Results of several algorithms, whose k-th requests are asked for together, for k = 1, 2, ...

    Args:
        steps: name -> what `Algorithm.update` returned: a generator.
    """
    results: dict[Any, Any] = {name: each for name, each in steps.items() if not isinstance(each, Generator)}
    replies: dict[Any, Any] = {name: None for name in steps if name not in results}
    while replies:
        asked: dict[Any, Any] = {}
        for name, reply in replies.items():
            try:
                asked[name] = steps[name].send(reply)
            except StopIteration as end:
                results[name] = end.value
        answers = yield list(asked.values())
        replies = dict(zip(asked, answers, strict=True))
    return results
