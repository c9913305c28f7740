"""`jc.plan` on virtual devices: what it returns and keeps in its file, never how long anything took."""

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.cli import main
from jaxcomp.plan import facts as files
from jaxcomp.plan import planning
from jaxcomp.plan.candidates import default_candidates, dense_candidates, hierarchies
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.facts import Work
from jaxcomp.plan.links import KINDS, Fit
from jaxcomp.plan.measure import sweep, work_of
from jaxcomp.plan.offline import offline, settled
from jaxcomp.plan.predict import Line
from jaxcomp.plan.trial import _local_steps

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


def test_what_was_run_is_kept_until_it_says_nothing_any_more(machine, tmp_path):
    """The second plan measures and runs nothing; another one runs what another argument or an edited file asks for."""
    path, said = tmp_path / "plan.json", []
    machine(1e-9, {"f32": line(0.0), "top_k": line(1e-3, 0.9)})
    options = {"cache": path, "tried": 1, "budget": 1000.0, "show": said.append}
    again = lambda **more: plan_of([*dense_candidates()[:1], SPARSE], **{**options, **more})
    first = again()
    assert "trying all in turn" in said
    del said[:]
    second = again()
    assert said == []
    assert second.facts == first.facts
    assert str(second) == str(first)
    assert [row.measured for row in second.rows] == [row.measured for row in first.rows]
    assert None not in [row.measured for row in second.rows]
    # Prediction alone, and other limits, are other questions.
    assert [row.measured for row in again(tried=0).rows] == [None, None]
    assert again(max_error=np.float32(0.5)).rows[1].measured is None
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


@pytest.fixture
def machine(monkeypatch):
    """A machine whose links and encoding take what a test says; returns what was measured on it."""

    def of(per_byte, work):
        measured = []
        fits = {AXIS: {kind: Fit(kind, 1e-6, per_byte) for kind in KINDS}}

        def work_of(clock, candidate, *_):
            measured.append(candidate.name)
            return work[candidate.name]

        monkeypatch.setattr(planning, "links_of", lambda *_: fits)
        monkeypatch.setattr(planning, "work_of", work_of)
        return measured

    return of


def line(seconds, error=0.0):
    return Work(Line(0.0, 0.0), Line(0.0, seconds / 2080), error)


def plan_of(candidates, **options):
    return jc.plan(loss, PARAMS, batch(0), **{"mesh": mesh_of(2), "candidates": candidates, "tried": 0, **options})


def test_dense_on_a_fast_link_and_compressed_on_a_slow_one(machine):
    work = {"f32": line(0.0), "top_k": line(1e-3, 0.9)}
    machine(1e-12, work)
    fast = plan_of([*dense_candidates()[:1], SPARSE])
    assert not fast.compresses
    assert fast.verdict.startswith("do not compress: f32")
    machine(1e-3, work)
    slow = plan_of([*dense_candidates()[:1], SPARSE])
    assert slow.chosen.candidate is SPARSE
    assert slow.verdict.startswith("compress: top_k")


@pytest.mark.slow
def test_f32_is_run_beside_the_best_dense_candidate_unless_it_takes_too_long(machine):
    """bf16 is the best here by prediction; f32 is measured, too, if three rounds of it fit into the budget."""
    dense = [each for each in dense_candidates() if each.name in ("f32", "bf16:two_shot")]
    machine(1e-6, {each.name: line(0.0) for each in dense} | {"top_k": line(10.0)})
    ran = lambda found: {row.candidate.name for row in found.rows if row.measured is not None}
    assert ran(plan_of([*dense, SPARSE], tried=1, budget=1000.0)) == {"f32", "bf16:two_shot", "top_k"}
    machine(1.0, {each.name: line(0.0) for each in dense} | {"top_k": line(10.0)})
    slow = plan_of([*dense, SPARSE], tried=1, budget=1000.0)
    assert min(slow.rows, key=lambda row: row.parts.total).candidate.name != "f32"
    assert ran(slow) == {"bf16:two_shot", "top_k"}


def test_candidates_share_what_is_measured_of_algorithm_and_route(machine):
    f32, bucketed = dense_candidates()[0], SPARSE._replace(name="in buckets", bucket_bytes=1024)
    work = {"f32": line(1.0), "top_k": line(1e-3, 0.9), "in buckets": line(1e-3, 0.9)}
    measured = machine(1e-3, work)
    found = plan_of([f32, SPARSE, bucketed])
    assert len(measured) == 2
    assert found.facts.work["top_k"] == found.facts.work["in buckets"]
    elsewhere = SPARSE._replace(name="elsewhere", via="two_shot")
    measured = machine(1e-3, work | {"elsewhere": line(1e-3)})
    plan_of([f32, SPARSE, elsewhere])
    assert measured == ["f32", "elsewhere"]  # so fast that the other route is too slow without any work


