"""Four virtual CPU devices, strict dtype promotion, and a seed that is printed and can be set."""

import gc
import importlib.metadata
import os
import shutil
import tempfile

# Two test processes with two threads each wait for one another inside XLA's loops, up to a hundredfold.
# What is tested is what XLA's own passes make of a program; LLVM's dearer ones only take time here, and so do the parts
# into which it would cut small programs.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_multi_thread_eigen=false"
    + " --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its new way to emit fusions takes a quarter of the tests' time. Later releases have no other, and run as they are.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Half of what is left of compiling is LLVM's. `make test-all` has it optimize, as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
import jax
import pytest
from variants import ABSENT, BETWEEN_WORKERS, LONG, absent, sampled

# Programs that a test starts compile the same steps again and again, and tests the same single operations: they share
# them, for as long as the tests run. Processes of pytest-xdist read it in the environment, too.
CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxcomp-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

DEFAULT_SEED = 20240607
CLEARED_AFTER = 500  # programs, and where a file ends: tests of one file share what they compiled
SINCE = {"cleared": 0}


def _count(event, *_, **__):
    SINCE["cleared"] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of all random inputs")


def pytest_report_header(config):
    return f"jax {jax.__version__}, {os.cpu_count()} cores, --seed {config.getoption('--seed')}"


def pytest_unconfigure():
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_finish():
    """Tracing makes many objects: a twelfth of the time went into looking for cycles, of which there are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_teardown(item, nextitem):
    """JAX keeps every module that it lowered, each with an MLIR context, and to make one more MLIR walks through all.

    A thousand programs are 1.4 GB, and one more takes half as long again; at last there are no memory mappings left.
    """
    if nextitem is not None and nextitem.path != item.path and SINCE["cleared"] >= CLEARED_AFTER:
        SINCE["cleared"] = 0
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("--seed")


@pytest.fixture
def optimized():
    """LLVM optimizes: how products and sums of one expression are rounded depends on it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def standard_promotion():
    """optax itself relies on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def key(seed):
    return jax.random.key(seed)


def pytest_collection_modifyitems(config, items):
    parts = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    config.stash[ABSENT] = [] if parts else absent(items)
    for item in items:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        if row is not None:
            between_workers = item.path.name in ("test_exchange.py", "test_ledger.py")
            if row.slow or (between_workers and row.name not in BETWEEN_WORKERS):
                item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("sampled") and not item.get_closest_marker("slow")]
    kept = set(map(id, sampled(marked)))
    left_out = {item for item in marked if id(item) not in kept}
    for item in items:
        if item in left_out or item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)
