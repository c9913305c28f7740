"""Other algorithms for other parts of the tree: each does to its leaves what it would do to them alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import AXIS, N, assert_close, at, fsum, gradients, mesh_of, run_shard_map, run_vmap, vmap_step

import jaxcomp as jc
from jaxcomp.ledger import read
from jaxcomp.paths import numbers_by_path, paths_of
from jaxcomp.transforms.arguments import trained_of

PARAMS = {
    "embed": jnp.zeros((40, 30)),
    "layer": {"bias": jnp.zeros(30), "mlp": {"w": jnp.zeros((72, 40))}, "attention": jnp.zeros((60, 30))},
    "norm": jnp.zeros(1500),
}
K = 9
DENSE, SPARSE = jc.direct(jc.identity()), jc.error_feedback(jc.top_k(k=K))
THREE = {"embed|norm|bias": DENSE, "mlp": jc.direct(jc.dithering(127)), ".*": SPARSE}


def largest(x):
    kept = np.zeros_like(x)
    kept[np.argsort(-np.abs(x), kind="stable")[:K]] = 1
    return x * kept


@functools.cache
def three_rounds(world):
    grads = gradients(1, 3, N, PARAMS)
    return grads, *world(jc.compressed_mean(jc.by_path(THREE), AXIS), PARAMS, grads)


@pytest.mark.sampled
@pytest.mark.parametrize("world", [run_shard_map, run_vmap])
def test_each_part_is_what_its_algorithm_makes_of_it(world):
    """Means of what goes dense; and of the rest m_i = e_i + g_i, (1/n) sum_i top_k(m_i), e_i = m_i - top_k(m_i)."""
    grads, directions, state = three_rounds(world)
    for of in (lambda t: t["embed"], lambda t: t["norm"], lambda t: t["layer"]["bias"]):
        np.testing.assert_allclose(of(directions), np.asarray(of(grads), np.float64).mean(1), rtol=1e-5, atol=1e-6)
    mine = np.asarray(grads["layer"]["attention"], np.float64).reshape(3, N, -1)
    memory = np.zeros_like(mine[0])
    for t in range(3):
        message = memory + mine[t]
        sent = np.apply_along_axis(largest, -1, message)
        memory = message - sent
        np.testing.assert_allclose(directions["layer"]["attention"][t].reshape(-1), sent.mean(0), rtol=1e-4, atol=1e-6)
    own = state.local.algorithm.parts[2].memory[-1]
    np.testing.assert_allclose(np.reshape(own, memory.shape), memory, rtol=1e-4, atol=1e-5)
    other = directions["layer"]["mlp"]["w"]
    exact = np.asarray(grads["layer"]["mlp"]["w"]).mean(1)
    assert 0 < np.linalg.norm(other - exact) < np.linalg.norm(exact)


def test_one_collective_for_what_is_added_and_one_for_the_rest():
    parts = {"embed": DENSE, "bias|norm": jc.direct(jc.identity()), "mlp": SPARSE, ".*": jc.direct(jc.dithering(7))}
    tx, mesh = jc.compressed_mean(jc.by_path(parts), AXIS), mesh_of(N)
    state, specs = jc.init_state(tx, PARAMS, mesh, AXIS)
    step = jax.shard_map(tx.update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False)
    compiled = jax.jit(step).lower(PARAMS, state).compile()
    text = compiled.as_text()
    assert text.count(" all-gather(") == 1
    assert text.count(" all-reduce(") == 1
    assert read(text).total_bytes == float(jc.info(compiled(PARAMS, state)[1]).sent_bytes)


def test_nothing_is_computed_twice():
    """What is traced once more for each exchange is dropped: as many loops and products, and as much memory."""
    like = {"w": jnp.zeros(40_000)}

    def compiled(algorithm):
        tx = jc.compressed_mean(algorithm, None)
        return jax.jit(lambda g, s: tx.update(g, s)).lower(like, tx.init(like)).compile()

    for algorithm in (jc.error_feedback(jc.top_k(0.01)), jc.power_sgd(2, min_ratio=1)):
        plain, parted = compiled(algorithm), compiled(jc.by_path({".*": algorithm}))
        for what in (" while(", " sort(", " dot(", " all-reduce("):
            assert parted.as_text().count(what) == plain.as_text().count(what), what
        assert parted.memory_analysis().temp_size_in_bytes <= 1.01 * plain.memory_analysis().temp_size_in_bytes + 4096


def test_several_exchanges_a_round_go_on_together():
    """PowerSGD sums twice, with a schedule inside of a conditional; error feedback is done after the first."""
    params = {"a": jnp.zeros((40, 40)), "b": jnp.zeros((50, 40)), "c": jnp.zeros(2000)}
    parts = {"a": jc.power_sgd(2), "b": jc.power_sgd({0: 1, 1: 3}), "c": SPARSE}
    grads = gradients(2, 2, N, params)
    joint, _ = run_vmap(jc.compressed_mean(jc.by_path(parts), AXIS), params, grads)
    alone, _ = run_vmap(jc.compressed_mean(SPARSE, AXIS), {"c": params["c"]}, {"c": grads["c"]})
    np.testing.assert_array_equal(joint["c"], alone["c"])
    for name, ranks in (("a", (2, 2)), ("b", (1, 3))):
        assert tuple(np.linalg.matrix_rank(joint[name][t], tol=1e-4) for t in range(2)) == ranks


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, ValueError, "at least one pattern"),
        ({"(": DENSE}, ValueError, "regular expression"),
        ({3: DENSE}, ValueError, "must be a string"),
        ([("a", DENSE)], TypeError, "a mapping from patterns"),
        ({".*": 3}, TypeError, "needs an algorithm"),
        ({".*": jc.methods.descend(DENSE, 0.1)}, TypeError, "jc.methods.rounds"),
        ({".*": jc.by_path({".*": DENSE})}, ValueError, "put its patterns into the one mapping"),
        ({"embed": DENSE, "norm": DENSE}, ValueError, "no pattern matches the leaf 'layer/attention'"),
        ({"emebd": DENSE, ".*": DENSE}, ValueError, "'emebd' matches no leaf; the paths are 'embed', "),
        ({".*": DENSE, "norm": DENSE}, ValueError, "taken by earlier ones. Put it before"),
    ],
)
def test_what_does_not_fit_is_said(parts, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        jc.compressed_mean(jc.by_path(parts), None).init(PARAMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"via": "two_shot"}, "chunks"), ({"bucket_bytes": 4}, "bucket_bytes does not go"), ({"via": "sum"}, "linear")],
)
def test_what_does_not_go_together_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        jc.compressed_mean(jc.by_path(THREE), AXIS, **options)


def test_paths_and_patterns():
    tree = {"a": [1, optax.MaskedNode()], "b": {"c": 2}}
    assert paths_of(tree) == [("a/0", True), ("a/1", False), ("b/c", True)]
    assert numbers_by_path("by_path", ["a/1", "a|b", ".*"], tree) == [(), (0, 1), ()]
    assert hash(jc.by_path(THREE)) != hash(jc.by_path(THREE))
    assert {SPARSE: 1}[jc.Algorithm(*SPARSE)] == 1


def test_value_and_grad_and_rounds_take_it():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 5), (8, 3)))
    params = {"kernel": jnp.ones((5, 3)), "bias": jnp.zeros(3)}
    loss = lambda p, x, y: jnp.mean((x @ p["kernel"] + p["bias"] - y) ** 2)
    algorithm = jc.by_path({"bias": jc.identity(), ".*": jc.error_feedback(jc.per_leaf(jc.top_k(k=2), dense_below=0))})
    grad_fn = jc.value_and_grad(loss, algorithm, mesh_of(N))
    _, grads, state = jax.jit(grad_fn)(params, grad_fn.init(params), x, y)
    exact = jax.jit(jax.grad(loss))(params, x, y)
    np.testing.assert_allclose(grads["bias"], exact["bias"], rtol=1e-5)
    assert 2 <= np.count_nonzero(grads["kernel"]) <= 2 * N
    run = jc.methods.rounds(jc.methods.descend(algorithm, 0.1), None)
    state, bits = jax.jit(lambda p: run.step(run.init(p), lambda p: jax.grad(loss)(p, x, y)))(params)
    np.testing.assert_allclose(run.point(state)["bias"], -0.1 * exact["bias"], rtol=1e-5)
    assert bits > 0


# ------------------------------------------------------------------------------------------------
# States and meshes


@pytest.mark.slow
def test_memories_keep_their_sum_with_other_workers():
    _, _, old = three_rounds(run_vmap)
    tx = jc.compressed_mean(jc.by_path(THREE), AXIS)
    new, step = vmap_step(tx, PARAMS, 3)
    moved = jc.redistribute(old, new)
    of = lambda state: state.local.algorithm.parts[2].memory[-1]
    assert fsum(of(moved)) == fsum(of(old))
    assert of(moved).shape[0] == 3
    assert int(moved.shared.count) == 3
    after = step(moved, at(gradients(3, 1, 3, PARAMS)))[1]
    assert int(after.shared.workers) == 3
    leaves, structure = jax.tree.flatten(old)  # as a checkpoint holds them
    assert jax.tree.structure(jc.init_state(tx, PARAMS, N, AXIS)[0]) == structure
    again = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(x)) for x in leaves])
    assert jc.info(again).lane_bytes == jc.info(old).lane_bytes


SPECS = {"embed": P(None, "model"), "layer": {"bias": P(), "mlp": {"w": P("model")}, "attention": P()}, "norm": P()}
FULLY = {"embed": P("data"), "layer": {"bias": P(), "mlp": {"w": P("data")}, "attention": P(None, "data")}, "norm": P()}


def sharded_step(tx, specs):
    """One step of a transformation of gradients over "data" on 2 x 2 devices, all of them made from a seed."""
    mesh = mesh_of((2, 2))
    inner = jax.tree.map(lambda s: P(*(None if e == "data" else e for e in s)), specs)
    grads = at(gradients(5, 1, 2, PARAMS))
    state, made = jc.init_state(tx, PARAMS, mesh, "data", specs)
    rows = jax.tree.map(lambda s: P("data", *s), inner)
    run = lambda grads, state: tx.update(at(grads), state)
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(rows, made), out_specs=(specs, made)))
    placed = jax.tree.map(lambda g, s: jax.device_put(g, NamedSharding(mesh, s)), grads, rows)
    direction, after = run(placed, state)
    return jax.tree.map(lambda g: np.mean(g, 0), grads), direction, after


@pytest.mark.sampled
@pytest.mark.parametrize("specs", [SPECS, FULLY], ids=["tensor", "fully"])
def test_shards(specs):
    """Cut over "model", each device exchanges its own shard; over the workers, each ends with its own."""
    exact, direction, state = sharded_step(
        jc.compressed_mean(jc.by_path({"embed|norm|bias": DENSE, ".*": SPARSE}), "data", sharded=specs), specs
    )
    for of in (lambda t: t["embed"], lambda t: t["norm"], lambda t: t["layer"]["bias"]):
        assert_close(of(direction), of(exact))
    kept = np.count_nonzero(direction["layer"]["mlp"]["w"])
    assert K < kept <= (2 if specs is SPECS else 4) * 2 * K
    assert jc.info(state).sent_bytes > 0


def test_multi_transform_takes_the_specs_of_the_whole_tree():
    mean = lambda algorithm: jc.compressed_mean(algorithm, "data", sharded=SPECS)
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "sparse" if "mlp" in jax.tree_util.keystr(path) else "dense", PARAMS
    )
    exact, direction, _ = sharded_step(
        optax.multi_transform({"sparse": mean(SPARSE), "dense": mean(DENSE)}, labels), SPECS
    )
    for name in ("embed", "norm"):
        assert_close(direction[name], exact[name])
    assert np.count_nonzero(direction["layer"]["mlp"]["w"]) <= 2 * 2 * K


def test_paths_of_an_nnx_model_are_the_same_split_or_whole():
    model = nnx.Sequential(nnx.Linear(40, 50, rngs=nnx.Rngs(0)), nnx.Linear(50, 10, rngs=nnx.Rngs(1)))
    split = [path for path, _ in paths_of(nnx.state(model, nnx.Param))]
    assert sorted(trained_of(model, nnx.Param).names) == sorted(split)
    assert "layers/1/kernel/value" in split
    algorithm = jc.by_path({"^layers/0/": jc.top_k(0.1), ".*": jc.dithering(7)})
    jc.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), algorithm, mesh_of(2), wrt=nnx.Param).init(model)
