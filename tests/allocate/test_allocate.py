"""Budgets over workers, layers, rounds and bandwidths against slow oracles and their own properties."""

import itertools

import numpy as np
import oracles_dagc as oracle
import pytest
from oracles_dagc import EXAMPLE
from variants import variants

from jaxcomp import allocate, dagc

RULES = ["uniform", "released", "phi", "sqrt", 2 / 3, 1.0]
MONOTONE = [rule for rule in RULES if rule != "released"]


@pytest.mark.parametrize("rule", RULES)
def test_worked_example(rule):
    delta = allocate.ratios(EXAMPLE, 0.1, rule=rule)
    np.testing.assert_allclose(delta, oracle.EXAMPLE_RATIOS[rule], rtol=0, atol=1e-12)
    phi, tight = oracle.EXAMPLE_BOUNDS[rule]
    assert allocate.coupled_bound(EXAMPLE, delta) == pytest.approx(phi, abs=1e-9)
    assert allocate.bound(EXAMPLE, delta) == pytest.approx(tight, abs=1e-9)
    if rule in oracle.EXAMPLE_COUNTS:
        exact, ceil = oracle.EXAMPLE_COUNTS[rule]
        got = allocate.counts(delta, 1000)
        # Workers with equal ratios may differ by one, in whatever order.
        assert sorted(got) == sorted(exact)
        assert got.sum() == 400
        assert allocate.counts(delta, 1000, mode="ceil").tolist() == ceil


@pytest.mark.parametrize(("rule", "mean"), oracle.EXAMPLE_CAPPED)
def test_worked_example_with_caps(rule, mean):
    want = oracle.EXAMPLE_CAPPED[rule, mean]
    np.testing.assert_allclose(allocate.ratios(EXAMPLE, mean, rule=rule), want, rtol=0, atol=1e-11)


def test_released_is_left_as_it_is_unless_a_cap_is_given():
    assert allocate.ratios(EXAMPLE, 0.5, rule="released")[0] == pytest.approx(1.0499776451, abs=1e-10)
    capped = allocate.ratios(EXAMPLE, 0.5, rule="released", cap=1.0)
    assert capped[0] == 1
    assert capped.sum() == pytest.approx(2)
    ratio = np.diff(np.log(capped[1:])) - np.diff(np.log(allocate.ratios(EXAMPLE, 0.5, rule="released")[1:]))
    np.testing.assert_allclose(ratio, 0, atol=1e-12)  # the surplus goes to the others in proportion


@pytest.mark.parametrize(("skew", "p1", "phi", "tight"), [(2, 0.142, 1, 1), (10, 0.263, 0.9965, 0.968)])
def test_skewed_profiles_of_the_released_generator(skew, p1, phi, tight):
    volumes = oracle.skewed_volumes(10, skew)
    uniform = np.full(10, 0.1)
    delta = allocate.ratios(volumes, 0.1, rule="phi")
    assert volumes[0] / volumes.sum() == pytest.approx(p1, abs=1e-3)
    relative = [f(volumes, delta) / f(volumes, uniform) for f in (allocate.coupled_bound, allocate.bound)]
    np.testing.assert_allclose(relative, [phi, tight], atol=1e-3)
    assert np.any(np.diff(allocate.ratios(volumes, 0.1, rule="released")) > 0)  # it is not monotone here


def profiles(seed, count):
    rng = np.random.default_rng(seed)
    for i in range(count):
        n = int(rng.integers(1, 15))
        spread = rng.choice([0.1, 0.5, 1.0, 5.0])
        p = rng.dirichlet(np.full(n, spread)) if i % 3 else np.exp(rng.uniform(0, 10, n))
        p = np.maximum(p, 1e-12 * p.max())
        if i % 7 == 0:
            p = np.round(p / p.max() * 4 + 1)  # ties
        yield p, float(rng.uniform(0.001, 0.06))


