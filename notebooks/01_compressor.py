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
# # One compressor, taken apart
#
# A compressor is a few pure functions: `init`, `compress`, `decompress`. Here we watch one gradient go through them,
# chain the result into optax, and read in the compiled program what really crosses between workers.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)  # four workers on this CPU; before anything else touches JAX

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc

# %% [markdown]
# ## 1. init, compress, decompress
#
# Random dithering rounds every entry at random to one of $2s + 1$ levels of the norm,
# $C(x)_j = \|x\|_2\,\mathrm{sign}(x_j)\,k_j / s$, with
# $k_j = \lfloor s|x_j| / \|x\|_2 + u_j \rfloor$.

# %%
compressor = jc.dithering(levels=7)
x = jax.random.laplace(jax.random.key(0), (1000,))

state = compressor.init(jax.random.key(1), x)  # shared randomness enters here (dithering has none)
payload, _ = compressor.compress(jax.random.key(2), x, state)  # private randomness enters here
x_hat = compressor.decompress(payload, state.shared, jax.ShapeDtypeStruct(x.shape, x.dtype))

jax.tree.map(lambda a: (a.dtype.name, a.shape), payload)

# %% [markdown]
# The payload is exactly what crosses: one norm, and 1000 codes of 4 bits in 32-bit words (the width is the first
# dimension; 32 codes fill 4 words, so 1000 codes take 32 groups). Seven levels and a sign need
# $\log_2 15 < 4$ bits.

# %%
print("dense      ", 4 * x.size, "bytes")
print("lane       ", jc.lane_bytes(payload), "bytes: what a collective moves")
print("code       ", jc.code_bits(payload) / 8, "bytes: what the content needs")
print("wire       ", len(jc.wire.encode(payload)), "bytes: with frame and checksum, between hosts")
print("levels used", np.unique(np.round(np.asarray(x_hat) * 7 / float(payload.norms[0]))).astype(int))

# %% [markdown]
# ## 2. Unbiased, and how noisy
#
# `roundtrip` does all of it with one key, so it can be mapped over keys. The mean over draws goes to $x$, and the
# mean squared error stays below $\omega \|x\|^2$.

# %%
draws = jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0])(jax.random.split(jax.random.key(3), 2000))
error = jnp.mean(jnp.sum((draws - x) ** 2, axis=1)) / jnp.sum(x**2)
print(f"relative squared error {error:.2f}, bound omega {compressor.spec.omega(x.size):.2f}")
off = jnp.sum((draws.mean(0) - x) ** 2) / jnp.sum(x**2)
print(f"the mean of 2000 draws is off by {off:.5f}; an unbiased one by {error / 2000:.5f} on average")

blocks = jc.dithering(levels=7, block_size=64)
print(f"with a norm per 64 entries: omega {blocks.spec.omega(x.size):.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for axis, c in zip(axes, (jc.dithering(7, block_size=64), jc.top_k(0.1)), strict=True):
    got, message = jc.roundtrip(c, x, key=jax.random.key(4))
    axis.scatter(x, got, s=8, color="#0072B2")
    axis.plot([-8, 8], [-8, 8], color="#000000", linewidth=0.8, linestyle="--")
    axis.set(xlabel="entry of x", ylabel="entry of C(x)", title=f"{c.spec.name}: {jc.lane_bytes(message)} bytes")
plt.show()

# %% [markdown]
# ## 3. Into optax
#
# Top-k is biased, so it needs a memory: `error_feedback` keeps what was not sent. `compressed_mean` makes an optax
# transformation of it. We simulate four workers with different targets on a least-squares problem.

# %%
mean = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), axis_name="data", measure=True)
tx = optax.chain(mean, optax.sgd(0.02))
targets = jax.random.normal(jax.random.key(5), (4, 400))


@jax.jit
def train(targets):
    def worker(target):
        def body(carry, _):
            w, state = carry
            updates, state = tx.update(w - target, state, w)  # gradient of |w - target|^2 / 2
            w = optax.apply_updates(w, updates)
            return (w, state), (w, jc.info(state).relative_error)

        w = jnp.zeros(400)
        return jax.lax.scan(body, (w, tx.init(w)), length=1000)[1]

    return jax.vmap(worker, axis_name="data")(targets)


path, errors = train(targets)
distance = jnp.linalg.norm(path[0] - targets.mean(0), axis=1) / jnp.linalg.norm(targets.mean(0))
print("distance to the mean target after 1, 100, 1000 steps:", np.round(distance[jnp.array([0, 99, 999])], 3))
print("all workers hold the same parameters:", bool((path == path[0]).all()))

# %% [markdown]
# ## 4. The ledger
#
# The same transformation under `shard_map` on four devices. The ledger lists every collective of the compiled
# program: one, in which values and indices travel joined, and nothing of the size of the gradient.

# %%
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
w = jnp.zeros(400)
state, specs = jc.init_state(tx, w, mesh, "data")


def step(w, state, target):
    updates, state = tx.update(w - target[0], state, w)
    return optax.apply_updates(w, updates), state


step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
book = jc.ledger(step, w, state, targets)
print(book)

# %% [markdown]
# One all-gather of 160 bytes: 20 values and 20 indices of 4 bytes each. That is `lane_bytes`, and the tests hold the
# two equal for every compressor. A dense step would have all-reduced 1600 bytes.

# %%
_, state = step(w, state, targets)
info = jc.info(state)
assert int(info.lane_bytes) == sum(row.operand_bytes for row in book.rows) == 160
info
