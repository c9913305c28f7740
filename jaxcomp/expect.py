"""Contracts on bytes: what a compiled program may send, as a test.

A promise is a sentence about the ledger of a program: "<= 1 MB" over the axis "data", "none" by all-gathers,
"unchanged" beside another program. It needs no compressor and no run: whatever JAX compiles, for whatever devices, has
a ledger.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxcomp.ledger import Ledger, is_compiled, ledger
from jaxcomp.program import SENT, UNKNOWN, Row, total_of

__all__ = ["expect"]

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    "==": lambda sent, promised: round(sent) == round(promised),
    ">=": operator.ge,
    ">": operator.gt,
}
DTYPES = re.compile(r"pred|(?:[suf]|bf|c)\d+|f\d+e\d+m\d+\w*|f8\w*")
SHOWN = 5  # collectives in a message


class Limit(NamedTuple):
    """A promise on an amount of bytes. amount: None for what the other program sends, `factor` times."""

    text: str
    compare: str
    amount: float | None
    factor: float = 1.0

    @property
    def is_upper(self) -> bool:
        return self.compare in ("<=", "<", "==")


ANY = Limit("any", "any", None)


def expect(step: Any, *args: Any, mesh: Any = None, against: Any = None, **promises: str | Mapping[str, str]) -> Ledger:
    """Raises AssertionError unless a program sends what was promised, and returns its ledger.

    The bytes are those that a device sends in one call, as `ledger` counts them. What is sent in a way that the ledger
    does not know breaks every promise, and so does what is sent nobody knows how often, where it counts.

    Args:
        step: a function (jitted here), a jitted function, a compiled program, or a `Ledger`.
        *args: of the function; `jax.ShapeDtypeStruct`s with shardings will do. Bind keyword arguments before
            (`functools.partial`).
        mesh: that the program is for; None: that of the arguments.
        against: another program, for "unchanged" and multiples: a function of the same arguments, a compiled program,
            or a `Ledger`.
        **promises: for each of these names a limit:

            an axis of the mesh    all that crosses it, alone or together with other axes
            a kind                 all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, ...
            a dtype                f32, bf16, u8, ...: what crosses as such
            total                  everything
            rest                   what crosses none of the axes that are named
            unknown                what communicates in a way that the ledger does not know; "none" unless it is given

            A limit is "<= 1 MB", with one of <=, <, ==, >=, > and B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB,
            TiB; "none"; "any"; "unchanged"; "<= 0.5 x" of what `against` sends. For an axis it may be a mapping from
            kinds, dtypes or "total" to limits.

    Returns:
        `Ledger` of the program.

    Raises:
        AssertionError: a promise is broken. It names the collectives, the lines that they come from, and cures.
        ValueError: a name or a limit that is none; an axis without a mesh; a comparison without `against`.
        TypeError: a limit is no string.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> jc.expect(lambda x: x + 1, jnp.zeros(3), mesh=mesh, data="<= 1 kB", all_gather="none").total_bytes
    0.0
    """
    __tracebackhide__ = True
    book = _book(step, args)
    other = None if against is None else _book(against, args)
    mesh = mesh if mesh is not None else _mesh_of(args, step)
    terms = _terms(promises, mesh)
    compared = [term for term in terms if term.limit.amount is None and term.limit is not ANY]
    if compared and other is None:
        raise ValueError(
            f"expect: {compared[0].name}={compared[0].limit.text!r} needs against=, the program to compare with"
        )
    broken = [text for term in terms if (text := _broken(term, book, other, mesh, args))]
    if broken:
        raise AssertionError("\n\n".join(broken))
    return book


# ------------------------------------------------------------------------------------------------
# Promises


class Term(NamedTuple):
    """One promise. name: as it was given. holds(row): whether a row counts."""

    name: str
    limit: Limit
    holds: Callable[[Row], bool]


def _terms(promises: Mapping[str, Any], mesh: Any) -> list[Term]:
    axes = tuple(mesh.shape) if mesh is not None else ()
    named = [name for name in promises if name in axes]
    unknown = promises.get("unknown", "none")
    terms = [Term("unknown", parse("unknown", unknown), lambda row: row.is_unknown)]
    for name, given in promises.items():
        if name in axes:
            crosses = lambda row, name=name: name in row.axes(mesh)
            parts = given if isinstance(given, Mapping) else {"total": given}
            for part, limit in parts.items():
                inside = _selected(f"{name}[{part!r}]", part, mesh)
                both = lambda row, crosses=crosses, inside=inside: crosses(row) and inside(row)
                terms.append(Term(name if part == "total" else f"{name}[{part!r}]", parse(name, limit), both))
        elif name == "rest":
            left = lambda row: bool(row.groups or not row.is_unknown) and not set(row.axes(mesh)) & set(named)
            if mesh is None:
                raise ValueError("expect: rest= needs mesh=, or arguments that lie on one")
            terms.append(Term(name, parse(name, given), left))
        elif name != "unknown":
            terms.append(Term(name, parse(name, given), _selected(name, name, mesh)))
    return terms


def _selected(name: str, part: str, mesh: Any) -> Callable[[Row], bool]:
    """The rows of a kind, of a dtype, or all."""
    kind = part.replace("_", "-")
    if part == "total":
        return lambda row: True
    if kind in SENT:
        return lambda row: row.op.removeprefix(UNKNOWN).split(" ")[0] == kind
    if DTYPES.fullmatch(part):
        return lambda row: row.dtype == part
    axes = (
        f"the axes of the mesh ({', '.join(mesh.shape)})" if mesh is not None else "axes (there is no mesh: give mesh=)"
    )
    kinds = ", ".join(each.replace("-", "_") for each in SENT)
    raise ValueError(
        f"expect: {name} is none of {axes}, kinds ({kinds}), dtypes (f32, bf16, u8, ...), total, rest, unknown"
    )


def parse(name: str, text: Any) -> Limit:
    """The limit that a text says.

    >>> parse("data", "<= 1.5 kB")
    Limit(text='<= 1.5 kB', compare='<=', amount=1500.0, factor=1.0)
    """
    if not isinstance(text, str):
        raise TypeError(f'expect: {name} must be a text like "<= 1 MB", "none" or "unchanged"; got {text!r}')
    words = {"none": Limit(text, "==", 0.0), "any": ANY, "unchanged": Limit(text, "==", None)}
    if text in words:
        return words[text]
    found = re.fullmatch(r"(<=|<|==|>=|>) *(\d+(?:\.\d+)?) *([A-Za-z]+)", text.strip())
    if found and found[3] == "x":
        return Limit(text, found[1], None, float(found[2]))
    if found and found[3] in UNITS:
        return Limit(text, found[1], float(found[2]) * UNITS[found[3]])
    near = [unit for unit in UNITS if found and unit.lower() == found[3].lower()]
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"expect: {name} must be <=, <, ==, >= or >, a number and one of {', '.join(UNITS)} or x; or "
        f'"none", "any", "unchanged"; got {text!r}{hint}'
    )


# ------------------------------------------------------------------------------------------------
# Programs


def _book(step: Any, args: Sequence[Any]) -> Ledger:
    if isinstance(step, Ledger):
        return step
    return ledger(step, *(() if is_compiled(step) else args))


def _mesh_of(args: Any, step: Any) -> Any:
    """The mesh on which arguments lie, or those of a compiled program, or the one that is set."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    shardings += jax.tree.leaves([getattr(step, name, ()) for name in ("input_shardings", "output_shardings")])
    found = [each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    ambient = jax.sharding.get_abstract_mesh()
    return max(found, key=lambda mesh: mesh.size, default=ambient if ambient.shape else None)


# ------------------------------------------------------------------------------------------------
# What is said of a broken promise


def _broken(term: Term, book: Ledger, other: Ledger | None, mesh: Any, args: Any) -> str | None:
    """Why a promise is broken; None where it is kept."""
    name, limit, _ = term
    if limit is ANY:
        return None
    counted = lambda book: [row for row in book.rows if row.counted and term.holds(row)]
    rows, before = counted(book), [] if other is None else counted(other)
    sent = total_of(rows)
    most = limit.amount if limit.amount is not None else limit.factor * total_of(before)
    # What crosses with unknown bytes, or unknown how often, keeps no upper limit.
    endless = limit.is_upper and limit.amount is not None and any(row.times is None and row.sent_bytes for row in rows)
    silent = name == "unknown" and limit.text == "none" and bool(rows)
    if COMPARED[limit.compare](sent, most) and not endless and not silent:
        return None
    least = "at least " if any(row.times is None for row in rows) else ""
    beside = "" if limit.amount is not None else f", beside {_amount(most)}"
    lines = [f"expect: {name} was promised {limit.text!r}, and {least}{_amount(sent)} are sent{beside}"]
    if silent:
        lines = [f"expect: the program communicates in {len(rows)} ways that the ledger does not know"]
    new = _new(rows, before) if limit.amount is None else rows
    for row in sorted(new, key=lambda row: -row.sent_bytes)[:SHOWN]:
        lines += [f"  {_said(row, mesh)}", *(f"      {line}" for line in _more(row, args))]
    if len(new) > SHOWN:
        lines.append(f"  and {len(new) - SHOWN} more")
    if limit.is_upper and len(rows) > 1 and not endless:
        without = [row for row in new if COMPARED[limit.compare](round(sent - row.sent_bytes), round(most))]
        if without:
            lines.append(f"  Without {_short(without[0])} the promise would be kept.")
    if not rows and not limit.is_upper:
        lines.append("  Nothing like it is in the program: the compiler may have found it to be of no use.")
    return "\n".join(lines)


def _new(rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """Rows that the other program does not have."""
    like = lambda row: (row.op, row.dtype, row.shape, row.sent_bytes)
    left = list(map(like, before))
    found = []
    for row in rows:
        if like(row) in left:
            left.remove(like(row))
        else:
            found.append(row)
    return found


def _amount(sent: float) -> str:
    if sent < 10**4:
        return f"{sent:,.0f} B"
    unit = next(unit for unit in ("TB", "GB", "MB", "kB") if sent >= UNITS[unit])
    return f"{sent / UNITS[unit]:.4g} {unit}"


def _short(row: Row) -> str:
    return f"{row.op} {row.dtype}[{','.join(map(str, row.shape))}]"


def _said(row: Row, mesh: Any) -> str:
    axes = row.axes(mesh) if mesh is not None and row.groups else ()
    over = f" over {', '.join(axes)}" if axes else ""
    often = "" if row.times == 1 else " in a loop of unknown length" if row.times is None else f", {row.times} times"
    return f"{_short(row)}{over}{often}: {_amount(row.sent_bytes)}"


def _more(row: Row, args: Any) -> list[str]:
    """The line that a collective comes from, and what would make it go."""
    lines = [f"at {row.source}"] if row.source else []
    if row.is_unknown:
        return [*lines, 'Take it out of the step, or promise it: unknown="<= 4 B", unknown="any".']
    size, kind = math.prod(row.shape), row.op.split(" ")[0]
    whole = _argument(args, size * (row.group_size if kind == "all-gather" else 1))
    if kind == "all-gather" and whole:
        lines.append(
            f"This brings the whole of {whole} to each device. Keep what uses it cut "
            "(jax.lax.with_sharding_constraint, out_shardings), or gather it in fewer bits."
        )
    elif kind in ("all-reduce", "reduce-scatter") and whole:
        lines.append(
            f"It has the size of {whole}: the compiler adds up its gradient. To compress it, or to add up once after "
            'several, differentiate with respect to jc.per_worker(...), or to parameters typed reduced={"axis"}.'
        )
    if row.times is None or row.times > 1:
        lines.append("It is in a loop: add up inside, and exchange once behind it.")
    if row.dtype in ("f32", "f64") and kind in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        lines.append(
            f"It crosses as {row.dtype}. A cast before it may have been widened, or moved behind it: jaxcomp's routes "
            "move narrow floats as words (jax.lax.bitcast_convert_type), which no compiler widens."
        )
    return lines


def _argument(args: Any, size: int) -> str:
    """Name of the largest argument with so many entries, whole or at one device; "" for none, or for few entries."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        shape = getattr(leaf, "shape", ())
        here = leaf.sharding.shard_shape(shape) if hasattr(getattr(leaf, "sharding", None), "shard_shape") else shape
        if size > 1 and size in (math.prod(shape), math.prod(here)):
            return f"args{jax.tree_util.keystr(path)} ({leaf.dtype}{list(shape)})"
    return ""
