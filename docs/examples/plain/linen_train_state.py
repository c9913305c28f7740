"""A Flax Linen network with BatchNorm in a TrainState, trained by four devices on their parts of each batch."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax import NamedSharding, P
from jax.sharding import AxisType

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


class TrainState(train_state.TrainState):
    batch_stats: dict


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(16, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_fn(params, images, labels, batch_stats):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updates = CNN().apply(variables, images, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates["batch_stats"]


@jax.jit
def train_step(state, images, labels):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = grad_fn(state.params, images, labels, batch_stats=state.batch_stats)
    return loss, state.apply_gradients(grads=grads, batch_stats=stats)


images = jax.random.normal(jax.random.key(1), (32, 16, 16, 1))
labels = jnp.arange(32) % 10
variables = jax.device_put(CNN().init(jax.random.key(0), images), NamedSharding(mesh, P()))
tx = optax.adam(1e-3)
state = TrainState.create(apply_fn=CNN().apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"])
images, labels = jax.device_put((images, labels), NamedSharding(mesh, P("data")))
for _ in range(20):
    loss, state = train_step(state, images, labels)
print(loss)
