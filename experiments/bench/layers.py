"""What a step sends and holds whose parameters are cut over devices: gathered whole, by layers, or on two axes.

Layers h + tanh(h w) in a scan under `jax.checkpoint`, compiled for four devices and not run: bytes by axis from the
ledger, temporary memory from `memory_analysis`, and the state of the exchange; each of a device, and a parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.cli import at_least
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from experiments.lib.training import find_devices
from jaxcomp.base import Algorithm

__all__ = ["main"]

EXAMPLES = 64
MESHES = {"data of 4": ((4,), ("data",)), "data 2 x fsdp 2": ((2, 2), ("data", "fsdp"))}
FEEDBACK, DITHERING = jc.error_feedback(jc.top_k(0.01)), jc.direct(jc.dithering(7))
INT8 = jc.block_scaled("int8")


def loss(weights: Any, x: Any, gather: Callable[[Any], Any] = lambda w: w) -> Any:
    layer = lambda h, w: (h + jnp.tanh(h @ gather(w)), None)
    return jnp.mean(lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)


def plain(mesh: Any, weights: Any) -> tuple[Any, Any]:
    return jax.jit(jax.value_and_grad(loss), out_shardings=(None, weights.sharding)), ()


def compressed(algorithm: Algorithm) -> Callable[[Any, Any], tuple[Any, Any]]:
    """By `value_and_grad`, which gathers what is cut over the workers themselves before it calls the loss."""

    def make(mesh: Any, weights: Any) -> tuple[Any, Any]:
        gradient = jc.value_and_grad(loss, algorithm, mesh)
        return jax.jit(lambda weights, x, state: gradient(weights, state, x)), (gradient.init(weights),)

    return make


def by_layer(gather: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """By a gather inside of each layer, whose gradient scatters."""

    def make(mesh: Any, weights: Any) -> tuple[Any, Any]:
        cut = weights.sharding.spec
        step = jax.value_and_grad(lambda weights, x: lax.pmean(loss(weights, x, gather), "data"))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(cut, P("data")), out_specs=(P(), cut))), ()

    return make


def narrow(wire: Any) -> Callable[[Any], Any]:
    """Both ways in a format."""
    options = {"axis": 1, "tiled": True, "wire": wire, "gradient": wire}
    return lambda w: jc.collectives.all_gather(w, "data", key=jax.random.key(0), **options)


CASES: list[tuple[str, str, Callable[[Any, Any], tuple[Any, Any]]]] = [
    ("plain jax.jit", "data of 4", plain),
    ("value_and_grad, error feedback with top-k 0.01", "data of 4", compressed(FEEDBACK)),
    ("value_and_grad, dithering without a memory", "data of 4", compressed(DITHERING)),
    ("lax.all_gather in the layers", "data of 4", by_layer(lambda w: lax.all_gather(w, "data", axis=1, tiled=True))),
    ("jc.collectives.all_gather, bf16", "data of 4", by_layer(narrow("bfloat16"))),
    ("jc.collectives.all_gather, int8", "data of 4", by_layer(narrow(INT8))),
    ("plain jax.jit", "data 2 x fsdp 2", plain),
    ("value_and_grad, error feedback with top-k 0.01", "data 2 x fsdp 2", compressed(FEEDBACK)),
]


def row_of(case: tuple[str, str, Any], layers: int, width: int) -> dict[str, Any]:
    name, mesh_name, make = case
    sizes, names = MESHES[mesh_name]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:4])
    weights = jax.device_put(np.ones((layers, width, width), np.float32), NamedSharding(mesh, P(None, None, names[-1])))
    x = jax.device_put(np.ones((EXAMPLES, width), np.float32), NamedSharding(mesh, P(names)))
    step, state = make(mesh, weights)
    program = step.lower(weights, x, *state).compile()
    sent = {
        " x ".join(axes) if isinstance(axes, tuple) else axes: n for axes, n in jc.ledger(program).by_axes(mesh).items()
    }
    held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    each = lambda n: n / weights.size
    return {
        "case": name,
        "mesh": mesh_name,
        "sent": {axes: each(n) for axes, n in sent.items()},
        "temporary": each(program.memory_analysis().temp_size_in_bytes),
        "state": each(held),
    }


COLUMNS: Columns = {
    "step": "{case}",
    "mesh": "{mesh}",
    "crosses": lambda row: ", ".join(f"{axes} {n:.2f}" for axes, n in row["sent"].items() if n >= 0.005),
    "temporary": "{temporary:.2f}",
    "state": "{state:.2f}",
}
NOTES = "Bytes a parameter, of a device. XLA for CPUs sums in whole where others reduce and scatter: 12 would be 9."


def main(arguments: Sequence[str]) -> int:
    p = parser_of("bench layers", __doc__)
    p.add_argument("--layers", type=at_least(1), default=16, help="of the scan")
    p.add_argument("--width", type=at_least(4), default=512, help="rows and columns of a layer, a multiple of 4")
    run = Run(p, arguments, "bench-layers")
    o = run.options
    find_devices(4)
    rows = run.rows_of(CASES, lambda case: f"{case[0]}, {case[1]}", lambda case: row_of(case, o.layers, o.width))
    run.keep(rows)
    run.table(f"{o.layers} layers of {o.width} x {o.width}", COLUMNS, rows, NOTES)
    return run.status
