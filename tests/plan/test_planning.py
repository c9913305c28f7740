"""`jc.plan` on virtual devices: what it returns and keeps in its file, never how long anything took."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plan_worlds import F32, PARAMS, SPARSE, batch, loss, machine, plan_of, work
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.cli import main
from jaxcomp.plan import planning
from jaxcomp.plan.candidates import Limits, dense_candidates, hierarchies
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.facts import from_text
from jaxcomp.plan.measure import Workload

RUN = {"tried": 1, "budget": 1000.0}
ran = lambda plan: {row.candidate.name for row in plan.rows if row.measured is not None}


def test_a_plan_measures_advises_and_keeps_its_facts(tmp_path):
    path, said = tmp_path / "plan.json", []
    options = {"budget": 1000.0, "cache": path, "show": said.append}
    advice = plan_of([F32, SPARSE], **{**options, "tried": 1})
    assert advice.verdict.startswith("compress" if advice.compresses else "do not compress")
    assert advice.chosen.candidate.name in advice.table
    assert advice.facts.gradient > 0
    assert 0 <= advice.facts.overlap <= 1
    assert all(fit.latency >= 0 and fit.per_byte >= 0 for fit in advice.facts.fits[AXIS].values())
    assert advice.facts.work["f32"].error == 0
    assert advice.rows[0].measured is not None  # the dense one was run
    assert advice.watch()(1.0) == []
    # What it returns is ready to be used.
    grad_fn = jc.value_and_grad(loss, advice.algorithm, mesh_of(2), **advice.options)
    value, grads, _ = jax.jit(grad_fn)(PARAMS, grad_fn.init(PARAMS), batch(0))
    assert np.isfinite(value)
    assert jax.tree.structure(grads) == jax.tree.structure(PARAMS)
    # The file is used in place of measuring, and may be edited.
    assert from_text(path.read_text()) == advice.facts
    del said[:]
    edited = json.loads(path.read_text())
    for fit in edited["fits"][AXIS].values():
        fit.update(latency=0.0, per_byte=1.0, ratios=[])
    edited["work"]["top_k"] = edited["work"]["f32"] | {"error": 0.5}
    path.write_text(json.dumps(edited))
    slow = plan_of([F32, SPARSE], **options)
    assert said == []
    assert slow.chosen.candidate is SPARSE
    assert slow.compresses
    assert not plan_of([F32, SPARSE], max_error=0.1, **options).compresses
    plan_of([F32], **options)
    assert said  # other candidates are another plan


def test_what_was_run_is_kept_until_it_says_nothing_any_more(monkeypatch, tmp_path):
    """The second plan measures and runs nothing; another one runs what another argument or an edited file asks for."""
    path, said = tmp_path / "plan.json", []
    machine(monkeypatch, 1e-9, {"f32": work(0.0), "top_k": work(1e-3, 0.9)})
    again = lambda **more: plan_of([F32, SPARSE], **{**RUN, "cache": path, "show": said.append, **more})
    first = again()
    assert "trying all in turn" in said
    del said[:]
    second = again()
    assert said == []
    assert second.facts == first.facts
    assert str(second) == str(first)
    assert ran(second) == {"f32", "top_k"}
    # Prediction alone, and other limits, are other questions.
    assert ran(again(tried=0)) == set()
    assert ran(again(max_error=np.float32(0.5))) == {"f32"}
    assert "trying f32" in said
    again()
    del said[:]
    edited = json.loads(path.read_text())
    edited["fits"][AXIS]["all_reduce"]["latency"] = 1e-3
    path.write_text(json.dumps(edited))
    again()
    assert "trying f32" in said
    assert "loss and gradient" not in said
    # A budget that ends before all are run: another plan may have the time.
    path.unlink()
    assert again(budget=1e-6).facts.trials is None


@pytest.mark.slow
def test_f32_is_run_beside_the_best_dense_candidate_unless_it_takes_too_long(monkeypatch):
    """bf16 is the best here by prediction; f32 is measured, too, if three rounds of it fit into the budget."""
    dense = [each for each in dense_candidates() if each.name in ("f32", "bf16:two_shot")]
    each_work = {each.name: work(0.0) for each in dense} | {"top_k": work(10.0)}
    machine(monkeypatch, 1e-6, each_work)
    assert ran(plan_of([*dense, SPARSE], **RUN)) == {"f32", "bf16:two_shot", "top_k"}
    machine(monkeypatch, 1.0, each_work)
    assert ran(plan_of([*dense, SPARSE], **RUN)) == {"bf16:two_shot", "top_k"}


def test_candidates_share_what_is_measured_of_algorithm_and_route(monkeypatch):
    bucketed, elsewhere = SPARSE._replace(name="in buckets", bucket_bytes=1024), SPARSE._replace(via="two_shot")
    each_work = {"f32": work(1.0), "top_k": work(1e-3, 0.9), "in buckets": work(1e-3, 0.9), "elsewhere": work(1e-3)}
    measured = machine(monkeypatch, 1e-3, each_work)
    found = plan_of([F32, SPARSE, bucketed])
    assert len(measured) == 2
    assert found.facts.work["top_k"] == found.facts.work["in buckets"]
    measured = machine(monkeypatch, 1e-3, each_work)
    plan_of([F32, SPARSE, elsewhere._replace(name="elsewhere")])
    assert measured == ["f32", "elsewhere"]  # so fast that the other route is too slow without any work


def test_what_is_not_eligible_does_not_keep_others_from_being_measured(monkeypatch):
    """Without a limit the lossy one is so fast that the other, dearer on the links alone, is not measured."""
    lossy = jc.Candidate("lossy", jc.error_feedback(jc.top_k(0.001)))
    each_work = {"f32": work(0.0), "top_k": work(1e-3, 0.1), "lossy": work(0.0, 0.9)}
    measured = machine(monkeypatch, 1e-3, each_work)
    assert plan_of([F32, lossy, SPARSE]).chosen.candidate is lossy
    assert measured == ["f32", "lossy"]
    measured = machine(monkeypatch, 1e-3, each_work)
    assert plan_of([F32, lossy, SPARSE], max_error=0.5).chosen.candidate is SPARSE
    assert measured == ["f32", "lossy", "top_k"]


@pytest.mark.slow
def test_local_updates_are_run_unless_they_are_too_long():
    local = [F32, SPARSE.with_every(3)]
    found = plan_of(local, **RUN)
    assert ran(found) == {"f32", "top_k, H=3"}
    assert "an exchange every 3 steps" in found.table
    limited = plan_of(local, **RUN, max_every=2)
    assert ran(limited) == set(limited.facts.work) == {"f32"}


@pytest.mark.slow
def test_what_is_run_is_dense_once_plain_and_at_most_once_more(monkeypatch):
    candidates = [*dense_candidates(), F32.in_buckets(4096), SPARSE]
    candidates += [jc.Candidate("other", jc.error_feedback(jc.top_k(0.1)))]
    seconds = {"bf16": 1e-3, "bf16:two_shot": 2e-3, "top_k": 5.0, "other": 9.0}
    machine(monkeypatch, 1e-9, {each.name: work(seconds.get(each.name, 0.0)) for each in candidates})
    said, params = [], jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh_of(2), PartitionSpec())), PARAMS)
    workload = Workload(Clock(mesh_of(2), 1000.0), loss, params, (batch(0),), AXIS)
    planning.plan_on(workload, candidates, Limits(), thorough=True, tried=2, show=said.append)
    run = [text.removeprefix("trying ") for text in said if text.startswith("trying")]
    assert (run[0], run[2]) == ("f32", "top_k")
    assert run[1] in ("bf16", "bf16:two_shot", candidates[3].name)  # one more of those that send everything
    assert len(run) == 3 + 1  # and at last all in turn


@pytest.mark.slow
def test_axes_together_and_hierarchies(tmp_path, capsys):
    """Workers of two axes, and a level for each of them."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    levels = jc.Candidate("levels", {"a": jc.direct(jc.identity()), "b": jc.error_feedback(jc.top_k(0.1))})
    options = {"mesh": mesh, "axis_name": ("a", "b")}
    found = jc.plan(loss, PARAMS, batch(0, 4), candidates=[F32, levels], tried=2, budget=1000.0, **options)
    assert "a,b" in found.facts.fits
    assert found.rows[0].sent_bytes == pytest.approx(2 * 3 / 4 * 4 * 2080)
    assert ran(found) == {"f32", "levels"}
    short = {"tried": 0, "budget": 1e-3, "cache": tmp_path / "both.json"}
    both = {row.candidate.name: row for row in jc.plan(loss, PARAMS, batch(0, 4), **options, **short).rows}
    sparse_a, sparse_b = (each.name for each in hierarchies(("a", "b")))
    assert both[sparse_a].candidate.algorithm.keys() == {"b", "a"}
    assert 0 < both[sparse_b].sent_bytes < both["f32"].sent_bytes
    assert main(["plan", "--facts", str(tmp_path / "both.json")]) == 0
    assert sparse_a in capsys.readouterr().out


