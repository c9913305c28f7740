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
    assert error_bound(jc.Candidate("p", jc.power_sgd(2)), LIKE, 4).words == "no bound is known"
