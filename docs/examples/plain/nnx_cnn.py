"""A Flax NNX network with BatchNorm and dropout, trained by four devices on their parts of each batch."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import NamedSharding, P
from jax.sharding import AxisType

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(16 * 8 * 8, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


model = CNN(nnx.Rngs(0))
nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, grads)
    return loss


images = jax.random.normal(jax.random.key(1), (32, 16, 16, 1))
labels = jnp.arange(32) % 10
images, labels = jax.device_put((images, labels), NamedSharding(mesh, P("data")))
for _ in range(20):
    loss = train_step(model, optimizer, images, labels)
print(loss)
