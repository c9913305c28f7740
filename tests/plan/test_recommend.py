"""`jc.recommend` against numbers computed by hand."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.plan.candidates import dense_candidates
from jaxcomp.plan.facts import Facts, Line, Work
from jaxcomp.plan.recommend import Machine

LIKE = jax.ShapeDtypeStruct((100_000,), jnp.float32)
FEW = [*dense_candidates()[:1], jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))]
NONE = Machine((("top_k", 10.0), ("f32", 0.0)), decode=0.0, copy=0.0)
SLOW = {"workers": 4, "link": jc.Link(1e-3, 1e7), "machine": NONE}


def columns_of(found):
    """Candidate -> its cells."""
    lines = [re.split(r"\s{2,}", line.removeprefix("->").strip()) for line in found.table.splitlines()[1:]]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.mark.filterwarnings("ignore:compressed_mean. this exchange sends")  # said of the gathered f32, and true
def test_where_a_candidate_pays_by_hand():
    """Among 4 workers top-k has three messages and f32 six; it takes a millisecond of work and 576,000 bytes less."""
    gathered = jc.Candidate("f32 gathered", jc.direct(jc.identity()), via="gather")
    candidates = [*FEW, gathered, jc.Candidate("f32 twice", jc.direct(jc.identity()))]
    at = lambda latency, bandwidth=1e7: jc.recommend(
        LIKE, candidates=candidates, **SLOW | {"link": jc.Link(latency, bandwidth)}
    )
    said = lambda latency: [columns_of(at(latency))[name][-1] for name in ("top_k", "f32 gathered", "f32 twice")]
    even = "never: it sends as much as dense"
    assert said(0.0) == ["4.61e+03 Mbit/s", "never: it sends more than dense", even]  # 8 * 576,000 / 1e-3
    assert said(1e-4) == ["6.58e+03 Mbit/s", "only above 1.6e+04 Mbit/s", even]  # / 7e-4; 8 * 600,000 / 3e-4
    assert said(1e-3) == ["always", "only above 1.6e+03 Mbit/s", even]
    # The seconds themselves cross there.
    for bandwidth, pays in ((6.57e9 / 8, True), (6.6e9 / 8, False)):
        f32, sparse, *_ = at(1e-4, bandwidth).rows
        assert (sparse.seconds < f32.seconds) == pays


def test_all_columns_and_the_verdict_are_per_step():
    """With local updates of f32 in the table, bytes and "pays below" still compare with f32 at every step."""
    local = [*FEW, FEW[0].with_every(4), FEW[1].with_every(4)]
    found = jc.recommend(LIKE, candidates=local, gradient=0.02, **SLOW)
    columns = columns_of(found)
    assert columns["f32"][:2] == ["0.6", "1/1"]
    assert columns["f32, H=4"][1] == "1/4"
    assert columns["top_k"] == ["0.024", "1/25", "<= 0.99, sent later", "5.4", "1", "26.4", "always"]
    assert columns["top_k, H=4"] == ["0.006", "1/100", "<= 0.99, sent later", "1.35", "0.25", "21.6", "always"]
    assert found.verdict.startswith(
        "compress: top_k, H=4 takes 21.6 ms a step, f32, the fastest dense candidate with an exchange at every step, "
        "86 ms. Of a step it is on the links for 1.35 ms in place of 66 ms and works for 0.25 ms to encode and decode"
    )
    words = '"bytes" and "pays below" compare with f32, the fastest dense candidate with an exchange at every step.'
    assert words in str(found)
    only = jc.recommend(LIKE, candidates=local[1:3], **SLOW)
    assert "compare with f32, H=4, the fastest dense candidate." in str(only)
    none = jc.recommend(LIKE, candidates=FEW[1:], **SLOW)
    assert "compare with" not in str(none)
    assert columns_of(none)["top_k"][1] == "-"


def test_a_link_and_a_machine_that_take_no_time():
    options = {"link": jc.Link(0.0, math.inf), "machine": Machine((("", 0.0),), 0, 0)}
    found = jc.recommend(LIKE, workers=4, candidates=FEW, **options)
    assert found.chosen.candidate.name == "f32"
    assert "top_k, takes the same time: it takes as long on the links and to encode and decode" in found.verdict


def test_advice_without_a_useful_bound_says_that_steps_may_grow():
    few = lambda algorithm: [FEW[0], jc.Candidate("c", algorithm)]
    said = lambda algorithm: jc.recommend(
        LIKE, workers=4, link=jc.Link(1e-3, 1e6), candidates=few(algorithm)
    ).verdict.split("What it loses: ")[1]
    hint = '. Steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'
    assert said(jc.error_feedback(jc.top_k(k=2))) == f"sent later; theory has no useful bound{hint}"
    assert said(jc.error_feedback(jc.top_k(0.01))).endswith("100 times as many transient steps")
    assert said(jc.direct(jc.dithering(7))).endswith("more variance")


def test_what_a_plan_has_measured_may_be_taken():
    work = {"f32": Work(Line(0.0, 0.0), Line(0.0, 0.0)), "top_k": Work(Line(0.0, 1e-7), Line(0.0, 2e-7), 0.3)}
    facts = Facts({}, {}, {}, work, 0.0, 0.4, 0.0)
    found = jc.recommend(LIKE, workers=2, candidates=FEW, machine=facts)
    assert found.rows[1].parts.encode == pytest.approx(0.01)
    assert found.rows[1].parts.decode == pytest.approx(0.01)
    assert found.rows[1].error == 0.3
    found = jc.recommend(LIKE, workers=4, candidates=FEW, machine=facts._replace(work={"f32": work["f32"]}))
    assert columns_of(found)["top_k"][-1] == "not known: work was not measured"


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
        ({"machine": "cpu"}, "machine must be a jaxcomp.plan.recommend.Machine or .*; got 'cpu'"),
        ({"machine": NONE._replace(copy=-1.0)}, "machine must have finite nanoseconds >= 0"),
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
    cells = columns_of(found)["top_k:two_shot"]
    assert cells[:-1] == ["-", "-", "not known", "-", "-", "-"]
    assert "3000000000 entries" in cells[-1]


def test_buckets_have_latencies_of_their_own():
    large, buckets = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 4, FEW[0].in_buckets(2**22)
    whole, in_four = jc.recommend(large, candidates=[FEW[0], buckets], **SLOW).rows
    assert in_four.parts.network - whole.parts.network == pytest.approx(3 * 6e-3)


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
