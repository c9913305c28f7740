"""Random compressors, algorithms, routes and placements: what a route gives against what gathering gives.

Routes that bring all payloads to all workers (concat, ring, ladder) give the bits of gather, in directions and in all
memories. A sum on the way has an order of its own: equal but for rounding. Two shots compress once more: finite, and
equal on all workers. Whatever a route or a theory does not allow has to be refused by a ValueError or TypeError.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.attack.draw import bits_of, compressor_text, made, vector
from jaxcomp.exchange.state import means_in

__all__ = ["check_close", "drawn"]

ROUNDS = 2
SAME_BITS = ("concat", "ring", "ladder")
SHAPES = {
    "one large": {"w": (64, 40)},
    "mixed": {"b": (5,), "v": (1100,), "w": (40, 30)},
    "small": {"b": (5,), "c": (3, 4)},
    "odd": {"a": (1,), "e": (0, 2), "w": (8, 257)},
}


def drawn(rng: np.random.Generator) -> tuple[str, Callable[[], None]]:
    algorithm = algorithm_text(rng)
    via = str(rng.choice(["concat", "ring", "ladder", "sum", "auto", "two_shot"]))
    place = str(rng.choice(["vmap", "mesh", "sharded", "hierarchy"], p=[0.4, 0.2, 0.2, 0.2]))
    options = {"weights": [1.0, 3.0]} if place != "hierarchy" and rng.random() < 0.2 else {}
    shapes, seed = str(rng.choice(list(SHAPES))), int(rng.integers(2**31))

    def attempt() -> None:
        runs = [run(made(algorithm), place, SHAPES[shapes], seed, via=each, **options) for each in (via, "gather")]
        directions = [np.asarray(x) for x in jax.tree.leaves(runs[0][0])]
        assert all(np.all(np.isfinite(x)) for x in directions), "directions are not finite"
        if place == "vmap":
            assert all(x[0].tobytes() == x[1].tobytes() for x in directions), "workers get different directions"
        if via in SAME_BITS:
            assert bits_of(runs[0]) == bits_of(runs[1]), "directions or memories have other bits than those of gather"
        elif via != "two_shot" and algorithm.startswith("jc.direct"):
            check_close(runs[0][0], runs[1][0])

    return f'{algorithm}, via "{via}", {place}, {shapes}{", weighted" if options else ""}', attempt


def algorithm_text(rng: np.random.Generator) -> str:
    """An expression for an algorithm; not all of them can be built."""
    inner = compressor_text(rng)
    if rng.random() < 0.2:
        inner = f"jc.{rng.choice(['flat', 'per_leaf'])}({inner})"
    if rng.random() < 0.25:
        inner = f"jc.dagc({rng.integers(0, 9, 2).tolist()}, {rng.uniform(0.02, 0.3):.2g})"
    known = {
        f"jc.direct({inner})": 0.25,
        f"jc.error_feedback({inner}, decay={rng.choice([1.0, 0.9])})": 0.4,
        f"jc.diana({inner})": 0.15,
        f"jc.contrib.momentum_correction({inner})": 0.1,
        "jc.power_sgd(2)": 0.1,
    }
    return str(rng.choice(list(known), p=list(known.values())))


def check_close(got: Any, want: Any) -> None:
    """Trees differ by no more than sums in another order do; 16-bit sums round their mean once more."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-2 * np.max(np.abs(b), initial=0) + 1e-30)


def run(algorithm: Any, place: str, shapes: dict[str, Any], seed: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Directions of all rounds, and the memories after them, but for what was counted."""
    rng, workers = np.random.default_rng(seed), 4 if place == "hierarchy" else 2
    step, state = placed(
        place, algorithm, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, options
    )
    one = lambda shape: vector(rng, math.prod(shape), spoiled=True)[1].reshape(shape)
    directions = []
    for _ in range(ROUNDS):
        grads = {name: np.stack([one(shape) for _ in range(workers)]) for name, shape in shapes.items()}
        direction, state = jax.block_until_ready(step(state, grads))
        directions.append(direction)
    return directions, [node.local.algorithm for node in means_in(state)]


def placed(place: str, algorithm: Any, params: Any, options: dict[str, Any]) -> tuple[Callable, Any]:
    """step(state, gradients [workers, ...]) -> directions, state; and the first state."""
    if place == "vmap":
        tx = jc.compressed_mean(algorithm, "data", **options)
        state, axes = jc.init_state(tx, params, 2, "data")
        return jax.jit(jax.vmap(lambda s, g: tx.update(g, s), (axes, 0), (0, axes), axis_name="data")), state
    sizes, axis, out, more = {"data": 2}, "data", P(), ()
    if place == "hierarchy":
        sizes, axis = {"dcn": 2, "ici": 2}, {"ici": jc.direct(jc.identity()), "dcn": algorithm}
        algorithm = None
    if place == "sharded":  # matrices are cut along their last even dimension; the others are whole on both devices
        cut = lambda x: P(*[None] * (x.ndim - 1), "model") if x.ndim > 1 and x.size and x.shape[-1] % 2 == 0 else P()
        out = jax.tree.map(cut, params)
        sizes, more, options = {"data": 2, "model": 2}, (out,), options | {"sharded": out}
    shape = tuple(sizes.values())
    mesh = Mesh(np.reshape(jax.devices()[: math.prod(shape)], shape), tuple(sizes))
    tx = jc.compressed_mean(algorithm, axis, **options)
    state, specs = jc.init_state(tx, params, mesh, axis, *more)
    across = tuple(sizes) if place == "hierarchy" else "data"
    given = jax.tree.map(lambda spec: P(across, *spec), out, is_leaf=lambda node: isinstance(node, P))
    step = lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s)  # each device with its own row
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, given), out_specs=(out, specs))), state
