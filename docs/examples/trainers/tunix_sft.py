"""Tunix's PeftTrainer, compressed: the mean stands in the optimizer, and its state in Tunix's checkpoints.

With gradient_accumulation_steps each worker adds up its own gradients, and they are exchanged once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer

import jaxcomp as jc


def added_up(tx, every, workers):
    """tx, on the mean of so many gradients of each worker: in place of optax.MultiSteps."""
    rows = lambda params: jax.tree.map(lambda x: jnp.zeros((workers, *x.shape), x.dtype), nnx.as_pure(params))

    def update(grads, state, params):
        step, total, inner = state
        total = jax.tree.map(lambda rows, g: rows + g.rows / every, total, grads)
        wait = lambda total: (jax.tree.map(jnp.zeros_like, params), inner, total)
        send = lambda total: (*tx.update(jax.tree.map(jc.WorkerGradients, total), inner, params), rows(params))
        updates, inner, total = jax.lax.cond(step % every == every - 1, send, wait, total)
        return updates, (step + 1, total, inner)

    return optax.GradientTransformation(lambda params: (jnp.zeros((), int), rows(params), tx.init(params)), update)


class Compressed(PeftTrainer):
    def __init__(self, model, optimizer, config, *args, algorithm, axis_name="fsdp", **kwargs):
        self.axis_name, every = axis_name, config.gradient_accumulation_steps or 1
        workers = jax.tree.leaves(nnx.state(model))[0].sharding.mesh.shape[axis_name]
        tx = optax.chain(jc.compressed_mean(algorithm, axis_name), optimizer)
        tx = added_up(tx, every, workers) if every > 1 else tx
        super().__init__(model, tx, dataclasses.replace(config, gradient_accumulation_steps=None), *args, **kwargs)
        self.config, self._iter_steps = config, self._iter_steps * every

    # what the default loss divides by; a loss of your own may divide by something else
    weight = staticmethod(lambda input_mask, **inputs: jnp.sum(input_mask[:, 1:]))

    def _train_step(self, model, optimizer, inputs):
        inputs = self.gen_model_input_fn(inputs)
        options = {"axis_name": self.axis_name, "wrt": optimizer.wrt, "weight": self.weight, "batch": tuple(inputs)}
        out, grads = jc.worker_value_and_grad(self.loss_fn, has_aux=self._has_aux, **options)(model, **inputs)
        norm = optax.global_norm(optimizer.update(model, grads))
        return (*out, norm) if self._has_aux else (out, None, norm)
