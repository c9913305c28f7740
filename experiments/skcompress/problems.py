"""Models with sparse gradients: linear ones on sparse rows, and a small network.

The rows are those of a file (news20 and the like), or drawn: `synthetic` imitates the KDD Cup sets on which
SketchML was tried, that is, rows of one-hot fields whose values are as unequal in frequency as words are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib.data import load, read_rows
from experiments.lib.flat import flat_model

__all__ = ["LOSSES", "Problem", "Rows", "linear", "network", "read", "synthetic"]

LOSSES = ("logistic", "svm", "regression")
L2 = 1e-5  # on the features that occur in a batch, as in the released code


class Rows(NamedTuple):
    """indices i32[m, l], values f32[m, l], zero where a row has fewer than l entries;  labels f32[m], -1 or 1;
    d features."""

    name: str
    indices: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    d: int


class Problem(NamedTuple):
    """params: f32[d], where training starts;  examples: how many;  loss(params, batch) and gradient(params, batch) for
    indices i32[b] of examples, given `data`, a tree of arrays."""

    name: str
    params: np.ndarray
    examples: int
    data: Any
    loss: Callable[..., Any]
    gradient: Callable[..., Any]


def synthetic(
    rows: int = 20_000, d: int = 1 << 17, fields: int = 20, skew: float = 1.1, positive: float = 0.2, seed: int = 0
) -> Rows:
    """One-hot rows with frequencies by Zipf's law, labels from a sparse logistic model.

    The d features are dealt to fields of geometrically growing size (a few small ones, one with most of them). In each
    field a row has the feature of rank k with a chance in proportion to 1 / k^skew. Entries are 1 / sqrt(fields). A
    quarter of the features carry a weight with a normal law; about `positive` of the labels are 1. KDD 2010 has about
    30 entries in a row, KDD 2012 about 11.
    """
    rng = np.random.default_rng([seed, 5])
    sizes = np.geomspace(2, 2 * d / fields, fields)
    sizes = np.maximum(np.floor(sizes * d / sizes.sum()).astype(int), 1)
    starts = np.cumsum(sizes) - sizes
    columns = []
    for start, size in zip(starts, sizes, strict=True):
        law = np.arange(1, size + 1) ** -skew
        columns.append(start + np.searchsorted(np.cumsum(law) / law.sum(), rng.random(rows)).clip(0, size - 1))
    shuffled = rng.permutation(d).astype(np.int32)
    indices = np.sort(shuffled[np.stack(columns, 1)], axis=1)
    weights = np.where(rng.random(d) < 0.25, 2 * rng.standard_normal(d), 0)
    margin = weights[indices].sum(1)
    chance = 1 / (1 + np.exp(-(margin - np.quantile(margin, 1 - positive))))
    labels = np.where(rng.random(rows) < chance, 1, -1).astype(np.float32)
    values = np.full(indices.shape, fields**-0.5, np.float32)
    return Rows(f"synthetic, Zipf {skew:g}", indices, values, labels, d)


def read(path: Path) -> Rows:
    """Rows of a file, scaled to norm one. Of several classes the lower half is against the upper one."""
    from sklearn.preprocessing import normalize

    unscaled, labels = read_rows(path)
    rows: Any = normalize(unscaled)
    lengths = np.diff(rows.indptr)
    present = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]
    indices, values = np.zeros(present.shape, np.int32), np.zeros(present.shape, np.float32)
    indices[present], values[present] = rows.indices, rows.data
    signs = np.where(labels > np.median(np.unique(labels)), 1, -1).astype(np.float32)
    return Rows(path.name.split(".")[0], indices, values, signs, rows.shape[1])


def linear(rows: Rows, kind: str) -> Problem:
    """Logistic regression, linear SVM or least squares on the labels, from zero."""
    of_margin = {
        "logistic": lambda margin: jnp.logaddexp(0.0, -margin),
        "svm": lambda margin: jnp.maximum(0.0, 1.0 - margin),
        "regression": lambda margin: 0.5 * jnp.square(1.0 - margin),  # labels are 1 and -1
    }[kind]

    def loss(params, data, batch):
        indices, values, labels = (part[batch] for part in data)
        return jnp.mean(of_margin(labels * jnp.sum(values * params[indices], axis=1)))

    def gradient(params, data, batch):
        present = jnp.zeros(params.shape).at[data[0][batch]].max(jnp.sign(jnp.abs(data[1][batch])))
        return jax.grad(loss)(params, data, batch) + L2 * present * params

    data = tuple(map(jnp.asarray, (rows.indices, rows.values, rows.labels)))
    return Problem(f"{kind}, {rows.name}", np.zeros(rows.d, np.float32), rows.labels.size, data, loss, gradient)


def network() -> Problem:
    """Two hidden layers of 256 on scikit-learn's digits: zeros in the gradient come from ReLU and from empty pixels."""
    images = load("digits")
    model = flat_model(images, 0)
    loss = lambda vector, data, batch: model.test(vector, data[0][batch], data[1][batch])[0]
    data = (jnp.asarray(images.train_x), jnp.asarray(images.train_y))
    return Problem("network, digits", np.asarray(model.start), len(images.train_y), data, loss, jax.grad(loss))
