"""A law that does not hold, in a sentence, and what all laws compare with and run on."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcomp.state.specs import init_state

__all__ = [
    "AXIS",
    "NOT_TRIED",
    "ROUNDING",
    "LawBroken",
    "all_hold",
    "broken",
    "differ",
    "equal",
    "gradients",
    "is_rounding",
    "on_devices",
    "same_bits",
    "same_types",
    "simulated",
]

AXIS = "workers"
NOT_TRIED = "not tried"  # what a law returns that has nothing to say here
ROUNDING = (
    "Compilers may contract a product and a sum, a + b * c, into one rounding, in one program and not in another. Make "
    "the product exact (b a power of two, or of few bits, as one in bfloat16 is), or add first: (a + c) * b"
)


class LawBroken(AssertionError):
    """A compressor or an algorithm breaks a law. laws: their names."""

    def __init__(self, message: str, laws: tuple[str, ...] = ()):
        super().__init__(message)
        self.laws = laws


def broken(text: str) -> NoReturn:
    """Raises `LawBroken`."""
    raise LawBroken(text)


def all_hold(
    name: str,
    table: dict[str, Any],
    chosen: Iterable[str] | None,
    run: Callable[[str], str | None],
    before: Iterable[str] = (),
) -> tuple[str, ...]:
    """The names of the laws that were tried; `LawBroken` with a sentence for those that do not hold.

    run: tries the law of a name; `NOT_TRIED` where it has nothing to say. before: laws without which the others say
    nothing: they are tried first, and where one of them is broken, no other is.
    """
    names = tuple(table if chosen is None else chosen)
    unknown = [law for law in names if law not in table]
    if unknown:
        raise ValueError(f"testing: laws must be of {', '.join(table)}; got {unknown[0]!r}")
    found, tried, end = {}, [], ""
    for law in sorted(names, key=lambda law: law not in before):
        try:
            if run(law) != NOT_TRIED:
                tried.append(law)
            continue
        except LawBroken as error:
            found[law] = str(error)
            end = f"\n  The other laws need {law!r}, and were not tried" if law in before and len(names) > 1 else ""
        except Exception as error:  # what it raises itself
            found[law] = f"it raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        tried.append(law)
        if end:
            break
    if found:
        said = {text: [law for law in found if found[law] == text] for text in found.values()}
        lines = "".join(f"\n  {', '.join(laws)}: {text}" for text, laws in said.items())
        raise LawBroken(f"{name} breaks {len(found)} of {len(tried)} laws{lines}{end}", tuple(found))
    return tuple(law for law in names if law in tried)


def differ(got: Any, want: Any, rtol: float = 0, atol: float = 0) -> str | None:
    """Says how two trees differ, whole numbers exactly; None where they do not."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structures are {jax.tree.structure(got)} and {jax.tree.structure(want)}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        exact = not jnp.issubdtype(jnp.result_type(a), jnp.floating)
        if found := _close(a, b, *((0, 0) if exact else (rtol, atol))):
            return found
    return None


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
    if found := differ(got, want, rtol, atol):
        broken(f"{what}; {found}")


def same_bits(what: str, got: Any, want: Any) -> None:
    """Holds two trees to the same structure, shapes, dtypes and bits."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        broken(f"{what}; {differ(got, want)}")
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b, where = np.asarray(a), np.asarray(b), jax.tree_util.keystr(path)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            broken(f"{what}; {where} comes back as {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}")
        if a.tobytes() != b.tobytes():
            found = _close(a, b, 0, 0) or "the numbers are equal, and their bits differ: signs of zeros, or NaN"
            broken(f"{what}; in {where} {found}")


def is_rounding(got: Any, want: Any) -> bool:
    """Whether two trees differ as a rounding makes them differ: all entries by little, or few at all."""

    def little(a: Any, b: Any) -> bool:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        few = np.sum(a != b) <= 0.05 * a.size
        return bool(few or np.abs(a - b).max() <= 1e-5 * np.abs(b).max())

    return all(map(little, jax.tree.leaves(got), jax.tree.leaves(want)))


def same_types(what: str, before: Any, after: Any) -> None:
    """Holds a state after a round to the types of the one before."""
    described = lambda state: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}{' weak' * a.weak_type}", state)
    if described(before) != described(after):
        broken(
            f"the state of {what} has the same structure, shapes and dtypes after a round, or it is traced again; "
            f"before {described(before)}, after {described(after)}"
        )


def gradients(params: Any, workers: int, seed: int) -> Any:
    """A row for each worker, which differ."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((workers, *p.shape)), p.dtype), params)


def simulated(tx: Any, params: Any, workers: int) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any]:
    """A round of a transformation under vmap, (grads, state) -> direction and state; and its first state."""
    state, axes = init_state(tx, params, workers, AXIS)
    return jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)), state


def on_devices(tx: Any, params: Any, workers: int) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any]:
    """The same among as many devices under `shard_map`."""
    mesh = jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])
    state, specs = init_state(tx, params, mesh, AXIS)
    one = lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs))), state
