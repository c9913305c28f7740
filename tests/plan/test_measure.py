"""Measuring: that all is measured, never how long it took."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plan_worlds import F32, PARAMS, batch, loss
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.exchange.links import KINDS
from jaxcomp.plan.clock import MeshClock
from jaxcomp.plan.links import fit
from jaxcomp.plan.measure import Workload, step_of, sweep, work_of


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_sweeps_of_every_collective(kind):
    found = sweep(MeshClock(mesh_of(2), 1000.0), kind, AXIS, 1e5, 1000.0)
    assert len(found) >= 2
    assert fit(kind, found).seconds(1e5, 2).mean > 0


@pytest.mark.slow
def test_work_of_algorithms_without_a_compressor_says_what_they_lose(key):
    grads = {"w": np.asarray(jax.random.normal(key, (64, 40))), "b": np.ones(40, np.float32)}
    work = lambda *candidate: work_of(MeshClock(mesh_of(2), 1000.0), jc.Candidate(*candidate), AXIS, grads, 1.0)
    assert 0 < work("8", jc.power_sgd(8)).error < work("1", jc.power_sgd(1)).error < 1
    two_shot = work("fp8", jc.direct(jc.cast("float8_e4m3fn")), "two_shot")
    assert 0 < two_shot.error < 0.01
    assert 0 < two_shot.encode.seconds(2600) <= two_shot.all.seconds(2600)
    inseparable = work("ladder", jc.error_feedback(jc.top_k(0.01)), "ladder")  # the exchange depends on the data
    assert inseparable.all.slope == 0
    assert 0 < inseparable.error < 1


def test_a_step_with_local_updates_is_what_it_says():
    """The program that is timed takes H steps of which the last one exchanges: then all workers have the same point."""
    mesh = mesh_of(2)
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), PARAMS)
    step = step_of(Workload(MeshClock(mesh, 1e5), loss, params, (batch(),), AXIS), F32.with_every(4))
    step()
    own, state = step.state
    assert int(state.exchange.count) == 4
    w = np.asarray(own["w"])
    np.testing.assert_allclose(w[0], w[1], rtol=1e-6)
    assert not np.array_equal(w[0], PARAMS["w"])
    step.restart()
    assert int(step.state[1].exchange.count) == 0
    np.testing.assert_array_equal(np.asarray(step.state[0]["w"])[0], PARAMS["w"])
