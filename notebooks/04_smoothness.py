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
# # Smoothness-aware compression
#
# A worker's loss is steep in some directions and flat in others. Its smoothness matrix $L_i$ says where. Compress
# the whitened gradient $L_i^{-1/2} g$ and take the whitening back on arrival: the error then lies where it does the
# least harm, and steps may be longer.

# %%
import tempfile
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import jaxcomp as jc

# %% [markdown]
# ## 1. Local data, smoothness matrices
#
# Logistic regression on scikit-learn's digits (is the digit at least five?), rows sorted by their norm and dealt to
# 8 workers. $L_i = \frac{1}{4m} A_i^\top A_i + \mu I$.

# %%
n, d, mu = 8, 64, 1e-2
images, digits = load_digits(return_X_y=True)
rows = images / np.abs(images).max(1, keepdims=True)
by_norm = np.argsort(np.linalg.norm(rows, axis=1))[: len(rows) // n * n].reshape(n, -1)
features, labels = rows[by_norm], np.where(digits >= 5, 1.0, -1.0)[by_norm]
S = jc.smoothness.glm(list(features), loss="logistic", l2=mu)  # a stack: one dense operator per worker
print(type(S).__name__, S.diag.shape, "largest diagonal entry over mean:", (S.diag.max(1) / S.diag.mean(1)).round(1))

# %% [markdown]
# The same from the command line is `jaxcomp smoothness DATA --workers 8 --l2 1e-2 --out FILE`; a file remembers what
# data it belongs to.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "digits.npz"
    data = features.reshape(-1, d)
    jc.smoothness.preprocess(jc.smoothness.open_source(data, labels.reshape(-1)), file, workers=n, l2=mu)
    again = jc.smoothness.load(file, shape=(n, d), data=data)
    print(np.allclose(again.diag, S.diag), jc.smoothness.describe(file)["digest"][:12])

# %% [markdown]
# ## 2. Steps that follow the smoothness
#
# Random dithering rounds entry $j$ to multiples of $h_j\|u\|$. For a number $\beta$ of expected non-zeros the best
# steps are $h_j \propto 1/\sqrt{(L_i)_{jj}}$: fine where the loss is steep. What remains is the generalised variance
# $V(C, L)$, here against equal steps, with and without whitening.

# %%
beta = d / 8
varying = jc.smoothness.steps(S.diag, beta, method="diana+", workers=n, mu=mu)
equal = np.full((n, d), np.sqrt(d) / beta)
variance = lambda diag, h: max(jc.smoothness.dithering_variance(a, b) for a, b in zip(diag, h, strict=True))
omega = lambda h: variance(np.ones((n, d)), h)
table = {
    "plain, equal steps": omega(equal) * float(np.max(S.lambda_max)),
    "whitened, equal steps": variance(S.diag, equal),
    "whitened, varying steps": variance(S.diag, varying),
}
for name, value in table.items():
    print(f"{name:24s} V = {value:8.3f}")

# %% [markdown]
# ## 3. The compressor, and what it costs on the wire
#
# `precondition` wraps any unbiased compressor. With plans per worker, the decoder uses row $j$ for message $j$.

# %%
plain = jc.dithering(steps=equal, per_worker=True)
aware = jc.precondition(jc.dithering(steps=varying, per_worker=True), S)
g = jnp.asarray(features[0].T @ labels[0] / 100)
draws = jax.vmap(lambda key: jc.roundtrip(aware, g, key=key)[0])(jax.random.split(jax.random.key(0), 4000))
print("bias", float(jnp.linalg.norm(draws.mean(0) - g) / jnp.linalg.norm(g)), "(a mean of 4000 draws)")
_, payload = jc.roundtrip(aware, g, key=jax.random.key(1))
print("Elias-coded bits", jc.code_bits(payload, code="elias"), "of", 64 * d)
print("bytes on the wire, framed:", len(jc.wire.encode(payload, code="elias")))

# %% [markdown]
# ## 4. DIANA, DIANA+, ADIANA+ at their theoretical steps
#
# The optimum by Newton's method, to measure distances to it:

# %%
A = (features * labels[..., None]).reshape(-1, d)
optimum = np.zeros(d)
for _ in range(20):
    s = 1 / (1 + np.exp(A @ optimum))
    hessian = (A * (s * (1 - s))[:, None]).T @ A / len(A) + mu * np.eye(d)
    optimum -= np.linalg.solve(hessian, mu * optimum - A.T @ s / len(A))

# %% [markdown]
# Two budgets: d / 8 expected non-zeros in a message, and 2 d.

# %%
constants = {"smoothness": jc.smoothness.mean_lambda_max(S), "workers": n, "mu": mu}


def smart(beta):
    """The whitened compressor with this budget, its generalised variance and its omega."""
    h = jc.smoothness.steps(S.diag, beta, method="diana+", workers=n, mu=mu)
    c = jc.precondition(jc.dithering(steps=h, per_worker=True), S)
    return c, {"omega": omega(h), "variance": variance(S.diag, h), **constants}


def diana(c, known):
    sizes = jc.theory.diana(**known)
    return jc.methods.descend(jc.diana(c, alpha=sizes.alpha), sizes.gamma)


(short, of_short), (long, of_long) = smart(d / 8), smart(2 * d)
methods = {
    "DIANA, d / 8": diana(plain, {"omega": omega(equal), "variance": table["plain, equal steps"], **constants}),
    "DCGD+, d / 8": jc.methods.descend(
        jc.direct(short), jc.theory.dcgd(variance=of_short["variance"], **constants).gamma
    ),
    "DIANA+, d / 8": diana(short, of_short),
    "ADIANA+, d / 8": jc.methods.adiana(short, jc.theory.adiana(**of_short)),
    "DIANA+, 2 d": diana(long, of_long),
    "ADIANA+, 2 d": jc.methods.adiana(long, jc.theory.adiana(**of_long)),
}


def run(method, count):
    rounds = jc.methods.rounds(method, "workers")

    def worker(features, labels):
        def gradient(x):
            return features.T @ (-labels * jax.nn.sigmoid(-labels * (features @ x))) / len(labels) + mu * x

        def body(state, _):
            state, bits = rounds.step(state, gradient)
            error = jnp.sum((rounds.point(state) - optimum) ** 2) / jnp.sum(optimum**2)
            return state, (error, bits)

        return jax.lax.scan(body, rounds.init(jnp.zeros(d)), length=count)[1]

    errors, bits = jax.jit(jax.vmap(worker, axis_name="workers"))(features, labels)
    return np.asarray(errors[0]), np.cumsum(np.asarray(bits, np.float64).mean(0)) / 8e3


curves = {name: run(method, 1500) for name, method in methods.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
colours = {"DIANA": "#000000", "DCGD+": "#E69F00", "DIANA+": "#0072B2", "ADIANA+": "#D55E00"}
for name, (errors, kilobytes) in curves.items():
    method, budget = name.split(", ")
    style = {"color": colours[method], "linestyle": "-" if budget == "d / 8" else "--"}
    axes[0].semilogy(errors, **style, label=name)
    axes[1].semilogy(kilobytes, errors, **style)
lowest = min(errors.min() for errors, _ in curves.values())
axes[0].set(xlabel="rounds", ylabel="relative squared error", ylim=(lowest / 3, 3))
axes[1].set(xlabel="kB sent by a worker", xscale="log")
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %%
for name, (errors, kilobytes) in curves.items():
    below = np.flatnonzero(errors <= 1e-6)
    text = f"{kilobytes[below[0]]:8.1f} kB in {below[0] + 1} rounds" if below.size else f"stays at {errors[-1]:.0e}"
    print(f"{name:14s} to 1e-6: {text}")

# %% [markdown]
# With short messages DIANA+ is the cheapest: 12.8 kB to an error of 1e-6, where DIANA has hardly begun. DCGD+ has no
# shifts and stops in a ball.
#
# **ADIANA+ loses with short messages.** It sends two of them in a round, and a compressor of d / 8 non-zeros is so
# noisy that theory leaves acceleration no larger steps: about as many rounds as DIANA+ and twice the bytes. With 2 d
# non-zeros the noise is small, and acceleration takes a quarter of the rounds and half of the bytes of DIANA+ at the
# same budget, down to rounding level, where the axis ends.
# So: short messages without acceleration where bytes count, long ones with it where rounds count.
#
# The one-off upload of the roots is not in these figures: here it is $32 \cdot d(d+1)/2$ bits, 8.3 kB for each worker.
#
# ## 5. A network has no such matrix
#
# Its curvature can be estimated where it stands, for instance the diagonal of the Gauss-Newton matrix. `precondition`
# stays unbiased whatever the estimate is: a poor one costs variance, never correctness. Here four workers train a
# network on the same digits with dithering at equal steps, and with whitening by a diagonal that is estimated anew
# every 20 steps.

# %%
model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(10)])
x, y = jnp.asarray(images / 16, jnp.float32), jnp.asarray(digits)
params = model.init(jax.random.key(0), x[:1])
start, unravel = ravel_pytree(params)
logits = lambda w, x: model.apply(unravel(w), x)
loss_fn = lambda w, x, y: optax.softmax_cross_entropy_with_integer_labels(logits(w, x), y).mean()
estimate = jax.jit(lambda w, key: jc.smoothness.ggn_diagonal(lambda w: logits(w, x[:512]), w, key, samples=8))


