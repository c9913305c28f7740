"""Messages between server and members, and how they are checked."""

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np

import jaxcomp
from jaxcomp.payloads import Sparse, plain_entries
from jaxcomp.wire import WireError, decode
from jaxcomp.wire.frame import VERSION

__all__ = [
    "Answer",
    "Refused",
    "Task",
    "applied",
    "content_of",
    "largest",
    "norm_of",
    "opened",
    "options_here",
    "parted",
    "point_checksum",
    "share_within",
    "well_formed",
    "whole_of",
]

Array = np.ndarray


class Refused(ValueError):
    """A message that is not used. kind: one word for counting."""

    def __init__(self, kind: str, why: str):
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class Answer(NamedTuple):
    """The message that a member sends in a round.

    round: of the task.  data: bytes of the payload.
    share: at most that much of it is to be used, in (0, 1]: who knows that it is longer than is allowed says so, sends
        it all, and keeps what is not used.
    leaves: whether it is all that the member remembers, its last answer before it goes.
    tokens: samples or tokens that it was trained on, its weight where the server weighs by them; 0: not said.
    """

    round: int
    data: bytes
    share: float = 1.0
    leaves: bool = False
    tokens: int = 0


class Task(NamedTuple):
    """The request to a member in a round: numbers, strings of bytes and lists of them, for any transport.

    round: its number, from 1.  entries: how many the answer may have.  norm: how much of it may be used: `Answer.share`
        times its norm.
    since: version of the shared point that `updates` start from; -1: the first of them is the whole point.
    version: after all of them.  check: CRC-32 of the point then.
    rounds, shares: answers of this member that the server has decided on, and how much of each it used, in [0, 1].
    options: JSON of what the member must have in common with the server (`options_here`).
    """

    round: int
    entries: int
    norm: float
    since: int
    version: int
    check: int
    updates: list[bytes]
    rounds: list[int]
    shares: list[float]
    options: str = ""


def options_here() -> dict[str, str]:
    """The version and the wire format of this process, in which server and members must agree."""
    return {"jaxcomp": jaxcomp.__version__, "wire format": str(VERSION)}


def largest(x: Array, entries: int) -> Sparse:
    """The `entries` largest of x in magnitude, ascending by index; zeros are left out.

    >>> largest(np.float32([1, -3, 0, 2]), 2)
    Sparse(values=array([-3.,  2.], dtype=float32), indices=array([1, 3], dtype=int32))
    """
    if entries < x.size:
        chosen = np.sort(np.argpartition(-np.abs(x), entries)[:entries]) if entries else np.zeros(0, np.int64)
    else:
        chosen = np.arange(x.size)
    chosen = chosen[x[chosen] != 0]
    return Sparse(x[chosen], chosen.astype(np.int32))


def well_formed(answer: Any) -> None:
    """Whether this is an `Answer` with fields of their types and ranges, whatever the transport let through.

    Raises:
        Refused: "garbage", or "shape" for a share out of its range.
    """
    if not isinstance(answer, Answer):
        raise Refused("garbage", f"expected an Answer; got {type(answer).__name__}")
    number, data, share, leaves, tokens = answer
    right = isinstance(number, int) and not isinstance(number, bool)
    right = right and isinstance(data, bytes) and isinstance(share, float) and isinstance(leaves, bool)
    if not right or not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise Refused("garbage", "an answer is a number, bytes, a share, whether its member leaves, and its tokens")
    if not 0 < share <= 1:
        raise Refused("shape", f"share must be in (0, 1]; got {share}")
    if leaves and share != 1:
        raise Refused("shape", f"who leaves hands over all; got share {share}")


def opened(data: bytes, size: int, entries: int) -> Sparse:
    """A message, if it is one: finite f32, at most `entries` entries of a vector of `size`; `Dense` has all of them.

    Raises:
        Refused: it is not. Its kind is "garbage", "shape", "entries" or "not finite".
    """
    return _checked(_decoded(data), size, entries)


