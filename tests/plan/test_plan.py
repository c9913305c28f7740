"""`jc.plan` on virtual devices: what it returns and keeps in its file, never how long anything took."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.plan import facts as files
from jaxcomp.plan.candidates import dense_candidates
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.links import KINDS
from jaxcomp.plan.measure import sweep

SPARSE = jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))
PARAMS = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}


def loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"]))


def batch(seed, workers=2):
    return np.random.default_rng(seed).standard_normal((4 * workers, 64)).astype(np.float32)


def test_a_plan_measures_advises_and_keeps_its_facts(seed, tmp_path):
    mesh, path, said = mesh_of(2), tmp_path / "plan.json", []
    candidates = [*dense_candidates()[:1], SPARSE]
    options = {"mesh": mesh, "candidates": candidates, "budget": 1000.0, "cache": path}
    advice = jc.plan(loss, PARAMS, batch(seed), tried=1, show=said.append, **options)
    assert {row.candidate.name for row in advice.rows} == {each.name for each in candidates}
    assert advice.verdict.startswith("do not compress" if not advice.compresses else "compress")
    assert advice.chosen.candidate.name in advice.table
    assert advice.facts.gradient > 0
    assert 0 <= advice.facts.overlap <= 1
    assert "all_reduce" in advice.facts.fits[AXIS]
    assert all(fit.latency >= 0 and fit.per_byte >= 0 for fit in advice.facts.fits[AXIS].values())
    assert advice.facts.work["f32"].error == 0
    assert advice.rows[0].measured is not None  # the dense one was run
    assert advice.watch()(1.0) == []
    # What it returns is ready to be used.
    grad_fn = jc.value_and_grad(loss, advice.algorithm, mesh, **advice.options)
    value, grads, _ = jax.jit(grad_fn)(PARAMS, grad_fn.init(PARAMS), batch(seed))
    assert np.isfinite(value)
    assert jax.tree.structure(grads) == jax.tree.structure(PARAMS)
    # The file is used in place of measuring, and may be edited.
    assert files.from_text(path.read_text()) == advice.facts
    del said[:]
    edited = json.loads(path.read_text())
    for fit in edited["fits"][AXIS].values():
        fit.update(latency=0.0, per_byte=1.0, ratios=[])
    edited["work"]["top_k"] = edited["work"]["f32"] | {"error": 0.5}
    path.write_text(json.dumps(edited))
    slow = jc.plan(loss, PARAMS, batch(seed), tried=0, show=said.append, **options)
    assert said == []
    assert slow.chosen.candidate.name == "top_k"
    assert slow.compresses
    exact = jc.plan(loss, PARAMS, batch(seed), tried=0, max_error=0.1, **options)
    assert not exact.compresses
    # Other candidates are another plan.
    options["candidates"] = candidates[:1]
    jc.plan(loss, PARAMS, batch(seed), tried=0, show=said.append, **options)
    assert said


@pytest.mark.parametrize("kind", KINDS)
def test_sweeps_of_every_collective(kind):
    found = sweep(Clock(mesh_of(2), 1000.0), kind, AXIS, 1e5, 1000.0)
    assert len(found.samples) >= 2
    assert found.seconds(1e5, 2).mean > 0


def test_times_are_agreed_and_texts_are_sent():
    clock = Clock(mesh_of(4), 1e5)
    np.testing.assert_allclose(clock.agreed([1.5, -2.0]), [1.5, -2.0])
    assert clock.broadcast("plan \N{GREEK SMALL LETTER ALPHA}") == "plan \N{GREEK SMALL LETTER ALPHA}"
    assert clock.broadcast(None) is None
    assert 0 < clock.left() <= 1e5
    assert len(clock.times(lambda: jnp.zeros(()), rounds=3)) >= 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"candidates": []}, TypeError, "candidates must be a list"),
        ({"candidates": [SPARSE, SPARSE]}, ValueError, "different names"),
        ({"budget": 0.0}, ValueError, "budget must be seconds > 0"),
        ({"max_error": -1.0}, ValueError, "max_error must be a number >= 0"),
        ({"axis_name": "model"}, ValueError, "axis_name must be of the mesh"),
        ({"tried": -1}, ValueError, "tried must be"),
    ],
)
def test_mistakes(options, error, said):
    with pytest.raises(error, match=said):
        jc.plan(loss, PARAMS, batch(0), **{"mesh": mesh_of(2), **options})
    with pytest.raises(TypeError, match="mesh must be a jax"):
        jc.plan(loss, PARAMS, batch(0))


def test_a_single_worker_has_nothing_to_exchange():
    advice = jc.plan(loss, PARAMS, batch(0), mesh=mesh_of(1))
    assert not advice.compresses
    assert "single worker" in str(advice)
