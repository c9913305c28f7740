"""`jc.recommend` against numbers computed by hand."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.plan.candidates import dense_candidates
from jaxcomp.plan.facts import Facts, Line, Work
from jaxcomp.plan.machine import Codec, Machine

LIKE = jax.ShapeDtypeStruct((100_000,), jnp.float32)
FEW = [*dense_candidates()[:1], jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))]
# 100,000 entries: a copy takes a millisecond.
SLOWLY = Machine("slow", 8e8, 1e9, {"top_k": Codec(1.0, 0.5, 1e-4), "cast": Codec(0.5, 0.5)})
NONE = Machine("none", 1e30, 1e9, {"": Codec(0.0, 0.0)})
SLOW = {"workers": 4, "link": jc.Link(1e-3, 1e7), "machine": SLOWLY}


def test_seconds_by_hand():
    """Among 4 workers top-k has a gather of 3 messages of 8,000 bytes, f32 a ring of 6 latencies and 600,000 bytes; 1.2
    and 1.1 times as long as their bytes. A step of top-k is 1 + 0.5 + 2.3 copies, and 3 messages of 1 % of the entries,
    9 times of each: 0.27."""
    found = jc.recommend(LIKE, candidates=FEW, gradient=0.02, **SLOW)
    f32, sparse = found.rows
    assert f32.parts.network == pytest.approx(4e-3 + 1.2 * 0.06)  # halving: 4 latencies
    assert sparse.parts.network == pytest.approx(2e-3 + 1.1 * 24_000 / 1e7)
    assert f32.parts.encode + f32.parts.decode == 0
    assert sparse.parts.encode + sparse.parts.decode == pytest.approx(1e-3 * (1 + 0.5 + 2.3 + 0.27) + 1e-4, rel=1e-3)
    assert sparse.parts.total == pytest.approx(0.02 + sum(sparse.parts[1:4]))
    said = "compress: top_k takes 28.8 ms a step where f32 takes 96 ms (4 workers, data 80 Mbit/s, computed for slow)"
    assert found.verdict.startswith(
        f"{said}: it sends 25 times fewer bytes and works 4.17 ms more; effect on the loss: "
    )
    assert "Times are computed, work for slow (stated)." in str(found)
    for bandwidth, pays in ((1.05e9 / 8, True), (1.15e10 / 8, False)):
        f32, sparse = jc.recommend(LIKE, candidates=FEW, **SLOW | {"link": jc.Link(1e-4, bandwidth)}).rows
        assert (sparse.seconds < f32.seconds) == pays


def test_levels_of_links():
    """Two groups of four: a flat sum sends 2 (8 - 1) / 8 of its bytes on each worker's link, and 2 (8 - 4) / 8 of them
    leave a group; of a hierarchy the sum within, and messages whose parts the four share between the groups."""
    levels = {"ici": jc.Link(0.0, 1e9, 4), "dcn": jc.Link(0.0, 1e7)}
    few = [FEW[0], jc.Candidate("both", {"ici": FEW[0].algorithm, "dcn": FEW[1].algorithm})]
    f32, both = jc.recommend(LIKE, candidates=few, link=levels, workers=8, machine=NONE).rows
    assert f32.parts.links == pytest.approx({"ici": 1.2 * 1.75 * 4e5 / 1e9, "dcn": 1.2 * 4e5 / 1e7})
    assert f32.parts.network == pytest.approx(1.2 * 4e5 / 1e7)
    assert both.parts.links["dcn"] == pytest.approx(1.1 * 8000 / 1e7)
    assert both.parts.links["ici"] == pytest.approx(1.2 * 1.5 * 4e5 / 1e9 + 1.1 * 3 * 2 * 2000 / 1e9)
    names = [row.candidate.name for row in jc.recommend(LIKE, link=levels, workers=8, machine="h100").rows]
    assert "f32 over ici, sidco(0.01)+ef over dcn" in names


def test_auto_chooses_on_the_links_that_the_advice_is_for():
    """The row of via="auto" has the time of its faster route, and its options make `compressed_mean` take that one."""
    levels = {"nvlink": jc.Link(3e-6, 450e9, 8), "net": jc.Link(2e-5, 12.5e9)}
    int8, like = jc.error_feedback(jc.block_scaled("int8")), jax.ShapeDtypeStruct((2**20,), jnp.float32)
    few = [*dense_candidates()[:1], *(jc.Candidate(via, int8, via) for via in ("auto", "two_shot"))]
    found = jc.recommend(like, candidates=few, link=levels, workers=32, machine=NONE)
    f32, auto, two_shot = (row.parts.network for row in found.rows)
    assert auto == f32 < two_shot / 2
    options = found.rows[1].candidate.options
    assert options["link"] == levels
    assert jc.compressed_mean(int8, "data", **options)
    assert found.rows[2].candidate.options == {"via": "two_shot"}
    found = jc.recommend(like, workers=4, machine=NONE, candidates=few)
    assert all("link" not in row.candidate.options for row in found.rows)
    with pytest.raises(TypeError, match=r"recommend: candidate 'x': link must be a jc.Link"):
        jc.recommend(like, candidates=[jc.Candidate("x", int8, link=5)], workers=4, machine=NONE)


def test_a_link_and_a_machine_that_take_no_time():
    found = jc.recommend(LIKE, workers=4, candidates=FEW, link=jc.Link(0.0, math.inf), machine=NONE)
    assert found.chosen.candidate.name == "f32"
    assert found.verdict.endswith("the fastest compressed candidate, top_k, takes the same time")


def test_only_what_is_trained_is_exchanged():
    params = {"w": LIKE, "frozen": LIKE}
    found = jc.recommend(params, candidates=FEW, wrt=lambda path, leaf: "w" in path, **SLOW)
    assert found.rows[0].sent_bytes == pytest.approx(600_000)
    with pytest.raises(TypeError, match="recommend: wrt must be"):
        jc.recommend(params, workers=2, wrt=3)


def test_seven_thousand_million_parameters_are_not_planned_as_on_a_cpu():
    """Issue: on 1,000 GPUs with 10 Gbit/s dense was advised, since work was that of a CPU's core."""
    like = jax.ShapeDtypeStruct((1000, 7_000_000), jnp.float32)
    candidates = [FEW[0], jc.Candidate("sidco", jc.error_feedback(jc.sidco(0.001)))]
    found = jc.recommend(like, workers=1000, link=jc.Link(5e-5, 1.25e9), candidates=candidates, machine="h100")
    assert found.chosen.candidate.name == "sidco"
    assert found.rows[1].seconds < found.rows[0].seconds / 50


