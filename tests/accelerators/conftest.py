"""Programs as users get them: optimized, and never from a cache, whose entries the compilers of accelerators refuse."""

import jax
import pytest

from experiments.lib.targets import lacks

jax.config.update("jax_platforms", "cpu")  # before a plugin looks for a GPU
collect_ignore = []
if lacks("h100") and lacks("v5e:2x2"):  # in the environment of `make test`
    collect_ignore = ["test_compiled.py", "test_slices.py"]
else:
    jax.config.update("jax_compilation_cache_dir", None)  # whether there is one is asked only once


@pytest.fixture(autouse=True, scope="module")
def _optimized():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
