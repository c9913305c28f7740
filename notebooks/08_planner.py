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
# # The planner: what to exchange on which link
#
# `jc.recommend` computes, from the shapes of a model, a link and a machine, what each method sends and how long a step
# takes, and says which is fastest; the answer may be not to compress. Nothing is run or compiled, so the machines need
# not be there. `jc.plan` measures instead, on yours.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxcomp as jc

# %% [markdown]
# ## What to vary
#
# Change this cell and run the notebook again.

# %%
LAYERS, WIDTH, WORDS = 12, 768, 32_000  # a GPT
WORKERS = 16
MACHINE = "h100"  # one of jc.Machine.names(), or a file of your own
GRADIENT = 0.1  # seconds of loss and gradient in a step
LATENCY = 5e-5  # seconds, of the link between workers
CANDIDATES = {
    "f32": "direct(identity)",
    "bf16": "direct(cast('bfloat16'))",
    "int4, error feedback": "error_feedback(block_scaled('int4'))",
    "top-k 1 %": "error_feedback(top_k(0.01))",
    "sidco 0.1 %": "error_feedback(sidco(0.001))",
    "rank 4": "power_sgd(4)",
}

# %% [markdown]
# ## 1. One link

# %%
shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
layer = {"qkv": shape(WIDTH, 3 * WIDTH), "out": shape(WIDTH, WIDTH), "norms": shape(4, WIDTH)}
layer |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
params = {"embed": shape(WORDS, WIDTH), "layers": [layer] * LAYERS}
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters;", "machines:", *jc.Machine.names())
candidates = [
    jc.Candidate(name, jc.from_config(text), "two_shot" if "int4" in name else "auto", dense=name in ("f32", "bf16"))
    for name, text in CANDIDATES.items()
]


def advice(bandwidth, workers=WORKERS):
    link = jc.Link(LATENCY, bandwidth)
    return jc.recommend(params, workers=workers, link=link, candidates=candidates, machine=MACHINE, gradient=GRADIENT)


print(advice(1.25e9))  # 10 Gbit/s

# %% [markdown]
# ## 2. All links
#
# Seconds of a step against bandwidth, from 100 Mbit/s to 1 Tbit/s. The gradient alone takes the time of the grey line.

# %%
bandwidths = np.geomspace(12.5e6, 125e9, 17)
found = [advice(bandwidth) for bandwidth in bandwidths]
seconds = {
    name: [next(r for r in each.rows if r.candidate.name == name).seconds for each in found] for name in CANDIDATES
}

# %%
COLOURS = ["#000000", "#56B4E9", "#0072B2", "#D55E00", "#E69F00", "#009E73"]  # distinct to colour-blind eyes, too
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
axis.axhline(GRADIENT, color="#999999", linewidth=1)
for i, (name, each) in enumerate(seconds.items()):
    axis.loglog(8 * bandwidths / 1e6, each, color=COLOURS[i], marker="os^DvP"[i], markersize=4, label=name)
axis.set(xlabel="bandwidth of a worker's link, Mbit/s", ylabel="seconds of a step, computed")
axis.legend(frameon=False)
plt.show()
for bandwidth, each in list(zip(bandwidths, found, strict=True))[::4]:
    print(f"{8 * bandwidth / 1e6:12,.0f} Mbit/s: {each.chosen.candidate.name}")

# %% [markdown]
# On slow links bytes alone decide, and all lines are straight and parallel. On fast ones all come down to the time of
# the gradient and lie on one another: compression then saves nothing that one could measure. The advice counts time
# alone: the column "effect on the loss" says what a method may cost in steps.
#
# ## 3. More workers
#
# A gather brings each worker the messages of all others, so its time grows with their number; a sum hardly does.

# %%
numbers = [2, 4, 8, 16, 32, 64]
by_number = [advice(1.25e9, n) for n in numbers]
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
for i, name in enumerate(CANDIDATES):
    each = [next(r for r in found.rows if r.candidate.name == name).seconds for found in by_number]
    axis.loglog(numbers, each, color=COLOURS[i], marker="os^DvP"[i], markersize=4, label=name)
axis.set(xlabel="workers", ylabel="seconds of a step at 10 Gbit/s, computed", xticks=numbers, xticklabels=numbers)
axis.xaxis.minorticks_off()
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Top-k's messages are gathered: beyond about 50 workers they cost more than an exchange in bf16. What is summed on the
# way (dense, low rank), or travels in two shots (int4), stays nearly as it is.
