"""Theory of candidates."""

import pytest
from plan_worlds import F32, LIKE, NAMED, SPARSE

import jaxcomp as jc
from jaxcomp.plan.candidates import error_bound


def test_what_theory_says():
    unbiased = error_bound(NAMED["dithering(7):gather"], LIKE, 4)
    assert (unbiased.unbiased, unbiased.memory) == (True, False)
    assert unbiased.bound == pytest.approx(jc.dithering(7, block_size=512).spec.omega(30_000))
    sparse = error_bound(SPARSE, LIKE, 4)
    assert (sparse.memory, sparse.is_useful, sparse.bound) == (True, True, pytest.approx(0.99))
    assert "100 times as many transient" in sparse.words
    hardly = error_bound(jc.Candidate("k", jc.error_feedback(jc.top_k(k=1))), LIKE, 4)
    assert not hardly.is_useful
    assert "no useful bound" in hardly.words
    assert error_bound(F32, LIKE, 4).bound == 0
    assert "apart" in error_bound(SPARSE.with_every(4), LIKE, 4).words
    assert error_bound(jc.Candidate("p", jc.power_sgd(2)), LIKE, 4).words == "sent later; no bound is known"


def test_bounds_are_of_the_layout_that_is_taken():
    """Among 16 workers auto takes two shots for signs, in chunks of 16 times fewer entries: alpha >= 1 / entries."""
    signs = jc.Candidate("sign", jc.error_feedback(jc.sign()))
    few, many = (error_bound(signs, LIKE, n) for n in (4, 100))
    chunked = error_bound(signs._replace(via="two_shot"), LIKE, 100)
    assert many == chunked
    assert many.words.endswith("the mean is compressed once more")
    assert "once more" not in few.words
    assert many.bound < few.bound == pytest.approx(1 - jc.sign().spec.alpha(30_000))


def test_a_hierarchy_loses_what_its_last_level_loses():
    slow = jc.Candidate("h", {"ici": jc.direct(jc.identity()), "dcn": jc.error_feedback(jc.top_k(0.01))})
    assert error_bound(slow, LIKE, 8) == error_bound(SPARSE, LIKE, 2)
