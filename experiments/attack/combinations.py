"""Random compressors, algorithms, routes and placements: what a route gives against what gathering gives.

Routes that bring all payloads to all workers (concat, ring, ladder) give the bits of gather, in directions and in all
memories. A sum on the way has an order of its own: equal but for rounding. Two shots compress once more: finite, and
equal on all workers. Whatever a route or a theory does not allow has to be refused by a ValueError or TypeError.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.attack import HELD, REFUSED, Attack
from experiments.attack.draw import compressor_text, made, vector
from jaxcomp.exchange.state import means_in

__all__ = ["ready"]

ROUNDS = 2
SAME_BITS = ("concat", "ring", "ladder")
PLACES = ("vmap", "mesh", "sharded", "hierarchy")
SHAPES = {
    "one large": {"w": (64, 40)},
    "mixed": {"b": (5,), "v": (1100,), "w": (40, 30)},
    "small": {"b": (5,), "c": (3, 4)},
    "odd": {"a": (1,), "e": (0, 2), "w": (8, 257)},
}


class Drawn(NamedTuple):
    """A case. algorithm: as text.  workers: of its axis."""

    algorithm: str
    via: str
    place: str
    shapes: str
    weighted: bool
    seed: int

    def __str__(self) -> str:
        weights = ", weighted" if self.weighted else ""
        return f'{self.algorithm}, via "{self.via}", {self.place}, {self.shapes}{weights}'


def drawn(rng: np.random.Generator) -> Drawn:
    inner = compressor_text(rng)
    if rng.random() < 0.2:
        inner = f"jc.{rng.choice(['flat', 'per_leaf'])}({inner})"
    if rng.random() < 0.25:
        inner = f"jc.dagc({[int(x) for x in rng.integers(0, 9, 2)]}, {rng.uniform(0.02, 0.3):.2g})"
    algorithm = {
        "direct": f"jc.direct({inner})",
        "error_feedback": f"jc.error_feedback({inner}, decay={rng.choice([1.0, 0.9])})",
        "diana": f"jc.diana({inner})",
        "momentum": f"jc.momentum_correction({inner})",
        "power_sgd": "jc.power_sgd(2)",
    }
    name = str(rng.choice(list(algorithm), p=[0.25, 0.4, 0.15, 0.1, 0.1]))
    via = str(rng.choice(["concat", "ring", "ladder", "sum", "auto", "two_shot"]))
    place = str(rng.choice(PLACES, p=[0.4, 0.2, 0.2, 0.2]))
    weighted = bool(place != "hierarchy" and rng.random() < 0.2)
    return Drawn(algorithm[name], via, place, str(rng.choice(list(SHAPES))), weighted, int(rng.integers(2**31)))


def ready(seed: int) -> Attack:
    held: dict[str, int] = {}

    def attempt(number: int) -> str:
        case = drawn(np.random.default_rng([seed, 4, number]))
        verdict = HELD
        try:
            wrong = tried(case)
            held[case.via] = held.get(case.via, 0) + (wrong is None)
        except (ValueError, TypeError) as error:
            wrong, verdict = foreign(error), REFUSED
        except Exception as error:
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return verdict if wrong is None else f"({case}): {wrong}"

    return Attack(attempt, lambda: ", ".join(f"{via} {count}" for via, count in sorted(held.items())))


def foreign(error: Exception) -> str | None:
    """What is wrong with a refusal: it must be raised by the library, not by what it is built on."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    if module.startswith("jaxcomp") or module == "experiments.attack.draw":
        return None
    return f"{type(error).__name__} of {module}: {' '.join(str(error).split())[:300]}"


def tried(case: Drawn) -> str | None:
    """What is wrong with a case; None where nothing is."""
    algorithm = made(case.algorithm)
    runs = [run(case, algorithm, via, np.random.default_rng(case.seed)) for via in (case.via, "gather")]
    if not all(np.all(np.isfinite(x)) for x in leaves_of(runs[0][0])):
        return "directions are not finite"
    if case.place == "vmap":  # each worker's direction is there
        for x in leaves_of(runs[0][0]):
            if any(x[:, 0].tobytes() != x[:, i].tobytes() for i in range(x.shape[1])):
                return "workers get different directions"
    if case.via in SAME_BITS:
        return differ(runs[0], runs[1])
    if case.via == "two_shot":
        return None
    return far(runs[0][0], runs[1][0]) if case.algorithm.startswith("jc.direct") else None


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def differ(got: Any, want: Any) -> str | None:
    """Which arrays are not the same bit for bit."""
    pairs = list(zip(leaves_of(got), leaves_of(want), strict=True))
    wrong = [np.max(np.abs(a - b)) for a, b in pairs if a.tobytes() != b.tobytes()]
    return f"{len(wrong)} of {len(pairs)} arrays differ from gather, the first by {wrong[0]:.3g}" if wrong else None