@pytest.mark.parametrize("count", variants([1000, 10_000], {1000}))
def test_random_profiles_keep_every_property(count, seed):
    """Budget, limits, order, scale, permutation; and which rule is never above which on which bound."""
    rng = np.random.default_rng(seed + 1)
    for number, (volumes, mean) in enumerate(profiles(seed, count)):
        n = len(volumes)
        p = volumes / volumes.sum()
        order = rng.permutation(n)
        delta = {rule: allocate.ratios(volumes, mean, rule=rule) for rule in RULES}
        for rule, d in delta.items():
            assert d.sum() == pytest.approx(n * mean, rel=1e-12)
            assert d.min() > 0
            assert d.max() <= 1
            if number % 10 == 0:
                np.testing.assert_allclose(allocate.ratios(7.5 * volumes, mean, rule=rule), d, rtol=1e-9)
                if rule != "released" or len(set(volumes)) == n:
                    np.testing.assert_allclose(allocate.ratios(volumes[order], mean, rule=rule), d[order], rtol=1e-9)
        rank = np.argsort(volumes)
        for rule in MONOTONE:
            ranked = delta[rule][rank]
            assert np.all(np.diff(ranked) >= -1e-15)
            tied = np.diff(volumes[rank]) == 0
            assert np.all(np.diff(ranked)[tied] == 0)
        phi = {rule: allocate.coupled_bound(volumes, d) for rule, d in delta.items()}
        tight = {rule: allocate.bound(volumes, d) for rule, d in delta.items()}
        assert all(phi["phi"] <= value * (1 + 1e-12) for value in phi.values())
        assert all(tight["sqrt"] <= value * (1 + 1e-12) for value in tight.values())
        assert tight["sqrt"] == pytest.approx(np.sum(np.sqrt(p)) ** 2 / (n * mean), rel=1e-9)
        if n > 1 and abs(p.max() * n - 2) > 1e-9:
            assert bool(np.all(delta["phi"] == delta["phi"][0])) == (p.max() <= 2 / n)


def test_released_against_its_transcription(seed):
    for volumes, mean in profiles(seed, 1000):
        p = np.sort(volumes / volumes.sum())[::-1]
        np.testing.assert_allclose(
            allocate.ratios(p, mean, rule="released"), oracle.released(p, mean), rtol=1e-9, atol=1e-15
        )


