"""DiLoCo over the coordination service: `python diloco.py [ADDRESS PROCESSES NUMBER]`, in every process.

Without arguments jax.distributed finds them itself: under SLURM, Open MPI, Kubernetes and on TPUs.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxcomp as jc

STEPS = 60


def train(link):
    """Steps of this process, with an exchange of 4-bit differences every ten, beside the next two steps."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), link.index), (256, 20))
    y = x @ jnp.linspace(-1, 1, 20)
    loss = jax.jit(lambda w: jnp.mean((x @ w - y) ** 2))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    mean = jc.direct(jc.dithering(bits=4))
    options = {"every": 10, "delay": 2, "mixing": 0.5}
    with jc.local_process(optax.adamw(1e-2), outer, mean, link.gather, link.index, link.size, **options) as worker:
        w = worker.start(jnp.zeros(20))
        first = loss(w)
        for _ in range(STEPS):
            w = worker.step(jax.grad(loss)(w), w)
        print(f"worker {link.index}: loss from {first:.3f} to {loss(w):.3f}; {worker.metrics()}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leave out where there are accelerators
    words = sys.argv[1:]
    place = (words[0], int(words[1]), int(words[2])) if words else ()
    # Silent for 30 s: dead, and the others end with an error. 100 and 300 s if not given.
    jax.distributed.initialize(
        *place, initialization_timeout=60, heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30
    )
    with jc.transports.coordination(seconds=60.0) as link:
        train(link)
