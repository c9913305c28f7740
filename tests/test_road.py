"""The road of one gradient, as it is walked: files, switches between them, functions and calls of one update.

Every function of the package that is entered while one update is traced counts, without exemptions; comprehensions do
not, which some versions of Python inline. Each walk is that of a process of its own: what was traced before, by other
tests, would be entered no more. The numbers are what they are: who makes the road shorter writes the smaller numbers
down here.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from worlds import AXIS, mesh_of

import jaxcomp as jc

PACKAGE = Path(jc.__file__).parent
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
TREE = {"w": jnp.zeros((64, 64)), "b": jnp.zeros((64,)), "v": jnp.zeros((2048, 2))}
WORKERS = 4


class Walk(NamedTuple):
    """files: in the order in which they are entered first. switches: from one file to another, there and back."""

    files: list[str]
    switches: int
    functions: int
    calls: int


def walked(function, *args):
    """The walk of one trace of a function."""
    inside, calls, files, order = f"{PACKAGE}{os.sep}", Counter(), {}, []

    def file_of(frame):
        name = frame.f_code.co_filename
        known = name.startswith(inside) and frame.f_code.co_name not in INLINED
        return Path(name).relative_to(PACKAGE).as_posix() if known else None

    def note_call(frame, event, _):
        if event == "call" and (file := file_of(frame)):
            files.setdefault(file)
            calls[file, frame.f_code.co_firstlineno, frame.f_code.co_name] += 1

    def note_line(frame, event, _):
        file = file_of(frame)
        if file is None:
            return None
        if not order or order[-1] != file:
            order.append(file)
        return note_line

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(note_line)
    sys.setprofile(note_call)
    try:
        jax.eval_shape(function, *args)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return Walk(list(files), len(order), len(calls), sum(calls.values()))


def walked_alone(name):
    """The same, of one of `MADE`, in a process of its own."""
    command = [sys.executable, __file__, name]
    return Walk(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def update_of(algorithm):
    """One update of `compressed_mean` among workers under vmap, and the shapes of its arguments."""
    tx = jc.compressed_mean(algorithm, AXIS)
    state, axes = jc.init_state(tx, TREE, WORKERS, AXIS)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), TREE)
    return jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS), grads, state


def gradients_of(algorithm):
    """One step of `value_and_grad` on a mesh, whose state has been made, and the shapes of its arguments."""
    mesh = mesh_of(1)
    loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2) + jnp.sum(params["v"] ** 2)
    grad_fn = jc.value_and_grad(loss, algorithm, mesh, AXIS, gradients="per_worker")
    return grad_fn, TREE, grad_fn.init(TREE), jax.ShapeDtypeStruct((8, 64), jnp.float32)


def local_updates_of(algorithm):
    """One step of `local_updates` among workers under vmap, and the shapes of its arguments."""
    tx = jc.local_updates(optax.sgd(0.1, 0.9), optax.sgd(0.7), algorithm, AXIS, every=4)
    state, axes = jc.init_state(tx, TREE, WORKERS, AXIS)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), TREE)
    return jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS), own, state, own


TOP_K = jc.error_feedback(jc.top_k(0.01))
MADE = {
    "error_feedback(top_k)": lambda: update_of(TOP_K),
    "direct(identity)": lambda: update_of(jc.direct(jc.identity())),
    "value_and_grad": lambda: gradients_of(TOP_K),
    "local_updates": lambda: local_updates_of(TOP_K),
}

# The files in which something happens to the gradient, in this order; what stands beside them, arrays, collectives,
# counts, is entered from many of these.
ROAD = ["transforms/compressed_mean.py", "exchange/driver.py", "groups.py"]
ERROR_FEEDBACK = ["algorithms/error_feedback.py", "compressors/sparsify.py", "select.py", "exchange/routes/route.py"]
DIRECT = ["algorithms/direct.py", "compressors/dense.py", "exchange/routes/route.py"]
ROADS = {
    "error_feedback(top_k)": (ROAD + ERROR_FEEDBACK, Walk([""] * 15, 217, 161, 310)),
    "direct(identity)": (ROAD + DIRECT, Walk([""] * 12, 169, 92, 220)),  # 165 with JAX 0.10
}


@pytest.mark.parametrize("name", ROADS)
def test_the_walk_of_one_update(name):
    road, most = ROADS[name]
    walk = walked_alone(name)
    assert [file for file in walk.files if file in road] == road
    assert len(walk.files) <= len(most.files), walk
    assert all(found <= bound for found, bound in zip(walk[1:], most[1:], strict=True)), walk


@pytest.mark.parametrize(("name", "most"), [("value_and_grad", 19), ("local_updates", 16)])
def test_the_files_of_what_is_built_on_it(name, most):
    files = walked_alone(name).files
    assert [file for file in files if file in ERROR_FEEDBACK] == ERROR_FEEDBACK
    assert len(files) <= most, files


def test_the_platform_is_asked_in_two_files():
    """`backend.py`, and the collectives."""
    asking = [file for file in PACKAGE.rglob("*.py") if "platform()" in file.read_text()]
    assert {file.relative_to(PACKAGE).as_posix() for file in asking} <= {"backend.py", "exchange/collectives.py"}


if __name__ == "__main__":
    print(json.dumps(walked(*MADE[sys.argv[1]]())))