@pytest.mark.slow
def test_sharded_parameters():
    """Parameters that are cut over an axis without workers."""
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    cut = {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model")}
    params = {name: jax.device_put(x, NamedSharding(mesh, cut[name])) for name, x in PARAMS.items()}
    candidates = [F32, SPARSE, F32.with_every(2)]
    found = jc.plan(loss, params, batch(0), mesh=mesh, candidates=candidates, budget=1000.0, tried=2)
    assert found.facts.about["leaves"] == ["float32[16]", "float32[64,16]"]
    assert ran(found) == {each.name for each in candidates}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"candidates": []}, TypeError, "candidates must be a list of jc.Candidate, not empty"),
        ({"candidates": [SPARSE, SPARSE]}, ValueError, "different names"),
        ({"budget": 0.0}, ValueError, "budget must be seconds > 0"),
        ({"budget": "20"}, ValueError, "budget must be seconds > 0; got '20'"),
        ({"max_error": math.nan}, ValueError, "max_error must be a number >= 0; got nan"),
        ({"axis_name": "model"}, ValueError, "axis_name must be of the mesh"),
        ({"tried": 1.5}, ValueError, "tried must be an integer >= 0"),
        ({"max_every": 0}, ValueError, "max_every must be an integer of at least 1; got 0"),
        ({"mesh": None}, TypeError, "mesh must be a jax"),
    ],
)
def test_mistakes(options, error, said):
    with pytest.raises(error, match=f"plan: {said}" if "names" not in said else said):
        plan_of(**{"candidates": [SPARSE], **options})


def test_a_gradient_that_is_not_finite_is_no_sample():
    broken = lambda p, x: jnp.nan * loss(p, x)
    with pytest.raises(ValueError, match="the gradient of the loss must be finite"):
        jc.plan(broken, PARAMS, batch(0), mesh=mesh_of(2), candidates=[SPARSE], max_error=0.5)


def test_a_single_worker_has_nothing_to_exchange():
    plain = plan_of([SPARSE], mesh=mesh_of(1))
    assert not plain.compresses
    assert plain.chosen.candidate.name == "f32"
    assert "single worker" in str(plain)


def test_a_plan_in_a_mesh_that_is_set():
    """With its devices, and as if none were in force where it measures."""
    with jax.set_mesh(mesh_of(2)):
        made = jc.plan(loss, PARAMS, (batch(0),), candidates=[F32, SPARSE], budget=10.0, tried=0)
    assert {row.candidate.name for row in made.rows} == {"f32", "top_k"}