def test_what_is_not_eligible_does_not_keep_others_from_being_measured(machine):
    """Without a limit the lossy one is so fast that the other, dearer on the links alone, is not measured."""
    f32, lossy = dense_candidates()[0], jc.Candidate("lossy", jc.error_feedback(jc.top_k(0.001)))
    work = {"f32": line(0.0), "top_k": line(1e-3, 0.1), "lossy": line(0.0, 0.9)}
    measured = machine(1e-3, work)
    assert plan_of([f32, lossy, SPARSE]).chosen.candidate is lossy
    assert measured == ["f32", "lossy"]
    measured = machine(1e-3, work)
    exact = plan_of([f32, lossy, SPARSE], max_error=0.5)
    assert measured == ["f32", "lossy", "top_k"]
    assert exact.chosen.candidate is SPARSE


@pytest.mark.slow
def test_local_updates_are_run_and_asked_for(seed):
    """H steps to an exchange are no candidates unless they are asked for; they are run as they are."""
    assert all(each.every == 1 for each in default_candidates())
    assert {each.every for each in default_candidates(20)} == {1, 4, 16, 20}
    local = [*dense_candidates()[:1], SPARSE.with_every(3)]
    options = {"mesh": mesh_of(2), "candidates": local, "budget": 1000.0, "tried": 1}
    found = jc.plan(loss, PARAMS, batch(seed), **options)
    assert found.rows[1].measured is not None
    assert "an exchange every 3 steps" in found.table
    limited = jc.plan(loss, PARAMS, batch(seed), **options, max_every=2)
    assert limited.rows[1].refused == "an exchange every 3 steps, and max_every is 2"
    assert limited.rows[1].measured is None
    assert set(limited.facts.work) == {"f32"}


@pytest.mark.slow
def test_what_is_run_is_dense_once_plain_and_at_most_once_more(machine):
    dense = dense_candidates()
    candidates = [*dense, dense[0].in_buckets(4096), SPARSE, jc.Candidate("other", jc.error_feedback(jc.top_k(0.1)))]
    work = {"f32": line(0.0), "f32, 0.00390625 MiB": line(0.0), "bf16": line(1e-3), "bf16:two_shot": line(2e-3)}
    machine(1e-9, work | {"top_k": line(5.0, 0.9), "other": line(9.0, 0.9)})
    said = []
    options = {"thorough": True, "tried": 2, "show": said.append}
    clock, params = Clock(mesh_of(2), 1000.0), PARAMS
    planning.plan_on(clock, loss, params, (batch(0),), AXIS, candidates, **options)
    run = [text.removeprefix("trying ") for text in said if text.startswith("trying")]
    assert (run[0], run[2]) == ("f32", "top_k")
    assert run[1] in work  # one more of those that send everything
    assert len(run) == 3 + 1  # and at last all in turn


@pytest.mark.slow
def test_axes_together_hierarchies_and_sharded_parameters(seed, tmp_path, capsys):
    """Workers of two axes, a level for each of them, and parameters cut over an axis without workers."""
    options = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    f32, identity = dense_candidates()[0], jc.direct(jc.identity())
    levels = jc.Candidate("levels", {"a": identity, "b": jc.error_feedback(jc.top_k(0.1))})
    mesh = jax.make_mesh((2, 2), ("a", "b"), **options)
    plans = {"mesh": mesh, "axis_name": ("a", "b"), "budget": 1000.0, "tried": 2}
    found = jc.plan(loss, PARAMS, batch(seed, 4), candidates=[f32, levels], **plans)
    assert "a,b" in found.facts.fits
    assert found.rows[0].sent_bytes == pytest.approx(2 * 3 / 4 * 4 * 2080)
    assert all(row.seconds > 0 for row in found.rows)
    options_of_both = plans | {"tried": 0, "budget": 1e-3, "cache": tmp_path / "both.json"}
    both = {row.candidate.name: row for row in jc.plan(loss, PARAMS, batch(seed, 4), **options_of_both).rows}
    (sparse_a, sparse_b) = (each.name for each in hierarchies(("a", "b")))
    assert both[sparse_a].candidate.algorithm.keys() == {"b", "a"}
    assert 0 < both[sparse_b].sent_bytes < both["f32"].sent_bytes
    assert main(["plan", "--facts", str(tmp_path / "both.json")]) == 0
    assert sparse_a in capsys.readouterr().out
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), **options)
    cut = {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model")}
    params = {name: jax.device_put(x, NamedSharding(mesh, cut[name])) for name, x in PARAMS.items()}
    candidates = [f32, SPARSE, f32.with_every(2)]
    found = jc.plan(loss, params, batch(seed), mesh=mesh, candidates=candidates, budget=1000.0, tried=2)
    assert found.facts.about["leaves"] == ["float32[16]", "float32[64,16]"]
    assert found.rows[0].measured is not None
    assert found.rows[2].measured is None  # workers without whole parameters of their own take no local steps here


def test_a_step_with_local_updates_is_what_it_says(seed):
    """The program that is timed takes H steps of which the last one exchanges: then all workers have the same point."""
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh_of(2), PartitionSpec())), PARAMS)
    candidate = dense_candidates()[0].with_every(4)
    run = _local_steps(candidate, loss, params, (batch(seed),), mesh_of(2), AXIS)
    run()
    own, state = run.state
    assert int(state.count) == 4
    assert int(state.means[0].shared.count) == 1
    w = np.asarray(own["w"])
    np.testing.assert_allclose(w[0], w[1], rtol=1e-6)
    assert not np.array_equal(w[0], PARAMS["w"])
    run.restart()
    assert int(run.state[1].count) == 0
    np.testing.assert_array_equal(np.asarray(run.state[0]["w"])[0], PARAMS["w"])