def test_advice_without_a_useful_bound_says_that_steps_may_grow():
    few = lambda algorithm: [FEW[0], jc.Candidate("c", algorithm)]
    said = lambda algorithm: jc.recommend(
        LIKE, workers=4, link=jc.Link(1e-3, 1e6), candidates=few(algorithm), machine="h100"
    ).verdict.split("effect on the loss: ")[1]
    hint = '; steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'
    assert said(jc.error_feedback(jc.top_k(k=2))) == f"sent later; theory has no useful bound{hint} (theory)"
    assert said(jc.error_feedback(jc.top_k(0.01))).endswith("100 times as many transient steps (theory)")
    assert said(jc.direct(jc.dithering(7))).endswith("more variance (theory)")


def test_what_a_plan_has_measured_may_be_taken():
    work = {"f32": Work(Line(0.0, 0.0), Line(0.0, 0.0)), "top_k": Work(Line(0.0, 1e-7), Line(0.0, 2e-7), 0.3)}
    facts = Facts({}, {}, {}, work, 0.0, 0.4, 0.0)
    found = jc.recommend(LIKE, workers=2, candidates=FEW, machine=facts)
    assert found.rows[1].parts.encode == pytest.approx(0.01)
    assert found.rows[1].parts.decode == pytest.approx(0.01)
    assert found.rows[1].error == 0.3
    found = jc.recommend(LIKE, workers=4, candidates=FEW, machine=facts._replace(work={"f32": work["f32"]}))
    assert "what it takes to encode and decode is not known" in found.table


