# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
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

import jaxcomp as jc
from experiments.smoothness.problems import make_problem

# %% [markdown]
# ## 1. Local data, smoothness matrices
#
# Logistic regression on scikit-learn's digits (is the digit at least five?), rows sorted by their norm and dealt to
# 8 workers. $L_i = \frac{1}{4m} A_i^\top A_i + \mu I$.

# %%
problem = make_problem("digits", None, workers=8, l2=1e-2)
n, d, mu = problem.workers, problem.d, problem.l2
S = jc.smoothness.glm(list(problem.features), loss="logistic", l2=mu)  # a stack: one dense operator per worker
print(type(S).__name__, S.diag.shape, "largest diagonal entry over mean:", (S.diag.max(1) / S.diag.mean(1)).round(1))

# %% [markdown]
# The same from the command line is `jaxcomp smoothness DATA --workers 8 --l2 1e-2 --out FILE`; a file remembers what
# data it belongs to.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "digits.npz"
    rows, labels = problem.features.reshape(-1, d), problem.labels.reshape(-1)
    jc.smoothness.preprocess(jc.smoothness.open_source(rows, labels), file, workers=n, l2=mu)
    again = jc.smoothness.load(file, shape=(n, d), data=rows)
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
    "plain, equal steps": omega(equal) * problem.L_max,
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
g = jnp.asarray(problem.features[0].T @ problem.labels[0] / 100)
draws = jax.vmap(lambda key: jc.roundtrip(aware, g, key=key)[0])(jax.random.split(jax.random.key(0), 4000))
print("bias", float(jnp.linalg.norm(draws.mean(0) - g) / jnp.linalg.norm(g)), "(a mean of 4000 draws)")
_, payload = jc.roundtrip(aware, g, key=jax.random.key(1))
print("Elias-coded bits", jc.code_bits(payload, code="elias"), "of", 64 * d)
print("bytes on the wire, framed:", len(jc.wire.encode(payload, code="elias")))

# %% [markdown]
# ## 4. DIANA, DIANA+, ADIANA+ at their theoretical steps

# %%
constants = {"smoothness": problem.L, "workers": n, "mu": mu}
diana = jc.theory.diana(omega=omega(equal), variance=table["plain, equal steps"], **constants)
diana_plus = jc.theory.diana(omega=omega(varying), variance=variance(S.diag, varying), **constants)
adiana_plus = jc.theory.adiana(omega=omega(varying), variance=variance(S.diag, varying), **constants)
dcgd_plus = jc.theory.dcgd(variance=variance(S.diag, varying), **constants)
methods = {
    "DIANA": jc.descend(jc.diana(plain, alpha=diana.alpha), diana.gamma),
    "DCGD+": jc.descend(jc.direct(aware), dcgd_plus.gamma),
    "DIANA+": jc.descend(jc.diana(aware, alpha=diana_plus.alpha), diana_plus.gamma),
    "ADIANA+": jc.adiana(aware, adiana_plus),
}


def run(method, count):
    rounds = jc.rounds(method, "workers")
    optimum = jnp.asarray(problem.optimum)

    def worker(features, labels):
        def gradient(x):
            return features.T @ (-labels * jax.nn.sigmoid(-labels * (features @ x))) / len(labels) + mu * x

        def body(state, _):
            state, bits = rounds.step(state, gradient)
            error = jnp.sum((rounds.point(state) - optimum) ** 2) / jnp.sum(optimum**2)
            return state, (error, bits)

        return jax.lax.scan(body, rounds.init(jnp.zeros(d)), length=count)[1]

    errors, bits = jax.jit(jax.vmap(worker, axis_name="workers"))(problem.features, problem.labels)
    return np.asarray(errors[0]), np.cumsum(np.asarray(bits, np.float64).mean(0)) / 8e3


curves = {name: run(method, 3000) for name, method in methods.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
styles = {
    "DIANA": ("#000000", "--"),
    "DCGD+": ("#E69F00", ":"),
    "DIANA+": ("#0072B2", "-"),
    "ADIANA+": ("#D55E00", "-."),
}
for name, (errors, kilobytes) in curves.items():
    colour, line = styles[name]
    axes[0].semilogy(errors, color=colour, linestyle=line, label=name)
    axes[1].semilogy(kilobytes, errors, color=colour, linestyle=line)
axes[0].set(xlabel="rounds", ylabel="relative squared error", ylim=(1e-20, 3))
axes[1].set(xlabel="kB sent by a worker", ylim=(1e-20, 3))
axes[0].legend(frameon=False)

# %%
for name, (errors, kilobytes) in curves.items():
    below = np.flatnonzero(errors <= 1e-6)
    text = f"{kilobytes[below[0]]:8.1f} kB in {below[0] + 1} rounds" if below.size else f"stays at {errors[-1]:.0e}"
    print(f"{name:8s} to 1e-6: {text}")

# %% [markdown]
# DCGD+ has no shifts and stops in a ball. The one-off upload of the roots is not in these figures: here it is
# $32 \cdot d(d+1)/2$ bits, 8.3 kB for each worker. `python -m experiments smoothness` plots both, on more data.