def test_the_command_knows_leaves_buckets_and_local_updates(machine, tmp_path, capsys):
    """power_sgd needs shapes; what a plan has measured of an algorithm holds for its buckets and local updates."""
    path = tmp_path / "plan.json"
    candidates = [each for each in default_candidates() if each.name in ("f32", "sidco(0.01)+ef", "power_sgd(2)")]
    machine(1e-7, {"f32": line(0.0), "sidco(0.01)+ef": line(1e-3, 0.5), "power_sgd(2)": line(1e-3, 0.5)})
    plan_of(candidates, cache=path)
    facts = files.from_text(path.read_text())
    assert facts.about["leaves"] == ["float32[32]", "float32[64,32]"]
    assert [x.shape for x in files.leaves_of(facts)] == [(32,), (64, 32)]
    assert main(["plan", "--facts", str(path), "--max-every", "4"]) == 0
    text = capsys.readouterr().out
    assert "power_sgd(2)" in text
    assert "sidco(0.01)+ef, H=4" in text
    assert "an exchange every 4 steps" in text
    assert "the same as f32: all leaves are one bucket" in text
    edited = json.loads(path.read_text())
    edited["about"]["leaves"] = ["nothing"]
    path.write_text(json.dumps(edited))
    assert main(["plan", "--facts", str(path)]) == 2
    assert (
        "must be like float32[784,10], with a dtype of float16, bfloat16, float32, float64; got 'nothing'"
        in capsys.readouterr().err
    )


