"""`base.Exchange` of one process among several: every message crosses as the bytes of `jc.wire`."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import bounded, like_of, wide, wide_like, zeros_like
from jaxcomp.base import Compressor, State, accumulate, add_own, advance, for_worker, residual
from jaxcomp.exchange.bind import shares_of
from jaxcomp.layout import Parts
from jaxcomp.payloads import Dense, Leaves, Several, Sparse
from jaxcomp.wire import WireError, decode, encode

__all__ = ["BytesExchange", "Gather"]

Array = jax.Array
NAME = "local_process"
Gather = Callable[[bytes], list[bytes]]


class BytesExchange:
    """`base.Exchange` of one process: every message crosses as the bytes of `wire.encode`.

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

    def _exchange(self, payload: Any) -> list[Any]:
        message = encode(payload, code=self._code)
        self.sent_bytes += len(message) * (self.size - 1)
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
        found = [_decoded(number, each) for number, each in enumerate(arrived)]
        own = _kinds(found[self._number])
        for number, each in enumerate(found):
            if _kinds(each) != own:
                raise ValueError(
                    f"{NAME}: gather must return messages of one exchange, of parameters of equal shapes and with the "
                    f"same options; that of worker {number} is {_words(each)}, that of this worker {self._number} "
                    f"{_words(found[self._number])}"
                )
        return found

    def _jit(self, name: str, compressor: Compressor, function: Callable) -> Callable:
        """Compiled once for each compressor."""
        return self._compiled.setdefault((name, id(compressor)), (jax.jit(function), compressor))[0]

    def mean(self, key: Array, compressor: Compressor, message: Any, state: State) -> "_Sent":
        mine = for_worker(compressor, state.shared, self.index, self.size)
        _, key = jax.random.split(key)
        compress = self._jit("compress", compressor, compressor.compress)
        payload, local = compress(key, message, State(state.local, mine))
        arrived = self._exchange(payload)
        _check_indices(arrived, message)
        mean = self.mean_of(compressor, arrived, message, state.shared)
        after = State(local, advance(compressor, state.shared))
        return _Sent(self, compressor, message, payload, mine, arrived, state.shared, mean, after)

    def mean_of(self, compressor: Compressor, arrived: list[Any], message: Any, shared: Any) -> Any:
        """The mean of messages as this compressor reads them.

        As in `exchange.mean`, each is weighted before it is added, by a power of two where all weigh alike: no sum
        overflows where the mean does not.
        """
        equal = 0.5 ** (self.size - 1).bit_length()
        last = 1 / (self.size * equal) if self._shares is None else 1.0

        def added(payloads, shared, zeros):
            dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(zeros)))
            weights = jnp.full((self.size,), equal, dtype) if self._shares is None else jnp.asarray(self._shares, dtype)
            total = accumulate(compressor, zeros, payloads, weights, shared)
            return total if last == 1 else jax.tree.map(lambda t: bounded(t * last), total)

        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *arrived)
        return self._jit("added", compressor, added)(stacked, shared, zeros_like(wide_like(message)))

    def means(self, messages: Sequence[tuple[Array, Compressor, Any, State]]) -> "list[_Sent]":
        return [self.mean(*each) for each in messages]

    def sum(self, x: Any) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, x))
        if not leaves:
            return x
        totals, kinds = list(leaves), list(dict.fromkeys(leaf.dtype for leaf in leaves))
        places = [[i for i, leaf in enumerate(leaves) if leaf.dtype == kind] for kind in kinds]
        parts = (Dense(np.concatenate([leaves[i].reshape(-1) for i in group])) for group in places)
        arrived = self._exchange(Several(tuple(parts)))
        for number, group in enumerate(places):
            with np.errstate(over="ignore", invalid="ignore"):
                total = self._sum_of([each.parts[number].values for each in arrived])
            cuts = np.cumsum([leaves[i].size for i in group])[:-1]
            for i, part in zip(group, np.split(total, cuts), strict=True):
                totals[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, map(jnp.asarray, totals))

    def _sum_of(self, arrays: list[np.ndarray]) -> np.ndarray:
        """With weights n times their weighted mean, as `exchange.runner` has it."""
        if self._shares is None:
            return functools.reduce(np.add, arrays)
        kind = wide(arrays[0].dtype)
        parts = (x.astype(kind) * np.asarray(w, kind) for x, w in zip(arrays, self._shares, strict=True))
        return functools.reduce(np.add, parts) * np.asarray(self.size, kind)

    def cond(self, predicate: Array, yes: Callable, no: Callable, *operands: Any) -> Any:
        return (yes if bool(predicate) else no)(*operands)


class _Sent(NamedTuple):
    """`base.Sent` of payloads that arrived as bytes."""

    link: "BytesExchange"
    compressor: Compressor
    message: Any
    payload: Any
    mine: Any
    arrived: list[Any]
    shared: Any
    mean: Any
    state: State

    @property
    def own(self) -> Any:
        read = lambda payload, mine, like: self.compressor.decompress(payload, mine, like_of(like))
        return self._jit("own", read)(self.payload, self.mine, self.message)

    @property
    def residual(self) -> Any:
        left = lambda message, payload, mine: residual(self.compressor, message, payload, mine)
        return self._jit("residual", left)(self.message, self.payload, self.mine)

    def add_to(self, total: Any, weight: Any) -> Any:
        def added(total, payload, weight, mine):
            return add_own(self.compressor, total, payload, weight, mine)

        return self._jit("add_to", added)(total, self.payload, weight, self.mine)

    def _jit(self, name: str, function: Callable) -> Callable:
        return self.link._jit(name, self.compressor, function)

    def read_by(self, compressor: Compressor) -> tuple[Any, Any]:
        mean = self.link.mean_of(compressor, self.arrived, self.message, self.shared)
        return mean, compressor.decompress(self.payload, self.mine, like_of(self.message))


# ------------------------------------------------------------------------------------------------
# Messages of other processes, which may be of another exchange


def _decoded(number: int, message: bytes) -> Any:
    try:
        return decode(message)
    except WireError as error:
        raise WireError(f"{error.field} of the message of worker {number}", error.got, error.allowed) from None


def _kinds(payload: Any) -> Any:
    """What messages of one exchange have in common: their structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(payload)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _words(payload: Any) -> str:
    arrays = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(payload)]
    return f"{type(payload).__name__} of {', '.join(arrays[:4])}{', ...' if len(arrays) > 4 else ''}"


def _check_indices(arrived: list[Any], message: Any) -> None:
    """Refuses sparse messages of longer vectors where an index shows it: the length itself does not cross."""
    lengths = [int(x.size) for x in jax.tree.leaves(message.vectors if isinstance(message, Parts) else message)]
    for number, payload in enumerate(arrived):
        parts = payload.leaves if isinstance(payload, Leaves) else (payload,)
        for part, length in zip(parts, lengths, strict=False):
            for each in jax.tree.leaves(part, is_leaf=lambda node: isinstance(node, Sparse)):
                indices = each.indices if isinstance(each, Sparse) else None
                if isinstance(indices, np.ndarray) and indices.max(initial=0) > length:  # padding has the length
                    raise ValueError(
                        f"{NAME}: gather must return messages of one exchange, of parameters of equal shapes; that of "
                        f"worker {number} has index {indices.max()}, and the vector here {length} entries"
                    )
