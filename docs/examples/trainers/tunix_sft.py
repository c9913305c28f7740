"""Tunix's PeftTrainer, compressed: the mean stands in the optimizer, and its state in Tunix's checkpoints."""

import jax.numpy as jnp
import optax
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer

import jaxcomp as jc


class Compressed(PeftTrainer):
    def __init__(self, model, optimizer, *args, algorithm, axis_name="fsdp", **kwargs):
        self.axis_name = axis_name
        super().__init__(model, optax.chain(jc.compressed_mean(algorithm, axis_name), optimizer), *args, **kwargs)

    def weight(self, input_mask, **inputs):
        """What the default loss divides by; a loss of your own may divide by something else."""
        return jnp.sum(input_mask[:, 1:])

    def _train_step(self, model, optimizer, inputs):
        inputs = self.gen_model_input_fn(inputs)
        wrt = nnx.LoRAParam if self._lora_enabled else nnx.Param
        options = {"axis_name": self.axis_name, "wrt": wrt, "weight": self.weight, "batch": tuple(inputs)}
        out, grads = jc.worker_value_and_grad(self.loss_fn, has_aux=self._has_aux, **options)(model, **inputs)
        norm = optax.global_norm(optimizer.update(model, grads))
        return (*out, norm) if self._has_aux else (out, None, norm)
