"""Two ways to a worker's gradient, beside each other: per worker, and unreduced, the loss of the whole batch.

Models of Flax Linen, Flax NNX, Equinox (where it is installed) and a GPT of functions, with a masked loss of unequal
lengths, on four virtual CPU devices: what each needed for Explicit axes, whether loss and gradient without compression
are those of plain `jax.jit`, and for error feedback with top-k 0.05 what crosses, temporary memory, milliseconds of a
step. Prints a table in markdown.
"""

import importlib.util
import os
import statistics
import time
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.cli import Parser, UserError, at_least
from experiments.lib.report import markdown
from experiments.ways import maxtext
from experiments.ways.models import BATCH, LENGTH, MODELS, VOCABULARY, Model, masked

__all__ = ["batch", "difference", "main", "measured", "ways"]

WAYS = {"per_worker": AxisType.Auto, "unreduced": AxisType.Explicit}


def batch() -> tuple[Any, Any]:
    """Tokens [b, t + 1] and a mask [b, t] of texts of unequal lengths."""
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY)
    return tokens, (jnp.arange(LENGTH) <= 2 * jnp.arange(BATCH)[:, None]).astype(jnp.float32)


def ways(model: Model, way: str, algorithm: Any) -> tuple[Any, Any, Any]:
    """A compiled step of one way, its arguments, and what plain JAX gives for the same model as it is."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(WAYS[way],))
    logits = model.explicit if way == "unreduced" else model.plain
    of = lambda logits: lambda params, tokens, mask: masked(logits(params, tokens[:, :-1]), tokens[:, 1:], mask)
    dense = jax.jit(jax.value_and_grad(of(model.plain)))(model.params, *batch())
    with jax.set_mesh(mesh):
        params = jax.device_put(model.params, NamedSharding(mesh, P()))
        data = jax.device_put(batch(), NamedSharding(mesh, P("data")))
        weight: Any = (lambda tokens, mask: mask.sum()) if way == "per_worker" else None
        grad_fn = jc.value_and_grad(of(logits), algorithm, mesh, gradients=way, weight=weight)
        args = (params, grad_fn.init(params), *data)
        return jax.jit(lambda *args: grad_fn(*args)).lower(*args).compile(), args, dense


def difference(found: Any, want: Any) -> float:
    """|found - want| / |want| over all entries."""
    joined = lambda tree: np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
    return float(np.linalg.norm(joined(found) - joined(want)) / np.linalg.norm(joined(want)))


def measured(model: Model, way: str, steps: int = 0) -> dict[str, Any]:
    """What one way of a model gives and costs."""
    step, args, dense = ways(model, way, jc.direct(jc.identity()))
    away = difference(step(*args)[:2], dense)
    step, args, _ = ways(model, way, jc.error_feedback(jc.top_k(0.05)))
    rows, times = [row for row in jc.ledger(step).rows if row.counted], []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "difference": away,
        "collectives": len(rows),
        "sent": sum(row.sent_bytes for row in rows),
        "temporary": step.memory_analysis().temp_size_in_bytes,
        "ms": statistics.median(times) if times else float("nan"),
    }


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m experiments ways", description=__doc__)
    parser.add_argument("--steps", type=at_least(1), default=20, help="that are timed")
    told = "MaxText's own model and loss in place of these, where the package is (extra trainers)"
    parser.add_argument("--maxtext", action="store_true", help=told)
    options = parser.parse_args(arguments)
    if options.maxtext:
        if importlib.util.find_spec("maxtext") is None:
            raise UserError("--maxtext needs MaxText, whose environment docs/results/trainers.md tells")
        head = ["mesh", "method", "loss of plain JAX", "loss", "largest difference", "collectives", "bytes"]
        print(markdown(head, [row for layout in maxtext.LAYOUTS for row in maxtext.rows(layout)]))
        return 0
    rows = []
    for name, make in MODELS.items():
        model = make()
        if model is None:
            continue
        for way in WAYS:
            found = measured(model, way, options.steps)
            rows.append(
                [
                    name,
                    way,
                    model.needed if way == "unreduced" else "nothing",
                    f"{found['difference']:.0e}",
                    f"{found['collectives']}",
                    f"{found['sent']:,.0f}",
                    f"{found['temporary'] / 1e6:.2f}",
                    f"{found['ms']:.0f}",
                ]
            )
    head = ["model", "way", "needed", "away from plain", "collectives", "bytes", "temporary MB", "ms a step"]
    print(markdown(head, rows))
    return 0
