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
# # SKCompress: the sketch seen from inside
#
# SketchML and SKCompress send a sparse gradient as keys, which are exact, and values, which are not: each value becomes
# the number of a quantile bucket, and the numbers go into a hash table that the keys are looked up in. Here we open
# that table, watch keys collide in it, measure what the collisions cost, and see what recentring mends.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn

import jaxcomp as jc
from jaxcomp.compressors.minmax_sketch import Shape, insert, list_of, places, query
from jaxcomp.payloads import sketch_bits

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # distinct to colour-blind eyes, too

# %% [markdown]
# ## 1. A sparse gradient
#
# A network that reads documents as bags of words: the mean of the embeddings of their words, then two layers. Words
# are as unequal in frequency as in text (Zipf's law). Only words that occur in the batch have a gradient in the table
# of embeddings.

# %%
WORDS, WIDTH, LENGTH = 8192, 4, 30
rng = np.random.default_rng(0)
chance = 1 / np.arange(1, WORDS + 1)
documents = rng.permutation(WORDS)[rng.choice(WORDS, (4000, LENGTH), p=chance / chance.sum())]
score = rng.standard_normal(WORDS)[documents].sum(1)
labels = (score > np.median(score)).astype(int)


class Bag(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH, name="embed")(words).mean(1)
        return nn.Dense(2)(nn.tanh(nn.Dense(16)(x)))


model, optimizer = Bag(), optax.adam(1e-2)
params = model.init(jax.random.key(0), documents[:1])


@jax.jit
def step(params, state, words, y):
    loss = lambda p: optax.softmax_cross_entropy_with_integer_labels(model.apply(p, words), y).mean()
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value, grads["params"]["embed"]["embedding"]


state = optimizer.init(params)
for _ in range(20):
    chosen = rng.choice(len(labels), 200, replace=False)
    params, state, value, gradient = step(params, state, documents[chosen], labels[chosen])
print(f"loss {value:.3f} after 20 steps")
g = np.asarray(gradient).reshape(-1)
keys = np.flatnonzero(g).astype(np.int32)
values = g[keys]
n = keys.size
print(f"{n:,} of {g.size:,} entries are not zero; {np.mean(values < 0):.0%} of them are negative")
print(f"largest magnitude {np.abs(values).max():.2g}, median {np.median(np.abs(values)):.2g}")

# %% [markdown]
# The tail is heavy. Quantile buckets hold equally many values each, so the outermost ones are very wide.
#
# ## 2. One MinMaxSketch
#
# The items of one group: each key has a rank, the distance of its bucket from zero. Insert takes the minimum in a cell,
# query the maximum over the rows. A key is read right if in at least one row no nearer key shares its cell.

# %%
B, rows, rho = 32, 2, 0.3
group = jnp.asarray(keys[:2048])
count = group.size
ranks = jnp.asarray(np.random.default_rng(0).permutation(count) % B, jnp.int32)  # equal depth
counts = jnp.array([count])


def read(rho, seeds):
    shape = Shape(len(seeds), rho)
    where = places(group, list_of(counts, count), counts, shape, seeds)
    table = insert(where, ranks, shape.size(count, 1), B)
    return query(table, where), table[: shape.rows * shape.widths(counts)[0]]


seeds = jax.random.bits(jax.random.key(0), (rows,), jnp.uint32)
got, table = read(rho, seeds)
print(f"{count} keys in {rows} rows of {table.size // rows} cells; {np.mean(table == B):.1%} of the cells are empty")
print(f"{np.mean(got == ranks):.1%} of the keys are read right; mean loss {np.mean(ranks - got):.2f} buckets of {B}")
print(f"no key is read too far from zero: largest gain {np.max(got - ranks)}")

# %% [markdown]
# With random hashes a cell keeps rank $i$ or more with chance $e^{-i/(\rho B)}$ for equal depth. From this follow the
# chance that a key of rank $j$ is right and its mean loss:
#
# $$P(\text{right}\mid j) = 1-\left[1-e^{-j/(\rho B)}\right]^s,\qquad
# E[\text{loss}\mid j] = j-\sum_{i<j}\left(1-\left[1-e^{-(i+1)/(\rho B)}\right]^s\right).$$

# %%
j = np.arange(B)
kept = lambda i, rho: 1 - (1 - np.exp(-i / (rho * B))) ** rows
losses = np.array(
    [np.asarray(ranks - read(rho, jax.random.bits(jax.random.key(i), (rows,), jnp.uint32))[0]) for i in range(20)]
)
by_rank = [losses[:, np.asarray(ranks) == rank] for rank in j]

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
left.imshow(
    np.histogram2d(np.asarray(ranks), np.asarray(got), bins=[np.arange(B + 1)] * 2)[0].T, origin="lower", cmap="viridis"
)
left.plot([0, B - 1], [0, B - 1], color="white", linestyle=":")
left.set(xlabel="rank that was inserted", ylabel="rank that is read", title="collisions pull towards zero")
left.grid(False)
middle.plot(j, [np.mean(loss == 0) for loss in by_rank], "o", color=COLOURS[0], label="measured")
middle.plot(j, kept(j, rho), color="black", label="theory")
middle.set(xlabel="rank", ylabel="share that is read right", ylim=(0, 1.05))
middle.legend()
right.plot(j, [np.mean(loss) for loss in by_rank], "o", color=COLOURS[1], label="measured")
right.plot(j, [rank - kept(np.arange(1, rank + 1), rho).sum() for rank in j], color="black", label="theory")
right.set(xlabel="rank", ylabel="mean loss in buckets")
right.legend()
plt.show()

