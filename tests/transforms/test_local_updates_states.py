"""States of local updates on disk and compared, one worker alone, and every route that carries differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_worlds import PARAMS, one_worker, random_gradients
from variants import variants

import jaxcomp as jc

pytestmark = pytest.mark.usefixtures("standard_promotion")
OUTER = optax.sgd(0.5, momentum=0.5, nesterov=True)
SPARSE = jc.sparse_loco(k=2, chunk=8)
MESH = ((4,), ("data",))


class Run:
    """Four workers on a mesh."""

    def __init__(self, algorithm, **options):
        tx = jc.local_updates(optax.adam(0.01), OUTER, algorithm, "data", **options)
        self.mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,))
        self.state, self.specs = jc.init_state(tx, PARAMS, self.mesh, "data")
        rows = jax.tree.map(lambda p: jnp.stack([p] * 4), PARAMS)
        self.own = jax.device_put(rows, NamedSharding(self.mesh, P("data")))

        def step(own, state, grads):
            mine, g = jax.tree.map(lambda x: x[0], (own, grads))
            updates, state = tx.update(g, state, mine)
            return jax.tree.map(lambda p: p[None], optax.apply_updates(mine, updates)), state

        across = P("data")
        step = jax.shard_map(
            step, mesh=self.mesh, in_specs=(across, self.specs, across), out_specs=(across, self.specs)
        )
        self.step = jax.jit(step)

    def go(self, grads, steps):
        for t in steps:
            now = jax.tree.map(lambda g: g[t], grads)  # noqa: B023
            self.own, self.state = jax.block_until_ready(self.step(self.own, self.state, now))
        return self


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_orbax_brings_back_differences_on_their_way_and_the_run_goes_on_to_the_bit(tmp_path, seed):
    ocp = pytest.importorskip("orbax.checkpoint")
    grads, options = random_gradients(seed, 11), {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.5}
    whole = Run(SPARSE, **options).go(grads, range(5))  # a difference was taken, and is not merged
    assert any(np.any(x) for x in jax.tree.leaves(whole.state.own.local.pending))
    other = Run(SPARSE, **options)
    other.step = whole.step  # compiled already
    with ocp.StandardCheckpointer() as keeper:
        keeper.save(tmp_path / "kept", (whole.own, whole.state))
        keeper.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (whole.own, whole.state))
        other.own, other.state = keeper.restore(tmp_path / "kept", like)
    whole.go(grads, range(5, 11))
    other.go(grads, range(5, 11))
    assert_same((whole.own, whole.state), (other.own, other.state))


def test_the_shared_point_and_the_outer_state_are_compared_and_a_changed_copy_is_named(seed):
    run = Run(SPARSE, every=3).go(random_gradients(seed, 4), range(4))
    marks = jax.shard_map(
        lambda s: jc.replicas.fingerprints(s, "data"), mesh=run.mesh, in_specs=(run.specs,), out_specs=P()
    )
    jc.check_replicas(jax.jit(marks)(run.state))
    good = np.asarray(run.state.point["c"])
    bad = good.copy()
    bad.view(np.uint32)[3] ^= 1
    parts = [jax.device_put(bad if i == 2 else good, d) for i, d in enumerate(run.mesh.devices.flat)]
    copies = jax.make_array_from_single_device_arrays(good.shape, NamedSharding(run.mesh, P()), parts)
    spoiled = run.state._replace(point={**run.state.point, "c": copies})
    with pytest.raises(jc.replicas.ReplicaDrift, match="worker 2 differ"):
        jc.check_replicas(jax.jit(marks)(spoiled))


def test_one_worker_with_one_step_a_round_is_its_inner_optimizer_to_the_bit(seed):
    plain = optax.adam(0.01)
    tx = jc.local_updates(plain, optax.sgd(1.0), jc.direct(jc.identity()), None, every=1)
    grads = jax.tree.map(lambda g: g[:, 0], random_gradients(seed, 6))
    point, state, want = one_worker(tx, plain, grads)
    assert_same(point, want)
    assert_same(state.point, want)


ROUTES = {"ring": SPARSE, "ladder": SPARSE, "concat": SPARSE, "two_shot": jc.error_feedback(jc.block_scaled("int4"))}


@pytest.mark.parametrize("via", variants(ROUTES, {"ladder"}))
def test_every_route_carries_differences(via, seed):
    grads = random_gradients(seed, 6)
    plain = Run(ROUTES[via], every=3, via="gather").go(grads, range(6))
    other = Run(ROUTES[via], every=3, via=via).go(grads, range(6))
    if via != "two_shot":  # which compresses the mean once more
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), plain.own, other.own)
    own = jax.tree.leaves(other.own)
    assert all(np.array_equal(leaf[0], leaf[i]) for leaf in own for i in range(4))
    assert not any(np.array_equal(leaf[0], p) for leaf, p in zip(own, PARAMS.values(), strict=True))
