"""What comes back from a server compressed: against float64, in all worlds, with its bits, and to the optimum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import AXIS, assert_same, heterogeneous, mesh_of, run_shard_map, run_vmap, vmap_step

import jaxcomp as jc
from jaxcomp.algorithms.bidirectional import send_down, start_down
from jaxcomp.base import Round
from jaxcomp.compressors.tree import each_of
from jaxcomp.groups import groups_of

N, D = 4, 60
DOWN = jc.dithering(5, blocks=1)


def test_directions_are_those_of_the_algorithm_rounded_once_more(seed):
    """C_down of what the algorithm alone would give, with the same randomness on all workers and in all worlds."""
    grads = jnp.asarray(heterogeneous(seed, 4, N, D))
    tx = jc.compressed_mean(jc.methods.bidirectional(jc.direct(jc.identity()), DOWN, code="elias"), AXIS)
    directions, state = run_vmap(tx, jnp.zeros(D), grads)
    again, other = run_shard_map(tx, jnp.zeros(D), grads)
    np.testing.assert_array_equal(directions, again)
    mean = np.float64(grads).mean(1)
    norm = np.linalg.norm(mean, axis=1, keepdims=True)
    levels = 5 * directions / norm
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    assert np.max(np.abs(5 * mean / norm - levels)) < 1 + 1e-4
    for end in (state, other):
        down = end.shared.algorithm.down
        assert int(down.rounds) == 4
        assert 32 < float(down.bits) < 32 + 6 * D


def test_what_comes_back_is_unbiased_and_within_omega(seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(D), jnp.float32)
    groups = groups_of(jc.Layout(), x).groups
    here = lambda key: Round(key, groups, each_of(DOWN, groups))
    draw = lambda key: send_down(here(key), DOWN, start_down(here(key), DOWN, (x,)), (x,))[0][0]
    drawn = np.float64(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(seed), 4000)))
    error = np.abs(drawn.mean(0) - x) / (drawn.std(0) / np.sqrt(4000) + 1e-7)
    assert np.max(error) < 6  # of 60 normal numbers: one false alarm in 10^7
    assert np.mean(np.sum((drawn - x) ** 2, 1)) < DOWN.spec.omega(D) * np.sum(np.square(x)) * 1.01


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["diana", "adiana"])
def test_both_directions_go_to_the_optimum(method, seed):
    """Least squares of workers that differ, at the step sizes of theory: past 1e-10, and as far as without `down`."""
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        a, b = rng.standard_normal((N, 40, 20)) / np.sqrt(40), rng.standard_normal((N, 40))
        hessians = np.einsum("nij,nik->njk", a, a)
        optimum = np.linalg.solve(hessians.mean(0), np.einsum("nij,ni->j", a, b) / N)
        mu, smoothness = np.linalg.eigvalsh(hessians.mean(0))[[0, -1]]
        c, down = jc.dithering(4, blocks=1), jc.dithering(5, blocks=1)
        omega, down_omega = c.spec.omega(20), down.spec.omega(20)
        given = {"smoothness": smoothness, "workers": N, "omega": omega, "mu": mu, "down_omega": down_omega}
        given["variance"] = omega * np.linalg.eigvalsh(hessians)[:, -1].max()
        if method == "diana":
            steps = jc.theory.diana(**given)
            made = jc.methods.descend(jc.methods.bidirectional(jc.diana(c, alpha=steps.alpha), down), steps.gamma)
        else:
            made = jc.methods.adiana(c, jc.theory.adiana(**given), down=down)
        run = jc.methods.rounds(made, AXIS)

        def worker(a, b):
            step = lambda state, _: (run.step(state, lambda x: a.T @ (a @ x - b))[0], None)
            return run.point(jax.lax.scan(step, run.init(jnp.zeros(20)), length=3000)[0])

        x = jax.jit(jax.vmap(worker, axis_name=AXIS, out_axes=None))(a, b)
        assert np.sum((x - optimum) ** 2) < 1e-10 * np.sum(optimum**2)


def test_other_workers_go_on(seed):
    tx = jc.compressed_mean(jc.methods.bidirectional(jc.diana(jc.dithering(3)), DOWN), AXIS)
    _, old = run_vmap(tx, jnp.zeros(D), jnp.asarray(heterogeneous(seed, 2, N, D)))
    moved = jc.redistribute(old, jc.init_state(tx, jnp.zeros(D), 2, AXIS)[0])
    assert_same(old.shared.algorithm.down, moved.shared.algorithm.down)
    mean = old.shared.algorithm.algorithm.shift
    shifts = np.reshape(moved.local.algorithm.algorithm.shift, (2, D))
    np.testing.assert_array_equal(shifts, np.broadcast_to(mean, (2, D)))


ADIANA = jc.theory.adiana(smoothness=1.0, mu=0.1, workers=4, omega=0.125, variance=1.0)
BAD = [
    (lambda: jc.methods.bidirectional(jc.diana(jc.natural()), jc.top_k(0.1)), "must be unbiased .omega known.; top_k"),
    (lambda: jc.methods.adiana(jc.natural(), ADIANA, down=jc.top_k(0.1)), "adiana: what goes down must be unbiased"),
    (
        lambda: jc.methods.bidirectional(jc.diana(jc.natural()), jc.bernoulli(np.full((2, 3), 0.5), per_worker=True)),
        "one message for all workers",
    ),
    (lambda: jc.theory.dcgd(smoothness=1.0, workers=1, variance=0.0, down_omega=-1.0), "down_omega must be at least 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("algorithm", "via"),
    [(jc.direct(jc.natural()), "two_shot"), (jc.direct(jc.per_leaf(jc.natural())), "auto")],
    ids=["two_shot", "equal leaves"],
)
def test_bits_of_stacked_vectors_are_those_of_their_rows(algorithm, via):
    tree = {"w": jnp.zeros((40, 50)), "v": jnp.zeros((40, 50))}
    tx = jc.compressed_mean(jc.methods.bidirectional(algorithm, jc.natural()), "data", via=via)
    state, step = vmap_step(tx, tree, 2)
    direction, state = step(state, jax.tree.map(lambda x: jnp.stack([x + 1, x + 1]), tree))
    np.testing.assert_array_equal(direction["w"], 1)
    assert 9 * 4000 <= state.shared.algorithm.down.bits <= 9 * 4096 + 64


def test_shards_of_the_workers_are_refused():
    w = jax.device_put(jnp.ones((40, 48)), NamedSharding(mesh_of(2), P(None, "data")))
    algorithm = jc.methods.bidirectional(jc.direct(jc.natural()), jc.natural())
    grad = jc.value_and_grad(lambda w, x: jnp.mean(x @ w), algorithm)
    with pytest.raises(ValueError, match=r"the state of this algorithm \(coin\) needs the whole of it"):
        grad.init(w)


def test_it_goes_into_each_part_of_by_path():
    """Around by_path it would be lost where each part is exchanged by itself."""
    with pytest.raises(ValueError, match="bidirectional: put it into each part of by_path, not around it"):
        jc.methods.bidirectional(jc.by_path({".*": jc.direct(jc.identity())}), DOWN)
    parts = jc.by_path({"a": jc.methods.bidirectional(jc.direct(jc.identity()), DOWN), ".*": jc.direct(jc.identity())})
    grads = {"a": jnp.asarray(heterogeneous(0, 1, N, D)), "b": jnp.asarray(heterogeneous(1, 1, N, D))}
    params = {"a": jnp.zeros(D), "b": jnp.zeros(D)}
    directions, _ = run_vmap(jc.compressed_mean(parts, AXIS), params, grads)
    np.testing.assert_allclose(directions["b"], np.float64(grads["b"]).mean(1), rtol=1e-5, atol=1e-5)
    assert len(np.unique(np.abs(directions["a"]))) <= 6