def far(got: Any, want: Any) -> str | None:
    """Which arrays differ by more than sums in another order do."""
    for a, b in zip(leaves_of(got), leaves_of(want), strict=True):
        apart, largest = np.max(np.abs(np.float64(a) - b), initial=0), np.max(np.abs(b), initial=0)
        if apart > 1e-2 * largest + 1e-30:  # 16-bit sums round their mean once more
            return f"differs from gather by {apart:.3g} of {largest:.3g}"
    return None


def run(case: Drawn, algorithm: Any, via: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """Directions of all rounds, and the memories after them, but for what was counted."""
    shapes = SHAPES[case.shapes]
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    workers = 4 if case.place == "hierarchy" else 2
    one = lambda shape: vector(rng, int(np.prod(shape)), spoiled=True)[1].reshape(shape)
    grads = [
        {name: np.stack([one(shape) for _ in range(workers)]) for name, shape in shapes.items()} for _ in range(ROUNDS)
    ]
    options = {"via": via} | ({"weights": [1.0, 3.0]} if case.weighted else {})
    step, state = PLACED[case.place](algorithm, options, params)
    directions = []
    for given in grads:
        direction, state = jax.block_until_ready(step(state, given))
        directions.append(jax.tree.map(np.asarray, direction))
    stacked = jax.tree.map(lambda *d: np.stack(d), *directions)
    return stacked, [node.local.algorithm for node in means_in(state)]


# ------------------------------------------------------------------------------------------------
# Placements: (algorithm, options of `compressed_mean`, parameters) -> step(state, gradients), state


def on_vmap(algorithm: Any, options: dict[str, Any], params: Any) -> tuple[Callable, Any]:
    tx = jc.compressed_mean(algorithm, "data", **options)
    state, axes = jc.init_state(tx, params, 2, "data")
    return jax.jit(jax.vmap(lambda s, g: tx.update(g, s), (axes, 0), (0, axes), axis_name="data")), state


def mapped(tx: Any, mesh: Any, specs: Any, given: Any, out: Any) -> Callable:
    """The update on a mesh, each device with its own row of the gradients."""
    step = lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, given), out_specs=(out, specs)))


def mesh_of(**sizes: int) -> Any:
    shape = tuple(sizes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(sizes), devices=devices, axis_types=(AxisType.Auto,) * len(shape))


def on_mesh(algorithm: Any, options: dict[str, Any], params: Any) -> tuple[Callable, Any]:
    tx, mesh = jc.compressed_mean(algorithm, "data", **options), mesh_of(data=2)
    state, specs = jc.init_state(tx, params, mesh, "data")
    return mapped(tx, mesh, specs, P("data"), P()), state


def on_shards(algorithm: Any, options: dict[str, Any], params: Any) -> tuple[Callable, Any]:
    """Matrices are cut along their last even dimension; the others are whole on both devices."""
    cut = lambda x: P(*[None] * (x.ndim - 1), "model") if x.ndim > 1 and x.size and x.shape[-1] % 2 == 0 else P()
    sharding, mesh = jax.tree.map(cut, params), mesh_of(data=2, model=2)
    tx = jc.compressed_mean(algorithm, "data", sharded=sharding, **options)
    state, specs = jc.init_state(tx, params, mesh, "data", sharding)
    given = jax.tree.map(lambda spec: P("data", *spec), sharding, is_leaf=lambda node: isinstance(node, P))
    return mapped(tx, mesh, specs, given, sharding), state


def in_levels(algorithm: Any, options: dict[str, Any], params: Any) -> tuple[Callable, Any]:
    levels = {"ici": jc.direct(jc.identity()), "dcn": algorithm}
    tx, mesh = jc.compressed_mean(axis_name=levels, via=options["via"]), mesh_of(dcn=2, ici=2)
    state, specs = jc.init_state(tx, params, mesh, levels)
    return mapped(tx, mesh, specs, P(("dcn", "ici")), P()), state


PLACED = {"vmap": on_vmap, "mesh": on_mesh, "sharded": on_shards, "hierarchy": in_levels}
