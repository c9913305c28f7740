"""Other algorithms for other parts of the tree, chosen by the paths of the leaves, in one exchange for all of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.arrays import wide
from jaxcomp.base import Algorithm, Compressor, Exchange, State, check_algorithm
from jaxcomp.layout import Layout, layout_of
from jaxcomp.paths import check_patterns

__all__ = ["by_path", "together"]

Array = jax.Array


class ByPathLocal(NamedTuple):
    """parts: local state of the algorithm of each part; () for one that has no leaf."""

    parts: tuple[Any, ...]


class ByPathShared(NamedTuple):
    """parts: shared state, likewise."""

    parts: tuple[Any, ...]


def by_path(parts: Mapping[str, Algorithm | Compressor]) -> Algorithm:
    """Other algorithms for other parts of the tree.

    direction_j = A_p(g)_j, with p the first pattern that is found in the path of leaf j.

    The path of a leaf is its keys with slashes between, say "params/block_3/mlp/kernel", and a pattern is a regular
    expression that may match anywhere in it (`re.search`). Each algorithm sees the leaves of its part as it would see
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
        ValueError: no pattern, or none that is a regular expression; a part that is made by `by_path`; and when the
            tree is known: a leaf that no pattern matches, a pattern that matches no leaf, or none that is left for it
            (a last ".*" for the rest may be left without any).

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

    def init(shared_key, like):
        keys = [jax.random.fold_in(shared_key, i) for i in range(len(algorithms))]
        states = [
            State() if x is None else each.init(key, x) for each, key, x in zip(algorithms, keys, like, strict=True)
        ]
        return State(ByPathLocal(tuple(s.local for s in states)), ByPathShared(tuple(s.shared for s in states)))

    def update(key, grads, state, exchange):
        pairs = zip(state.local.parts, state.shared.parts, strict=True)
        states = [State(local, shared) for local, shared in pairs]
        steps = {
            i: functools.partial(each.update, jax.random.fold_in(key, i), x, states[i])
            for i, (each, x) in enumerate(zip(algorithms, grads, strict=True))
            if x is not None
        }
        done = dict(zip(steps, together(list(steps.values()), exchange), strict=True))
        directions = tuple(done[i][0] if i in done else None for i in range(len(algorithms)))
        states = [done[i][1] if i in done else states[i] for i in range(len(algorithms))]
        local, shared = (tuple(s.local for s in states), tuple(s.shared for s in states))
        return directions, State(ByPathLocal(local), ByPathShared(shared))

    pieces = tuple(bool(each.pieces) for each in algorithms)
    roles = {"parts": {i: each.roles for i, each in enumerate(algorithms)}}
    layout, sparse = Layout("paths", parts=layouts), all(each.sparse for each in algorithms)
    return Algorithm(init, update, roles, layout=layout, parts=algorithms, pieces=pieces, sparse=sparse)


def _algorithm(pattern: str, value: Any) -> Algorithm:
    if isinstance(value, Compressor):
        return direct(value) if value.spec.omega is not None else error_feedback(value)
    algorithm = check_algorithm(f"by_path: pattern {pattern!r}", value)
    if algorithm.parts:
        raise ValueError("by_path: a part must not be made by by_path; put its patterns into the one mapping")
    return algorithm


# ------------------------------------------------------------------------------------------------
# Several algorithms, one exchange


def together(steps: Sequence[Callable[[Exchange], Any]], exchange: Exchange) -> list[Any]:
    """What the steps return, with their k-th exchanges made together, for k = 1, 2, ...

    A step is a pure function of the exchange that it is given. It is traced up to its first request, which stops it.
    When all have stopped, their requests are answered at once, and each step is traced anew with these answers, up to
    its second request; and so on. What a trace computes before a request that is answered already has no use, and the
    compiler drops it: the compiled program computes everything once.

    Args:
        steps: exchange -> result.
        exchange: of this worker.
    """
    scripts = [_Script(exchange) for _ in steps]
    results: list[Any] = [None] * len(steps)
    running = list(range(len(steps)))
    while running:
        asked = []
        for i in running:
            try:
                results[i] = steps[i](scripts[i].from_the_start())
            except _Asked as request:
                asked.append((i, request))
        _answer(asked, scripts, exchange)
        running = [i for i, _ in asked]
    return results


class _Asked(BaseException):
    """Stops a step at a request that has no answer yet. Not an `Exception`: no step may catch it."""

    def __init__(self, what: str, arguments: tuple):
        super().__init__(what)
        self.what, self.arguments = what, arguments


class _Script:
    """`base.Exchange` that answers from a list, and stops the step at the first request beyond it."""

    def __init__(self, exchange: Exchange):
        self._exchange, self.answers, self._next, self.answering = exchange, [], 0, False
        self.index, self.size = exchange.index, exchange.size

    def from_the_start(self) -> "_Script":
        self._next = 0
        return self

    def _ask(self, what: str, *arguments: Any) -> Any:
        if self.answering:  # inside of a branch of `cond`
            return getattr(self._exchange, what)(*arguments)
        if self._next == len(self.answers):
            raise _Asked(what, arguments)
        self._next += 1
        return self.answers[self._next - 1]

    def mean(self, key: Array, compressor: Compressor, message: Any, state: State) -> Any:
        return self._ask("mean", key, compressor, message, state)

    def means(self, messages: Sequence[tuple[Array, Compressor, Any, State]]) -> Any:
        return self._ask("means", messages)

    def sum(self, x: Any) -> Any:
        return self._ask("sum", x)

    def cond(self, predicate: Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        return self._ask("cond", predicate, yes, no, *operands)


def _answer(asked: list[tuple[int, _Asked]], scripts: list[_Script], exchange: Exchange) -> None:
    """Makes the exchanges that were asked for: messages together, sums together, conditionals one by one."""
    of_kind = lambda *kinds: [(i, request) for i, request in asked if request.what in kinds]
    means = of_kind("mean", "means")
    each = [[request.arguments] if request.what == "mean" else request.arguments[0] for _, request in means]
    messages = [message for some in each for message in some]
    sent = iter(exchange.means(messages) if messages else ())
    for i, request in means:
        own = next(sent) if request.what == "mean" else [next(sent) for _ in request.arguments[0]]
        scripts[i].answers.append(own)
    by_dtype: dict[Any, list] = {}
    for i, request in of_kind("sum"):
        dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(request.arguments[0])))
        by_dtype.setdefault(dtype, []).append((i, request.arguments[0]))
    for group in by_dtype.values():
        for (i, _), total in zip(group, exchange.sum(tuple(x for _, x in group)), strict=True):
            scripts[i].answers.append(total)
    for i, request in of_kind("cond"):
        scripts[i].answering = True
        scripts[i].answers.append(exchange.cond(*request.arguments))
        scripts[i].answering = False
