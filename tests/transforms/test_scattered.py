"""Parameters cut over the workers themselves: each ends with the compressed mean of its own shard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close, mesh_of

import jaxcomp as jc
from jaxcomp.exchange.state import means_in
from jaxcomp.transforms.scattered import RowLayout

N, K = 4, 9
RNG = np.random.default_rng(0)
PARAMS = {
    "a": jnp.asarray(RNG.normal(size=(8, 32)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=(32, 12)), jnp.float32),
    "c": jnp.zeros(12),
}
SPECS = {"a": P("data"), "b": P(None, "data"), "c": P()}
BATCH = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32), jnp.asarray(RNG.normal(size=(16, 12)), jnp.float32)


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"] - y) ** 2)


def placed(mesh, specs=SPECS):
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in PARAMS.items()}
    return params, jax.device_put(BATCH, NamedSharding(mesh, P("data")))


def rows_of(grads):
    """f64[n, c]: what each owner holds of a and b."""
    a, b = (np.asarray(grads[name], np.float64) for name in "ab")
    parts = zip(np.split(a, N, 0), np.split(b, N, 1), strict=True)
    return np.stack([np.concatenate([x.reshape(-1) for x in pair]) for pair in parts])


def largest(x):
    kept = np.zeros_like(x)
    kept[np.argsort(-np.abs(x), kind="stable")[:K]] = 1
    return x * kept


@functools.cache
def own_gradients():
    parts = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), BATCH)
    each = jax.jit(jax.vmap(jax.grad(loss_of), in_axes=(None, 0, 0)))(PARAMS, *parts)
    return [jax.tree.map(lambda x: x[i], each) for i in range(N)]  # noqa: B023


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_error_feedback_of_each_owners_rows(kind):
    """m_j = (1/n) sum_i top_k(e_ij + g_ij), and e_ij keeps the rest. Memories lie at workers, directions at owners."""
    params, batch = placed(mesh_of(kind=kind))
    grad_fn = jc.value_and_grad(loss_of, jc.error_feedback(jc.top_k(k=K)), gradients="per_worker")
    state, memory = grad_fn.init(params), np.zeros((N, N, 160))
    step = jax.jit(grad_fn)
    for _ in range(3):
        _, grads, state = step(params, state, *batch)
        message = memory + np.stack([rows_of(g) for g in own_gradients()])
        sent = np.apply_along_axis(largest, -1, message)
        memory = message - sent
        np.testing.assert_allclose(rows_of(grads), sent.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grads["c"], np.mean([g["c"] for g in own_gradients()], 0), rtol=1e-4, atol=1e-5)
    for name, x in grads.items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
    found = [m.local.algorithm.memory for m in state.exchange if np.asarray(m.local.counts.route)[0] == 7]
    np.testing.assert_allclose(np.asarray(found[0][0])[:, :, :160], memory, rtol=1e-4, atol=1e-5)
    assert found[0][0].sharding.shard_shape(found[0][0].shape)[0] == 1
    assert jc.info(state).chosen == "scatter"


def test_identity_is_the_gradient_for_half_the_bytes():
    """With the same axis on one dimension as tensor parallelism, too. Only payloads cross "data", and parameters."""
    both = {"a": P(None, ("model", "data")), "b": P("model", "data"), "c": P()}
    for mesh, specs in ((mesh_of(), SPECS), (mesh_of((2, 2)), both)):
        params, batch = placed(mesh, specs)
        grad_fn = jc.value_and_grad(loss_of, jc.direct(jc.identity()))
        state = grad_fn.init(params)
        step = jax.jit(grad_fn).lower(params, state, *batch).compile()
        loss, grads, state = step(params, state, *batch)
        assert_close((loss, grads), jax.jit(jax.value_and_grad(loss_of))(PARAMS, *BATCH), rtol=1e-4, atol=1e-5)
        crossing = [row for row in jc.ledger(step).rows if "data" in row.axes(mesh)]
        assert {row.op for row in crossing} <= {"all-gather", "all-to-all", "all-reduce"}
        n, shards = mesh.shape["data"], mesh.size // mesh.shape["data"]
        rows = sum(row.sent_bytes for row in crossing if row.op == "all-to-all")
        size = 640 // shards  # of a and b, at one device
        assert rows <= (n - 1) / n * 4 * (size + 32 * n)
        largest = max(row.operand_bytes for row in crossing if row.op == "all-reduce")
        assert largest <= 4 * 12  # the bias, which is whole everywhere


BAD = [
    (jc.diana(jc.rand_k(k=3)), {}, r"state of this algorithm \(shift\) needs the whole of it. Use direct"),
    (jc.power_sgd(2), {}, r"cuts all leaves together .*PowerSGD, FetchSGD and the like.*Use direct"),
    (jc.error_feedback(jc.per_leaf(jc.top_k(k=3))), {}, "needs a compressor of one array"),
    (jc.direct(jc.identity()), {"bucket_bytes": 1000}, "bucket_bytes does not go with"),
]


@pytest.mark.parametrize(("algorithm", "options", "said"), BAD, ids=[said for *_, said in BAD])
def test_what_cannot_be_scattered_is_refused(algorithm, options, said):
    with pytest.raises(ValueError, match=said):
        jc.value_and_grad(loss_of, algorithm, **options).init(placed(mesh_of())[0])


def test_workers_of_several_axes_scatter_over_all_and_levels_over_none():
    with pytest.raises(ValueError, match="over all of their axes"):
        jc.compressed_mean(jc.direct(jc.identity()), ("a", "b"), sharded={"x": P("a")})
    with pytest.raises(ValueError, match="of a hierarchy"):
        jc.compressed_mean(axis_name=dict.fromkeys("ab", jc.direct(jc.identity())), sharded={"x": P(("a", "b"))})


@pytest.mark.parametrize("workers", [N, 2])
def test_another_number_of_owners_goes_on_from_the_memories(workers, seed):
    """Each entry at its leaf and its place; the memories of two workers are those of four, added."""
    algorithm = jc.error_feedback(jc.top_k(k=K))
    init = lambda workers: jc.value_and_grad(loss_of, algorithm).init(placed(mesh_of(workers))[0])
    (old,), (new,) = (
        [mean for mean in means_in(state) if mean.about.owners is not None] for state in (init(N), init(workers))
    )
    rows, others = old.about.owners, new.about.owners
    whole = [np.random.default_rng(seed).integers(-9, 9, (N, *shape)).astype(np.float32) for shape in rows.whole]
    memory = np.stack([rows.stack([leaf[i] for leaf in whole]) for i in range(N)])
    filled = lambda x: jnp.asarray(memory) if x.shape == memory.shape else x
    (found,) = [x for x in jax.tree.leaves(jc.redistribute(jax.tree.map(filled, old), new)) if x.ndim == 3]
    total = lambda leaf: leaf if workers == N else np.stack([leaf[::2].sum(0), leaf[1::2].sum(0)])
    want = [others.stack([total(leaf)[i] for leaf in whole]) for i in range(workers)]
    np.testing.assert_array_equal(found.sum(0), np.sum(want, 0))
    if workers == N:
        np.testing.assert_array_equal(found, want)


def test_rows_of_owners_are_cut_anew():
    shapes = [(8, 3), (2, 8, 5), (16,)]
    leaves = [jnp.arange(1.0, 1.0 + float(np.prod(shape))).reshape(shape) for shape in shapes]
    of = lambda n: RowLayout(n, ((8 // n, 3), (2, 8 // n, 5), (16 // n,)), (0, 1, 0))
    for before, after in ((4, 2), (2, 8), (1, 4)):
        found = of(before).recut(np.asarray(of(before).stack(leaves))[None], of(after))
        np.testing.assert_array_equal(found[0], of(after).stack(leaves))
