"""Programs as users of accelerators get them: optimized, and never from a cache, whose entries name no compiler."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # before a plugin looks for a GPU


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile():
    other = {"jax_disable_most_optimizations": False, "jax_enable_compilation_cache": False}
    before = {name: jax.config.read(name) for name in other}
    for name, value in other.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
