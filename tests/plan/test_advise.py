"""The choice, and what is said of it."""

import re

import pytest
from plan_worlds import F32, NAMED, facts_of, rows

from jaxcomp.plan.advise import break_even, choose, rate, reason, table, verdict
from jaxcomp.plan.candidates import ErrorBound
from jaxcomp.plan.predict import Advice, step_seconds

SIGNS, FP8 = NAMED["sign+ef:two_shot"], NAMED["fp8+ef:two_shot"]


def cells_of(text):
    """Candidate -> its cells."""
    lines = [re.split(r"\s{2,}", line.removeprefix("->").strip()) for line in text.splitlines()]
    return {cells[0]: dict(zip(lines[0], cells, strict=False)) for cells in lines[1:]}


def test_the_advice_turns_where_it_must():
    """f32 takes 6 latencies and 1.5 * 120,400 bytes; where that is less than encoding costs, dense is advised."""
    facts = [facts_of(per_byte) for per_byte in (1e-10, 1e-6)]
    fast, slow = (rows([F32, SIGNS], each) for each in facts)
    assert fast[0].parts.network == pytest.approx(6e-4 + 1.5 * 120_400 * 1e-10)
    assert choose(fast) is fast[0]
    assert verdict(fast, fast[0]).startswith("do not compress: f32")
    assert choose(slow) is slow[1]
    assert verdict(slow, slow[1], "here").startswith("compress: sign+ef:two_shot takes 17.5 ms")
    assert "where f32 takes 191 ms (here): it sends 30.8 times fewer bytes and works 1 ms more" in verdict(
        slow, slow[1], "here"
    )
    assert table(slow, slow[1], facts[1]).count("->") == 1
    with pytest.raises(ValueError, match="all are refused"):
        choose([slow[1]._replace(refused="no")])
    ran = lambda dense, other: [slow[0]._replace(measured=dense), slow[1]._replace(measured=other)]
    assert choose(ran(1.04, 1.0)).candidate is F32  # 4 % is not worth it
    assert choose(ran(1.06, 1.0)).candidate is SIGNS


def test_the_table_says_what_a_row_is():
    """Work is never negative, and none is said of f32; what was measured stands beside what was predicted."""
    facts = facts_of(1e-10, ("f32", "sign+ef:two_shot"))
    f32, signs, fp8 = rows([F32, SIGNS, FP8], facts)
    f32 = f32._replace(parts=f32.parts._replace(decode=2e-3, total=f32.parts.total + 2e-3))
    cells = cells_of(table([fp8, signs, f32], f32, facts))
    assert [*cells] == ["sign+ef:two_shot", "f32", "fp8+ef:two_shot"]  # the last one is a lower bound
    assert [cells[name]["work"] for name in cells] == ["0 ms", "0 ms", "-"]
    assert "measured" not in cells["f32"]
    assert cells["f32"]["data"] == "0.618 ms"
    assert cells["sign+ef:two_shot"]["known from"] == "theory"
    cells = cells_of(table([signs._replace(measured=0.5), f32._replace(measured=0.25)], f32, facts))
    assert (cells["f32"]["step"], cells["f32"]["measured"]) == ("12.6 ms", "250 ms")
    assert cells["sign+ef:two_shot"]["loses"] == "0.1 (measured here)"


def test_reasons_say_why_a_row_is_not_compared():
    f32, signs, fp8 = rows([F32, SIGNS, FP8], facts_of(1e-10, ("f32", "sign+ef:two_shot")))
    both = [f32, signs]
    assert reason(f32, both) == reason(signs, both) == ""
    assert verdict(both, f32).endswith("the fastest compressed candidate, sign+ef:two_shot, is 9% slower")
    slower = fp8._replace(parts=fp8.parts._replace(total=f32.seconds + 2e-3))
    words = "not measured: without encoding and decoding it is 2 ms slower than f32"
    assert reason(slower, both) == words
    assert verdict([f32, slower], f32).endswith(f"fp8+ef:two_shot, was {words}")
    assert reason(fp8, both) == "not measured: what it takes to encode and decode is not known"
    as_fast = signs._replace(parts=signs.parts._replace(total=f32.parts.total))
    assert verdict([f32, as_fast], f32).endswith("sign+ef:two_shot, takes the same time")
    left = "; 1 compressed candidate could not be measured: the budget was too short"
    assert verdict([f32, signs, fp8], f32).endswith(left)
    assert verdict([f32], f32).endswith("there is no compressed candidate")
    assert "f32" not in verdict([f32._replace(refused="no"), signs], signs)  # it is no standard


def test_the_break_even_link_is_where_seconds_cross():
    """f32: 6 a + 1.5 * 120,400 / B; signs, whose messages are much shorter, take a millisecond of work."""
    facts = facts_of(1e-7)
    f32, signs = rows([F32, SIGNS], facts)
    cells = cells_of(table([f32, signs], signs, facts))
    less = f32.sent_bytes - signs.sent_bytes
    assert cells["sign+ef:two_shot"]["pays (data)"] == f"below {rate(less / 1e-3)}"
    assert [break_even(lambda _, x=x: x) for x in (True, False)] == ["always", "never"]
    assert break_even(lambda bandwidth: bandwidth > 1e6) == "above 8 Mbit/s"


def test_the_columns_of_local_updates_are_per_step():
    parts = step_seconds(2.0, 0.5, (0.5, 0.2, 1.0), (0.5, 0.5), overlap=1.0, every=4)._replace(links={"data": 0.2})
    row = Advice(F32.with_every(4), parts, 0.0, ErrorBound(0.0, True, False, "none"))
    cells = cells_of(table([row], row, facts_of(1e-7)))
    assert (cells["f32, H=4"]["data"], cells["f32, H=4"]["step"]) == ("50 ms", "2.4 s")
