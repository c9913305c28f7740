"""Bytes per collective, read from the compiled program: what the machine will really send.

A payload says what should cross (`lane_bytes`); the compiled program says what does. XLA may
widen a narrow float, gather a whole gradient that was sharded, or merge collectives; only its
output is proof. Bytes sent per device (their mean, where devices differ) follow the usual models,
for operands of b bytes at each of g devices:

    all-gather               (g - 1) b            ring
    all-reduce               2 (g - 1) / g b      ring (reduce-scatter, then all-gather)
    reduce-scatter, all-to-all   (g - 1) / g b    ring, pairwise
    collective-permute       b pairs / devices    the mean: only the source of a pair sends
    collective-broadcast     b

Between slices of TPUs the same models hold, with b as it crosses: with the padding of the layout. What
communicates in a way that is not understood has rows, too, of kind "unknown: ..." (the rule: `jaxcomp.transfers`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxcomp.program import Module, Row, total_of

__all__ = ["Ledger", "Row", "aligned", "is_compiled", "ledger", "read"]


class Ledger(NamedTuple):
    """rows: one per operand of each collective; total_bytes: sent per device in one call.

    Of the arms of a conditional the most expensive one is counted. A loop that runs nobody knows how often is counted
    once: the total is then a lower bound (`is_bound`), and is printed as "at least". What communicates in a way
    that the ledger does not know is listed, and counted with what it contributes: `unknown_bytes` of the total.
    """

    rows: tuple[Row, ...]
    total_bytes: float

    @property
    def is_bound(self) -> bool:
        """Whether the total is only a lower bound: something crosses in a loop of unknown length."""
        return any(row.times is None and row.sent_bytes > 0 for row in self.rows)

    @property
    def unknown(self) -> tuple[Row, ...]:
        """Rows of what communicates in a way that the ledger does not know; empty for most programs."""
        return tuple(row for row in self.rows if row.is_unknown)

    @property
    def unknown_bytes(self) -> float:
        """How many of `total_bytes` are those of unknown rows: what a device contributes to them."""
        return total_of(self.unknown)

    @property
    def slice_bytes(self) -> float:
        """Bytes that all chips of a slice of TPUs send to other slices in one call; the mean over the slices."""
        return float(sum(row.slice_bytes for row in self.rows if row.counted))

    def by_axes(self, mesh: Any) -> dict[tuple[str, ...], float]:
        """Bytes sent per device over each combination of mesh axes; together they are `total_bytes`.

        What is sent nobody knows where is said of an axis ("unknown",).

        Args:
            mesh: as for `Row.axes`.

        >>> import jax, jax.numpy as jnp, jaxcomp as jc
        >>> jc.ledger(lambda x: x + 1, jnp.zeros(3)).by_axes(jax.sharding.AbstractMesh((1,), ("data",)))
        {}
        """
        sent: dict[tuple[str, ...], float] = {}
        for row in self.rows:
            if row.counted:
                axes = ("unknown",) if row.is_unknown and not row.groups else row.axes(mesh)
                sent[axes] = sent.get(axes, 0.0) + row.sent_bytes
        return sent

    def __str__(self) -> str:
        columns: list[tuple[str, bool, Callable[[Row], str]]] = [  # name, whether it is text, cell
            ("op", True, lambda r: r.op),
            ("dtype", True, lambda r: r.dtype),
            ("shape", False, lambda r: "x".join(map(str, r.shape)) or "scalar"),
            ("group", False, lambda r: str(r.group_size)),
            ("operand B", False, lambda r: f"{r.operand_bytes:,}"),
            ("times", False, lambda r: "?" if r.times is None else str(r.times)),
            ("sent B", False, lambda r: f"{r.sent_bytes:,.0f}"),
            ("branch", True, lambda r: r.branch),
        ]
        if any(row.physical_bytes > row.operand_bytes for row in self.rows):
            columns.insert(5, ("physical B", False, lambda r: f"{r.physical_bytes:,}"))
        if any(row.slices for row in self.rows):
            columns.insert(-1, ("a slice B", False, lambda r: f"{r.slice_bytes:,.0f}"))
        if any(row.beside is not None for row in self.rows):
            columns.insert(-1, ("beside", False, lambda r: "" if r.beside is None else str(r.beside)))
        text = aligned([(left, [name, *map(cell, self.rows)]) for name, left, cell in columns])
        least = "at least " if self.is_bound else ""
        total = [f"total: {least}{self.total_bytes:,.0f} bytes sent per device"]
        if any(row.slices for row in self.rows):
            total.append(f"a slice sends {self.slice_bytes:,.0f} bytes to others")
        if self.unknown:
            rows = "1 row" if len(self.unknown) == 1 else f"{len(self.unknown)} rows"
            total.append(f"unknown: {rows} with {self.unknown_bytes:,.0f} bytes of the total")
        return "\n".join([text, *total])


def aligned(columns: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """Columns beside each other, as lines of text. Each says whether it holds words, which begin at its left edge.

    >>> print(aligned([(True, ["op", "sum"]), (False, ["bytes", "8"])]))
    op   bytes
    sum      8
    """
    texts = []
    for holds_words, cells in columns:
        width = max(map(len, cells))
        texts.append([cell.ljust(width) if holds_words else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*texts, strict=True))


def ledger(fn: Any, *args: Any, **kwargs: Any) -> Ledger:
    """Compiles a function for these arguments and lists its collectives.

    Args:
        fn: a function (jitted here), a jitted function, or something compiled already
            (`jax.jit(f).lower(...).compile()`), which then takes no arguments.
        *args, **kwargs: as for the function; `jax.ShapeDtypeStruct`s will do.

    Returns:
        `Ledger` of one device. Print it for a table; `by_axes(mesh)` tells what crosses which axes of a mesh.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> jc.ledger(lambda x: x + 1, jnp.zeros(3)).total_bytes
    0.0
    """
    if is_compiled(fn) and not (args or kwargs):
        compiled = fn
    elif not callable(fn):
        raise TypeError(f"ledger: call it as ledger(step, *arguments), with the function itself; got {type(fn)}")
    else:
        compiled = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs).compile()
    return read(str(compiled.as_text()), devices_of(compiled))


def is_compiled(fn: Any) -> bool:
    """Whether it is a program that was compiled, `jax.jit(f).lower(...).compile()`."""
    return hasattr(fn, "as_text") and hasattr(fn, "runtime_executable")


def devices_of(compiled: Any) -> Sequence[Any]:
    """Devices that a program was compiled for, in its order; none where its shardings do not say."""
    shardings = [getattr(compiled, name, ()) for name in ("input_shardings", "output_shardings")]
    for sharding in jax.tree.leaves(shardings):
        mesh = getattr(sharding, "mesh", None)
        devices = (
            mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else getattr(sharding, "_device_assignment", ())
        )
        if len(devices) > 1:
            return tuple(devices)
    return ()


def read(text: str, devices: Sequence[Any] = ()) -> Ledger:
    """The ledger of a compiled module in HLO text form.

    Args:
        text: of the module.
        devices: that it was compiled for, in its order. It matters for several slices: without it, slices are taken to
            follow one another in the mesh.
    """
    module = Module(text, devices)
    rows = module.walk(module.entry)
    return Ledger(tuple(rows), total_of(rows))
