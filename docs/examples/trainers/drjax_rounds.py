"""Rounds of local steps in DrJAX, whose mean is compressed: four lines differ from drjax.reduce_mean."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import drjax
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc

mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
params = jax.device_put({"w": jnp.zeros((64, 256)), "b": jnp.zeros(256)}, NamedSharding(mesh, P()))
tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), "clients")
exchange, _ = jc.init_state(tx, params, mesh, "clients")


def difference(params, x, y):
    """How far one client comes in five steps."""

    def step(p, batch):
        x, y = batch
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(p)
        return jax.tree.map(lambda a, g: a - 2.0 * g, p, grads), None

    after, _ = jax.lax.scan(step, params, (x, y))
    return jax.tree.map(jnp.subtract, params, after)


@jax.jit
@drjax.program(placements={"clients": 4})
def one_round(params, exchange, x, y):
    rows = drjax.map_fn(difference, (drjax.broadcast(params, mesh=mesh), x, y), mesh=mesh)
    mean, exchange = tx.update(jax.tree.map(jc.WorkerGradients, rows), exchange)  # for drjax.reduce_mean(rows)
    return jax.tree.map(jnp.subtract, params, mean), exchange


x = jax.random.normal(jax.random.key(0), (4, 5, 32, 64))
y = x @ jax.random.normal(jax.random.key(1), (64, 256))
x, y = jax.device_put((x, y), NamedSharding(mesh, P("clients")))
with jax.set_mesh(mesh):
    for _ in range(10):
        params, exchange = one_round(params, exchange, x, y)
    print(jc.ledger(one_round, params, exchange, x, y).by_axes(mesh))
