"""Predictions against cases computed by hand, and fits against lines that are known."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.plan.advise import Row, choose, predicted, reason, table, verdict, with_expected
from jaxcomp.plan.candidates import Candidate, Loss, collectives_of, default_candidates, dense_candidates, loss_of
from jaxcomp.plan.facts import Facts, Work, from_text, leaves_of, read, to_text
from jaxcomp.plan.links import KINDS, Collective, Fit, Sample, fit, seconds_of
from jaxcomp.plan.predict import Bucket, Line, Parts, factors_of, line_through, overlap_of, regret, step_seconds

NONE = Loss(0.0, True, False, "none")


def sweep_of(kind, latency, per_byte, workers, sizes, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    times = [
        KINDS[kind].messages(n) * latency + KINDS[kind].sent(size, n) * per_byte for n in workers for size in sizes
    ]
    places = [(n, size) for n in workers for size in sizes]
    noisy = [t * (1 + noise * rng.standard_normal()) for t in times]
    return [Sample(n, size, t, noise * t) for (n, size), t in zip(places, noisy, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_the_line_it_was_made_from(kind):
    samples = sweep_of(kind, 3e-4, 2e-8, (2, 4), (256, 10_000, 1e6))
    found = fit(kind, samples)
    assert found.latency == pytest.approx(3e-4, rel=1e-9)
    assert found.per_byte == pytest.approx(2e-8, rel=1e-9)
    for n, size in ((3, 5e5), (8, 4e6)):  # held back
        expected = KINDS[kind].messages(n) * 3e-4 + KINDS[kind].sent(size, n) * 2e-8
        assert found.seconds(size, n).mean == pytest.approx(expected, rel=1e-9)
    assert found.seconds(1e6, 1).mean == 0


def test_a_fit_is_weighted_least_squares_with_its_covariance():
    samples = sweep_of("all_gather", 1e-3, 1e-8, (4,), (256, 1e4, 1e5, 1e6), noise=0.05, seed=1)
    found = fit("all_gather", samples)
    x = np.array([[3.0, 3 * s.operand_bytes] for s in samples])
    weight = np.diag([1 / max(s.error, 0.02 * s.seconds) ** 2 for s in samples])
    normal = np.linalg.inv(x.T @ weight @ x)
    t = np.array([s.seconds for s in samples])
    expected = normal @ x.T @ weight @ t
    np.testing.assert_allclose([found.latency, found.per_byte], expected, rtol=1e-8)
    misfit = (t - x @ expected) @ weight @ (t - x @ expected) / 2
    a, both, c = found.covariance
    np.testing.assert_allclose([[a, both], [both, c]], normal * max(misfit, 1), rtol=1e-6)
    mean, deviation = found.seconds(1e5, 4)
    row = np.array([3.0, 3e5])
    assert deviation == pytest.approx(math.sqrt(row @ (normal * max(misfit, 1)) @ row))
    assert mean == pytest.approx(samples[2].seconds)  # measured sizes are met


def test_coverage_of_the_uncertainty():
    """Two standard deviations hold the truth in about 95 % of fits; at least 85 % of 200 here (false alarm < 1e-6)."""
    inside = 0
    for seed in range(200):
        found = fit("all_reduce", sweep_of("all_reduce", 1e-3, 1e-8, (2,), (256, 1e4, 1e5, 1e6, 4e6), 0.05, seed))
        inside += abs(found.per_byte - 1e-8) <= 2 * math.sqrt(found.covariance[2])
    assert inside >= 170


def test_a_coefficient_is_never_negative():
    samples = [Sample(2, 1e4, 1.0, 0.0), Sample(2, 1e5, 0.5, 0.0)]
    found = fit("permute", samples)
    assert found.latency > 0
    assert found.per_byte == 0
    steep = fit("permute", [Sample(2, 1e4, 1e-4, 0.0), Sample(2, 1e5, 1.0, 0.0)])
    assert steep.latency == 0
    assert steep.per_byte > 0


def test_the_wait_for_shared_cores_is_told_from_the_latency():
    """Times with a wait on two cores, of 2 to 4 workers, are met at 8; of 2 workers alone there is none to be seen."""
    model = Fit("all_reduce", 1e-4, 1e-8, wait=2e-4, cores=2)
    samples = [Sample(n, b, model.line(b, n), 0.0) for n in (2, 3, 4) for b in (256.0, 1e4, 1e6)]
    found = fit("all_reduce", samples, cores=2)
    assert (found.latency, found.per_byte, found.wait) == pytest.approx((1e-4, 1e-8, 2e-4))
    assert found.seconds(256.0, 8).mean == pytest.approx(14 * (1e-4 + 3 * 2e-4) + 2 * 7 / 8 * 256 * 1e-8)
    assert fit("all_reduce", samples[:3], cores=2).wait == 0
    one = fit("all_reduce", samples[6:], cores=2)  # of four workers alone a wait looks like latency
    assert (one.latency, one.wait) == (pytest.approx(1e-4 + 2e-4), 0)
    assert fit("all_reduce", samples).seconds(256.0, 8).mean < 0.5 * found.seconds(256.0, 8).mean
    with pytest.raises(ValueError, match="cores must be an integer >= 0; got -1"):
        fit("all_reduce", samples, cores=-1)
    for wrong in (0.5, math.nan, "2", True):
        with pytest.raises(ValueError, match="cores must be an integer"):
            fit("all_reduce", samples, cores=wrong)


def test_the_error_of_a_wait_is_told(seed):
    """Without a wait in truth noise makes one; what it does to 16 workers is within four deviations in 95 % of fits."""
    model, rng, far = Fit("all_gather", 1e-3, 1e-8), np.random.default_rng(seed), []
    for _ in range(200):
        places = [(n, b, model.line(b, n)) for n in (2, 3, 4) for b in (256.0, 1e4, 1e5)]
        noisy = [Sample(n, b, t * (1 + 0.05 * rng.standard_normal()), 0.05 * t) for n, b, t in places]
        found = fit("all_gather", noisy, cores=2)._replace(ratios=())
        said = found.seconds(256.0, 16)
        far.append(abs(said.mean - model.line(256.0, 16)) / said.deviation)
    assert np.mean(np.array(far) < 4) > 0.95


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "two sizes; got 0"),
        ([Sample(2, 10, 1, 0)] * 3, "at least two sizes"),
        ([Sample(2, 10, 1, 0), Sample(2, 20, math.nan, 0)], "finite"),
    ],
)
def test_fits_of_what_cannot_be_fitted(samples, said):
    with pytest.raises(ValueError, match=said):
        fit("all_gather", samples)
    with pytest.raises(ValueError, match="kind must be one of"):
        fit("broadcast", samples)


def test_seconds_of_collectives_by_hand():
    fits = {"a": {"all_gather": Fit("all_gather", 1e-3, 1e-9)}, "b": {"all_reduce": Fit("all_reduce", 1e-2, 1e-8)}}
    sizes = {"a": 4, "b": 2}
    found = seconds_of(
        [
            Collective("all_gather", 1e6, "a", 2),
            Collective("all_reduce", 1e5, "b"),
            Collective("permute", 1e6, "a"),  # not measured: as a message of the all-gather
        ],
        fits,
        sizes,
    )
    assert found.mean == pytest.approx(2 * (3 * 1e-3 + 3e6 * 1e-9) + (2 * 1e-2 + 1e5 * 1e-8) + (1e-3 + 1e6 * 1e-9))


def test_steps_by_hand():
    one = [Bucket(1.0, 0.1, 1.0, 0.2)]
    assert step_seconds(2.0, 0.5, one).total == pytest.approx(3.3)
    assert step_seconds(2.0, 0.5, one, overlap=1.0).total == pytest.approx(3.3)  # one bucket waits for all of it
    assert step_seconds(2.0, 0.5, one, every=4).total == pytest.approx(2 + 1.3 / 4)
    # Two buckets: computing 1 + .5 = 1.5 | 2.0; exchanging 1.5 .. 2.5 | 2.5 .. 3.5.
    two = [Bucket(0.5, 0.0, 1.0, 0.0)] * 2
    assert step_seconds(2.0, 0.5, two, overlap=1.0).total == pytest.approx(3.5)
    assert step_seconds(2.0, 0.5, two, overlap=0.5).total == pytest.approx(3.75)
    # Encoding delays the backward pass: 1 + .5 + .25 | + .75 = 2.5; exchanging 1.75 .. 1.85 | 2.5 .. 2.6; decoding 1.
    coded = [Bucket(0.5, 0.25, 0.1, 0.5)] * 2
    found = step_seconds(2.0, 0.5, coded, overlap=1.0)
    assert found.total == pytest.approx(3.6)
    assert found.hidden == pytest.approx(0.1)
    assert overlap_of(0.0, 1.0, 1.0) == 0
    with pytest.raises(ValueError, match="overlap and forward_share"):
        step_seconds(1.0, 0.5, one, overlap=1.5)
    with pytest.raises(ValueError, match="every must be"):
        step_seconds(1.0, 0.5, one, every=0)


def test_steps_that_were_run_say_what_the_others_take():
    """Links that take twice what they took alone, and work half as much again; one factor alone, where one was run."""
    step = lambda network, rest: Parts(rest, 0.0, network, 0.0, 0.0, network + rest, 0.0)
    rng = np.random.default_rng(0)
    steps = [step(*rng.uniform(0.1, 10, 2)) for _ in range(20)]
    seconds = [2 * x.network + 1.5 * x.gradient for x in steps]
    found = factors_of([(x, 1, t) for x, t in zip(steps, seconds, strict=True)], trust=1e-6)
    assert found == pytest.approx((2, 1.5), rel=1e-3)
    assert found.of(step(3.0, 4.0)) == pytest.approx(12, rel=1e-3)
    assert factors_of([]).of(steps[0]) == pytest.approx(steps[0].total)
    one = factors_of([(step(5.0, 0.001), 1, 10.0)])
    assert one.network == pytest.approx(1.2, rel=0.01)  # (a / 2 - 1)^2 + (a - 1)^2 is least there
    assert one.rest == pytest.approx(1, rel=0.01)  # nothing is known of it
    many = factors_of([(step(5.0, 0.001), 1, 10.0)] * 40)
    assert many.network == pytest.approx(2, rel=0.1)
    rows = [Row(Candidate(name, jc.direct(jc.identity())), x, 0.0, NONE) for name, x in zip("abc", steps, strict=False)]
    rows = with_expected([rows[0]._replace(measured=2 * rows[0].parts.total), *rows[1:]])
    assert rows[0].expected is None
    assert rows[1].seconds == rows[1].expected != rows[1].parts.total
    assert with_expected(rows[1:])[0].expected is None  # none of these was run


def test_lines():
    assert line_through([]) == Line(0.0, 0.0)
    assert line_through([(100, 2.0)]).seconds(200) == pytest.approx(4.0)
    line = line_through([(1e3, 1e-3), (8e3, 4.5e-3)])
    assert line.base == pytest.approx(5e-4)
    assert line.seconds(8e4) == pytest.approx(5e-4 + 8e4 * 5e-7)
    assert line.seconds(0) == 0
    flat = line_through([(1e3, 2e-3), (8e3, 1e-3)])
    assert flat.slope == 0
    assert flat.seconds(8e3) == pytest.approx(1e-3)  # measured points are met
    assert regret(1.0, [2.0, 1.0]) == 0


LIKE = {"w": jax.ShapeDtypeStruct((300, 100), jnp.float32), "b": jax.ShapeDtypeStruct((100,), jnp.float32)}


@functools.cache
def sent_by_default():
    return {each.name: collectives_of(each, LIKE, "data", {"data": 4}) for each in default_candidates()}


@pytest.mark.slow
def test_what_candidates_send():
    """The dense leaf goes with the vector, or beside it; bytes are those of lanes."""
    sent = sent_by_default()
    assert [(x.kind, x.operand_bytes) for x in sent["f32"]] == [("all_reduce", 4 * 30_100.0)]
    like = {"long": jnp.zeros(2**17), "first": jnp.zeros(100), "second": jnp.zeros(50)}
    apart = collectives_of(dense_candidates()[0], like, "data", {"data": 4}, joined=False)
    assert sorted(x.operand_bytes for x in apart) == [4 * 50.0, 4 * 100.0, 4 * 2.0**17]  # a CPU runs them one by one
    assert {x.kind for x in sent["bf16:two_shot"]} == {"all_to_all", "all_gather"}
    kinds = sorted(x.kind for x in sent["sidco(0.01)+ef"])
    assert kinds == ["all_gather", "all_reduce"]
    assert all(x.axis == "data" for each in sent.values() for x in each)
    ladder = Candidate("ladder", jc.error_feedback(jc.top_k(0.01)), "ladder")
    assert max(x.operand_bytes for x in collectives_of(ladder, LIKE, "data", {"data": 2})) >= 8 * 300
    levels = {"a": jc.direct(jc.identity()), "b": jc.error_feedback(jc.top_k(0.01))}
    both = collectives_of(Candidate("two", levels), LIKE, None, {"a": 2, "b": 2})
    assert {x.axis for x in both} >= {"a", "b"}
    dependent = collectives_of(Candidate("p", jc.power_sgd(2)), LIKE, "data", {"data": 2})
    assert sum(x.kind == "all_reduce" for x in dependent) >= 2  # the second factor waits for the first


def test_what_theory_says():
    dithering = next(each for each in default_candidates() if each.name == "dithering(7):gather")
    loss = loss_of(dithering, LIKE, 4)
    assert loss.unbiased
    assert not loss.memory
    assert loss.bound == pytest.approx(jc.dithering(7, block_size=512).spec.omega(30_000))
    sparse = loss_of(Candidate("k", jc.error_feedback(jc.top_k(0.01))), LIKE, 4)
    assert sparse.memory
    assert sparse.bound == pytest.approx(0.99)
    assert "100 times as many transient" in sparse.words
    hardly = loss_of(Candidate("k", jc.error_feedback(jc.top_k(k=1))), LIKE, 4)
    assert "no useful bound" in hardly.words
    assert loss_of(dense_candidates()[0], LIKE, 4).bound == 0
    assert "apart" in loss_of(Candidate("k", jc.error_feedback(jc.top_k(0.01)), every=4), LIKE, 4).words


def facts_of(per_byte, encode=1e-3, gradient=0.01, latency=1e-4, overlap=0.0):
    fits = {"data": {kind: Fit(kind, latency, per_byte) for kind in KINDS}}
    work = {
        each.name: Work(Line(0.0, 0.0), Line(0.0, 0.0 if each.dense else encode / 30_100), None if each.dense else 0.1)
        for each in default_candidates()
    }
    return Facts({}, {"data": 4}, fits, work, gradient, 0.4, overlap)


def test_the_advice_turns_where_it_must():
    """f32 takes 6 latencies and 1.5 * 120,400 bytes; where that is less than encoding costs, dense is advised."""
    rows_at = lambda per_byte, **more: [
        predicted(each, facts_of(per_byte), LIKE, "data", collectives=sent_by_default()[each.name], **more)
        for each in default_candidates()
    ]
    fast, slow = rows_at(1e-10), rows_at(1e-6)
    assert fast[0].parts.network == pytest.approx(6e-4 + 1.5 * 120_400 * 1e-10)
    chosen = choose(fast)
    assert chosen.candidate.dense
    assert verdict(fast, chosen).startswith("do not compress")
    sparse = choose(slow)
    assert not sparse.candidate.dense
    assert verdict(slow, sparse).startswith("compress: ")
    text = table(slow, sparse)
    assert text.count("->") == 1
    assert "ms on the links" in text
    exact = choose(rows_at(1e-6, max_error=0.0))
    assert exact.candidate.dense
    with pytest.raises(ValueError, match="all are refused"):
        choose([slow[-1]._replace(refused="no")])
    close = [slow[0]._replace(measured=1.04), slow[-1]._replace(measured=1.0)]
    assert choose(close).candidate.dense  # 4 % is not worth it
    assert not choose([close[0]._replace(measured=1.06), close[1]]).candidate.dense


def test_reasons_say_what_a_row_is():
    """A dearer row is slower, never one that saves a negative time; one without its work measured says why."""
    facts = facts_of(1e-10)
    facts = facts._replace(work={name: facts.work[name] for name in ("f32", "sign+ef:two_shot")})
    at = lambda each, **more: predicted(each, facts, LIKE, "data", collectives=sent_by_default()[each.name], **more)
    rows = {each.name: at(each) for each in default_candidates()}
    f32, signs, fp8 = rows["f32"], rows["sign+ef:two_shot"], rows["fp8+ef:two_shot"]
    both = [f32, signs]
    assert reason(f32, f32, both) == "the best dense candidate"
    assert reason(signs, f32, both).startswith(
        "0.983 ms slower than f32: it saves 0.0175 ms on the links and costs 1 ms"
    )
    assert reason(f32, signs, both).startswith("0.983 ms faster than sign+ef:two_shot: it costs 0.0175 ms on the links")
    slower = fp8._replace(parts=fp8.parts._replace(total=f32.seconds + 2e-3))
    words = "not measured: without encoding and decoding it is 2 ms slower than f32"
    assert reason(slower, f32, both) == words
    assert verdict([f32, slower], f32).endswith(f"fp8+ef:two_shot, was {words}")
    assert reason(fp8, f32, both) == "not measured: the budget was spent"
    assert "more than allowed" in reason(at(default_candidates()[-1], max_error=0.2), f32, both)
    slow = signs._replace(measured=2.5)
    assert reason(slow, f32._replace(measured=0.5), both).startswith("2e+03 ms slower than f32; by the parts it saves")
    assert "is 9% slower: it saves 0.0175 ms on the links and costs 1 ms of work" in verdict(both, f32)
    as_dear = signs._replace(parts=signs.parts._replace(network=f32.parts.network))
    assert reason(as_dear, f32, both).endswith(": it costs 1 ms of work")
    as_fast = as_dear._replace(parts=as_dear.parts._replace(total=f32.parts.total))
    assert reason(as_fast, f32, both).startswith("takes the same time as f32: it costs 1 ms")
    assert "sign+ef:two_shot, takes the same time: it costs 1 ms" in verdict([f32, as_fast], f32)
    every = lambda row: row._replace(candidate=row.candidate.with_every(4))
    assert ": it saves 0.00437 ms on the links and costs 0.25 ms of work" in reason(every(signs), every(f32), both)
    assert verdict([f32, signs, fp8], f32).endswith(
        ". 1 compressed candidate could not be measured: the budget was too short"
    )
    order = [line.split()[0 if line[0] != "-" else 1] for line in table([fp8, signs, f32], f32).splitlines()[1:]]
    assert order == ["f32", "sign+ef:two_shot", "fp8+ef:two_shot"]  # the last one is a lower bound
    assert verdict([f32], f32).endswith("there is no compressed candidate")
    # A dense candidate that is not eligible is no standard.
    refused = [f32._replace(refused="no"), rows["bf16"], signs]
    assert reason(signs, None, refused) == ""
    assert "f32" not in verdict(refused, signs)


def test_the_columns_of_local_updates_are_per_step():
    parts = step_seconds(2.0, 0.5, [Bucket(0.5, 0.25, 0.1, 0.5)] * 2, overlap=1.0, every=4)
    row = Row(Candidate("local", jc.direct(jc.identity()), every=4), parts, 0.0, NONE)
    cells = table([row], row).splitlines()[1].split()
    assert cells[2:9] == ["2400", "0", "2000", "125", "50", "250", "25"]  # 2000 + 125 + 50 + 250 - 25


def test_buckets_hide_exchanges_where_the_machine_overlaps():
    like = [jax.ShapeDtypeStruct((50_000,), jnp.float32)] * 4
    bucketed = dense_candidates()[0]._replace(bucket_bytes=200_000)
    at = lambda e: predicted(bucketed, facts_of(1e-8, overlap=e), like, "data").parts
    assert at(0.0).hidden == 0
    assert 0 < at(1.0).hidden < at(1.0).network
    assert at(1.0).network == pytest.approx(4 * 6e-4 + 1.5 * 800_000 * 1e-8)


def test_the_file_says_what_was_measured():
    facts = facts_of(1e-8)
    text = to_text(facts)
    assert from_text(text) == facts
    edited = from_text(text.replace('"per_byte": 1e-08', '"per_byte": 1e-05'))
    assert edited.fits["data"]["all_gather"].per_byte == 1e-5
    for broken in (
        "",
        "{}",
        "[" * 100_000,
        text.replace('"version": 2', '"version": 7'),
        text.replace('"latency"', '"lag"'),
    ):
        with pytest.raises(ValueError, match="must hold what a plan"):
            from_text(broken, "f.json")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("wait", -1, "wait of all_gather must be a number >= 0; got -1"),
        ("wait", math.nan, "wait of all_gather must be a number"),
        ("cores", 1.5, "cores of all_gather must be an integer in .0, 2.31.; got 1.5"),
        ("cores", None, "cores of all_gather must be an integer"),
        ("latency", math.inf, "latency of all_gather must be a number"),
        ("covariance", [1], "covariance of all_gather must be three numbers"),
        ("ratios", [[2, 1.0, math.nan]], "ratios of all_gather must be a number"),
        ("gradient", -1.0, "gradient must be a number >= 0; got -1.0"),
        ("overlap", 7, "overlap must be a number in .0, 1.; got 7"),
        ("sizes", {}, "sizes must be the axes"),
        ("sizes", {"data": 0}, "sizes of data must be an integer in .1, 2.31.; got 0"),
        ("sizes", {"data": 10**400}, "sizes of data must be an integer in .1, 2.31.; got 1000"),
        pytest.param("gradient", 10**400, "gradient must be a number >= 0; got 1000", id="gradient-huge"),
        ("covariance", [10**400, 0, 0], "must hold what a plan has measured"),
        ("about", 3, "must hold what a plan has measured"),
        ("about", {"candidates": 3}, "candidates of about must be a list of names; got 3"),
        ("about", {"candidates": None}, "candidates of about must be a list of names; got None"),
        ("about", {"candidates": ["f32", 1]}, "candidates of about must be a list of names; got .'f32', 1."),
        ("fits", {"": {}}, "fits must be of axes of sizes, data; got ''"),
        (
            "trials",
            {"options": {}, "seconds": {"f32": -1}, "digest": ""},
            "trials of f32 must be a number >= 0; got -1",
        ),
        ("version", "2", "version must be 2; got '2'"),
        ("fits", {"data": {"broadcast": {}}}, "kind must be one of"),
    ],
)
def test_what_was_edited_wrongly_is_named(place, value, said):
    plain = json.loads(to_text(facts_of(1e-8)))
    inner = plain if place in {**plain, "trials": None} else plain["fits"]["data"]["all_gather"]
    inner[place] = value
    with pytest.raises(ValueError, match=f"plan: f.json .*{said}"):
        from_text(json.dumps(plain), "f.json")


@pytest.mark.parametrize(
    "leaves",
    [
        *(3, None, ["float31[3]"], ["float32[" + "9" * 400 + "]"]),
        *(["object[3]"], ["1f4[3]"], ["str[3]"], ["float128[3]"], ["int32[3]"], ["complex64[3]"]),
    ],
)
def test_leaves_that_are_none(leaves):
    facts = facts_of(1e-8)._replace(about={"leaves": leaves})
    words = r"plan: leaves in f.json must be like float32\[784,10\], with a dtype of float16, bfloat16, .*; got"
    with pytest.raises(ValueError, match=words):
        leaves_of(facts, "f.json")


def test_leaves_of_every_float_but_none_too_large():
    facts = lambda *leaves: facts_of(1e-8)._replace(about={"leaves": list(leaves)})
    floats = ["float16[3]", "bfloat16[]", "float32[2,0]", "float64[4]"]
    assert [f"{x.dtype}" for x in leaves_of(facts(*floats))] == ["float16", "bfloat16", "float32", "float64"]
    with pytest.raises(ValueError, match=r"fewer than 2\^40 entries each; got 'float32\[99999999,99999999\]'"):
        leaves_of(facts("float32[99999999,99999999]"))


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "f", tmp_path):
        with pytest.raises(ValueError, match="must be a file of text"):
            read(path)
    assert read(tmp_path / "none") is None
    empty = facts_of(1e-8)._replace(fits={})
    with pytest.raises(ValueError, match="fits must hold what was measured of axis 'data'"):
        predicted(default_candidates()[0], empty, LIKE, "data")