def whole_of(data: bytes) -> Array:
    """The shared point as a whole, f32[d].

    Raises:
        Refused: the message is something else.
    """
    payload = _decoded(data)
    values, indices = _plain(payload)
    if indices is not None or np.ndim(values) != 1:
        raise Refused("shape", f"expected the whole point as Dense; got {type(payload).__name__}")
    return _checked(payload, np.size(values), np.size(values)).values


def _decoded(data: bytes) -> Any:
    try:
        return decode(data)
    except WireError as error:
        raise Refused("garbage", str(error)) from None


def _plain(payload: Any) -> tuple[Any, Any]:
    return plain_entries(payload) or (None, None)


def _checked(payload: Any, size: int, entries: int) -> Sparse:
    is_array = lambda x, dtype: isinstance(x, np.ndarray) and x.dtype == dtype and x.ndim == 1
    values, indices = _plain(payload)
    if indices is None:
        if not is_array(values, np.float32):
            raise Refused("shape", f"expected Sparse, or Dense of f32; got {type(payload).__name__}")
        if values.size != size:
            raise Refused("shape", f"a vector of {values.size} entries; expected {size}")
        indices = np.arange(size, dtype=np.int32)
    elif not is_array(values, np.float32):
        raise Refused("shape", "values must be f32[k]")
    elif not (is_array(indices, np.int32) and indices.shape == values.shape):
        raise Refused("shape", "indices must be i32[k]")
    real = indices != size  # padding
    if np.any(indices < 0) or np.any(indices > size) or np.any(np.diff(indices[real]) <= 0):
        raise Refused("shape", f"indices must ascend within [0, {size})")
    if np.count_nonzero(real) > entries:
        raise Refused("entries", f"{np.count_nonzero(real)} entries; at most {entries} are allowed here")
    if not np.all(np.isfinite(values)):
        raise Refused("not finite", f"{np.count_nonzero(~np.isfinite(values))} values are NaN or infinite")
    return Sparse(values[real], indices[real])


def content_of(message: Sparse) -> bytes:
    """SHA-256 of what a message says: the same for every code and any zeros in it."""
    real = message.values != 0
    return hashlib.sha256(message.indices[real].tobytes() + message.values[real].tobytes()).digest()


def applied(point: Array, update: Sparse) -> Array:
    """The shared point after an update: the same bits at the server and at every member."""
    point = point.copy()
    point[update.indices] += update.values
    return point


def point_checksum(point: Array) -> int:
    """CRC-32 of the shared point."""
    return zlib.crc32(point.tobytes())


def norm_of(values: Array) -> float:
    """The 2-norm, in float64."""
    return float(np.linalg.norm(values.astype(np.float64)))


def parted(values: Array, share: float) -> tuple[Array, Array]:
    """values = used + rest, exactly, entry by entry, with used about share * values.

    The larger part is rounded; the smaller one is then a difference of two floats within a factor of two, which is a
    float (Sterbenz 1974).

    Args:
        values: f32.
        share: in [0, 1].

    >>> used, rest = parted(np.float32([3.0, -0.1]), 0.3)
    >>> from fractions import Fraction
    >>> used + rest == np.float32([3.0, -0.1]), Fraction(float(used[1])) + Fraction(float(rest[1])) == Fraction(
    ...     float(np.float32(-0.1)))
    (array([ True,  True]), True)
    """
    share32 = np.float32(share)
    if share32 >= 0.5:
        used = values * share32
        return used, values - used
    rest = values * (np.float32(1) - share32)
    return values - rest, rest


def share_within(values: Array, share: float, norm: float) -> float:
    """`share`, halved until the used part of `parted` is at most `norm` long, within one in a hundred.

    Rounding makes parts of very small shares, of values that a hostile member may choose, up to four times longer than
    share * |values|.
    """
    while norm_of(parted(values, share)[0]) > 1.01 * norm:
        share /= 2
    return share
