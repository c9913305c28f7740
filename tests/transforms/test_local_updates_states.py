"""States of local updates on disk and compared, one worker alone, and every route that carries differences."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from local_worlds import PARAMS, mesh_step, one_worker, random_gradients
from variants import variants
from worlds import assert_close, assert_same, at, mesh_of

import jaxcomp as jc

pytestmark = pytest.mark.usefixtures("standard_promotion")
OUTER = optax.sgd(0.5, momentum=0.5, nesterov=True)
SPARSE = jc.sparse_loco(k=2, chunk=8)


class Run:
    """Four workers on a mesh."""

    def __init__(self, algorithm, **options):
        tx = jc.local_updates(optax.adam(0.01), OUTER, algorithm, "data", **options)
        self.own, self.state, self.step = mesh_step(tx)

    def go(self, grads, steps):
        for t in steps:
            self.own, self.state = jax.block_until_ready(self.step(self.own, self.state, at(grads, t)))
        return self


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
    specs, mesh = jc.state_specs(run.state, "data"), mesh_of()
    marks = lambda s: jc.replicas.fingerprints(s, "data")
    marks = jax.shard_map(marks, mesh=mesh, in_specs=(specs,), out_specs=P())
    jc.check_replicas(jax.jit(marks)(run.state))
    good = np.asarray(run.state.point["c"])
    bad = good.copy()
    bad.view(np.uint32)[3] ^= 1
    parts = [jax.device_put(bad if i == 2 else good, d) for i, d in enumerate(mesh.devices.flat)]
    copies = jax.make_array_from_single_device_arrays(good.shape, NamedSharding(mesh, P()), parts)
    spoiled = run.state._replace(point={**run.state.point, "c": copies})
    with pytest.raises(jc.replicas.ReplicaDrift, match="worker 2 differ"):
        jc.check_replicas(jax.jit(marks)(spoiled))


def test_one_worker_with_one_step_a_round_is_its_inner_optimizer_to_the_bit(seed):
    plain = optax.adam(0.01)
    tx = jc.local_updates(plain, optax.sgd(1.0), jc.direct(jc.identity()), None, every=1)
    point, state, want = one_worker(tx, plain, at(random_gradients(seed, 6), np.s_[:, 0]))
    assert_same(point, want)
    assert_same(state.point, want)


ROUTES = {"ring": SPARSE, "ladder": SPARSE, "concat": SPARSE, "two_shot": jc.error_feedback(jc.block_scaled("int4"))}


@pytest.mark.parametrize("via", variants(ROUTES, {"ladder"}))
def test_every_route_carries_differences(via, seed):
    grads = random_gradients(seed, 6)
    plain = Run(ROUTES[via], every=3, via="gather").go(grads, range(6))
    other = Run(ROUTES[via], every=3, via=via).go(grads, range(6))
    if via != "two_shot":  # which compresses the mean once more
        assert_close(plain.own, other.own, rtol=1e-6, atol=1e-7)
    own = jax.tree.leaves(other.own)
    assert all(np.array_equal(leaf[0], leaf[i]) for leaf in own for i in range(4))
    assert not any(np.array_equal(leaf[0], p) for leaf, p in zip(own, PARAMS.values(), strict=True))
