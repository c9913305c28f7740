"""The figures in the table of compressors of docs/reference/compressors.md, computed from the code.

The page has a row for each compressor: the call, what it does, and its bounds omega and alpha as formulas. What stands
behind the formulas, the payload, its bits and the route follow from the call. `python -m experiments.tables` prints the
table with these figures; with --write it puts them into the page. A test compares the two.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from jaxcomp.base import Compressor

__all__ = ["PAGE", "computed"]

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "compressors.md"
D = 2**20  # entries


def message(compressor: Compressor, x: jax.Array) -> tuple[Any, jax.Array]:
    """The payload, and the bits of its default code."""
    _, payload = jc.roundtrip(compressor, x, key=jax.random.key(1))
    return payload, jnp.asarray(jc.code_bits(payload), jnp.float32)


def bound(cell: str, value: Any) -> str:
    """A formula and what it is at D entries. cell: "formula = figure", or the figure alone."""
    if value is None:
        return "-"
    formula, _, _ = cell.rpartition(" = ")
    return f"{formula} = {value(D):.3g}".removeprefix(" = ")


def computed(row: str) -> str:
    """A row of the table with its figures from the code."""
    call, what, omega, alpha, *_ = [cell.strip() for cell in row.strip("|").split("|")]
    compressor = eval(call.strip("`"), {"jc": jc, "S": jc.smoothness.diagonal_of(1.0 / np.arange(1, D + 1))})
    spec = compressor.spec
    x = jnp.asarray(jax.random.laplace(jax.random.key(0), (D,)))
    payload, code_bits = jax.jit(message, static_argnums=0)(compressor, x)
    bits = (f"{8 * jc.lane_bytes(payload) / D:.3g}", f"{float(code_bits) / D:.3g}")
    route = "sum" if spec.linear else "gather" if compressor.lengths is None else "fastest"
    bounds = (bound(omega, spec.omega), bound(alpha, spec.alpha))
    return f"| {' | '.join((call, what, *bounds, type(payload).__name__, *bits, route))} |"


def main(arguments: list[str]) -> None:
    lines = [computed(line) if line.startswith("| `jc.") else line for line in PAGE.read_text().splitlines()]
    if arguments == ["--write"]:
        PAGE.write_text("\n".join(lines) + "\n")
    else:
        print("\n".join(line for line in lines if line.startswith("|")))


if __name__ == "__main__":
    main(sys.argv[1:])
