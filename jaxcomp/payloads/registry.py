"""Registry of payloads: a `Family` of functions for each type, and the functions of all types.

A new payload is one new file that ends with `register(Family(...))`; nothing else switches on the types. Sizes, words
in jit and bytes on the host all come from the codings that a family lists, and `shortest` chooses among them. The two
plain payloads, `Dense` and `Scaled`, stand here. Their records on the wire:

    1 Dense       record of an array or a payload
    2 Scaled      array values | array scale
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import is_host
from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.payloads.words import Coded, Cursor, uncoded, uncoded_like, whole_array
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import ARRAY, is_float, read_array, write_array
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import MAX_DEPTH, PART_BYTES

__all__ = [
    "CODES",
    "DENSE",
    "SCALED",
    "Choices",
    "Coding",
    "Dense",
    "Family",
    "Scaled",
    "cheap_bits",
    "code_bits",
    "count_type",
    "counted",
    "decode_message",
    "encode_message",
    "highest_indices",
    "lane_bytes",
    "limits",
    "message_bits",
    "num_entries",
    "pack_message",
    "per_tile",
    "plain_entries",
    "read_record",
    "register",
    "same_everywhere",
    "shortest",
    "unpack_message",
    "write_record",
]

Array = Any
CODES = ("fixed", "elias", "best")
DENSE, SCALED = 1, 2  # kinds of records
WORDS = "words"  # what `encode_message` may choose from


class Dense(NamedTuple):
    """values: float[m]. Plain numbers: all entries, or those of an index set that both ends know."""

    values: Any


class Scaled(NamedTuple):
    """values: narrow float[d];  scale: f32[], or f32[b], one for each block of entries; powers of two.

    x_hat = values * scale.
    """

    values: Array
    scale: Array


class Coding(NamedTuple):
    """One way to code a payload.

    kind: of its record on the wire.
    codes: those of "fixed", "elias", "best" and "words" that may take it.
    bits: what it needs, without what all codings of this payload need alike.
    fits: whether it can hold this payload.
    plan: whatever writing it can use again.
    """

    kind: int
    codes: tuple[str, ...]
    bits: Array | int
    fits: Array | bool = True
    plan: Any = None


class Choices(NamedTuple):
    """codings: the first holds any payload.  rest(): bits that all of them need besides, of what is inside; None for no
    such.  entries: those of the payload (`Family.entries`), where the codings count them anyway.
    """

    codings: Sequence[Coding]
    rest: Callable[[], Array | int] | None = None
    entries: Array | int | None = None


def same_everywhere(payload: Any, lengths: Any) -> list:
    """`limits` of payloads that are equally long on all workers."""
    return [None] * len(jax.tree.leaves(payload))


class Family(NamedTuple):
    """Functions of the payloads of one type. Arrays are of JAX inside jit, of NumPy on the host.

    type: a NamedTuple of arrays, or of other payloads.
    codings(payload, code): the ways to code it that `code` may take, in jit or on the host.
    check(payload): raises WireError for arrays of the wrong type or shape, before encoding and after decoding.
    write(out, payload, coding): its record on the wire, without the byte that says its kind.
    readers: kind -> reader of such a record.
    pack(payload): its words, in jit.
    unpack(cursor, like): inverse of pack.
    entries(payload): how many entries of the vector it carries; None for all of them.
    limits(payload, lengths): for each array (lengths, what padding holds), or None for all of it; left out where all
        workers send equally much.
    entropy: whether even its "fixed" code is an entropy code, whose bits cost an instance of it to count.
    per_tile(payload): for each array how many of its numbers belong to a tile of `backend_gpu.TOGETHER` entries: tile
        after tile, in the order of the vector, so that the array is cut where the vector is; 0 for other arrays. None:
        for all of them.
    plain(payload): its values and their indices, None in place of these for a whole vector; None if it has no values as
        they are.
    highest_index(payload): of those that it holds, that of padding included; 0 for none. On the host.
    """

    type: type
    codings: Callable[[Any, str], Choices]
    check: Callable[[Any], None]
    write: Callable[[Writer, Any, Coding], None]
    readers: Mapping[int, Callable[[Reader], Any]]
    pack: Callable[[Any], Coded]
    unpack: Callable[[Cursor, Any], Any]
    entries: Callable[[Any], Array | int | None]
    limits: Callable[[Any, Any], list] = same_everywhere
    entropy: bool = False
    per_tile: Callable[[Any], list[int]] | None = None
    plain: Callable[[Any], tuple[Any, Any] | None] | None = None
    highest_index: Callable[[Any], int] | None = None


_families: dict[type, Family] = {}
_readers: dict[int, Family] = {}


def register(family: Family) -> None:
    """Makes a type of payloads known.

    Args:
        family: the type, and its functions for bits, words and bytes.

    Raises:
        ValueError: the type, or a kind of record that it reads, is registered already.
    """
    taken = set(family.readers) & {ARRAY, *_readers}
    if family.type in _families or taken:
        raise ValueError(f"register: {family.type.__name__} or its kinds {sorted(taken)} are registered already")
    _families[family.type] = family
    _readers.update(dict.fromkeys(family.readers, family))


def family_of(payload: Any, who: str) -> Family:
    """The family of a payload; TypeError, named after the caller `who`, for what is none."""
    family = _families.get(type(payload))
    if family is None:
        raise TypeError(f"{who}: unknown payload type {type(payload).__name__}")
    return family


# ------------------------------------------------------------------------------------------------
# Sizes, and the choice of the shortest code


def count_type(like: Array, most: int) -> Any:
    """The dtype that counts up to so many bits: in jit i32, or f32 beyond 2^31; on the host i64."""
    if is_host(like):
        return np.int64
    return jnp.int32 if most < 2**31 else jnp.float32


def shortest(codings: Sequence[Coding], code: str) -> tuple[Array | int, Array | int]:
    """The one place where a code is chosen: the shortest that `code` may take and that fits, else the first of all.

    Returns:
        Its place in `codings`, and its bits: traced if they depend on traced content.
    """
    places = [i for i, coding in enumerate(codings) if code in coding.codes]
    if not places:
        return 0, codings[0].bits
    if places == [0] or (len(places) == 1 and codings[places[0]].fits is True):
        return places[0], codings[places[0]].bits
    if all(isinstance(x, int | np.generic) for i in places for x in (codings[i].bits, codings[i].fits)):
        best = min((i for i in places if codings[i].fits), key=lambda i: int(codings[i].bits), default=0)
        return best, codings[best].bits
    best, bits = jnp.asarray(places[0]), jnp.asarray(codings[places[0]].bits)
    fits = jnp.asarray(codings[places[0]].fits)
    for i in places[1:]:
        other = jnp.asarray(codings[i].bits, bits.dtype)
        better = jnp.asarray(codings[i].fits) & (~fits | (other < bits))
        best, bits, fits = jnp.where(better, i, best), jnp.where(better, other, bits), fits | codings[i].fits
    none = jnp.asarray(codings[0].bits, bits.dtype)
    return jnp.where(fits, best, 0), jnp.where(fits, bits, none)


def lane_bytes(payload: Any) -> int:
    """Bytes that one worker contributes to the collective: sum of size * itemsize of the arrays.

    Args:
        payload: of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
        A Python int: it follows from the shapes.

    >>> from jaxcomp.payloads import Sparse
    >>> lane_bytes(Sparse(jnp.zeros(3), jnp.zeros(3, jnp.int32)))
    24
    """
    leaves = jax.tree.leaves(payload)
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        family_of(payload, "lane_bytes")  # says what it is
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def code_bits(payload: Any, *, code: str = "fixed") -> Array | int:
    """Bits of the code that `wire.encode` uses for this payload, without frame and byte padding.

    Which codings there are stands in the docstring of each file of `jaxcomp/payloads`.

    Args:
        payload: concrete or traced.
        code: as for `wire.encode`: "fixed", a fixed number of bits for each index and level; "elias", gaps and levels
            in Elias omega codes; "best", for each part of the payload the shortest code that there is.

    Returns:
        A Python int where it follows from the shapes; else a scalar, i32 when the largest
        possible result is below 2^31, f32 otherwise.

    Raises:
        ValueError: unknown code.
        TypeError: not a payload.

    >>> from jaxcomp.payloads import Sparse
    >>> print(code_bits(Sparse(jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1, 5, 9, 9]))))
    108
    """
    if code not in CODES:
        raise ValueError(f"code_bits: code must be one of {', '.join(CODES)}; got {code!r}")
    choices = family_of(payload, "code_bits").codings(payload, code)
    bits = shortest(choices.codings, code)[1]
    return bits if choices.rest is None else bits + choices.rest()


def message_bits(node: Any, code: str) -> Array | int:
    """Bits of an array, or of a payload in a code."""
    return 8 * lane_bytes(node) if hasattr(node, "dtype") else code_bits(node, code=code)


def cheap_bits(payload: Any) -> Array | int:
    """The bits of the "fixed" code where they are cheap to count; those of the lanes where that is an entropy code.

    Args:
        payload: of any registered type, in jit or on the host.
    """
    if family_of(payload, "cheap_bits").entropy:
        return 8 * lane_bytes(payload)
    return code_bits(payload)


# ------------------------------------------------------------------------------------------------
# Words in jit


def encode_message(payload: Any) -> Coded:
    """A payload as words; the capacity follows from its shapes.

    What no code can hold (indices that do not ascend, padding that is not zero) is reported, not coded.

    >>> from jaxcomp.payloads import Sparse
    >>> message = jax.jit(encode_message)(Sparse(jnp.array([1.0, 2.0, 0.0]), jnp.array([4, 5, 9])))
    >>> print(message.used, message.words.size)
    5 9
    """
    return family_of(payload, "encode_message").pack(payload)


def pack_message(node: Any) -> Coded:
    """An array as it is, or a payload, as words."""
    return whole_array(node) if hasattr(node, "dtype") else encode_message(node)


def decode_message(words: Array, like: Any) -> Any:
    """The payload of a message whose `fits` was true.

    Args:
        words: u32[w], the words in use or more; what is missing counts as zeros.
        like: payload of arrays or of `jax.ShapeDtypeStruct`.
    """
    room = jax.eval_shape(encode_message, like).words.size
    return unpack_message(Cursor(words, room), like)


def unpack_message(cursor: Cursor, like: Any) -> Any:
    """The array or payload that begins here."""
    return cursor.array(like) if hasattr(like, "dtype") else family_of(like, "decode_message").unpack(cursor, like)


# ------------------------------------------------------------------------------------------------
# Bytes on the host


def write_record(out: Writer, node: Any) -> None:
    """An array or a payload, in the code of the writer.

    Args:
        out: where the record is added.
        node: what is written, with NumPy arrays.

    Raises:
        TypeError: neither of them.
        WireError: a payload that no reader would take.
    """
    out.work += PART_BYTES
    if isinstance(node, np.ndarray):
        out.byte(ARRAY)
        write_array(out, node)
        return
    family = _families.get(type(node))
    if family is None:
        raise TypeError(f"wire.encode: {type(node).__name__} is not a payload")
    family.check(node)
    if out.depth == MAX_DEPTH:
        raise WireError("nesting", f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}")
    out.depth += 1
    codings = family.codings(node, out.code).codings
    coding = codings[int(shortest(codings, out.code)[0])]
    out.byte(coding.kind)
    family.write(out, node, coding)
    out.depth -= 1


def read_record(reader: Reader) -> Any:
    """The array or payload that begins here.

    Args:
        reader: of a message, at the first byte of the record.

    Raises:
        WireError: nothing that `write_record` could have written; says which field was wrong.
    """
    reader.part()
    kind = reader.byte("payload type")
    if kind == ARRAY:
        return read_array(reader, "array")
    family = _readers.get(kind)
    if family is None:
        raise WireError("payload type", kind, f"one of {ARRAY}, {', '.join(map(str, sorted(_readers)))}")
    if reader.depth == MAX_DEPTH:
        raise WireError("nesting", f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}")
    reader.depth += 1
    payload = family.readers[kind](reader)
    family.check(payload)
    reader.depth -= 1
    return payload


# ------------------------------------------------------------------------------------------------
# What an exchange may know


def num_entries(payload: Any) -> Array | int | None:
    """How many entries of the vector a payload carries, without padding; None for all of them.

    >>> from jaxcomp.payloads import Sparse
    >>> print(num_entries(Sparse(jnp.array([1.0, 2.0, 0.0]), jnp.array([4, 5, 9]))))
    2
    """
    return family_of(payload, "num_entries").entries(payload)


def counted(payload: Any, like: Any, code: str | None) -> tuple[int, Array | float, Array | float]:
    """Bytes of the lanes of a payload, bits of its code, and its entries; of a stack those of all rows.

    Numbers where they follow from the shapes, so that nothing is computed in the step; else f32[].

    Args:
        like: what was compressed, or its shape.
        code: as for `code_bits`; None: `cheap_bits`.
    """

    def one(part):
        family = family_of(part, "counted")
        if code is None and family.entropy:
            bits, entries = cheap_bits(part), family.entries(part)
        else:
            choices = family.codings(part, code or "fixed")
            bits = shortest(choices.codings, code or "fixed")[1]
            bits = bits if choices.rest is None else bits + choices.rest()
            entries = family.entries(part) if choices.entries is None else choices.entries
        found = (bits, like.size // max(rows, 1) if entries is None else entries)
        return [x.astype(jnp.float32) if isinstance(x, jax.Array) else float(x) for x in found]

    stacked = len(like.shape) > 1
    rows = like.shape[0] if stacked else 1
    bits, entries = jax.tree.map(jnp.sum, jax.vmap(one)(payload)) if stacked else one(payload)
    return lane_bytes(payload), bits, entries


def plain_entries(payload: Any) -> tuple[Any, Any] | None:
    """Values and indices of a payload that holds entries as they are; None for anything else.

    Args:
        payload: of which nothing is known. Its arrays are not checked.

    Returns:
        values, and the index of each; None in place of the indices where the values are a whole vector.

    >>> from jaxcomp.payloads import Sparse
    >>> plain_entries(Sparse(np.float32([5]), np.int32([9])))
    (array([5.], dtype=float32), array([9], dtype=int32))
    """
    family = _families.get(type(payload))
    return None if family is None or family.plain is None else family.plain(payload)


def highest_indices(payload: Any) -> list[int]:
    """The highest index of each part of a payload that holds indices, that of padding, the length, included.

    Args:
        payload: with NumPy arrays, or several in a tree.

    >>> from jaxcomp.payloads import Sparse
    >>> highest_indices(Dense(Sparse(np.float32([5, 0]), np.int32([7, 9]))))
    [9]
    """
    highest_of = lambda node: getattr(_families.get(type(node)), "highest_index", None)
    parts = jax.tree.leaves(payload, is_leaf=lambda node: highest_of(node) is not None)
    return [highest(part) for part in parts if (highest := highest_of(part)) is not None]


def per_tile(payload: Any) -> list[int]:
    """For each array how many of its numbers belong to a tile of entries (`Family.per_tile`); 0 if it cannot be cut.

    Args:
        payload: of arrays or of their shapes.
    """
    family = _families.get(type(payload))
    none = [0] * len(jax.tree.leaves(payload))
    return none if family is None or family.per_tile is None else family.per_tile(payload)


def limits(payload: Any, lengths: Any) -> list:
    """How much of each array of a payload each worker needs to send.

    Args:
        payload: of one worker, or a tuple of payloads.
        lengths: `base.Lengths` in the place of each payload whose length depends on the worker, None elsewhere.

    Returns:
        For each array (lengths, what padding holds), or None for all of it.
    """
    if type(payload) is tuple and type(lengths) is tuple:
        return [limit for pair in zip(payload, lengths, strict=True) for limit in limits(*pair)]
    family = _families.get(type(payload))
    return same_everywhere(payload, lengths) if family is None else family.limits(payload, lengths)


# ------------------------------------------------------------------------------------------------
# Plain numbers, with a scale or without: bits, words and bytes are those of the arrays


def _dense_codings(payload: Dense, code: str) -> Choices:
    values = payload.values
    if hasattr(values, "dtype"):
        return Choices([Coding(DENSE, (code,), 8 * values.size * values.dtype.itemsize)], entries=values.size)
    return Choices([Coding(DENSE, (code,), 0)], lambda: code_bits(values, code=code))


def _dense_entries(payload: Dense) -> Any:
    return payload.values.size if hasattr(payload.values, "dtype") else num_entries(payload.values)


def _dense_per_tile(payload: Dense) -> list[int]:
    return [TOGETHER] if hasattr(payload.values, "dtype") else per_tile(payload.values)


def _dense_plain(payload: Dense) -> tuple[Any, None] | None:
    return (payload.values, None) if hasattr(payload.values, "dtype") else None


def _check_scaled(payload: Scaled) -> None:
    for name, array in payload._asdict().items():
        if not isinstance(array, np.ndarray) or not is_float(array.dtype):
            raise WireError(f"Scaled.{name} dtype", getattr(array, "dtype", type(array).__name__), "a float")
    if payload.scale.ndim > 1:
        raise WireError("Scaled.scale ndim", payload.scale.ndim, "0 or 1")


def _write_scaled(out: Writer, payload: Scaled, coding: Coding) -> None:
    write_array(out, payload.values)
    write_array(out, payload.scale)


def _read_scaled(reader: Reader) -> Scaled:
    return Scaled(read_array(reader, "Scaled.values"), read_array(reader, "Scaled.scale"))


register(
    Family(
        type=Dense,
        codings=_dense_codings,
        check=lambda payload: None,
        write=lambda out, payload, coding: write_record(out, payload.values),
        readers={DENSE: lambda reader: Dense(read_record(reader))},
        pack=lambda payload: pack_message(payload.values),
        unpack=lambda cursor, like: Dense(unpack_message(cursor, like.values)),
        entries=_dense_entries,
        per_tile=_dense_per_tile,
        plain=_dense_plain,
    )
)
register(
    Family(
        type=Scaled,
        codings=lambda payload, code: Choices([Coding(SCALED, (code,), 8 * lane_bytes(payload))]),
        check=_check_scaled,
        write=_write_scaled,
        readers={SCALED: _read_scaled},
        pack=uncoded,
        unpack=uncoded_like,
        entries=lambda payload: payload.values.size,
        per_tile=lambda payload: [TOGETHER, 0],
    )
)