# %% [markdown]
# The theory fits. The far ranks lose most: just those that hold the large values. More columns help, and cost bits.
#
# ## 3. The cells
#
# The minimum rule makes small ranks frequent, and that is all that Huffman coding can use: bucket numbers themselves
# are uniform.

# %%
cells = np.bincount(np.asarray(table), minlength=B + 1) / table.size
entropy = -np.sum(cells[cells > 0] * np.log2(cells[cells > 0]))
law = np.append(np.exp(-j / (rho * B)) * (1 - np.exp(-1 / (rho * B))), np.exp(-1 / rho))
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
axis.bar(np.arange(B + 1), cells, color=COLOURS[0], label="measured")
axis.plot(np.arange(B + 1), law, color="black", marker=".", label="truncated geometric law")
axis.set(
    xlabel=f"cell ({B}: empty)", ylabel="share of the cells", title=f"entropy {entropy:.2f} of {np.log2(B):.0f} bits"
)
axis.legend()
plt.show()

# %% [markdown]
# Small ranks are the most frequent, as the law says. But coding gains only half a bit of five from it.
#
# ## 4. What recentring mends
#
# As released, a bucket stands for its midpoint; collisions then shrink what is decoded. The encoder can run the decoder
# and let each bucket stand for the mean of the values that really decode to it. That costs no bytes, and makes the
# error orthogonal to what is sent: $|x - C(x)|^2 = |x|^2 - |C(x)|^2$, so $C$ contracts and error feedback is safe.
# "paper" is refused there. Below, the same sketches as released, and with their levels recentred afterwards.


# %%
def roundtrip(key=1, **options):
    compressor = jc.skcompress(jc.contrib.hard_threshold(0.0, room=0.25), **options)
    x_hat, payload = jax.jit(lambda x, key: jc.roundtrip(compressor, x, key=key))(jnp.asarray(g), jax.random.key(key))
    return np.float64(x_hat)[keys], sum(int(part) for part in jax.jit(sketch_bits)(payload)) / n


def error_of(decoded):
    return np.sum((values - decoded) ** 2) / np.sum(np.float64(values) ** 2)


def recentred(decoded):
    _, bucket = np.unique(decoded, return_inverse=True)
    return (np.bincount(bucket, values) / np.bincount(bucket))[bucket]


released, bits = roundtrip(mode="paper")
sides = np.array([np.quantile(np.abs(values), 0.01), np.abs(values).max()])  # the smallest hundredth is not shown
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for axis, decoded, name, colour in zip(
    axes, (released, recentred(released)), ("released", "recentred"), COLOURS, strict=False
):
    axis.plot(np.abs(values), np.abs(decoded), ".", markersize=3, color=colour)
    axis.plot(sides, sides, color="black")
    axis.set(xscale="log", yscale="log", xlim=sides * [0.8, 1.3], ylim=sides * [0.8, 1.3])
    axis.set(xlabel="magnitude", title=f"{name}: error {error_of(decoded):.3f}")
    length = np.sum(decoded**2) / np.sum(np.float64(values) ** 2)
    print(f"{name:10s} error {error_of(decoded):.4f}   1 - |C(x)|²/|x|² {1 - length:.4f}")
axes[0].set_ylabel("decoded magnitude")
plt.show()

# %% [markdown]
# Left, as released: nearly all points lie below the line, and those on the right, which hold most of the norm, lie an
# order of magnitude below it. Right, recentred: the same collisions, but points lie on both sides of the line, and the
# error is what the orthogonality says, $1 - |C(x)|^2 / |x|^2$.

# %% [markdown]
# ## 5. And what it cannot mend
#
# Keys travel without loss anyway, so the place in the list says which value it is, which needs no hashing: "quantile".
# And the lists for each group, without which collisions would be worse, cost $\log_2 r$ bits a key. With equally many
# values in each bucket (`power=0`) that is the control for the sketch at equal bits. Where tails are heavy, buckets of
# equal parts of $\sum|x_j|$ do far better (`power=1`, the default): narrow where values are large, and so unequally
# filled that Huffman coding shortens their numbers.

# %%
families = {
    "quantile, power 1": ({"power": 1}, (4, 8, 16, 32, 64)),
    "quantile, power 0": ({"power": 0}, (8, 16, 32, 64, 256)),
    "recentred sketch": ({"mode": "recentred"}, (64, 256)),
    "paper": ({"mode": "paper"}, (64, 256)),
}
figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
for (label, (options, choices)), colour, marker in zip(families.items(), COLOURS, "os^D", strict=True):
    points = [roundtrip(buckets=q, **options) for q in choices]
    sizes, errors = [bits for _, bits in points], [error_of(decoded) for decoded, _ in points]
    axis.plot(sizes, errors, color=colour, marker=marker, label=label)
    for q, size, error in zip(choices, sizes, errors, strict=True):
        print(f"{label:18s} {q:4d} buckets: {size:5.2f} bits, error {error:.4f}")
        axis.annotate(f"{q}", (size, error), textcoords="offset points", xytext=(4, 4), fontsize=8)
axis.set(
    yscale="log",
    xlabel="bits per nonzero, keys among them",
    ylabel="relative squared error",
    title="numbers at the points: buckets",
)
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# Lower left is better. Buckets of equal parts of $\sum|x_j|$ are below everything else at equal bits; the recentred
# sketch needs more bits than plain buckets of equal depth for the same error, and the released form more again. From 32
# to 64 buckets the error falls by an order of magnitude for one bit, since the few largest values get buckets of their
# own.
