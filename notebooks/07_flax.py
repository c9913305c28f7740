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
# # A Flax model, trained by four workers
#
# A convolutional network of Flax NNX with BatchNorm and dropout, on scikit-learn's digits. Two lines of the training
# loop change. We train it with several methods, compare them by steps and by bytes, and look at accuracy on examples
# that were not trained on.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)  # four workers on this CPU; before anything else touches JAX

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcomp as jc

# %% [markdown]
# ## What to vary
#
# Change this cell and run the notebook again. Methods may be written as strings, as in a configuration file.

# %%
METHODS = {
    "dense": "direct(identity)",
    "top-k, 2 %": "error_feedback(top_k(0.02))",
    "4 bits": "error_feedback(block_scaled('int4'))",
    "rank 2": "power_sgd(2)",
}
STEPS = 60
BATCH = 256
RATE = 3e-3  # of Adam
WIDTH = 16  # channels of the convolution

# %% [markdown]
# ## 1. Model and data

# %%
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
order = np.random.default_rng(0).permutation(len(labels))
train, test = order[:1400], order[1400:]


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, axis_name="data", rngs=rngs)  # statistics of the whole batch
        self.dropout = nnx.Dropout(0.1)
        self.hidden = nnx.Linear(16 * WIDTH, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(self.dropout(x, rngs=rngs))


def loss_fn(model, x, y, *, rngs):
    return optax.softmax_cross_entropy_with_integer_labels(model(x, rngs=rngs), y).mean()


mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(CNN(nnx.Rngs(0)), nnx.Param))]
print(f"{sum(sizes):,} parameters in {len(sizes)} arrays")

# %% [markdown]
# ## 2. The loop
#
# The two lines that know of compression are marked. Each worker has a key of its own for dropout; the statistics of the
# BatchNorm move inside the model.


# %%
def trained(algorithm):
    """Losses, kB that a worker has sent after each step, accuracy on the test set, and the last round in numbers."""
    model = CNN(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
    grad_fn = jc.value_and_grad(loss_fn, algorithm, wrt=nnx.Param)  # was nnx.value_and_grad(loss_fn)
    exchange, rngs = grad_fn.init(model), nnx.Rngs(dropout=1)

    @nnx.jit
    def step(model, optimizer, exchange, rngs, x, y):
        loss, grads, exchange = grad_fn(model, exchange, x, y, rngs=rngs)  # was loss, grads = grad_fn(model, x, y, ...)
        optimizer.update(model, grads)
        return loss, exchange

    rng, losses, sent = np.random.default_rng(0), [], []
    for _ in range(STEPS):
        chosen = rng.choice(train, BATCH, replace=False)
        x, y = jax.device_put((images[chosen], labels[chosen]), NamedSharding(mesh, P("data")))
        loss, exchange = step(model, optimizer, exchange, rngs, x, y)
        losses.append(float(loss))
        sent.append(jc.info(exchange).as_dict()["total_sent_bytes"] / 1e3)
    model.eval()
    accuracy = np.mean(np.argmax(model(images[test]), 1) == labels[test])
    return losses, sent, accuracy, jc.metrics(exchange)


runs = {name: trained(jc.from_config(text)) for name, text in METHODS.items()}

# %%
COLOURS = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"]  # distinct to colour-blind eyes, too
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
for i, (name, (losses, sent, accuracy, _)) in enumerate(runs.items()):
    style = {"color": COLOURS[i], "linestyle": ["-", "--", "-.", ":"][i % 4]}
    left.semilogy(np.arange(1, STEPS + 1), losses, label=name, **style)
    right.loglog(sent, losses, **style)
    print(f"{name:12} loss {losses[-1]:.3f}, accuracy {accuracy:.3f} after {sent[-1]:8,.0f} kB")
left.set(xlabel="step", ylabel="loss of the batch")
right.set(xlabel="kB sent by a worker")
left.legend(frameon=False)
plt.show()

# %% [markdown]
# Four bits with error feedback lie on the dense exchange, step by step, and send a quarter of its bytes. Top-k and rank
# 2 need more steps, as Adam does not like gradients that come late, and are still far ahead by bytes: at a loss of 0.3
# rank 2 has sent about a tenth of what the dense exchange had. 60 steps are few: the losses of both still fall.

# %% [markdown]
# ## 3. What goes into a log
#
# `jc.metrics` is a flat dictionary of plain numbers for TensorBoard, W&B or a file.

# %%
next(reversed(runs.values()))[3]
