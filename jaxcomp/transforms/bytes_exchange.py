"""The requests of an algorithm, answered at one process among several: messages cross as the bytes of `jc.wire`."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import bounded, like_of, wide, wide_like, zeros_like
from jaxcomp.base import (
    Compressor,
    Mean,
    State,
    Sum,
    accumulate,
    add_own,
    advance,
    answered,
    for_worker,
    residual,
)
from jaxcomp.compressors.tree import as_leaves, from_leaves
from jaxcomp.exchange.binding import shares_of
from jaxcomp.payloads import Dense, Several, highest_indices
from jaxcomp.wire import WireError, decode, encode

__all__ = ["BytesExchange", "Gather"]

Array = jax.Array
NAME = "local_process"
Gather = Callable[[bytes], list[bytes]]


class BytesExchange:
    """Answers the requests of an algorithm at one process: every message crosses as the bytes of `wire.encode`.

    Args:
        gather: this worker's bytes -> those of all workers, in their order.
        index, size: number of this worker, and how many there are.
        code: as for `wire.encode`.
        weights: of the workers, `size` numbers >= 0, not all zero; None for equal ones.
    """

    def __init__(self, gather: Gather, index: int, size: int, code: str, weights: Sequence[float] | None = None):
        self.index, self.size, self.sent_bytes = jnp.asarray(index, jnp.int32), size, 0
        self._gather, self._number, self._code = gather, index, code
        self._shares = None if weights is None else shares_of(NAME, weights)
        self._compiled: dict[Any, Any] = {}

    def answer(self, requests: list[Any]) -> list[Any]:
        """The answers, one request after the other."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Mean):
            return _Sent(self, request)
        if isinstance(request, Sum):
            return self.sum(request.x)
        branch = request.yes if bool(request.predicate) else request.no
        return answered(branch(*request.operands), self.answer)

    def exchange(self, payload: Any, compressors: Sequence[Compressor] = ()) -> list[Any]:
        """The payloads of all workers. The header of a message says by which compressors it was made."""
        message = encode(payload, code=self._code, compressor=compressors)
        self.sent_bytes += len(message) * (self.size - 1)
        arrived = self.gathered(message)
        found = [_decoded(number, each, compressors) for number, each in enumerate(arrived)]
        own = _kinds(found[self._number])
        for number, each in enumerate(found):
            if _kinds(each) != own:
                raise ValueError(
                    f"{NAME}: gather must return messages of one exchange, of parameters of equal shapes and with the "
                    f"same options; that of worker {number} is {_words(each)}, that of this worker {self._number} "
                    f"{_words(found[self._number])}"
                )
        return found

    def gathered(self, message: bytes) -> list[bytes]:
        """The bytes of all workers."""
        arrived = self._gather(message)
        if not isinstance(arrived, Iterable) or isinstance(arrived, (bytes, bytearray, memoryview, str, Mapping)):
            raise TypeError(
                f"{NAME}: gather must return a list with the bytes of all {self.size} workers; got a "
                f"{type(arrived).__name__}"
            )
        arrived = list(arrived)
        if len(arrived) != self.size:
            raise ValueError(f"{NAME}: gather must return the bytes of all {self.size} workers; got {len(arrived)}")
        if arrived[self._number] != message:
            raise ValueError(
                f"{NAME}: gather must return the messages in the order of the workers; place {self._number} does not "
                "hold the message of this worker"
            )
        return arrived

    def jit(self, name: str, compressor: Compressor, function: Callable) -> Callable:
        """A function, compiled once for each compressor."""
        return self._compiled.setdefault((name, id(compressor)), (jax.jit(function), compressor))[0]

    def mean_of(self, compressor: Compressor, arrived: list[Any], message: Any, shared: Any) -> Any:
        """The mean of messages of one group as this compressor reads them.

        As in `exchange.driver`, each is weighted before it is added, by a power of two where all weigh alike: no sum
        overflows where the mean does not.
        """
        equal = 0.5 ** (self.size - 1).bit_length()
        last = 1 / (self.size * equal) if self._shares is None else 1.0

        def added(payloads, shared, zeros):
            weights = np.full(self.size, equal) if self._shares is None else self._shares
            weights = jnp.asarray(weights, zeros.dtype)
            total = accumulate(compressor, zeros, payloads, weights, shared)
            return total if last == 1 else bounded(total * last)

        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *arrived)
        return self.jit("added", compressor, added)(stacked, shared, zeros_like(wide_like(message)))

    def sum(self, x: Any) -> Any:
        """The sum over the workers of each array of a tree."""
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, x))
        if not leaves:
            return x
        totals, kinds = list(leaves), list(dict.fromkeys(leaf.dtype for leaf in leaves))
        places = [[i for i, leaf in enumerate(leaves) if leaf.dtype == kind] for kind in kinds]
        parts = (Dense(np.concatenate([leaves[i].reshape(-1) for i in group])) for group in places)
        arrived = self.exchange(Several(tuple(parts)))
        for number, group in enumerate(places):
            with np.errstate(over="ignore", invalid="ignore"):
                total = self._sum_of([each.parts[number].values for each in arrived])
            cuts = np.cumsum([leaves[i].size for i in group])[:-1]
            for i, part in zip(group, np.split(total, cuts), strict=True):
                totals[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, map(jnp.asarray, totals))

    def _sum_of(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Sum over the workers; with weights n times their weighted mean, as `exchange.driver` has it."""
        if self._shares is None:
            return functools.reduce(np.add, arrays)
        kind = wide(arrays[0].dtype)
        parts = (x.astype(kind) * np.asarray(w, kind) for x, w in zip(arrays, self._shares, strict=True))
        return functools.reduce(np.add, parts) * np.asarray(self.size, kind)


class _Sent:
    """Outcome of one message (`base.Sent`), whose payloads arrived as bytes."""

    def __init__(self, link: BytesExchange, request: Mean):
        self.link, self.request = link, request
        self.mine = tuple(
            for_worker(c, state.shared, link.index, link.size)
            for c, state in zip(request.compressors, request.states, strict=True)
        )
        done = []
        given = zip(request.compressors, request.keys, request.message, request.states, self.mine, strict=True)
        for c, key, x, state, mine in given:
            done.append(link.jit("compress", c, c.compress)(key, x, State(state.local, mine)))
        self.payloads = tuple(payload for payload, _ in done)
        after = zip(request.compressors, done, request.states, strict=True)
        self.states = tuple(State(local, advance(c, state.shared)) for c, (_, local), state in after)
        arrived = link.exchange(as_leaves(request.groups, self.payloads), request.compressors)
        each = [from_leaves(request.groups, payload) for payload in arrived]
        self.arrived = list(zip(*each, strict=True))
        _check_indices(self.arrived, request.message)

    @functools.cached_property
    def mean(self) -> tuple[Any, ...]:
        return self._mean(self.request.compressors)

    @property
    def direction(self) -> tuple[Any, ...]:
        return self.mean

    def _mean(self, compressors: tuple[Compressor, ...]) -> tuple[Any, ...]:
        each = zip(compressors, self.arrived, self.request.message, self.request.states, strict=True)
        return tuple(self.link.mean_of(c, list(arrived), x, state.shared) for c, arrived, x, state in each)

    @property
    def own(self) -> tuple[Any, ...]:
        return self._own(self.request.compressors)

    def _own(self, compressors: tuple[Compressor, ...]) -> tuple[Any, ...]:
        read = lambda c: lambda payload, mine, x: c.decompress(payload, mine, like_of(x))
        return self._each("own", read, compressors, self.payloads, self.mine, self.request.message)

    @property
    def residual(self) -> tuple[Any, ...]:
        left = lambda c: functools.partial(residual, c)
        return self._each("residual", left, self.request.compressors, self.request.message, self.payloads, self.mine)

    def add_to(self, total: tuple[Any, ...], weight: Any) -> tuple[Any, ...]:
        added = lambda c: lambda total, payload, mine, weight: add_own(c, total, payload, weight, mine)
        weights = (weight,) * len(total)
        return self._each("add_to", added, self.request.compressors, total, self.payloads, self.mine, weights)

    def _each(self, name: str, function: Callable, compressors: tuple[Compressor, ...], *groups: Any) -> tuple:
        """Results of the function of each compressor, compiled, for the arrays of its group."""
        each = zip(compressors, *groups, strict=True)
        return tuple(self.link.jit(name, c, function(c))(*arrays) for c, *arrays in each)

    def read_by(self, compressors: tuple[Compressor, ...]) -> tuple[Any, Any]:
        return self._mean(compressors), self._own(compressors)

    def again(self, message: tuple[Any, ...], payloads: tuple[Any, ...]) -> "_Sent":
        other = copy.copy(self)
        other.request, other.payloads = self.request._replace(message=message), payloads
        return other


# ------------------------------------------------------------------------------------------------
# Messages of other processes, which may be of another exchange


def _decoded(number: int, message: bytes, compressors: Sequence[Compressor]) -> Any:
    try:
        return decode(message, compressor=compressors)
    except WireError as error:
        raise WireError(f"{error.field} of the message of worker {number}", error.got, error.allowed) from None


def _kinds(payload: Any) -> Any:
    """Facts that messages of one exchange have in common: their structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(payload)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _words(payload: Any) -> str:
    arrays = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(payload)]
    return f"{type(payload).__name__} of {', '.join(arrays[:4])}{', ...' if len(arrays) > 4 else ''}"


def _check_indices(arrived: Sequence[Sequence[Any]], message: tuple[Any, ...]) -> None:
    """Refuses sparse messages of longer vectors where an index shows it: the length itself does not cross.

    arrived: of each group, of all workers.
    """
    for payloads, x in zip(arrived, message, strict=True):
        for number, payload in enumerate(payloads):
            for index in highest_indices(payload):
                if index > x.size:  # padding has the length
                    raise ValueError(
                        f"{NAME}: gather must return messages of one exchange, of parameters of equal shapes; that of "
                        f"worker {number} has index {index}, and the vector here {x.size} entries"
                    )
