"""Kauldron's train step, compressed: import this, put the mean first in the optimizer, and train on Kauldron's mesh.

cfg.optimizer = optax.chain(jc.compressed_mean(algorithm, "devices"), optax.adam(1e-3))
with jax.set_mesh(kd.sharding.DEVICES_MESH):
    trainer.train()
"""

from types import SimpleNamespace

import jax
from kauldron import kd
from kauldron.train import train_step

import jaxcomp as jc

KINDS = {"^(preds|interms)": "concat", "^loss_states": "sum", ".*": "mean"}  # of what the forward pass leaves behind


def grad(forward, **_):
    """In place of jax.grad in Kauldron's step, whose argument is a context of parameters, batch and state."""

    def run(context, **options):
        def loss(params, batch):
            value, after = forward(context.replace(params=params, batch=batch), **options)
            return value, after.replace(params=None, batch=None, opt_state=None, step=None)

        grad_fn = jc.worker_value_and_grad(loss, kd.sharding.DEVICES_MESH, "devices", has_aux=True, aux=KINDS)
        (_, after), grads = grad_fn(context.params, context.batch)
        kept = {name: getattr(context, name) for name in ("params", "batch", "opt_state", "step")}
        return context.replace(params=grads), after.replace(**kept)

    return run


train_step.jax = SimpleNamespace(**vars(jax) | {"grad": grad})
