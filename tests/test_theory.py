"""Step sizes: limits in which they are known, the tight form of DIANA, and arguments out of range."""

import decimal
import math

import numpy as np
import pytest

from jaxcomp import theory

GIVEN = {"smoothness": 2.0, "workers": 5, "variance": 3.0}


def test_without_compression_they_are_those_of_gradient_descent():
    exact = {**GIVEN, "variance": 0.0}
    assert theory.dcgd(**exact, mu=0.1).gamma == 1 / 2
    assert theory.diana(**exact, omega=0.0, mu=0.1).gamma == 1 / 2
    assert theory.isega(**exact, mu=0.1).gamma == 1 / 2
    assert theory.marina(**exact, full=0.5).gamma == theory.marina(**GIVEN, full=1.0).gamma == 1 / 2
    assert theory.adiana(**exact, omega=0.0, mu=0.1).eta == 1 / 4


def test_interpolation_halves_the_noise():
    assert theory.dcgd(**GIVEN, mu=0.1).gamma == pytest.approx(1 / (2 + 6 / 5))
    assert theory.dcgd(**GIVEN, mu=0.1, interpolation=True).gamma == pytest.approx(1 / (2 + 3 / 5))


def test_without_strong_convexity_steps_are_halved():
    for method, more in ((theory.dcgd, {}), (theory.diana, {"omega": 1.0}), (theory.isega, {})):
        convex, strongly = method(**GIVEN, **more), method(**GIVEN, **more, mu=1e-9)
        assert convex.gamma == pytest.approx(strongly.gamma / 2)
        assert convex.rate == 0


@pytest.mark.parametrize("omega", [0.5, 10.0, 1e4])
@pytest.mark.parametrize("mu", [1e-9, 1e-3, 1.0])
def test_the_tight_form_balances_both_rates(omega, mu):
    paper, tight = (theory.diana(**GIVEN, omega=omega, mu=mu, tight=tight) for tight in (False, True))
    assert tight.rate >= paper.rate * (1 - 1e-9)
    c = (math.sqrt((1 / tight.gamma - 2.0) * 5 / 3.0) - 1) ** 2
    if c < 1e5:
        assert tight.gamma * mu == pytest.approx(tight.alpha * (1 - 1 / c), rel=1e-4)
    other = theory.isega(**GIVEN, mu=mu, smallest_probability=tight.alpha, tight=True)
    assert other[:1] + other[-1:] == tight[:1] + tight[-1:]


@pytest.mark.parametrize("alpha", [1e-300, 1e-17, 1e-12, 0.1, 0.75, 1.0])
@pytest.mark.parametrize("mu", [0.0, 1e-3, 1.0])
def test_ef21_is_exact_for_any_alpha(alpha, mu):
    with decimal.localcontext(prec=700):
        left = (1 - decimal.Decimal(alpha)).sqrt()
        theta, factor = 1 - left, decimal.Decimal(2 if mu else 1).sqrt()
        gamma = 1 / (2 + 3 * factor * left / theta)
        gamma = min(gamma, theta / (2 * decimal.Decimal(mu))) if mu else gamma
        want = float(gamma)
    got = theory.ef21(smoothness=2.0, alpha=alpha, worker_smoothness=3.0, mu=mu)
    assert got.gamma == pytest.approx(want, rel=1e-15)
    assert got.rate == got.gamma * mu


def test_numpy_scalars_are_numbers():
    given = {"smoothness": np.float32(2), "workers": np.int64(5), "variance": np.float32(3)}
    assert theory.dcgd(**given, mu=np.float64(0.1)) == theory.dcgd(**GIVEN, mu=0.1)


INF = float("inf")
BAD = [
    (lambda: theory.dcgd(smoothness=0, workers=1, variance=0), "dcgd: smoothness must be above 0; got 0"),
    (lambda: theory.dcgd(smoothness=1, workers=0, variance=0), "dcgd: workers must be at least 1; got 0"),
    (lambda: theory.dcgd(smoothness=1, workers=1, variance=-1), "dcgd: variance must be at least 0; got -1"),
    (lambda: theory.diana(**GIVEN, omega=-1), "diana: omega must be at least 0; got -1"),
    (lambda: theory.diana(**GIVEN, omega=1, mu=3), r"diana: mu must be in \[0, smoothness = 2.0\]; got 3"),
    (lambda: theory.diana_released(smoothness_max=0, workers=1, omega=0), "smoothness_max must be above 0; got 0"),
    (lambda: theory.adiana(**GIVEN, omega=1, mu=0), "adiana: mu must be above 0; got 0"),
    (lambda: theory.isega(**GIVEN, tight=True), "isega: tight needs smallest_probability"),
    (lambda: theory.isega(**GIVEN, smallest_probability=2), r"smallest_probability must be in \(0, 1\]; got 2"),
    (lambda: theory.dcgd(smoothness="a", workers=1, variance=0), "dcgd: smoothness must be above 0; got 'a'"),
    (lambda: theory.dcgd(smoothness=INF, workers=1, variance=0), "dcgd: smoothness must be finite; got inf"),
    (lambda: theory.dcgd(smoothness=1, workers=2.5, variance=0), "dcgd: workers must be an integer; got 2.5"),
    (lambda: theory.marina(smoothness=1, workers=1, variance=INF, full=1), "marina: variance must be finite; got inf"),
    (lambda: theory.diana(**GIVEN, omega=1, mu="a"), r"diana: mu must be in \[0, smoothness = 2.0\]; got 'a'"),
    (lambda: theory.diana_released(smoothness_max=INF, workers=1, omega=0), "smoothness_max must be finite; got inf"),
    (lambda: theory.ef21(smoothness=1, alpha="a"), r"ef21: alpha must be in \(0, 1\]; got 'a'"),
    (lambda: theory.ef21(smoothness=1, alpha=1, worker_smoothness=INF), "worker_smoothness must be finite; got inf"),
    (lambda: theory.marina(**GIVEN, full=0), r"marina: full must be in \(0, 1\]; got 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
