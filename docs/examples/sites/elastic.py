"""Data parallelism that goes on with the processes that are left: `python elastic.py ADDRESS PROCESSES NUMBER STEPS`.

Each step runs over the devices that `live_devices` names. Where they have become fewer, the state of the exchange is
handed on by `jc.redistribute`, with all that memories hold, and the step is compiled for the new mesh.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import ProcessFailureError, live_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc

address, processes, number, steps = sys.argv[1], *map(int, sys.argv[2:5])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_recoverability", True)  # a process that is killed does not end the others
jax.distributed.initialize(address, processes, number, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), "data"), optax.sgd(0.1))
params, goal = np.zeros(1000, np.float32), np.linspace(1, 2, 1000, dtype=np.float32)


def built(devices):
    """The mesh of these devices, a fresh state on it, and the compiled step."""
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    state, specs = jc.init_state(tx, params, mesh, "data")

    def loss(params):  # each worker has data of its own
        return 0.5 * jnp.sum((params - goal * (1 + 0.1 * jnp.cos(jax.lax.axis_index("data")))) ** 2)

    def step(params, state):
        grads = jax.grad(loss)(jc.per_worker(params, "data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)))
    whole = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))  # every process has all memories
    return mesh, state, step, whole


everyone, devices = jax.devices(), None
kept = None  # parameters and state after the last step that all finished, on the host
t = 0
while t < steps:
    try:
        with live_devices(everyone) as live:
            live = sorted(live, key=lambda device: device.id)
            if live != devices:
                devices = live
                mesh, state, step, whole = built(devices)
                if kept is not None:
                    params, state = kept[0], jc.redistribute(kept[1], state)
                print(f"step {t}: {len(devices)} devices", flush=True)
            after = step(params, state)
            now = jax.tree.map(np.asarray, (after[0], whole(after[1])))  # waits for the step
    except (jax.errors.JaxRuntimeError, ProcessFailureError) as error:  # in this step a process has died
        print(f"step {t}: {type(error).__name__}, again", flush=True)
        devices = None
        continue
    (params, state), kept, t = after, now, t + 1
print(f"distance {np.linalg.norm(goal):.2f} to {jnp.linalg.norm(params - goal):.2f}", flush=True)
time.sleep(0 if number else 3)  # the service ends with process 0, and the others with it if they still run
