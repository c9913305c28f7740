"""MaxText's own step, compressed: run this in place of maxtext.trainers.pre_train.train, with shard_mode=explicit.

The mean over "data" is compressed; that over "fsdp", if the batch is cut over it, too, is taken before in full.
"""

import functools
import os
from types import SimpleNamespace

import jax
import optax
from absl import app
from flax import nnx
from jax.sharding import PartitionSpec
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import jaxcomp as jc

ALGORITHM = jc.from_config(os.environ.get("JAXCOMP", "error_feedback(block_scaled('int4'))"))
tokens = lambda data, rest: (data["targets_segmentation"] != 0).sum()
# now: the state of the exchange within a step.
options, now = {"has_aux": True, "gradients": "unreduced", "aux": {"^1": "equal", "_loss": "mean", ".*": "sum"}}, {}


def value_and_grad(loss, params, custom, rest, config, data):
    """In place of jax.value_and_grad in MaxText's step: of the mean over all tokens, also of several micro-batches."""
    whole = lambda params, data, rest: loss(params, custom, rest, config, dict(data))
    out, grads, now["state"] = jc.value_and_grad(whole, **options)(params, now["state"], data, rest=rest)
    return out, (grads, custom)


def get_optimizer(config, *args, mesh, make=optimizers.get_optimizer, **kwargs):
    """MaxText's optimizer, and beside its state that of the exchange, which so is in MaxText's checkpoints."""

    def init(params):
        state = jc.value_and_grad(init, mesh=mesh, param_specs=PartitionSpec(), **options).init(params)
        specs = jc.state_specs(state, tuple(axes))
        return jax.tree.map(lambda x, spec: nnx.Variable(x, out_sharding=spec), state, specs)

    assert not config.routed_bias or config.gradient_accumulation_steps == 1, "routed_bias: without accumulation"
    axes = [axis for axis in ("fsdp", "data") if mesh.shape[axis] > 1]
    levels = {axis: jc.direct(jc.identity()) for axis in axes} | {axes[-1]: ALGORITHM}
    options.update(axis_name=levels, micro_batches=config.gradient_accumulation_steps, weight=tokens)
    hold = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, now["state"]))
    return optax.chain(hold, make(config, *args, mesh=mesh, **kwargs))


def train_step(graph, config, *args, step=train.train_step):
    now["state"] = nnx.as_pure(nnx.merge(graph, args[2]).optimizer.opt_state[0])
    return step(graph, SimpleNamespace(**config.get_keys() | {"gradient_accumulation_steps": 1}), *args)


train.jax = SimpleNamespace(**vars(jax) | {"value_and_grad": lambda loss, **_: functools.partial(value_and_grad, loss)})
train.train_step, optimizers.get_optimizer = train_step, get_optimizer

if __name__ == "__main__":
    app.run(train.main)
