"""The order in which gradients are ready, and buckets in that order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import assert_same

import jaxcomp as jc
from jaxcomp.groups import Layout, groups_of

ONES = jnp.ones((4, 4))
PARAMS = {"block_0": ONES, "block_1": ONES, "block_10": ONES, "wte": jnp.ones((9, 4))}
BLOCKS = ("block_0", "block_1", "block_10")
READY = ("['block_10']", "['block_1']", "['block_0']", "['wte']")


def loss(params, tokens, *, scale=1.0):
    h = params["wte"][tokens]
    for name in BLOCKS:
        h = jnp.tanh(h @ params[name])
    return scale * jnp.sum(h)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_the_order_is_that_of_the_backward_pass(wrap):
    assert jc.buckets(2**20, wrap(loss), PARAMS, jnp.arange(3)) == (2**20, READY)


def test_values_beside_the_loss_keywords_and_shapes():
    shapes = jax.eval_shape(lambda: (PARAMS, jnp.arange(3)))
    with_aux = lambda params, tokens, scale: (loss(params, tokens, scale=scale), tokens)
    assert jc.buckets(1, with_aux, *shapes, has_aux=True, scale=2.0).order == READY


def test_leaves_of_one_instruction_go_from_the_last_to_the_first():
    def scanned(params, x):
        layer = lambda h, each: (jnp.tanh(h @ each["a"] + each["b"]), None)
        return jnp.sum(jax.lax.scan(layer, params["embed"][x], params["layers"])[0] @ params["zero"])

    layers = {"a": jnp.ones((5, 4, 4)), "b": jnp.ones((5, 4))}
    params = {"embed": jnp.ones((9, 4)), "layers": layers, "zero": jnp.ones((4, 4))}
    order = jc.buckets(1, scanned, params, jnp.arange(3)).order
    assert order == ("['zero']", "['layers']['b']", "['layers']['a']", "['embed']")


def test_leaves_are_in_buckets_in_that_order_and_what_is_not_named_comes_last():
    tree = PARAMS | {"extra": jnp.ones((4, 4))}
    buckets = jc.buckets(2 * 64, loss, PARAMS, jnp.arange(3))
    groups = groups_of(Layout(dense_below=0).in_buckets(*buckets), tree).groups
    names = sorted(tree)
    found = [(group.bucket, [names[i] for i in group.leaves]) for group in sorted(groups, key=lambda g: g.bucket)]
    assert found == [(1, ["block_1", "block_10"]), (2, ["block_0", "wte"]), (3, ["extra"])]


def test_the_mean_is_the_same_whatever_the_order(seed):
    rng, workers = np.random.default_rng(seed), 4
    grads = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal((workers, *x.shape)), jnp.float32), PARAMS)

    def mean(**options):
        layout = Layout(dense_below=0)
        compressor = jc.cast("bfloat16")
        compressor = compressor._replace(spec=compressor.spec._replace(layout=layout))
        tx = jc.compressed_mean(jc.direct(compressor), "data", **options)
        step = lambda grads: tx.update(grads, tx.init(grads))[0]
        return jax.jit(jax.vmap(step, axis_name="data", out_axes=None))(grads)

    ordered = jc.buckets(100, loss, PARAMS, jnp.arange(3))
    assert_same(mean(), mean(bucket_bytes=ordered))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="buckets: size must be an integer of at least 1"):
        jc.buckets(size, loss, PARAMS, jnp.arange(3))
    if size is not None:
        with pytest.raises(ValueError, match=r"must be an integer of at least 1, or what jc\.buckets makes"):
            jc.compressed_mean(jc.direct(jc.identity()), "data", bucket_bytes=size)


def test_an_order_of_another_tree_is_refused():
    buckets = jc.buckets(100, loss, PARAMS, jnp.arange(3))
    tx = jc.compressed_mean(jc.direct(jc.top_k(0.1)), None, bucket_bytes=buckets)
    with pytest.raises(ValueError, match=r"its order names no leaf of this tree, of which one is \['other'\]"):
        tx.init({"other": jnp.ones(5000)})
