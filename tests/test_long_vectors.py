"""More entries than 32 bits can number: cut into rows, or refused by name. Shapes only, nothing is allocated."""

import jax
import jax.numpy as jnp
import pytest
from worlds import AXIS

import jaxcomp as jc
from jaxcomp.groups import LONGEST, Layout, groups_of

N = 2
HUGE = {"b": jax.ShapeDtypeStruct((7,), jnp.float32), "w": jax.ShapeDtypeStruct((2**16, 2**17), jnp.float32)}
BARE = jax.ShapeDtypeStruct((2**32,), jnp.float32)
CHUNKS = r"entries in 2 chunks, one for each worker, are 4294968320 in each.* via=\"gather\""


def direction(algorithm, via, tree=HUGE):
    """Shapes of the mean direction of N workers."""
    tx = jc.compressed_mean(algorithm, AXIS, via=via)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)
    return jax.eval_shape(step, jax.tree.map(lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype), tree))


ROUTED = {
    "gather": (jc.error_feedback(jc.top_k(k=5)), "gather"),
    "sum": (jc.error_feedback(jc.identity()), "sum"),
    "ring": (jc.error_feedback(jc.dagc([1, 2], 1e-6)), "ring"),
    "flat": (jc.error_feedback(jc.flat(jc.top_k(k=5))), "gather"),
    "per_leaf": (jc.error_feedback(jc.per_leaf(jc.top_k(k=5))), "gather"),
    "all dense": (jc.error_feedback(jc.per_leaf(jc.top_k(k=5), dense_below=2**40)), "gather"),
    "power_sgd": (jc.power_sgd(2), "auto"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROUTED)
def test_long_leaves_are_cut_or_go_whole(name):
    got = direction(*ROUTED[name])
    assert jax.tree.map(lambda x: x.shape[1:], got) == jax.tree.map(lambda x: x.shape, HUGE)


@pytest.mark.parametrize("compressor", [jc.top_k(k=5), jc.cast("bfloat16")], ids=["top_k", "cast"])
def test_two_shots_are_refused_before_anything_is_made(compressor):
    with pytest.raises(ValueError, match=CHUNKS):
        direction(jc.error_feedback(compressor), "two_shot")


def test_pmean_is_refused():
    mean = jax.vmap(lambda x: jc.collectives.pmean(x, AXIS, wire="bfloat16"), axis_name=AXIS)
    with pytest.raises(ValueError, match="entries in 2 chunks, one for each worker"):
        jax.eval_shape(mean, jax.ShapeDtypeStruct((N, 2**32), jnp.float32))


@pytest.mark.parametrize("layout", [Layout(), Layout("leaf"), Layout("apart"), Layout("tree", 0, single=True)])
def test_no_vector_is_longer_than_can_be_numbered(layout):
    for tree in (HUGE, BARE):
        vectors = groups_of(layout, tree).like
        assert all(vector.shape[-1] <= LONGEST for vector in vectors)


COMPRESSORS = [jc.top_k(k=5), jc.rand_k(k=5), jc.sidco(1e-7), jc.contrib.dgc(1e-7), jc.bernoulli(1e-7), jc.skcompress()]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=[c.spec.name for c in COMPRESSORS])
def test_a_compressor_of_one_array_says_what_to_do(compressor):
    run = lambda x: jc.roundtrip(compressor, x, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"has 4294967296 entries, .* flat\(\.\.\.\) cuts long arrays into rows"):
        jax.eval_shape(run, BARE)


def test_flat_takes_what_one_array_may_not_be():
    got = jax.eval_shape(lambda x: jc.roundtrip(jc.flat(jc.top_k(k=5)), x, key=jax.random.key(0))[0], BARE)
    assert got.shape == BARE.shape
