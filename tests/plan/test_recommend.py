"""`jc.recommend` against numbers computed by hand."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from jaxcomp.plan.candidates import dense_candidates
from jaxcomp.plan.facts import Facts, Work
from jaxcomp.plan.predict import Line
from jaxcomp.plan.recommend import Machine

LIKE = jax.ShapeDtypeStruct((100_000,), jnp.float32)
FEW = [*dense_candidates()[:1], jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))]
NONE = Machine((("top_k", 10.0), ("f32", 0.0)), decode=0.0, copy=0.0)


def columns_of(found):
    """Candidate -> its cells."""
    lines = [re.split(r"\s{2,}", line.removeprefix("->").strip()) for line in found.table.splitlines()[1:]]
    return {cells[0]: cells[1:] for cells in lines}


def test_a_recommendation_by_hand():
    found = jc.recommend(LIKE, workers=4, link=jc.Link(1e-3, 1e7), candidates=FEW, machine=NONE)
    f32, sparse = found.rows
    assert f32.parts.network == pytest.approx(6e-3 + 600_000 / 1e7)
    assert sparse.parts.network == pytest.approx(3e-3 + 3 * 8_000 / 1e7)
    assert sparse.parts.encode == pytest.approx(1e-3)
    assert found.chosen is sparse
    assert "<= 0.99, sent later" in found.table
    assert found.verdict.startswith("compress: top_k")
    # Where theory allows too much loss, it is not eligible.
    exact = jc.recommend(LIKE, workers=4, link=jc.Link(1e-3, 1e7), candidates=FEW, machine=NONE, max_error=0.5)
    assert exact.chosen.candidate.name == "f32"
    assert "loses 0.99" in str(exact)


def test_where_a_candidate_pays_by_hand():
    """Of n = 4 workers top-k has three messages and f32 six; it takes a millisecond of work and 576,000 bytes less."""
    gathered = jc.Candidate("f32 gathered", jc.direct(jc.identity()), via="gather")
    twice = jc.Candidate("f32 twice", jc.direct(jc.identity()))
    at = lambda latency, bandwidth=1e7: jc.recommend(
        LIKE, workers=4, link=jc.Link(latency, bandwidth), candidates=[*FEW, gathered, twice], machine=NONE
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
    none = jc.recommend(LIKE, workers=4, candidates=FEW[1:])
    assert columns_of(none)["top_k"][1] == "-"


def test_all_columns_and_the_verdict_are_per_step():
    local = [*FEW, FEW[0].with_every(4), FEW[1].with_every(4)]
    link = jc.Link(1e-3, 1e7)
    found = jc.recommend(LIKE, workers=4, link=link, candidates=local, machine=NONE, gradient=0.02)
    columns = columns_of(found)
    assert columns["f32"][:2] == ["0.6", "1/1"]  # the standard exchanges at every step
    assert columns["top_k"] == ["0.024", "1/25", "<= 0.99, sent later", "5.4", "1", "26.4", "always"]
    assert columns["top_k, H=4"] == ["0.006", "1/100", "<= 0.99, sent later", "1.35", "0.25", "21.6", "always"]
    assert found.verdict.startswith(
        "compress: top_k, H=4 takes 21.6 ms a step, f32, the fastest dense candidate with an exchange at every step, "
        "86 ms. Of a step it is on the links for 1.35 ms in place of 66 ms and works for 0.25 ms to encode and decode"
    )


def test_a_link_and_a_machine_that_take_no_time():
    found = jc.recommend(
        LIKE, workers=4, link=jc.Link(0.0, math.inf), candidates=FEW, machine=Machine((("", 0.0),), 0, 0)
    )
    assert found.chosen.candidate.name == "f32"
    assert "top_k, takes the same time: it takes as long on the links and to encode and decode" in found.verdict
    facts = Facts({}, {}, {}, {"f32": Work(Line(0.0, 0.0), Line(0.0, 0.0))}, 0.0, 0.4, 0.0)
    found = jc.recommend(LIKE, workers=4, candidates=FEW, machine=facts)
    assert columns_of(found)["top_k"][-1] == "not known: work was not measured"


def test_the_standard_of_shares_is_named():
    """Where local updates with f32 are advised, bytes and "pays below" still compare with f32 at every step."""
    slow = {"workers": 4, "link": jc.Link(1e-3, 1e7), "machine": NONE}
    found = jc.recommend(LIKE, candidates=[*FEW[:1], FEW[0].with_every(100), FEW[1]], **slow)
    assert found.chosen.candidate.name == "f32, H=100"
    assert [columns_of(found)[name][1] for name in ("f32", "f32, H=100")] == ["1/1", "1/100"]
    words = '"bytes" and "pays below" compare with f32, the fastest dense candidate with an exchange at every step.'
    assert words in str(found)
    only = jc.recommend(LIKE, candidates=[FEW[0].with_every(100), FEW[1]], **slow)
    assert "compare with f32, H=100, the fastest dense candidate." in str(only)
    assert "compare with" not in str(jc.recommend(LIKE, candidates=FEW[1:], **slow))


def test_advice_without_a_useful_bound_says_that_steps_may_grow():
    said = lambda algorithm: (
        jc.recommend(
            LIKE, workers=4, link=jc.Link(1e-3, 1e6), candidates=[FEW[0], jc.Candidate("c", algorithm)]
        ).verdict
    )
    hint = '. Steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'
    assert said(jc.error_feedback(jc.top_k(k=2))).endswith(f"theory has no useful bound{hint}")
    assert said(jc.error_feedback(jc.top_k(0.01))).endswith("100 times as many transient steps")
    assert said(jc.direct(jc.dithering(7))).endswith("more variance")


def test_codes_of_four_bits_are_among_the_defaults():
    rows = {row.candidate.name: row for row in jc.recommend(LIKE, workers=4).rows}
    for name in ("block_scaled(int4)+ef:two_shot", "eden(4):two_shot"):
        assert rows[name].sent_bytes == pytest.approx(rows["dithering(7):two_shot"].sent_bytes, rel=0.05)
        assert rows[name].loss.is_useful


def test_what_a_plan_has_measured_may_be_taken():
    work = {"f32": Work(Line(0.0, 0.0), Line(0.0, 0.0)), "top_k": Work(Line(0.0, 1e-7), Line(0.0, 2e-7), 0.3)}
    facts = Facts({}, {}, {}, work, 0.0, 0.4, 0.0)
    found = jc.recommend(LIKE, workers=2, candidates=FEW, machine=facts)
    assert found.rows[1].parts.encode == pytest.approx(0.01)
    assert found.rows[1].parts.decode == pytest.approx(0.01)
    assert found.rows[1].error == 0.3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 1}, "workers must be an integer of at least 2 and below 2\\^31; got 1"),
        ({"workers": 2**31}, "workers must be an integer of at least 2 and below 2\\^31; got 2147483648"),
        (
            {"workers": 3, "candidates": [FEW[0], jc.Candidate("dagc", jc.error_feedback(jc.dagc([1, 2], 0.1)))]},
            "2 weights for 3 workers",
        ),
        ({"workers": 4, "link": jc.Link(0.0, 0.0)}, "a bandwidth of at least 1 byte per second"),
        (
            {"workers": 4, "link": jc.Link(12.5e6, 1e-3)},
            r"latency in \[0, 60\] seconds .* in this order; got .*12500000",
        ),
        ({"workers": 4, "link": jc.Link(10, 1e-3)}, "a bandwidth of at least 1 byte per second, in this order; got"),
        ({"workers": 4, "link": 12.5e6}, r"link must be a jc\.Link.*; got 12500000\.0"),
        ({"workers": 4, "candidates": []}, "candidates must be a list"),
        ({"workers": 4, "link": jc.Link(math.inf, 1e6)}, "a latency in .* seconds .*; got .*inf"),
        ({"workers": 4, "link": jc.Link(math.nan, 1e6)}, "a latency in .* seconds .*; got .*nan"),
        ({"workers": 4, "link": jc.Link("1ms", 1e6)}, "a latency in .* seconds .*; got .*1ms"),
        ({"workers": 4, "link": jc.Link(1e-3, math.nan)}, "a bandwidth of at least 1 byte"),
        ({"workers": 4, "link": jc.Link(1e-3, None)}, "a bandwidth of at least 1 byte"),
        ({"workers": 4, "gradient": -1.0}, r"gradient must be finite seconds >= 0; got -1\.0"),
        ({"workers": 4, "gradient": math.nan}, "gradient must be finite seconds >= 0; got nan"),
        ({"workers": 4, "gradient": "1s"}, "gradient must be finite seconds >= 0; got '1s'"),
        ({"workers": 4, "max_error": math.nan}, "max_error must be a number >= 0; got nan"),
        ({"workers": 4, "max_error": -1}, "max_error must be a number >= 0; got -1"),
        ({"workers": 4, "machine": "cpu"}, "machine must be a jaxcomp.plan.recommend.Machine or .*; got 'cpu'"),
        ({"workers": 4, "machine": NONE._replace(copy=-1.0)}, "machine must have finite nanoseconds >= 0"),
        ({"workers": 4, "candidates": [FEW[1], FEW[1]]}, "recommend: candidates must have different names"),
        ({"workers": 4, "max_every": 1.5}, r"max_every must be an integer of at least 1; got 1\.5"),
        (
            {"workers": 4, "candidates": FEW[1:], "max_error": 0.5},
            "^recommend: candidates must .* one that is eligible",
        ),
        ({"workers": 4, "params": {}}, "params must hold at least one entry"),
    ],
)
def test_what_cannot_be_recommended(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        jc.recommend(options.pop("params", LIKE), **options)


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
    assert columns_of(found)["top_k:two_shot"][:-1] == ["-", "-", "not known", "-", "-", "-"]
    assert "3000000000 entries" in columns_of(found)["top_k:two_shot"][-1]
    with pytest.raises(
        ValueError, match="recommend: candidates must hold at least one that is eligible; all are refused"
    ):
        jc.recommend(jax.ShapeDtypeStruct((3 * 10**9,), jnp.bfloat16), workers=2, candidates=[scattered])


@pytest.mark.slow
def test_local_updates_and_buckets_where_they_are_asked_for():
    slow = {"workers": 4, "link": jc.Link(1e-3, 1e6), "machine": NONE}
    found = jc.recommend(LIKE, candidates=[FEW[0], FEW[0].with_every(5)], **slow)
    once, often = (row.parts.total for row in found.rows)
    assert often == pytest.approx(once / 5)
    assert found.rows[1].sent_bytes == pytest.approx(found.rows[0].sent_bytes / 5)
    names = {row.candidate.name for row in jc.recommend(LIKE, **slow, max_every=4).rows}
    assert {"f32, H=4", "sidco(0.01)+ef, H=4", "f32, 4 MiB", "power_sgd(2)"} <= names
    limited = jc.recommend(LIKE, candidates=[FEW[0], FEW[0].with_every(5)], **slow, max_every=4)
    assert "max_every is 4" in limited.rows[1].refused
    large = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 4
    buckets = next(row for row in jc.recommend(large, workers=4).rows if row.candidate.name == "f32, 4 MiB")
    assert buckets.refused is None
    assert buckets.parts.network > 3.9 * 6e-3  # four exchanges, each with its own latencies


def test_small_leaves_are_not_worth_compressing():
    found = jc.recommend({"bias": jnp.zeros(3)}, workers=2)
    assert found.chosen.candidate.dense
    assert found.verdict.startswith("do not compress")
    others = [row for row in found.rows if not row.candidate.dense and row.candidate.via != "two_shot"]
    assert all("compresses nothing" in row.refused for row in others)


def test_two_shots_compress_small_leaves_too():
    few = [
        jc.Candidate("f32", jc.direct(jc.identity()), dense=True),
        jc.Candidate("sign", jc.error_feedback(jc.sign())),
        jc.Candidate("sign:two_shot", jc.error_feedback(jc.sign()), "two_shot"),
    ]
    like = [jax.ShapeDtypeStruct((33, 17), jnp.float32)] * 100
    found = jc.recommend(like, workers=8, link=jc.Link(1e-3, 1e6), candidates=few)
    assert [row.refused is not None for row in found.rows] == [False, True, False]
    assert found.chosen.candidate.name == "sign:two_shot"


def test_the_command(capsys, tmp_path):
    from jaxcomp.cli import main

    assert main(["plan", "--parameters", "100K", "--workers", "2", "--rate", "10mbit"]) == 0
    printed = capsys.readouterr().out
    assert "power_sgd" not in printed  # a number of entries has no matrices
    assert "compress: " in printed
    assert "pays below" in printed
    assert main(["plan", "--facts", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text("{}")
    assert main(["plan", "--facts", str(tmp_path / "bad.json")]) == 2
    assert "must hold what a plan has measured" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--rate", "fast"])
    with pytest.raises(SystemExit):
        main(["plan", "--parameters", "many"])
    for text in ("nan", "-1"):
        with pytest.raises(SystemExit):
            main(["plan", f"--max-error={text}"])
        assert f"--max-error: must be a number >= 0; got '{text}'" in capsys.readouterr().err
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["plan", "--bogus", "1"])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: jaxcomp plan ")
    assert "error: unrecognized arguments: --bogus 1" in printed
