# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One compressor, taken apart
#
# A compressor is a few pure functions: `init`, `compress`, `decompress`. Here we watch the gradient of a network go
# through them, train the network on four workers with and without compression, and read in the compiled program what
# really crosses.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)  # four workers on this CPU; before anything else touches JAX

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcomp as jc

# %% [markdown]
# ## 1. A network and its gradient
#
# Scikit-learn's digits, 8 x 8 pixels, and a network with one hidden layer.

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
model = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)])
params = jax.jit(model.init)(jax.random.key(0), images[:1])


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


x = jax.jit(lambda *args: ravel_pytree(jax.grad(loss_fn)(*args))[0])(params, images[:256], labels[:256])
print(
    f"d = {x.size:,} entries, {float(jnp.mean(x == 0)):.0%} of them zero (pixels at the border that are always black)"
)

# %% [markdown]
# ## 2. init, compress, decompress
#
# Random dithering rounds every entry at random to one of $2s + 1$ levels of a norm,
# $C(x)_j = \|x\|_2\,\mathrm{sign}(x_j)\,k_j / s$, with
# $k_j = \lfloor s|x_j| / \|x\|_2 + u_j \rfloor$ and $u_j$ uniform in $[0, 1)$. Each block of 512 entries has a norm of
# its own.

# %%
compressor = jc.dithering(levels=7)
state = compressor.init(jax.random.key(1), x)  # shared randomness enters here (dithering has none)
payload, _ = jax.jit(compressor.compress)(jax.random.key(2), x, state)  # private randomness enters here
x_hat = jax.jit(lambda payload, shared: compressor.decompress(payload, shared, x))(payload, state.shared)

jax.tree.map(lambda a: (a.dtype.name, a.shape), payload)

# %% [markdown]
# The payload is exactly what crosses: a norm for each block, and one code of 4 bits for each entry, packed into 32-bit
# words (the width is the first dimension). Seven levels and a sign need $\log_2 15 < 4$ bits.

# %%
print(f"dense {4 * x.size:6,} bytes")
print(f"lane  {jc.lane_bytes(payload):6,} bytes: what a collective moves")
print(f"wire  {len(jc.wire.encode(payload)):6,} bytes: with frame and checksum, between hosts")
print(f"best  {len(jc.wire.encode(payload, code='best')):6,} bytes: the same, entropy coded (most codes are 0 here)")

# %% [markdown]
# ## 3. Unbiased, and how noisy
#
# `roundtrip` does all of it with one key, so it can be mapped over keys. The mean over draws goes to $x$, and the mean
# squared error stays below $\omega \|x\|^2$.

# %%
draws = jax.jit(jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0]))(jax.random.split(jax.random.key(3), 100))
error = jnp.mean(jnp.sum((draws - x) ** 2, axis=1)) / jnp.sum(x**2)
off = jnp.sum((draws.mean(0) - x) ** 2) / jnp.sum(x**2)
print(f"relative squared error {error:.2f}, bound omega {compressor.spec.omega(x.size):.2f}")
print(f"the mean of 100 draws is off by {off:.4f}; that of an unbiased compressor by {error / 100:.4f} on average")

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
largest = 1.05 * float(jnp.abs(x).max())
for axis, c in zip(axes, (compressor, jc.top_k(0.05)), strict=True):
    got, message = jax.jit(lambda x, c=c: jc.roundtrip(c, x, key=jax.random.key(4)))(x)
    axis.scatter(x, got, s=6, color="#0072B2")
    axis.plot([-largest, largest], [-largest, largest], color="#000000", linewidth=0.8, linestyle="--")
    axis.set(xlabel="entry of x", ylabel="entry of C(x)", title=f"{c.spec.name}: {jc.lane_bytes(message):,} bytes")
plt.show()

# %% [markdown]
# Left, every entry is moved to one of the levels of its block, up or down at random, so that errors average out. Right,
# the largest twentieth is copied exactly and everything else is dropped: nothing averages out, and the rest must be
# remembered.

# %% [markdown]
# ## 4. Training on four workers
#
# Dithering is unbiased and needs no memory. Top-k does: `error_feedback` keeps what was not sent. `value_and_grad`
# stands where `jax.value_and_grad` stood; each worker sees its quarter of the batch.

# %%
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(1e-2)
rng = np.random.default_rng(0)
order = np.stack([rng.choice(len(labels), 256, replace=False) for _ in range(40)])


def train(algorithm):
    """Losses, bytes that a worker sent in a step, and what the ledger needs."""
    grad_fn = jc.value_and_grad(loss_fn, algorithm, mesh, axis_name="data")

    @jax.jit
    def step(params, opt_state, state, x, y):
        loss, grads, state = grad_fn(params, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state, state

    now = jax.device_put(params, NamedSharding(mesh, P()))
    carry = now, optimizer.init(now), grad_fn.init(now)
    losses = []
    for chosen in order:
        batch = images[chosen], labels[chosen]
        loss, *carry = step(*carry, *batch)
        losses.append(float(loss))
    return losses, float(jc.info(carry[2]).sent_bytes), (step, *carry, *batch)


algorithms = {
    "dense": jc.direct(jc.identity()),
    "dithering, 4 bits": jc.direct(jc.dithering(7)),
    "top-k 0.02, error feedback": jc.error_feedback(jc.top_k(0.02)),
}
runs = {name: train(algorithm) for name, algorithm in algorithms.items()}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained", sharey=True)
for (name, (losses, sent, _)), colour, line in zip(
    runs.items(), ("#000000", "#0072B2", "#D55E00"), ("-", "--", "-."), strict=True
):
    left.plot(losses, color=colour, linestyle=line, label=name)
    right.plot(sent * np.arange(1, len(losses) + 1) / 1e3, losses, color=colour, linestyle=line)
    print(f"{name:28s} loss {losses[-1]:.3f} after {len(losses)} steps of {sent:,.0f} bytes")
left.set(yscale="log", xlabel="step", ylabel="loss of the batch")
right.set(xscale="log", xlabel="kB sent by a worker")
left.legend(frameon=False)
plt.show()

# %% [markdown]
# By steps the dense exchange is ahead, and top-k needs about twice as many for the same loss. By bytes the order is the
# other way round: for every loss that all of them reach, dithering sends a fraction of what dense sends, and top-k a
# fraction of that.

# %% [markdown]
# ## 5. The ledger
#
# The ledger lists every collective of the compiled program: a gather of messages, in which values and indices travel
# joined, a sum of the small leaves (138 entries, not worth compressing), the loss, and nothing of the size of the
# gradient.

# %%
step = runs["top-k 0.02, error feedback"][2]
book = jc.ledger(*step)
print(book)

# %% [markdown]
# `jc.info` counts the same bytes in the compiled step, without the loss.

# %%
info = jc.info(step[3])
assert float(info.sent_bytes) == book.total_bytes - book.rows[0].sent_bytes
info
