"""`jax.export` for CPU, CUDA and TPU at once lowers every method: one artifact for all three."""

import jax
import pytest

from experiments.compiled.cases import ALGORITHMS, ROUTES, update

PLATFORMS = ("cpu", "cuda", "tpu")
CASES = [update(name, algorithm) for name, algorithm in ALGORITHMS.items()]
CASES += [update(f"via={via}", algorithm, via) for via, algorithm in ROUTES.items() if via != "ragged"]  # no CPU has it
QUICK = ("direct(bf16)", "error_feedback(int4)", "diana(dithering)")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in CASES]
)
def test_every_method_is_exported_for_three_platforms_at_once(case):
    function, args = case.on(jax.devices("cpu"))
    exported = jax.export.export(function, platforms=PLATFORMS)(*args)
    assert (exported.platforms, exported.nr_devices) == (PLATFORMS, 4)