DAGC = [FEW[0], jc.Candidate("dagc", jc.error_feedback(jc.dagc([1, 2], 0.1)))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 1}, r"workers must be an integer of at least 2 and below 2\^31; got 1"),
        ({"workers": 3, "candidates": DAGC}, "2 weights for 3 workers"),
        ({"link": jc.Link(12.5e6, 1e-3)}, r"latency in \[0, 60\] seconds .* in this order; got .*12500000"),
        ({"link": 12.5e6}, r"link must be a jc\.Link.*; got 12500000\.0"),
        ({"candidates": FEW[1:], "max_error": 0.5}, "^recommend: candidates must .* one that is eligible"),
        ({"gradient": "1s"}, "gradient must be finite seconds >= 0; got '1s'"),
        ({"max_error": -1}, "recommend: max_error must be a number >= 0; got -1"),
        ({"machine": "gpu"}, "machine must be a file of a machine or one of cpu, .*; got 'gpu'"),
        ({"machine": 3}, "recommend: machine must be a jc.Machine, its name or file"),
        ({"machine": SLOWLY._replace(bandwidth=0.0)}, "recommend: machine must have a bandwidth of at least 1"),
        ({"link": {"a": jc.Link(), "b": jc.Link()}}, "link must have a width at each level, but for one"),
        ({"link": jc.Link(width=3)}, "widths whose product is the 4 workers; it is 3"),
        ({"params": {}}, "params must hold at least one entry"),
    ],
)
def test_what_cannot_be_recommended(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        jc.recommend(**{"params": LIKE, "workers": 4, **options})


def test_a_candidate_that_cannot_carry_so_many_entries_is_one_row():
    """Two shots cut all leaves into a chunk for each worker, which here is longer than its indices can number."""
    scattered = jc.Candidate("top_k:two_shot", FEW[1].algorithm, via="two_shot")
    few = [scattered, *FEW, scattered.with_every(4)]
    found = jc.recommend(jax.ShapeDtypeStruct((3 * 10**9,), jnp.bfloat16), workers=2, candidates=few)
    assert [row.candidate.name for row in found.rows] == [each.name for each in few]
    first, f32, sparse, same = found.rows
    assert first.refused.startswith("3000000000 entries in 2 chunks, one for each worker, are 1500000256 in each")
    assert same.refused == first.refused
    assert f32.refused is None
    assert f32.sent_bytes == pytest.approx(3 * 10**9 * 2, rel=1e-5)
    assert found.chosen is sparse
    assert "3000000000 entries" in found.table


def test_buckets_have_latencies_of_their_own():
    large, buckets = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 4, FEW[0].in_buckets(2**22)
    whole, in_four = jc.recommend(large, candidates=[FEW[0], buckets], **SLOW).rows
    assert in_four.parts.network - whole.parts.network == pytest.approx(3 * 4e-3)


def test_small_leaves_are_not_worth_compressing_but_in_two_shots():
    found = jc.recommend({"bias": jnp.zeros(3)}, workers=2)
    assert found.chosen.candidate.dense
    assert found.verdict.startswith("do not compress")
    others = [row for row in found.rows if not row.candidate.dense and row.candidate.via != "two_shot"]
    assert all("compresses nothing" in row.refused for row in others)
    sign = jc.Candidate("sign", jc.error_feedback(jc.sign()))
    few = [FEW[0], sign, sign._replace(name="sign:two_shot", via="two_shot")]
    like = jax.ShapeDtypeStruct((33, 17), jnp.float32), jax.ShapeDtypeStruct((400,), jnp.float32)
    found = jc.recommend(like, workers=8, link=jc.Link(1e-3, 1e6), candidates=few)
    assert [row.refused is not None for row in found.rows] == [False, True, False]
    assert found.chosen.candidate.name == "sign:two_shot"
