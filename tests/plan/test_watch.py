"""The detector of changes: its rate of false alarms, and that it finds what changes."""

import math
import random

import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.plan.watch import Martingale, Watch, bet


def test_a_bet_has_mean_one():
    u = (np.arange(10_000) + 0.5) / 10_000
    assert np.mean([bet(x**10) * 10 * x**9 for x in u]) == pytest.approx(1, rel=1e-3)  # p = u^10: no pole is left


def test_false_alarms_of_the_martingale():
    """At a = 0.05 at most 5 % of exchangeable series pass 1 / a; 400 series, so more than 42 has probability < 1e-5."""
    alarms = 0
    for seed in range(400):
        rng, bets = random.Random(seed), Martingale(seed=seed)
        alarms += max(bets.add(rng.lognormvariate(0, 1)) for _ in range(300)) >= math.log(20)
    assert alarms <= 42


def test_changes_are_found_soon_and_once():
    rng = random.Random(5)
    watch, found = Watch(), []
    for step in range(2400):
        slow = 1.5 if step >= 1200 else 1.0
        found += watch(slow * rng.gauss(1.0, 0.1), relative_error=rng.gauss(0.5, 0.02), overflow=0.0)
    assert [(change.series, change.before < change.after) for change in found] == [("seconds", True)]
    assert 1200 < found[0].step < 1450
    assert "slower" in found[0].words


def test_what_is_too_small_or_not_known_is_not_reported():
    rng = random.Random(6)
    watch = Watch(tolerance=0.15)
    for step in range(3000):
        assert watch((1.05 if step > 1000 else 1.0) * rng.gauss(1, 0.02), relative_error=math.nan) == []
    heavier = Watch(warm_up=0)
    found = [c for t in range(800) for c in heavier(None, overflow=0.0 if t < 400 else 5.0 + rng.random())]
    assert [change.series for change in found] == ["overflow"]
    for mistake, said in (({"false_alarm": 0.0}, "false_alarm must be"), ({"block": 0}, "block must be")):
        with pytest.raises(ValueError, match=said):
            Watch(**mistake)


def test_it_takes_what_info_says():
    watch = Watch(warm_up=0)
    info = jc.Info(*map(np.float32, (8, 64, 0.1, np.nan, np.nan, 0, 24, 1)))
    assert watch(0.1, info) == []
    assert watch.pending["sent_bytes"] == [24.0]
    assert watch.pending["relative_error"] == []
    with pytest.raises(ValueError, match="series must be of"):
        watch(1.0, speed=1.0)
