"""Fits against lines that are known."""

import math

import numpy as np
import pytest

from jaxcomp.exchange.links import KINDS
from jaxcomp.plan.links import Collective, Fit, Timing, fit, seconds_of


def sweep_of(kind, workers, sizes, latency=1e-3, per_byte=1e-8, noise=0.0, seed=0):
    rng, line = np.random.default_rng(seed), Fit(kind, latency, per_byte).line
    noisy = lambda t: t * (1 + noise * rng.standard_normal())
    return [Timing(n, size, noisy(line(size, n)), noise * line(size, n)) for n in workers for size in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_the_line_it_was_made_from(kind):
    found = fit(kind, sweep_of(kind, (1, 2, 4), (256, 10_000, 1e6), 3e-4, 2e-8))
    assert (found.latency, found.per_byte) == pytest.approx((3e-4, 2e-8), rel=1e-9)
    for n, size in ((3, 5e5), (8, 4e6)):  # held back
        expected = KINDS[kind].messages(n) * 3e-4 + KINDS[kind].sent(size, n) * 2e-8
        assert found.seconds(size, n).mean == pytest.approx(expected, rel=1e-9)
    assert found.seconds(1e6, 1).mean == 0


def test_a_fit_is_weighted_least_squares_with_its_covariance():
    timings = sweep_of("all_gather", (4,), (256, 1e4, 1e5, 1e6), noise=0.05, seed=1)
    found = fit("all_gather", timings)
    x = np.array([[3.0, 3 * s.operand_bytes] for s in timings])
    weight = np.diag([1 / max(s.error, 0.02 * s.seconds) ** 2 for s in timings])
    normal = np.linalg.inv(x.T @ weight @ x)
    t = np.array([s.seconds for s in timings])
    expected = normal @ x.T @ weight @ t
    np.testing.assert_allclose([found.latency, found.per_byte], expected, rtol=1e-8)
    misfit = (t - x @ expected) @ weight @ (t - x @ expected) / 2
    a, both, c = found.covariance
    np.testing.assert_allclose([[a, both], [both, c]], normal * max(misfit, 1), rtol=1e-6)
    mean, deviation, _ = found.seconds(1e5, 4)
    row = np.array([3.0, 3e5])
    assert deviation == pytest.approx(math.sqrt(row @ (normal * max(misfit, 1)) @ row))
    assert mean == pytest.approx(timings[2].seconds)  # measured sizes are met


def test_a_coefficient_is_never_negative():
    flat = fit("permute", [Timing(2, 1e4, 1.0, 0.0), Timing(2, 1e5, 0.5, 0.0)])
    assert (flat.latency > 0, flat.per_byte) == (True, 0)
    steep = fit("permute", [Timing(2, 1e4, 1e-4, 0.0), Timing(2, 1e5, 1.0, 0.0)])
    assert (steep.latency, steep.per_byte > 0) == (0, True)


@pytest.mark.parametrize(
    ("kind", "timings", "said"),
    [
        ("all_gather", [], "two sizes; got 0"),
        ("all_gather", [Timing(2, 10, 1, 0)] * 3, "at least two sizes"),
        ("all_gather", [Timing(2, 10, 1, 0), Timing(2, 20, math.nan, 0)], "finite"),
        ("broadcast", [], "kind must be one of"),
    ],
)
def test_fits_of_what_cannot_be_fitted(kind, timings, said):
    with pytest.raises(ValueError, match=said):
        fit(kind, timings)


def test_seconds_of_collectives_by_hand():
    fits = {"a": {"all_gather": Fit("all_gather", 1e-3, 1e-9)}, "b": {"all_reduce": Fit("all_reduce", 1e-2, 1e-8)}}
    sent = [Collective("all_gather", 1e6, "a", 2), Collective("all_reduce", 1e5, "b")]
    sent += [Collective("permute", 1e6, "a")]  # not measured: as a message of the all-gather
    found = seconds_of(sent, fits, {"a": 4, "b": 2})
    assert found.mean == pytest.approx(2 * (3 * 1e-3 + 3e6 * 1e-9) + (2 * 1e-2 + 1e5 * 1e-8) + (1e-3 + 1e6 * 1e-9))
    assert found.each == pytest.approx({"a": found.mean - 2.1e-2, "b": 2.1e-2})
    with pytest.raises(ValueError, match="fits must hold what was measured of axis 'b'"):
        seconds_of(sent, {"a": fits["a"]}, {"a": 4, "b": 2})