def network_losses(whiten, share, seed=0):
    size = start.size

    def compressor_at(w, key):
        S = jc.smoothness.network_operator(estimate(w, key)) if whiten else None
        h = jc.smoothness.steps(np.ones(size) if S is None else S.diag, share * size, method="dcgd+")
        return jc.dithering(steps=h) if S is None else jc.precondition(jc.dithering(steps=h), S)

    w, losses, rng = start, [], np.random.default_rng(seed)
    for phase in range(4):
        tx = jc.compressed_mean(jc.direct(compressor_at(w, jax.random.key(phase))), "workers", seed=phase)
        state, axes = jc.init_state(tx, w, 4, "workers")

        def step(w, state, x, y, tx=tx):
            loss, g = jax.value_and_grad(loss_fn)(w, x, y)
            direction, state = tx.update(g, state, w)
            return w - 0.5 * direction, state, jax.lax.pmean(loss, "workers")

        many = jax.jit(jax.vmap(step, in_axes=(None, axes, 0, 0), out_axes=(None, axes, None), axis_name="workers"))
        for _ in range(20):
            chosen = rng.choice(len(y), (4, 64))
            w, state, loss = many(w, state, x[chosen], y[chosen])
            losses.append(float(loss))
    return losses


network = {
    "equal steps": network_losses(False, 0.05),
    "whitened, varying steps": network_losses(True, 0.05),
}

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
for (name, losses), colour, line in zip(network.items(), ("#000000", "#0072B2"), ("--", "-"), strict=True):
    axis.plot(losses, color=colour, linestyle=line, label=name)
    print(f"{name:24s} mean loss of the last 10 steps {np.mean(losses[-10:]):.3f}")
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The two curves lie on each other: here the estimate gains nothing, and it would have to be sent besides. Smoothness
# matrices pay where they are exact and hold everywhere, as for logistic regression above.
