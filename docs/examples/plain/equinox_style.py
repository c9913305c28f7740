"""A model that is a tree of its own class, as in Equinox, trained by four devices on their parts of each batch."""

import dataclasses
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import jax
import jax.numpy as jnp
import optax
from jax import NamedSharding, P
from jax.sharding import AxisType

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MLP:
    layers: list
    activation: str = dataclasses.field(default="tanh", metadata={"static": True})

    def __call__(self, x):
        for weights, bias in self.layers[:-1]:
            x = getattr(jnp, self.activation)(x @ weights + bias)
        weights, bias = self.layers[-1]
        return x @ weights + bias


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


keys, sizes = jax.random.split(jax.random.key(0), 3), (8, 64, 64, 1)
shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
model = MLP([(jax.random.normal(key, (m, n)) / m**0.5, jnp.zeros(n)) for key, m, n in shapes])
model = jax.device_put(model, NamedSharding(mesh, P()))
optimizer = optax.adam(3e-3)
state = optimizer.init(model)


@jax.jit
def train_step(model, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(model, x, y)
    updates, state = optimizer.update(grads, state, model)
    return loss, optax.apply_updates(model, updates), state


x = jax.random.normal(jax.random.key(1), (256, 8))
x, y = jax.device_put((x, jnp.sin(x[:, :1])), NamedSharding(mesh, P("data")))
for _ in range(100):
    loss, model, state = train_step(model, state, x, y)
print(loss)
