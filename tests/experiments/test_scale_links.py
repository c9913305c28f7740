"""The wait for shared cores: told from the latency, with its error."""

import numpy as np
import pytest

from experiments.scale.links import row_of, wait_fit
from jaxcomp.plan.links import Timing


def times_of(kind, workers, sizes, numbers, cores=2, noise=0.0, rng=None):
    each = [(n, b, float(row_of(kind, b, n, cores) @ numbers)) for n in workers for b in sizes]
    noisy = lambda t: t * (1 + noise * rng.standard_normal()) if noise else t
    return [Timing(n, b, noisy(t), noise * t) for n, b, t in each]


def test_the_wait_for_shared_cores_is_told_from_the_latency():
    """Times with a wait on two cores, of 2 to 4 workers, are met at 8; of one number of workers there is none seen."""
    timings = times_of("all_reduce", (2, 3, 4), (256.0, 1e4, 1e6), (1e-4, 1e-8, 2e-4))
    found = wait_fit("all_reduce", timings, 2)
    assert (found.fit.latency, found.fit.per_byte, found.wait) == pytest.approx((1e-4, 1e-8, 2e-4))
    assert found.seconds(256.0, 8).mean == pytest.approx(14 * (1e-4 + 3 * 2e-4) + 2 * 7 / 8 * 256 * 1e-8)
    assert wait_fit("all_reduce", timings[:3], 2).wait == 0
    one = wait_fit("all_reduce", timings[6:], 2)  # of four workers alone a wait looks like latency
    assert (one.fit.latency, one.wait) == (pytest.approx(1e-4 + 2e-4), 0)
    assert wait_fit("all_reduce", timings, 0).seconds(256.0, 8).mean < 0.5 * found.seconds(256.0, 8).mean


def test_the_error_of_a_wait_is_told(seed):
    """Without a wait in truth noise makes one; what it does to 16 workers is within four deviations in 95 % of fits."""
    rng, far, truth = np.random.default_rng(seed), [], (1e-3, 1e-8, 0.0)
    for _ in range(200):
        timings = times_of("all_gather", (2, 3, 4), (256.0, 1e4, 1e5), truth, noise=0.05, rng=rng)
        found = wait_fit("all_gather", timings, 2)
        said = found._replace(fit=found.fit._replace(ratios=())).seconds(256.0, 16)
        far.append(abs(said.mean - row_of("all_gather", 256.0, 16, 2) @ truth) / said.deviation)
    assert np.mean(np.array(far) < 4) > 0.95
