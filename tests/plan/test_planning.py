"""`jc.plan` on virtual devices: what it returns and keeps in its file, never how long anything took."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plan_worlds import F32, NAMED, PARAMS, SPARSE, batch, edited, loss, plan_of, work
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.cli import main
from jaxcomp.plan import planning
from jaxcomp.plan.candidates import hierarchies
from jaxcomp.plan.facts import from_text

RUN = {"tried": 1, "budget": 1000.0}
ran = lambda plan: {row.candidate.name for row in plan.rows if row.measured is not None}


def test_a_plan_measures_advises_and_keeps_its_facts(tmp_path):
    path, said = tmp_path / "plan.json", []
    options = {"budget": 1000.0, "cache": path, "show": said.append}
    advice = plan_of([F32, SPARSE], **{**options, "tried": 1})
    assert advice.verdict.startswith("compress" if advice.compresses else "do not compress")
    assert advice.chosen.candidate.name in advice.table
    assert 0 <= advice.facts.overlap <= 1
    assert all(fit.latency >= 0 and fit.per_byte >= 0 for fit in advice.facts.fits[AXIS].values())
    assert advice.facts.work["f32"].error == 0
    assert advice.rows[0].measured is not None  # the dense one was run
    assert advice.watch()(1.0) == []
    # What it returns is ready to be used.
    grad_fn = jc.value_and_grad(loss, advice.algorithm, mesh_of(2), **advice.options)
    value, _, _ = jax.jit(grad_fn)(PARAMS, grad_fn.init(PARAMS), batch())
    assert np.isfinite(value)
    # The file is used in place of measuring, and may be edited.
    assert from_text(path.read_text()) == advice.facts
    del said[:]

    def slow(plain):
        for fit in plain["fits"][AXIS].values():
            fit.update(latency=0.0, per_byte=1.0, ratios=[])
        plain["work"]["top_k"] = plain["work"]["f32"] | {"error": 0.5}

    edited(path, slow)
    assert plan_of([F32, SPARSE], **options).chosen.candidate is SPARSE
    assert said == []
    assert not plan_of([F32, SPARSE], max_error=0.1, **options).compresses
    plan_of([F32], **options)
    assert said  # other candidates are another plan


def test_a_plan_is_of_what_is_trained():
    """Of a model with a frozen leaf only the others are exchanged; the loss has it as a constant."""
    params = {**PARAMS, "frozen": np.full(3000, 2.0, np.float32)}
    frozen = lambda params, x: loss(params, x) * params["frozen"][0]
    options = {"mesh": mesh_of(2), "candidates": [F32], "tried": 0, "wrt": lambda path, leaf: "frozen" not in path}
    advice = jc.plan(frozen, params, batch(), **options)
    assert sorted(advice.facts.about["leaves"]) == ["float32[32]", "float32[64,32]"]
    assert advice.rows[0].sent_bytes == pytest.approx(4 * 2080)
    with pytest.raises(TypeError, match="plan: wrt must be"):
        jc.plan(frozen, params, batch(), **{**options, "wrt": 3})


@pytest.mark.slow
def test_what_was_run_is_kept_until_it_says_nothing_any_more(machine, tmp_path):
    """The second plan measures and runs nothing; another one runs what another argument or an edited file asks for."""
    path, said = tmp_path / "plan.json", []
    machine(1e-9, {"f32": work(0.0), "top_k": work(1e-3, 0.9)})
    again = lambda **more: plan_of([F32, SPARSE], **{**RUN, "cache": path, "show": said.append, **more})
    first = again()
    assert "trying all in turn" in said
    del said[:]
    second = again()
    assert (said, second.facts, str(second), ran(second)) == ([], first.facts, str(first), {"f32", "top_k"})
    # Prediction alone, and other limits, are other questions.
    assert ran(again(tried=0)) == set()
    assert ran(again(max_error=np.float32(0.5))) == {"f32"}
    again()
    del said[:]
    edited(path, lambda plain: plain["fits"][AXIS]["all_reduce"].update(latency=1e-3))
    again()
    assert ("trying f32" in said, "loss and gradient" in said) == (True, False)
    # A budget that ends before all are run: another plan may have the time.
    path.unlink()
    assert again(budget=1e-6).facts.trials is None


def test_candidates_that_may_be_the_fastest_are_measured_once(machine):
    """Candidates of one algorithm and route share it; one that is too dear on the links alone is not measured."""
    bucketed, elsewhere = SPARSE._replace(name="in buckets", bucket_bytes=1024), SPARSE._replace(via="two_shot")
    each_work = {"f32": work(1.0), "top_k": work(1e-3, 0.1), "in buckets": work(1e-3, 0.1), "lossy": work(0.0, 0.9)}
    each_work["top_k:two_shot"] = work(1e-3)
    measured = machine(1e-3, each_work)
    found = plan_of([F32, SPARSE, bucketed])
    assert len(measured) == 2
    assert found.facts.work["top_k"] == found.facts.work["in buckets"]
    measured = machine(1e-3, each_work)
    plan_of([F32, SPARSE, elsewhere._replace(name="top_k:two_shot")])
    assert measured == ["f32", "top_k:two_shot"]
    lossy = jc.Candidate("lossy", jc.error_feedback(jc.top_k(0.001)))
    measured = machine(1e-3, each_work)
    assert plan_of([F32, lossy, SPARSE]).chosen.candidate is lossy
    assert measured == ["f32", "lossy"]
    measured = machine(1e-3, each_work)
    assert plan_of([F32, lossy, SPARSE], max_error=0.5).chosen.candidate is SPARSE
    assert measured == ["f32", "lossy", "top_k"]  # what is not eligible keeps no other from being measured


def test_what_is_run(machine, monkeypatch):
    """f32 and the best dense one; the best others, one of them dense; what would take too long is left out."""
    monkeypatch.setattr(planning, "step_of", lambda *_: lambda: 0.0)
    monkeypatch.setattr(planning, "seconds_of_steps", lambda _, steps, *__: np.ones((len(steps), 2)))
    dense = [F32, NAMED["bf16"], NAMED["bf16:two_shot"], F32.in_buckets(4096)]
    candidates = [*dense, SPARSE, jc.Candidate("other", jc.error_feedback(jc.top_k(0.1))), SPARSE.with_every(10**8)]
    seconds = {"bf16": 1e-3, "bf16:two_shot": 2e-3, "top_k": 5.0, "other": 9.0, "top_k, H=100000000": 5.0}
    each_work = {each.name: work(seconds.get(each.name, 0.0)) for each in candidates}
    machine(1e-9, each_work)
    found = ran(plan_of(candidates, tried=4, budget=1000.0))
    assert len(found & {each.name for each in dense}) == 2
    assert found >= {"f32", "top_k", "other"}
    assert "top_k, H=100000000" not in found
    limited = plan_of(candidates, max_every=2, **RUN)
    assert next(row.refused for row in limited.rows if row.candidate.every > 2)
    machine(1.0, each_work)
    assert "f32" not in ran(plan_of(candidates, **RUN))  # three rounds take longer than the budget


@pytest.mark.slow
def test_axes_together_hierarchies_and_sharded_parameters(tmp_path, capsys):
    """Workers of two axes, and a level for each of them; parameters that are cut over an axis without workers."""
    meshes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    levels = jc.Candidate("levels", {"a": jc.direct(jc.identity()), "b": jc.error_feedback(jc.top_k(0.1))})
    options = {"mesh": jax.make_mesh((2, 2), ("a", "b"), **meshes), "axis_name": ("a", "b")}
    found = jc.plan(loss, PARAMS, batch(4), candidates=[F32, levels], tried=2, budget=1000.0, **options)
    assert "a,b" in found.facts.fits
    assert found.rows[0].sent_bytes == pytest.approx(2 * 3 / 4 * 4 * 2080)
    assert ran(found) == {"f32", "levels"}
    file = tmp_path / "both.json"
    jc.plan(loss, PARAMS, batch(4), tried=0, budget=1e-3, cache=file, **options)
    assert main(["plan", "--facts", str(file)]) == 0
    assert hierarchies(("a", "b"))[0].name in capsys.readouterr().out
    mesh, cut = jax.make_mesh((2, 2), (AXIS, "model"), **meshes), PartitionSpec("model")
    params = {name: jax.device_put(x, NamedSharding(mesh, cut)) for name, x in PARAMS.items()}
    candidates = [F32, SPARSE, F32.with_every(2)]
    found = jc.plan(loss, params, batch(), mesh=mesh, candidates=candidates, budget=1000.0, tried=2)
    assert found.facts.about["leaves"] == ["float32[16]", "float32[32,32]"]
    assert ran(found) == {each.name for each in candidates}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"candidates": []}, TypeError, "candidates must be a list of jc.Candidate, not empty"),
        ({"candidates": [SPARSE, SPARSE]}, ValueError, "candidates must have different names"),
        ({"budget": "20"}, ValueError, "budget must be seconds > 0; got '20'"),
        ({"max_error": math.nan}, ValueError, "max_error must be a number >= 0; got nan"),
        ({"axis_name": "model"}, ValueError, "axis_name must be of the mesh"),
        ({"tried": 1.5}, ValueError, "tried must be an integer >= 0"),
        ({"max_every": 0}, ValueError, "max_every must be an integer of at least 1; got 0"),
        ({"mesh": None}, TypeError, "mesh must be a jax"),
    ],
)
def test_mistakes(options, error, said):
    with pytest.raises(error, match=f"plan: {said}"):
        plan_of(**{"candidates": [SPARSE], **options})


def test_a_gradient_that_is_not_finite_is_no_sample():
    broken = lambda p, x: jnp.nan * loss(p, x)
    with pytest.raises(ValueError, match="the gradient of the loss must be finite"):
        jc.plan(broken, PARAMS, batch(), mesh=mesh_of(2), candidates=[SPARSE])


def test_a_single_worker_has_nothing_to_exchange():
    plain = plan_of([SPARSE], mesh=mesh_of(1))
    assert plain.chosen.candidate.name == "f32"
    assert "single worker" in str(plain)


def test_a_plan_in_a_mesh_that_is_set():
    """With its devices, and as if none were in force where it measures."""
    with jax.set_mesh(mesh_of(2)):
        made = jc.plan(loss, PARAMS, (batch(),), candidates=[F32, SPARSE], budget=10.0, tried=0)
    assert {row.candidate.name for row in made.rows} == {"f32", "top_k"}
