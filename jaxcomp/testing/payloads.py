"""The laws of payloads: each is a function that raises `LawBroken` with one sentence."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import wire
from jaxcomp.payloads.registry import (
    CODES,
    code_bits,
    decode_message,
    encode_message,
    family_of,
    lane_bytes,
    limits,
    num_entries,
    per_tile,
)
from jaxcomp.testing.law import all_hold, broken, same_bits
from jaxcomp.wire.frame import seal, unseal

__all__ = ["PAYLOAD_LAWS", "check_payload"]

HEADS = 16  # bytes of an array's record besides its numbers: a type, dimensions, a count


def check_payload(
    payload: Any, *, places: int = 400, seed: int = 0, laws: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Holds a payload, and the family of its type, to what sizes, words, bytes and routes rely on.

    Bytes bring it back, bit for bit, in every code; `code_bits` are those of the bytes, on the host and in jit; words
    bring it back in jit; what the family says of each array is said of all of them. Bytes that were cut off or changed
    end in another payload, which survives the wire in turn, or in `WireError`, and in nothing else.

    Args:
        payload: of a registered type, with arrays as a compressor makes them. Try several: one that is full, one with
            padding, one without entries, one of a single entry.
        places: in so many places, at most, bytes are cut off, and changed.
        seed: of the changes.
        laws: names of `PAYLOAD_LAWS`; None: all.

    Returns:
        The names of the laws that were tried.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: a type that is not registered.

    >>> import jaxcomp as jc
    >>> jc.testing.check_payload(jc.payloads.Sparse(np.float32([1, 2, 0]), np.int32([4, 7, 9])))
    ('bytes', 'bits', 'words', 'arrays', 'cuts', 'changes')
    """
    family_of(payload, "testing.check_payload")
    tried = _Tried(jax.tree.map(np.asarray, payload), places, np.random.default_rng(seed))
    return all_hold(f"the payload {type(payload).__name__}", PAYLOAD_LAWS, laws, lambda law: PAYLOAD_LAWS[law](tried))


class _Tried:
    """payload: of NumPy arrays. body: its bytes in the fixed code, without the frame. places: in the body, in order."""

    def __init__(self, payload: Any, places: int, rng: np.random.Generator):
        self.payload, self.rng = payload, rng
        self.body = bytes(unseal(wire.encode(payload)))
        count = min(places, len(self.body))
        self.places = np.sort(rng.choice(len(self.body), count, replace=False)).tolist()


def _bytes(tried: _Tried) -> None:
    """The bytes of each code bring it back, bit for bit."""
    for code in CODES:
        said = f'wire.decode(wire.encode(payload, code="{code}")) is the payload'
        same_bits(said, wire.decode(wire.encode(tried.payload, code=code)), tried.payload)


def _bits(tried: _Tried) -> None:
    """`code_bits` are those of the bytes, but for the heads of records and whole bytes; and the same in jit."""
    on_device = jax.tree.map(jnp.asarray, tried.payload)
    arrays = len(jax.tree.leaves(tried.payload))
    for code in CODES:
        here = int(code_bits(tried.payload, code=code))
        there = int(jax.jit(lambda p: jnp.asarray(code_bits(p, code=code)))(on_device))  # noqa: B023
        if here != there and abs(here - there) > 1e-6 * here:  # beyond 2^31 they are counted in f32
            broken(f'code_bits in jit are those on the host; with code="{code}" {there} and {here}')
        held = 8 * len(unseal(wire.encode(tried.payload, code=code)))
        if held < here:
            broken(f'the bytes hold all bits of the code; with code="{code}" {held} bits of {here}')
        if code == "fixed" and held - here > 8 * HEADS * (arrays + 1):
            broken(f"the bytes hold little besides the code; of {held} bits code_bits are {here}")


def _words(tried: _Tried) -> None:
    """The words of a message bring it back, in jit, unless it says that they do not fit."""
    message = jax.jit(encode_message)(jax.tree.map(jnp.asarray, tried.payload))
    used = int(message.used)
    if not bool(message.fits):
        return
    if used > message.words.size:
        broken(f"no more words are used than there are; {used} of {message.words.size}")
    for words in (message.words, message.words[: max(used, 1)]):
        back = jax.jit(lambda w: decode_message(w, tried.payload))(words)
        same_bits("decode_message(encode_message(payload).words) is the payload", back, tried.payload)


def _arrays(tried: _Tried) -> None:
    """The family says something of each array, and counts entries alike on the host and in jit."""
    payload, leaves = tried.payload, jax.tree.leaves(tried.payload)
    if (found := lane_bytes(payload)) != (held := sum(leaf.nbytes for leaf in leaves)):
        broken(f"lane_bytes are the bytes of the arrays; {found} for {held}")
    for what, said in (("limits", limits(payload, None)), ("per_tile", per_tile(payload))):
        if len(said) != len(leaves):
            broken(f"Family.{what} says something of each of the {len(leaves)} arrays; it has {len(said)} items")
    here, there = num_entries(payload), num_entries(jax.tree.map(jnp.asarray, payload))
    if (here is None) != (there is None) or (here is not None and there is not None and int(here) != int(there)):
        broken(f"Family.entries counts alike on the host and in jit; {here} and {there}")


def _survives(body: bytes, what: str) -> None:
    """Bytes that nobody wrote so are another payload, which survives the wire, or a `WireError`."""
    try:
        payload = wire.decode(seal(body))
    except wire.WireError:
        return
    except Exception as error:
        broken(f"{what} ends in a payload or in WireError; got {type(error).__name__}: {error}")
    same_bits(
        f"{what} ends in a payload that survives the wire, or in WireError", wire.decode(wire.encode(payload)), payload
    )


def _cuts(tried: _Tried) -> None:
    """Bytes that are cut off, or added."""
    for place in tried.places:
        _survives(tried.body[:place], f"a record cut off after {place} of {len(tried.body)} bytes")
    _survives(tried.body + b"\0", "a record with a byte too many")


def _changes(tried: _Tried) -> None:
    """Bytes that are changed: the bit of least weight, and any other bits."""
    for place in tried.places:
        for change in (1, int(tried.rng.integers(1, 256))):
            changed = bytearray(tried.body)
            changed[place] ^= change
            _survives(bytes(changed), f"a record whose byte {place} is {changed[place]} for {tried.body[place]}")


PAYLOAD_LAWS: dict[str, Callable[[_Tried], None]] = {
    "bytes": _bytes,
    "bits": _bits,
    "words": _words,
    "arrays": _arrays,
    "cuts": _cuts,
    "changes": _changes,
}
