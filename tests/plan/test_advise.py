"""The choice, and what is said of it."""

import pytest
from plan_worlds import F32, NAMED, facts_of, rows

from jaxcomp.plan.advise import choose, reason, table, verdict
from jaxcomp.plan.candidates import ErrorBound
from jaxcomp.plan.predict import Advice, step_seconds

SIGNS, FP8 = NAMED["sign+ef:two_shot"], NAMED["fp8+ef:two_shot"]


def test_the_advice_turns_where_it_must():
    """f32 takes 6 latencies and 1.5 * 120,400 bytes; where that is less than encoding costs, dense is advised."""
    fast, slow = (rows([F32, SIGNS], facts_of(per_byte)) for per_byte in (1e-10, 1e-6))
    assert fast[0].parts.network == pytest.approx(6e-4 + 1.5 * 120_400 * 1e-10)
    assert choose(fast) is fast[0]
    assert verdict(fast, fast[0]).startswith("do not compress: f32")
    assert choose(slow) is slow[1]
    assert verdict(slow, slow[1]).startswith("compress: sign+ef:two_shot takes")
    assert table(slow, slow[1]).count("->") == 1
    with pytest.raises(ValueError, match="all are refused"):
        choose([slow[1]._replace(refused="no")])
    ran = lambda dense, other: [slow[0]._replace(measured=dense), slow[1]._replace(measured=other)]
    assert choose(ran(1.04, 1.0)).candidate is F32  # 4 % is not worth it
    assert choose(ran(1.06, 1.0)).candidate is SIGNS


def test_reasons_say_what_a_row_is():
    """A dearer row is slower, never one that saves a negative time; one without its work measured says why."""
    f32, signs, fp8 = rows([F32, SIGNS, FP8], facts_of(1e-10, ("f32", "sign+ef:two_shot")))
    both, saves = [f32, signs], "it saves 0.0175 ms on the links and costs 1 ms of work"
    assert reason(f32, f32, both) == "the best dense candidate"
    assert reason(signs, f32, both) == f"0.983 ms slower than f32: {saves}"
    assert reason(f32, signs, both).startswith("0.983 ms faster than sign+ef:two_shot: it costs 0.0175 ms on the links")
    assert f"is 9% slower: {saves}" in verdict(both, f32)
    slower = fp8._replace(parts=fp8.parts._replace(total=f32.seconds + 2e-3))
    words = "not measured: without encoding and decoding it is 2 ms slower than f32"
    assert reason(slower, f32, both) == words
    assert verdict([f32, slower], f32).endswith(f"fp8+ef:two_shot, was {words}")
    assert reason(fp8, f32, both) == "not measured: the budget was spent"
    slow = signs._replace(measured=2.5)
    assert reason(slow, f32._replace(measured=0.5), both).startswith("2e+03 ms slower than f32; by the parts it saves")
    parts = signs.parts._replace(network=f32.parts.network, total=f32.parts.total)
    as_fast = signs._replace(parts=parts)
    assert reason(as_fast, f32, both) == "takes the same time as f32: it costs 1 ms of work"
    assert "sign+ef:two_shot, takes the same time: it costs 1 ms" in verdict([f32, as_fast], f32)
    every = lambda row: row._replace(candidate=row.candidate.with_every(4))
    assert ": it saves 0.00437 ms on the links and costs 0.25 ms of work" in reason(every(signs), every(f32), both)
    left = ". 1 compressed candidate could not be measured: the budget was too short"
    assert verdict([f32, signs, fp8], f32).endswith(left)
    order = [line.removeprefix("->").split()[0] for line in table([fp8, signs, f32], f32).splitlines()[1:]]
    assert order == ["f32", "sign+ef:two_shot", "fp8+ef:two_shot"]  # the last one is a lower bound
    assert verdict([f32], f32).endswith("there is no compressed candidate")
    assert "f32" not in verdict([f32._replace(refused="no"), signs], signs)  # it is no standard


def test_the_columns_of_local_updates_are_per_step():
    parts = step_seconds(2.0, 0.5, (0.5, 0.2, 1.0), (0.5, 0.5), overlap=1.0, every=4)
    row = Advice(F32.with_every(4), parts, 0.0, ErrorBound(0.0, True, False, "none"))
    cells = table([row], row).splitlines()[1].split()
    assert cells[3:10] == ["2400", "0", "2000", "125", "50", "250", "25"]  # 2000 + 125 + 50 + 250 - 25
