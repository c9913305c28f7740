"""A law that does not hold, in a sentence, and what all laws compare with."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["LawBroken", "all_hold", "broken", "equal", "same_types"]


class LawBroken(AssertionError):
    """A compressor or an algorithm breaks a law. laws: their names."""

    def __init__(self, message: str, laws: tuple[str, ...] = ()):
        super().__init__(message)
        self.laws = laws


def broken(text: str) -> NoReturn:
    """Raises `LawBroken`."""
    raise LawBroken(text)


def all_hold(
    name: str, table: dict[str, Any], chosen: Iterable[str] | None, run: Callable[[str], None]
) -> tuple[str, ...]:
    """The names of the laws that were tried; `LawBroken` with a sentence for each that does not hold."""
    names = tuple(table if chosen is None else chosen)
    unknown = [law for law in names if law not in table]
    if unknown:
        raise ValueError(f"testing: laws must be of {', '.join(table)}; got {unknown[0]!r}")
    found = {}
    for law in names:
        try:
            run(law)
        except LawBroken as error:
            found[law] = str(error)
        except Exception as error:  # what it raises itself
            found[law] = f"it raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found:
        lines = "".join(f"\n  {law}: {text}" for law, text in found.items())
        raise LawBroken(f"{name} breaks {len(found)} of {len(names)} laws{lines}", tuple(found))
    return names


def _close(got: Any, want: Any, rtol: float, atol: float) -> str | None:
    """Says where and how far two arrays differ; None where they do not."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    bad = ~np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if not bad.any():
        return None
    i = np.unravel_index(np.argmax(np.where(bad, np.abs(got - want), -1)), got.shape) if got.ndim else ()
    furthest = f"{got[i]:.9g} instead of {want[i]:.9g} at {list(map(int, i))}"
    return f"{bad.sum()} of {got.size} entries differ; the furthest is {furthest}"


def equal(what: str, got: Any, want: Any, rtol: float = 0, atol: float = 0) -> None:
    """Holds two trees to the same structure and numbers, whole numbers exactly."""
    leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        broken(f"{what}; structures are {jax.tree.structure(got)} and {jax.tree.structure(want)}")
    for a, b in zip(*leaves, strict=True):
        exact = not jnp.issubdtype(jnp.result_type(a), jnp.floating)
        if found := _close(a, b, *((0, 0) if exact else (rtol, atol))):
            broken(f"{what}; {found}")


def same_types(what: str, before: Any, after: Any) -> None:
    """Holds a state after a round to the types of the one before."""
    described = lambda state: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}{' weak' * a.weak_type}", state)
    if described(before) != described(after):
        broken(
            f"the state of {what} has the same structure, shapes and dtypes after a round, or it is traced again; "
            f"before {described(before)}, after {described(after)}"
        )
