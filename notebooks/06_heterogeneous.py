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
# # Algorithms on data that differ from worker to worker
#
# If all workers hold the same kind of data, almost any method trains. Where they do not, each worker's gradient stays
# large at the common optimum, only the mean vanishes, and what a method remembers decides whether it gets there. Here
# workers hold different digits, and six methods descend on the same loss.

# %%
import gzip
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)  # distances are followed down to 1e-12

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import jaxcomp as jc

# %% [markdown]
# ## What to vary
#
# Everything below follows from this cell. Change it, and run the notebook again. `DATA` may be a folder with the four
# files of MNIST (`train-images-idx3-ubyte.gz`, ...); without it the digits of scikit-learn are taken.

# %%
DATA = None  # a folder, as a string
WORKERS = 10
SKEW = 0.9  # share of a worker's examples that are of its own digits: 0 for all alike, 1 for nothing else
RATIO = 0.05  # of the entries that top-k sends
LEVELS = 3  # of dithering: 1 is the roughest
ROUNDS = 400
L2 = 5e-2  # weight of |w|^2 / 2 in the loss


# %% [markdown]
# ## 1. The data, and who holds it
#
# A share `SKEW` of the examples is sorted by digit and cut into one piece for each worker, the rest is dealt at random.


# %%
def read_mnist(folder):
    read = lambda name: np.frombuffer(gzip.decompress((Path(folder) / name).read_bytes()), np.uint8)
    images = read("t10k-images-idx3-ubyte.gz")[16:].reshape(-1, 28, 28)  # the 10,000 of the test set are enough here
    return images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255, read("t10k-labels-idx1-ubyte.gz")[8:]


def dealt(labels, skew, seed=0):
    """Numbers of the examples of each worker: i64[workers, examples]."""
    order = np.random.default_rng(seed).permutation(len(labels))[: len(labels) // WORKERS * WORKERS]
    own = round(skew * len(order) / WORKERS) * WORKERS
    mine = order[:own][np.argsort(labels[order[:own]], kind="stable")]
    return np.concatenate([mine.reshape(WORKERS, -1), order[own:].reshape(WORKERS, -1)], axis=1)


images, labels = read_mnist(DATA) if DATA else load_digits(return_X_y=True)
images = np.append(images / images.max(), np.ones((len(images), 1)), axis=1)  # a bias
held = dealt(labels, SKEW)

figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
counts = np.array([np.bincount(labels[each], minlength=10) for each in held])
shown = axis.imshow(counts, cmap="viridis")
axis.set(xlabel="digit", ylabel="worker", xticks=range(10), yticks=range(WORKERS))
figure.colorbar(shown, label="examples")
plt.show()

# %% [markdown]
# ## 2. One loss, six methods
#
# Softmax regression, convex, with the whole local gradient in each round: nothing is random but the compressor. The
# step size is 1 / L for all, L being the smoothness of the loss, so that differences come from the methods alone.

# %%
d = images.shape[1]
L = float(np.linalg.eigvalsh(images.T @ images / len(images))[-1]) / 2 + L2


def loss_fn(w, x, y):
    scores = x @ w
    picked = jnp.take_along_axis(scores, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - picked) + L2 / 2 * jnp.sum(w**2)


def newton(x, y):
    """The minimum of the loss, by Newton's method."""
    flat = lambda w: loss_fn(w.reshape(d, 10), x, y)
    step = jax.jit(lambda w: w - jnp.linalg.solve(jax.hessian(flat)(w), jax.grad(flat)(w)))
    w = jnp.zeros(d * 10)
    for _ in range(12):
        w = step(w)
    return w.reshape(d, 10)


def run(algorithm, held):
    """Relative squared distance to the optimum after each round, and kB that a worker has sent by then."""
    tx = jc.compressed_mean(algorithm, "workers")
    start = jnp.zeros((d, 10))
    state, axes = jc.init_state(tx, start, WORKERS, "workers")

    def worker(state, x, y):
        def body(carry, _):
            w, state = carry
            direction, state = tx.update(jax.grad(loss_fn)(w, x, y), state)
            w = w - direction / L
            return (w, state), (jnp.sum((w - optimum) ** 2) / jnp.sum(optimum**2), jc.info(state).sent_bytes)

        return jax.lax.scan(body, (start, state), length=ROUNDS)[1]

    step = jax.jit(jax.vmap(worker, in_axes=(axes, 0, 0), axis_name="workers"))
    distances, sent = step(state, jnp.asarray(images[held]), jnp.asarray(labels[held].astype(int)))
    return np.asarray(distances[0]), np.cumsum(sent[0]) / 1e3


few, rough = jc.flat(jc.top_k(RATIO)), jc.flat(jc.dithering(LEVELS))  # one vector of all entries
methods = {
    "dense": jc.direct(jc.identity()),
    "top-k, nothing remembered": jc.direct(few),
    "top-k, error feedback": jc.error_feedback(few),
    "top-k, EF21": jc.ef21(few),
    "dithering, nothing remembered": jc.direct(rough),
    "dithering, DIANA": jc.diana(rough),
}
optimum = newton(jnp.asarray(images[held.reshape(-1)]), jnp.asarray(labels[held.reshape(-1)].astype(int)))
curves = {name: run(algorithm, held) for name, algorithm in methods.items()}

# %%
COLOURS = ["#000000", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#0072B2"]  # distinct to colour-blind eyes, too
LINES = ["-", ":", "--", "-.", ":", "-"]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
for (name, (distances, kilobytes)), colour, line in zip(curves.items(), COLOURS, LINES, strict=True):
    left.semilogy(np.arange(1, ROUNDS + 1), distances, color=colour, linestyle=line, label=name)
    right.loglog(kilobytes, distances, color=colour, linestyle=line)
left.set(xlabel="round", ylabel="relative squared distance to the optimum")
right.set(xlabel="kB sent by a worker")
left.legend(frameon=False, fontsize=8)
plt.show()
for name, (distances, kilobytes) in curves.items():
    print(f"{name:30} {distances[-1]:.1e} after {ROUNDS} rounds and {kilobytes[-1]:8,.0f} kB")

# %% [markdown]
# Which methods arrive? Those without a memory do not: top-k converges to another point, dithering to a ball around
# the optimum, since what it rounds does not vanish there. Error feedback comes nearer and stops, too: what it holds
# back is as large as the local gradients. EF21 and DIANA send differences to a shift that follows the local gradient,
# so that their errors vanish, and they arrive at nearly the pace of the dense exchange: by rounds these three nearly
# lie on one another. By bytes they are apart: DIANA sends a quarter of what the dense exchange sends, EF21 a third.
# (Entries are 64-bit here; a training run would send half.)

# %% [markdown]
# ## 3. How much it depends on the data
#
# The same with data from alike (0) to sorted (1): where each method is after the same number of rounds. The examples
# are the same ones, so the optimum is, too.

# %%
skews = [0, 0.5, 1]
reached = {name: [run(method, dealt(labels, skew))[0][-1] for skew in skews] for name, method in methods.items()}

# %%
figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
for (name, found), colour, line, marker in zip(reached.items(), COLOURS, LINES, "osD^vP", strict=True):
    axis.semilogy(skews, found, color=colour, linestyle=line, marker=marker, label=name)
axis.set(xlabel="share of a worker's examples that are of its own digits", ylabel=f"distance after {ROUNDS} rounds")
axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Even where all workers hold the same kind of data (0) methods without a memory stop before the optimum, as the parts
# are small samples. The more the data differ, the farther off they stop, and error feedback with them. EF21 and DIANA
# hardly notice; at 0 they lie on the dense exchange.
