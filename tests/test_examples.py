"""The scripts of docs/examples: few lines differ from the script without compression, and both compute the same."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from experiments.lib.launch import end_all, free_port, start

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
FEWEST = {"nnx_cnn": 4, "linen_train_state": 4, "equinox_style": 4}
QUICK = ("nnx_cnn",)
ALGORITHM = "jc.error_feedback(jc.top_k(0.05))"


def source(name, plain):
    return (FOLDER / "plain" / f"{name}.py" if plain else FOLDER / f"{name}.py").read_text()


def code(text):
    """Lines with something in them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def run(name, plain, algorithm=ALGORITHM, steps=3, rate=None):
    """What a script defines, after a few steps; without any, before its loop. rate: of SGD in place of Adam.

    Statistics of batches are those of all workers, and nothing is dropped: a batch and its parts give the same.
    """
    head, loop = source(name, plain).replace("Dropout(0.1", "Dropout(0.0").split("for _ in range(")
    text = head + (f"for _ in range({steps})" + loop[loop.index(")") + 1 :] if steps else "")
    if not plain:
        assert head.count(ALGORITHM) == 1
        text = text.replace(ALGORITHM, algorithm).replace("BatchNorm(", 'BatchNorm(axis_name="data", ')
        text = text.replace('BatchNorm(axis_name="data", 16', 'BatchNorm(16, axis_name="data"')
    text = text if rate is None else re.sub(r"optax\.adam\([^)]*\)", f"optax.sgd({rate})", text)
    space = {"__name__": name}
    jax.clear_caches()  # of optax's jitted helpers: a class that is defined again would get trees of the first one
    exec(compile(text, f"{name}.py", "exec"), space)
    return space


def model_of(space):
    """Parameters and statistics."""
    state = space.get("state")
    if "model" in space:
        tree = space["model"]
    else:
        tree = state["params"] if isinstance(state, dict) else (state.params, state.batch_stats)
    return [np.asarray(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.fixture(autouse=True)
def _as_users_do():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ(name):
    plain, compressed = code(source(name, True)), code(source(name, False))
    assert len(source(name, False).splitlines()) < 60
    found = list(difflib.ndiff(plain, compressed))
    changed = max(sum(line.startswith(sign) for line in found) for sign in ("+ ", "- "))
    assert changed <= FEWEST.get(name, 6)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_with_identity_they_are_the_same_to_rounding(name, capsys):
    """Losses, steps of the parameters, and of statistics of BatchNorm, under SGD.

    Adam would step as far where a gradient is zero but for rounding, as that of a bias before BatchNorm is.
    """
    one = lambda plain, steps: run(name, plain, "jc.direct(jc.identity())", steps, rate=0.05)
    start, plain, compressed = one(True, 0), one(True, 3), one(False, 3)
    np.testing.assert_allclose(compressed["loss"], plain["loss"], rtol=1e-3)
    begun, want, found = map(model_of, (start, plain, compressed))
    largest = max(np.max(np.abs(b - a)) for a, b in zip(begun, want, strict=True))
    assert largest > 1e-3
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * largest)
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_they_train_as_they_stand(name, capsys):
    first, last = (run(name, False, steps=steps)["loss"] for steps in (1, 20))
    assert last < first
    capsys.readouterr()


@pytest.mark.slow
def test_nothing_of_the_order_of_the_gradient_crosses():
    """A transformer that the compiler splits over "model": its collectives stay, and over "data" go payloads alone."""
    books, states = [], []
    for plain in (True, False):
        space = run("gpt_tensor_parallel", plain, steps=0)
        given = space["state"], space["tokens"]
        step = space["train_step"].lower(*given).compile()
        books.append(jc.ledger(step).by_axes(space["mesh"]))
        states.append(step(*given)[1])
    gradient = 4 * sum(x.size for x in jax.tree.leaves(states[1]["params"]))
    assert set(books[1]) == {("data",), ("model",)}  # nothing crosses both axes at once
    extra = books[1]["model",] - books[0]["model",]
    assert books[1]["data",] + extra == float(jc.info(states[1]["exchange"]).sent_bytes) + 4  # payloads, and the loss
    assert 0 <= extra < 0.01 * books[0]["model",]  # parts of the payload of what is whole along "model"
    assert books[0]["data",] > 0.5 * gradient
    assert books[1]["data",] < 0.06 * gradient


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 4, int(sys.argv[3]))
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 1
exec(compile(open(sys.argv[1]).read(), "example", "exec"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp"])
def test_four_processes_train_as_one_does(name, tmp_path):
    """The script as it stands, each device in a process of its own: every process prints the loss of one process."""
    script = tmp_path / "example.py"
    script.write_text(source(name, False))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    count = lambda devices: {**environment, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    alone = subprocess.run([sys.executable, script], env=count(4), check=True, timeout=300, **pipes)
    address = f"localhost:{free_port()}"
    command = [sys.executable, "-c", PROCESS, str(script), address]
    each = [start([*command, str(i)], env=count(1), **pipes) for i in range(4)]
    try:
        told = [process.communicate(timeout=300) for process in each]
    finally:
        end_all(each)
    assert [process.returncode for process in each] == [0] * 4, told[0][1][-2000:]
    np.testing.assert_allclose([float(out.split()[-1]) for out, _ in told], float(alone.stdout), rtol=1e-5)