def test_the_command_names_what_it_does_not_know(machine, tmp_path, capsys):
    """Candidates of one's own, and local updates, are left out by name; without a compressed one there is no advice."""
    path = tmp_path / "plan.json"
    sparse = next(each for each in default_candidates() if each.name == "sidco(0.01)+ef")
    own = [*dense_candidates()[:1], SPARSE, SPARSE._replace(name="mine"), sparse, sparse.with_every(4)]
    machine(1e-7, {each.name: line(1e-3, 0.5) for each in own})
    plan_of(own, cache=path)
    assert main(["plan", "--facts", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\nnot known here, left out: top_k; mine\n" in printed
    assert "\nmore steps than --max-every 1, left out: sidco(0.01)+ef, H=4\n" in printed
    plan_of(own[:3], cache=path)
    assert main(["plan", "--facts", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "must hold a compressed candidate that this command knows by name" in err
    assert "not known here, left out: top_k; mine" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--parameters", "1M"), ("--workers", "8"), ("--rate", "10mbit"), ("--latency", "2ms"), ("--gradient", "1ms")],
)
def test_the_command_refuses_what_the_file_has_itself(option, value, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["plan", option, value, "--facts", str(tmp_path / "plan.json")])
    said = f"error: argument {option}: not allowed with argument --facts; edit that file instead"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("candidates", 3), ("candidates", None), *(("leaves", [f"{each}[3]"]) for each in ("object", "1f4", "float128"))],
)
def test_the_command_has_one_line_for_a_file_that_was_edited_wrongly(name, value, machine, tmp_path, capsys):
    path = tmp_path / "plan.json"
    machine(1e-7, {"f32": line(1e-3)})
    plan_of(dense_candidates()[:1], cache=path)
    edited = json.loads(path.read_text())
    edited["about"][name] = value
    path.write_text(json.dumps(edited))
    assert main(["plan", "--facts", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: plan: ")
    assert said.count("\n") == 1
    assert name in said


def test_a_program_in_two_halves(key):
    """What a worker sends before it receives, and after; where all send the same it receives its own messages."""
    tx = jc.compressed_mean(jc.power_sgd(2), AXIS)
    grads = {"w": jax.random.normal(key, (60, 40)), "b": jnp.ones(40)}
    states = jax.jit(jax.vmap(lambda _: tx.init(grads), axis_name=AXIS))(jnp.arange(3))
    mean, after = jax.jit(jax.vmap(lambda _, state: tx.update(grads, state), axis_name=AXIS))(jnp.arange(3), states)
    halves = offline(tx.update, {AXIS: 3}, grads, jax.tree.map(lambda x: x[0], states))
    run = jax.jit(halves.whole)
    given = (grads, jax.tree.map(lambda x: x[0], states))
    received = settled(halves.arrivals, lambda received: run(0, received, *given)[0])
    assert len(received) >= 2  # the second factor waits for the first
    kept = jax.jit(halves.early)(jnp.zeros((), jnp.int32), *jax.tree.leaves(given))
    _, results = halves.outcome(kept, jax.jit(halves.late)(received, kept))
    for mine, theirs in zip(results, jax.tree.leaves((mean, after)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_work_of_algorithms_without_a_compressor_says_what_they_lose(key):
    grads = {"w": np.asarray(jax.random.normal(key, (64, 40))), "b": np.ones(40, np.float32)}
    clock = Clock(mesh_of(2), 1000.0)
    found = {
        rank: work_of(clock, jc.Candidate(f"{rank}", jc.power_sgd(rank)), AXIS, grads, 1.0).error for rank in (1, 8)
    }
    assert 0 < found[8] < found[1] < 1
    two_shot = work_of(clock, jc.Candidate("fp8", jc.direct(jc.cast("float8_e4m3fn")), "two_shot"), AXIS, grads, 1.0)
    assert 0 < two_shot.error < 0.01
    assert 0 < two_shot.encode.seconds(2600) <= two_shot.all.seconds(2600)


@pytest.mark.sampled
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


def test_programs_are_timed_in_turn():
    """Each round all of them, in the next one backwards; `before` begins each run; a long one is run less often."""
    said = []
    quick, slow = lambda: said.append("q"), lambda: (said.append("s"), time.sleep(0.06))[:0]
    times = Clock(mesh_of(2), 1e5).interleaved([quick, slow], 3, 1e5, before=lambda i: said.append(f"{i}"))
    assert times.shape == (2, 3)
    assert (times[1] >= 0.06).all()
    few, many = "1s" * 2, "0q" * 16
    assert "".join(said[8:]) == few + many + many + few + few + many


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"candidates": []}, TypeError, "candidates must be a list"),
        ({"candidates": [SPARSE, SPARSE]}, ValueError, "different names"),
        ({"budget": 0.0}, ValueError, "budget must be seconds > 0"),
        ({"max_error": -1.0}, ValueError, "max_error must be a number >= 0"),
        ({"max_error": math.nan}, ValueError, "max_error must be a number >= 0; got nan"),
        ({"candidates": 3}, TypeError, "candidates must be a list of jc.Candidate, not empty; got 3"),
        ({"axis_name": "model"}, ValueError, "axis_name must be of the mesh"),
        ({"tried": -1}, ValueError, "tried must be"),
        ({"tried": 1.5}, ValueError, "tried must be"),
        ({"budget": "20"}, ValueError, "budget must be seconds > 0; got '20'"),
        ({"budget": math.inf}, ValueError, "budget must be seconds > 0"),
        ({"max_every": 0}, ValueError, "max_every must be an integer of at least 1; got 0"),
    ],
)
def test_mistakes(options, error, said):
    with pytest.raises(error, match=said):
        jc.plan(loss, PARAMS, batch(0), **{"mesh": mesh_of(2), **options})
    with pytest.raises(TypeError, match="mesh must be a jax"):
        jc.plan(loss, PARAMS, batch(0))


def test_a_gradient_that_is_not_finite_is_no_sample():
    with pytest.raises(ValueError, match="the gradient of the loss must be finite"):
        jc.plan(
            lambda p, x: jnp.nan * loss(p, x), PARAMS, batch(0), mesh=mesh_of(2), candidates=[SPARSE], max_error=0.5
        )


def test_a_single_worker_has_nothing_to_exchange():
    advice = jc.plan(loss, PARAMS, batch(0), mesh=mesh_of(1))
    assert not advice.compresses
    assert "single worker" in str(advice)
    plain = jc.plan(loss, PARAMS, batch(0), mesh=mesh_of(1), candidates=[SPARSE])
    assert not plain.compresses
    assert plain.chosen.candidate.name == "f32"


def test_a_plan_in_a_mesh_that_is_set():
    """With its devices, and as if none were in force where it measures."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    few = [
        jc.Candidate("f32", jc.direct(jc.identity()), dense=True),
        jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01))),
    ]
    with jax.set_mesh(mesh):
        loss = lambda w, x: jnp.mean((x @ w) ** 2)
        made = jc.plan(loss, jnp.ones((64, 32)), (jnp.ones((8, 64)),), candidates=few, budget=10.0, tried=0)
    assert {row.candidate.name for row in made.rows} == {"f32", "top_k"}
