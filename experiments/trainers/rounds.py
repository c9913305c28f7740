"""Rounds in DrJAX: its own `reduce_mean`, and a compressed mean of the same rows in its place."""

from typing import Any, NamedTuple

import drjax  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomp as jc
from jaxcomp.base import Algorithm

__all__ = ["FORMS", "METHODS", "Form", "trained"]

AXIS = "clients"
STEPS, RATE = 5, 2.0  # of one client in a round
METHODS: dict[str, Algorithm | None] = {
    "drjax.reduce_mean": None,
    "identity": jc.direct(jc.identity()),
    "int4 + error feedback": jc.error_feedback(jc.block_scaled("int4")),
    "top_k(0.05) + error feedback": jc.error_feedback(jc.top_k(0.05)),
    "sparse_loco": jc.sparse_loco(),
}


class Form(NamedTuple):
    """cut: devices over which each client's parameters are cut. streaming: a fragment a round, merged a round later."""

    cut: int = 1
    streaming: bool = False


FORMS = {
    "whole parameters": Form(),
    "parameters over fsdp 2": Form(cut=2),
    "fragments, merged a round later": Form(streaming=True),
}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def locally(params: Any, x: Any, y: Any) -> Any:
    """The parameters of one client after its steps."""

    def step(p, batch):
        grads = jax.grad(loss_of)(p, *batch)
        return jax.tree.map(lambda a, g: a - RATE * g, p, grads), None

    return jax.lax.scan(step, params, (x, y))[0]


def trained(form: Form, algorithm: Algorithm | None, rounds: int) -> dict[str, Any]:
    """Losses of the shared parameters after each round, the parameters, and bytes by axis of one round.

    algorithm: of the mean; None for DrJAX's own.
    """
    clients = 4 // form.cut
    mesh = jax.make_mesh((clients, form.cut), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    spec = {"w": PartitionSpec("fsdp"), "b": PartitionSpec("fsdp")} if form.cut > 1 else None
    place = NamedSharding(mesh, PartitionSpec("fsdp" if form.cut > 1 else None))
    params = jax.device_put({"w": jnp.zeros((64, 256)), "b": jnp.zeros((256,))}, place)
    parts = [["w"], ["b"]] if form.streaming else [["w", "b"]]
    of = lambda tree, names: None if tree is None else {name: tree[name] for name in names}
    txs = [algorithm and jc.compressed_mean(algorithm, AXIS, sharded=of(spec, names)) for names in parts]
    make = lambda tx, names: tx and jc.init_state(tx, of(params, names), mesh, AXIS, of(spec, names))[0]
    states = [make(tx, names) for tx, names in zip(txs, parts, strict=True)]

    def mean_of(i: int, rows: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        tx = txs[i]
        if tx is None:
            return drjax.reduce_mean(rows), states
        mean, state = tx.update(jax.tree.map(jc.WorkerGradients, rows), states[i])
        return mean, [*states[:i], state, *states[i + 1 :]]

    @drjax.program(placements={AXIS: clients})
    def one_round(point, own, waiting, states, x, y, number):
        own = drjax.map_fn(locally, (own, x, y), mesh=mesh)

        def exchanged(i: int):
            def run(states):
                rows = jax.tree.map(lambda a, b: a[None] - b, of(point, parts[i]), of(own, parts[i]))
                mean, states = mean_of(i, rows, states)
                return {**jax.tree.map(jnp.zeros_like, point), **mean}, states

            return run

        taken, states = jax.lax.switch(number % len(parts), [exchanged(i) for i in range(len(parts))], states)
        merged = waiting if form.streaming else taken
        point = jax.tree.map(jnp.subtract, point, merged)
        shared = drjax.broadcast(point, mesh=mesh)
        if form.streaming:  # the clients take over the fragment that was merged, and keep the other
            turn = [(number - 1) % len(parts) == i for i, names in enumerate(parts) for _ in names]
            shared = {
                name: jnp.where(mine & (number > 0), shared[name], own[name])
                for mine, name in zip(turn, point, strict=True)
            }
        return point, shared, taken, states

    x, y = batches(clients, mesh)
    step, losses = jax.jit(one_round), []
    with jax.set_mesh(mesh):
        cut = {name: PartitionSpec(AXIS, *(spec[name] if spec else ())) for name in params}
        own = {
            k: jax.device_put(jnp.zeros((clients, *v.shape)), NamedSharding(mesh, cut[k])) for k, v in params.items()
        }
        waiting = jax.tree.map(jnp.zeros_like, params)
        given = (params, own, waiting, states)
        for number in range(rounds):
            given = step(*given, x, y, number)
            losses.append(float(loss_of(jax.device_get(given[0]), np.asarray(x[0, 0]), np.asarray(y[0, 0]))))
        axes = jc.ledger(step, *given, x, y, 0).by_axes(mesh)
    return {"losses": losses, "params": given[0], "axes": {"+".join(names): sent for names, sent in axes.items()}}


def batches(clients: int, mesh: Mesh) -> tuple[Any, Any]:
    """What each client sees in a round: the targets of one linear map."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (clients, STEPS, 32, 64))
    return jax.device_put((x, x @ jax.random.normal(keys[1], (64, 256))), NamedSharding(mesh, PartitionSpec(AXIS)))
