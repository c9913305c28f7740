"""Four virtual CPU devices, strict dtype promotion, and a seed that is printed and can be set."""

import os

# Two test processes with two threads each wait for one another inside XLA's loops, up to a hundredfold.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

DEFAULT_SEED = 20240607


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of all random inputs")


def pytest_report_header(config):
    return f"jax {jax.__version__}, {os.cpu_count()} cores, --seed {config.getoption('--seed')}"


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("--seed")


@pytest.fixture
def key(seed):
    return jax.random.key(seed)


def pytest_collection_modifyitems(items):
    """Tests of one row of a table run in one process (--dist loadgroup), where they share compiled functions."""
    for item in items:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        if row is not None:
            item.add_marker(pytest.mark.xdist_group(row.name))
