"""The same payloads give the same mean with vmap, on a mesh and as bytes on the host, bitwise for equal weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from laws import ROWS, D
from variants import variants
from worlds import AXIS, at, mesh_of, vmap_step

import jaxcomp as jc
from jaxcomp.arrays import like_of, wide_like
from jaxcomp.base import Round, State, accumulate, for_worker, keys_of
from jaxcomp.compressors.tree import as_leaves, each_of, from_leaves, laid_out
from jaxcomp.exchange.driver import _mean
from jaxcomp.exchange.routes import Parcel, Way, route_of
from jaxcomp.groups import groups_of

N = 4
WEIGHTS = {"equal": None, "weighted": np.array([0.1, 0.4, 0.3, 0.2])}
TREE = {"w": jnp.zeros((30, 50)), "b": jnp.zeros(7), "v": jnp.zeros(1100)}


def payloads_of(here, key, seed):
    """Shared states; and of each worker its payloads and what they decode to, one for each group."""
    rng = np.random.default_rng(seed)
    likes = [group.like for group in here.groups]
    messages = [tuple(jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in likes) for _ in range(N)]
    run = sender(here.compressors, here.groups)
    shared, payloads, decoded = zip(*(run(key, i, message) for i, message in enumerate(messages)), strict=True)
    return shared[0], payloads, decoded


@functools.cache
def sender(compressors, groups):
    """What a worker makes of its message, compiled once for all weights and routes."""
    here, likes = Round(None, groups, compressors), [group.like for group in groups]

    @jax.jit
    def run(key, i, message):
        shared, payloads, decoded = [], [], []
        states = here._replace(key=key).start(tuple(likes))
        keys = keys_of(jax.random.fold_in(key, i), here.groups)
        for c, own, x, state, like in zip(here.compressors, keys, message, states, likes, strict=True):
            mine = state._replace(shared=for_worker(c, state.shared, i, N))
            payloads.append(c.compress(own, x, mine)[0])
            decoded.append(c.decompress(payloads[-1], mine.shared, like))
            shared.append(state.shared)
        return tuple(shared), tuple(payloads), tuple(decoded)

    return run


def everywhere(compressor, via, weights, like, key, seed):
    """The mean in three worlds, and what it should be in float64; `like` is an array, or a tree to be laid out."""
    groups = groups_of(laid_out(compressor).layout, like).groups
    here = Round(key, groups, each_of(compressor, groups))
    shared, payloads, decoded = payloads_of(here, key, seed)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *payloads)
    w = None if weights is None else jnp.asarray(weights, jnp.float32)

    def worker(payloads, shared):
        way, each = Way(AXIS, N, weights=w), zip(here.compressors, payloads, shared, groups, strict=True)
        parcels = [Parcel(c, payload, state, group.like) for c, payload, state, group in each]
        arrived = route_of(via).carry(parcels, way, jax.random.key(0), State()).arrived
        each = zip(parcels, arrived, here.compressors, strict=True)
        return tuple(_mean(parcel, one, way, compressor) for parcel, one, compressor in each)

    own = lambda payloads, shared: worker(at(payloads), shared)
    sharded = jax.shard_map(own, mesh=mesh_of(), in_specs=(P(AXIS), P()), out_specs=P())
    arrived = [from_leaves(groups, jc.wire.decode(jc.wire.encode(as_leaves(groups, each)))) for each in payloads]
    want = jax.tree.map(lambda *x: np.average(np.float64(x), axis=0, weights=weights), *decoded)
    given = None if weights is None else np.float32(weights)
    each = zip(here.compressors, zip(*arrived, strict=True), shared, groups, strict=True)
    return {
        "shard_map": jax.jit(sharded)(stacked, shared),
        "vmap": jax.jit(jax.vmap(worker, in_axes=(0, None), out_axes=None, axis_name=AXIS))(stacked, shared),
        "bytes": tuple(on_host(c, sent, given, via, state, group.like) for c, sent, state, group in each),
    }, want


def on_host(compressor, payloads, weights, via, shared, like):
    """The mean of one group in NumPy, from decoded messages; of those that are added on the way, of their sum."""
    scale = 1 / N if weights is None else 1.0
    stacked = jax.tree.map(lambda *a: np.stack(a), *payloads)
    if via != "gather" and compressor.spec.linear:
        stacked, weights = jax.tree.map(lambda *parts: summed(parts, weights), *payloads), None
    zeros = jnp.zeros(like.shape, wide_like(like).dtype)

    @jax.jit
    def mean(payloads, weights):
        return jax.tree.map(lambda t: t * scale, accumulate(compressor, zeros, payloads, weights, shared))

    return mean(stacked, weights)


def summed(parts, weights):
    """In the order of the workers, in f32; 16-bit floats are rounded once, at the end."""
    each = np.ones(N, np.float32) if weights is None else weights
    terms = [p if weights is None else p * w.astype(p.dtype) for p, w in zip(parts, each, strict=True)]
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = total + term.astype(np.float32)
    return total.astype(parts[0].dtype)[None]


def assert_right(results, want, tolerance, weights):
    names = list(results)
    for name in names[1:]:
        for a, b in zip(jax.tree.leaves(results[names[0]]), jax.tree.leaves(results[name]), strict=True):
            if weights == "equal":
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (names[0], name)
            else:  # a weight times a value may be rounded with the sum, or before it
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=tolerance)
    for a, b in zip(jax.tree.leaves(results[names[0]]), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Weights go the same way whatever the row; a row of each kind of payload is enough.
FEW = ["identity", "cast-bf16", "top_k-k", "rand_k-k", "dithering-7", "contract-rand_k", "compose-top_k-dithering"]
GATHERED = [(row, w) for row in ROWS for w in WEIGHTS if w == "equal" or row.name in FEW]
SUMMED = [(row, w) for row in ROWS for w in WEIGHTS if row.compressor.spec.linear]


def named(cases):
    return {"argvalues": cases, "ids": [f"{row.name}-{weights}" for row, weights in cases]}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:via=.gather. pads")  # said of unequal messages, and true
@pytest.mark.parametrize(("row", "weights"), **named(GATHERED))
def test_gather_is_right_and_bitwise_equal_everywhere(row, weights, key, seed):
    like = jax.ShapeDtypeStruct((D,), jnp.float32)
    # What is scaled once more, by no power of two, may be rounded with the sum, too.
    exact = weights if row.name != "contract-dithering" else "scaled"
    assert_right(*everywhere(row.compressor, "gather", WEIGHTS[weights], like, key, seed), 1e-5, exact)


@pytest.mark.sampled
@pytest.mark.parametrize(("row", "weights"), **named(SUMMED))
def test_sum_is_right_and_bitwise_equal_everywhere(row, weights, key, seed):
    like = jax.ShapeDtypeStruct((D,), jnp.float32)
    tolerance = 2**-6 if row.name.startswith("cast") else 1e-5  # 16-bit sums are rounded to 16 bits
    assert_right(*everywhere(row.compressor, "sum", WEIGHTS[weights], like, key, seed), tolerance, weights)


TREES = [
    jc.per_leaf(jc.top_k(0.05)),
    jc.per_leaf(jc.rand_k(0.05)),
    jc.flat(jc.dithering(7)),
    jc.contract(jc.per_leaf(jc.rand_k(0.1))),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "way",
    variants([(v, w) for v in ("auto", "gather") for w in WEIGHTS], [("auto", "weighted")]),
    ids="-".join,
)
@pytest.mark.parametrize("compressor", TREES, ids=lambda c: c.spec.name)
def test_trees_are_right_and_bitwise_equal_everywhere(compressor, way, key, seed):
    via, weights = way
    like = like_of(TREE)
    assert_right(*everywhere(compressor, via, WEIGHTS[weights], like, key, seed), 1e-5, weights)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_mean_on_the_way_is_the_sum_over_n_and_holds_the_largest_numbers(workers, seed):
    """Where 1/n is exact, messages are scaled before they are added."""
    tx = jc.compressed_mean(jc.direct(jc.identity()), AXIS)
    update = lambda x: tx.update(x, tx.init(x))[0]
    mean = jax.jit(jax.vmap(update, axis_name=AXIS, axis_size=workers))
    x = np.random.default_rng(seed).standard_normal((workers, D)).astype(np.float32)
    want = np.mean(x, axis=0, dtype=np.float64)
    np.testing.assert_allclose(mean(x), np.tile(want, (workers, 1)), rtol=1e-6, atol=1e-7)
    if workers != 3:
        largest = np.full((workers, D), np.finfo(np.float32).max)
        np.testing.assert_array_equal(mean(largest), largest)


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_mean_of_equal_rows_is_that_row(workers):
    """Also of the largest numbers, for two and four workers, whose sum would be infinite."""
    tx = jc.compressed_mean(jc.direct(jc.top_k(1.0)), "data", via="gather")
    largest = float(jnp.finfo(jnp.float32).max) if workers != 3 else 3.0
    x = jnp.asarray([largest, -largest, 1.5, 0.0])
    state, step = vmap_step(tx, x, workers)
    mean, _ = step(state, jnp.tile(x, (workers, 1)))
    np.testing.assert_allclose(mean, x, rtol=0 if workers != 3 else 1e-6)