def test_phi_and_powers_with_caps_against_slow_search(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        p = rng.dirichlet(np.full(int(rng.integers(2, 8)), 0.5))
        mean = float(rng.uniform(0.1, 0.95))
        delta = allocate.ratios(p, mean, rule="phi")
        assert delta.sum() == pytest.approx(len(p) * mean)
        assert delta.max() <= 1
        assert allocate.coupled_bound(p, delta) == pytest.approx(oracle.phi_minimum(p, mean), rel=1e-7)
        floor = mean / 5
        want = oracle.filled(p**0.5, len(p) * mean, floor, 1.0)
        np.testing.assert_allclose(allocate.ratios(p, mean, floor=floor), want, rtol=1e-9)
        assert allocate.ratios(p, mean, rule="phi", floor=floor).min() >= floor


def test_no_feasible_change_improves_phi(seed):
    rng = np.random.default_rng(seed)
    delta = allocate.ratios(EXAMPLE, 0.1, rule="phi")
    least = allocate.coupled_bound(EXAMPLE, delta)
    for scale in (1e-6, 1e-4, 1e-2):
        moves = rng.standard_normal((2000, 4)) * scale
        moves -= moves.mean(1, keepdims=True)
        for other in delta + moves:
            if other.min() > 0:
                assert allocate.coupled_bound(EXAMPLE, other) >= least * (1 - 1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_edge_cases(rule):
    assert allocate.ratios([3], 0.1, rule=rule) == 0.1
    np.testing.assert_array_equal(allocate.ratios([5] * 7, 0.1, rule=rule), np.full(7, 0.1))
    with_empty = allocate.ratios([0, 5, 0, 3, 2], 0.1, rule=rule)
    np.testing.assert_array_equal(with_empty[[1, 3, 4]], allocate.ratios([5, 3, 2], 0.1, rule=rule))
    assert not with_empty[[0, 2]].any()
    shared = allocate.ratios([0, 5, 0, 3, 2], 0.1, rule=rule, active_only=False)
    assert shared.sum() == pytest.approx(0.5)
    assert allocate.ratios([5, 3, 2], 1.5, rule=rule).tolist() == [1, 1, 1]
    tiny = allocate.ratios([1, 1e-300], 0.1, rule=rule, cap=1.0)
    assert np.all(np.isfinite(tiny))
    assert tiny.sum() == pytest.approx(0.2)
    pair = allocate.ratios([3, 1], 0.1, rule=rule)
    assert (pair[0] == pytest.approx(pair[1], rel=1e-12)) == (rule in ("uniform", "released", "phi"))


def test_caps_of_each_worker():
    cap = np.array([0.1, 1.0, 1.0])
    delta = allocate.ratios([80, 10, 10], 0.1, cap=cap)
    np.testing.assert_allclose(delta, [0.1, 0.1, 0.1])
    assert allocate.ratios([80, 15, 5], 0.1, cap=[0.11, 1, 1], rule="phi")[0] == pytest.approx(0.11)
    assert allocate.ratios([80, 10, 10], 0.5, cap=[0.1, 0.2, 0.3]).tolist() == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("rule", RULES)
def test_a_worker_on_a_dead_link_counts_as_one_without_data(rule):
    cap = allocate.by_bandwidth([0, 1e6, 1e6], 1.0, 10**5)
    delta = allocate.ratios([10, 5, 1], 0.05, rule=rule, cap=cap)
    np.testing.assert_array_equal(delta, allocate.ratios([0, 5, 1], 0.05, rule=rule, cap=1.0))
    shared = allocate.ratios([10, 5, 1], 0.05, rule=rule, cap=cap, active_only=False)
    assert shared.sum() == pytest.approx(0.15)
    assert allocate.ratios([10, 5], 0.05, rule=rule, cap=0).tolist() == [0, 0]
    capped, without = dagc([10, 5, 1], 0.05, rule=rule, cap=cap).spec, dagc([0, 5, 1], 0.05, rule=rule, cap=1.0).spec
    assert capped.weights == without.weights
    assert capped.alpha(100) == without.alpha(100) > 0


def test_counts_keep_the_budget(seed):
    rng = np.random.default_rng(seed)
    for _ in range(500):
        delta = allocate.ratios(rng.dirichlet(np.ones(6)), float(rng.uniform(0.01, 0.5)), cap=1.0)
        size = int(rng.integers(0, 3000))
        k = allocate.counts(delta, size)
        assert np.all(k <= size)
        assert np.all(k >= (size > 0))
        assert k.sum() == max(np.floor(delta.sum() * size + 1e-6), np.maximum(np.floor(delta * size), size > 0).sum())
        assert np.all(np.abs(k - delta * size) <= 1 + 1e-6)
    assert allocate.counts([0.1 * 3], 1000, mode="ceil") == 300
    assert allocate.counts([0.0, 1.0, 7.0], 5).tolist() == [0, 5, 5]


def test_thresholds():
    want = [0.004406898698, 0.010158862846, 0.018712785357, 0.047153264348]
    np.testing.assert_allclose(allocate.thresholds(EXAMPLE, 0.01), want, atol=1e-12)
    twin = [0.005104037592, 0.009548779979, 0.015097946804, 0.030195893608]
    got = allocate.thresholds(EXAMPLE, 0.01, rule="sqrt")
    np.testing.assert_allclose(got, twin, atol=1e-12)
    assert EXAMPLE @ got == pytest.approx(0.00729433592637, abs=1e-13)
    assert np.sum(EXAMPLE**2 * allocate.thresholds(EXAMPLE, 0.01) ** 2) == pytest.approx(1.677471976e-5, rel=1e-9)
    for rule in (2 / 3, "sqrt", "uniform", 1.3):
        each = allocate.thresholds([4, 0, 1, 7], 0.02, rule=rule)
        assert each[1] == np.inf
        assert 3 / np.sum(1 / each[each < np.inf]) == pytest.approx(0.02)
    assert allocate.thresholds([1, 1e-9], 1.0, cap=20)[1] == 20
    np.testing.assert_array_equal(allocate.thresholds([3, 3], 0.5), [0.5, 0.5])
    assert np.all(np.isfinite(allocate.thresholds([1, 1e-100], 1.0, rule=5)))


@pytest.mark.parametrize("rule", [2 / 3, "sqrt", "uniform"])
def test_calibration_meets_the_budget(rule, seed):
    rng = np.random.default_rng(seed)
    probes = rng.standard_normal((4, 500))
    probes[1, 7] = np.nan
    for mean in (0.001, 0.01, 0.3, 1.0):
        base = allocate.calibrate(EXAMPLE, probes, mean, rule=rule)
        kept = lambda base: np.sum(np.abs(probes) >= allocate.thresholds(EXAMPLE, base, rule=rule)[:, None])
        assert kept(base) == min(round(mean * 2000), 1999)
        assert kept(base * (1 - 1e-9)) >= kept(base)
        capped = allocate.calibrate(EXAMPLE, probes, mean, rule=rule, cap=1.5)
        each = allocate.thresholds(EXAMPLE, capped, rule=rule, cap=1.5)
        assert np.sum(np.abs(probes) >= each[:, None]) == min(round(mean * 2000), 1999)


BAD = [
    (lambda: allocate.ratios([], 0.1), "n finite numbers"),
    (lambda: allocate.ratios([1, -1], 0.1), "n finite numbers"),
    (lambda: allocate.ratios([0, 0], 0.1), "at least one volume"),
    (lambda: allocate.ratios([1, np.nan], 0.1), "n finite numbers"),
    (lambda: allocate.ratios(["a", "b"], 0.1), r"volumes must be n finite numbers >= 0; got \['a', 'b'\]"),
    (lambda: allocate.ratios(["1", "2"], 0.1), r"volumes must be n finite numbers >= 0; got \['1', '2'\]"),
    (lambda: allocate.ratios([1, None], 0.1), r"volumes must be n finite numbers >= 0; got \[1, None\]"),
    (lambda: allocate.ratios([[1], [1, 2]], 0.1), r"volumes must be n finite numbers >= 0; got \[\[1\], \[1, 2\]\]"),
    (lambda: allocate.ratios([1, 2], 0.1, cap="a"), r"ratios: cap must be in \[0, 1\]; got a"),
    (lambda: allocate.ratios([1, 2], 0.1, cap=[1, "a"]), r"ratios: cap must be in \[0, 1\]; got \[1, 'a'\]"),
    (lambda: allocate.calibrate([1, 2], "ab", 0.1), r"probes must have shape \[2, d\]; got \(\)"),
    (lambda: allocate.counts(["a"], 10), r"counts: ratios must be n finite numbers >= 0; got \['a'\]"),
    (lambda: allocate.counts([0.1], "a"), "counts: size must be an integer of at least 0; got 'a'"),
    (lambda: allocate.counts([0.1], None), "counts: size must be an integer of at least 0; got None"),
    (lambda: allocate.counts([0.1], np.inf), "counts: size must be an integer of at least 0; got inf"),
    (lambda: allocate.ratios([1, 2], 0), "mean_ratio must be a finite number above 0; got 0"),
    (lambda: allocate.ratios([1, 2], None), "mean_ratio must be a finite number above 0; got None"),
    (lambda: allocate.ratios([1, 2], 0.1, rule=None), "rule must be a name or a finite exponent >= 0; got None"),
    (lambda: allocate.ratios([1, 2], 0.1, floor=None), r"floor must be in \[0, 0.1\]; got None"),
    (lambda: allocate.ratios([1, 2], 0.1, cap=[1, 1, 1]), r"cap must be one number or 2; got shape \(3,\)"),
    (lambda: allocate.ratios([1, 2], 0.1, cap=[1, -1]), r"cap must be in \[0, 1\]; got \[1, -1\]"),
    (lambda: allocate.calibrate([1, 2], np.ones((2, 3)), None), r"mean_ratio must be in \(0, 1\]; got None"),
    (lambda: allocate.calibrate([1, 2], np.ones((2, 3)), 0.1, cap=0), "calibrate: cap must be at least 1; got 0"),
    (lambda: allocate.ratios([1, 2], 0.1, rule="magic"), "rule must be one of 'sqrt', 'phi', 'released', 'uniform'"),
    (lambda: allocate.ratios([1, 2], 0.1, rule=-1), "rule must be a name or a finite exponent >= 0; got -1"),
    (lambda: allocate.ratios([1, 2], 0.1, floor=0.2), r"floor must be in \[0, 0.1\]; got 0.2"),
    (lambda: allocate.ratios([1, 2], 0.1, cap=2), r"cap must be in \[0, 1\]; got 2"),
    (lambda: allocate.thresholds([1, 2], 0.0), "base must be a finite number above 0; got 0"),
    (lambda: allocate.thresholds([1, 2], 1.0, cap=0.5), "cap must be at least 1"),
    (lambda: allocate.thresholds([1, 2], 1.0, rule="phi"), "rule must be one of 'released', 'sqrt', 'uniform'"),
    (lambda: allocate.calibrate([1, 2], np.ones(3), 0.1), r"probes must have shape \[2, d\]"),
    (lambda: allocate.calibrate([1, 2], np.zeros((2, 3)), 0.1), "no entry of the probes"),
    (lambda: allocate.counts([0.1, -1], 10), "ratios must be n finite numbers >= 0"),
    (lambda: allocate.counts([0.1], -1), "size must be an integer of at least 0"),
    (lambda: allocate.counts([0.1], 10, mode="round"), "mode must be 'exact' or 'ceil'"),
    (lambda: allocate.bound([1, 2], [0.1]), "1 ratios for 2 volumes"),
    (lambda: allocate.by_layer([[1]], [[1, 2]], 1), "one shape"),
    (lambda: allocate.by_layer([[1.0]], [[2.0]], 1), "no choice keeps the total error within 1"),
    (lambda: allocate.by_layer([[1.0]], [[2.0]], -1), "budget must be"),
    (lambda: allocate.by_regime(1, 1, low=0.1, high=0.01), "need 0 < low <= high <= 1"),
    (lambda: allocate.by_bandwidth([1], 0, 10), "seconds must be"),
    (lambda: allocate.by_bandwidth([-1], 1, 10), "bandwidths must be"),
    (lambda: allocate.layer_errors([np.ones(3)], [0.0]), r"ratios must be in \(0, 1\]"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------------------------------------
# Layers, rounds, bandwidths


def test_by_layer_against_trying_everything(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        layers, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        # Errors are whole units, so nothing is lost by rounding.
        error = rng.integers(0, 20, (layers, candidates)).astype(float)
        cost = rng.integers(1, 100, (layers, candidates)).astype(float)
        budget = float(rng.integers(error.min(1).sum(), error.max(1).sum() + 1)) or 1.0
        best, _ = oracle.knapsack(cost, error, budget)
        choice = allocate.by_layer(cost, error, budget, steps=int(budget))
        rows = np.arange(layers)
        assert error[rows, choice].sum() <= budget
        assert cost[rows, choice].sum() == best


def test_by_layer_never_costs_more_than_the_uniform_ratio_it_replaces(seed):
    rng = np.random.default_rng(seed)
    tree = [rng.standard_normal(3000) * 10, rng.laplace(size=(50, 40)), rng.standard_normal(500) ** 5]
    candidates = np.geomspace(0.001, 0.5, 24)
    sent, lost = allocate.layer_errors(tree, candidates)
    default = 12
    choice = allocate.by_layer(sent, lost, lost[:, default].sum(), steps=100_000)
    rows = np.arange(3)
    assert lost[rows, choice].sum() <= lost[:, default].sum()
    assert sent[rows, choice].sum() < sent[:, default].sum()


def test_layer_errors_are_those_of_the_largest_entries(seed):
    x = np.random.default_rng(seed).standard_normal(200)
    x[3] = np.nan
    sent, lost = allocate.layer_errors({"w": x}, [0.05, 1.0])
    assert sent.tolist() == [[10, 200]]
    rest = np.sort(np.abs(np.nan_to_num(x)))[:-10]
    np.testing.assert_allclose(lost, [[np.linalg.norm(rest), 0]])


def test_by_regime_and_by_bandwidth():
    norms = itertools.product([0.0, 1.0, np.inf], [0.0, 0.4, 0.51, 1.4, 1.5, np.nan])
    before, now = np.array(list(norms)).T
    got = allocate.by_regime(before, now, low=0.01, high=0.1)
    with np.errstate(invalid="ignore"):
        want = [0.1 if b == 0 or not np.abs(b - n) / b < 0.5 else 0.01 for b, n in zip(before, now, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    delta = allocate.by_bandwidth([0, 1e6, np.inf], 1.0, 10**6, bits=32, floor=0.001)
    np.testing.assert_allclose(delta, [0.001, 1 / 32, 1])
    # Volumes and links together: no worker above its link, the budget kept.
    both = allocate.ratios([10, 5, 1], 0.05, cap=allocate.by_bandwidth([1e5, 1e6, 1e6], 1.0, 10**5, bits=20))
    assert both[0] == 0.05
    assert both.sum() == pytest.approx(0.15)
