"""The road of one gradient, as it is walked: files, switches between them, functions and calls of one update.

Every function of the package that is entered while one update is traced counts, without exemptions; comprehensions do
not, which some versions of Python inline. The numbers are what they are: who makes the road shorter writes the smaller
numbers down here.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from worlds import AXIS

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


def update_of(algorithm):
    """One update of `compressed_mean` among workers under vmap, and the shapes of its arguments."""
    tx = jc.compressed_mean(algorithm, AXIS)
    state, axes = jc.init_state(tx, TREE, WORKERS, AXIS)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), TREE)
    return jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS), grads, state


# The files in which something happens to the gradient, in this order; what stands beside them, arrays, collectives,
# counts, is entered from many of these.
ROADS = {
    "error_feedback(top_k)": (
        jc.error_feedback(jc.top_k(0.01)),
        ["algorithms/error_feedback.py", "compressors/sparsify.py", "select.py", "exchange/routes/auto.py"],
        Walk([""] * 19, 243, 211, 437),
    ),
    "direct(identity)": (
        jc.direct(jc.identity()),
        ["algorithms/direct.py", "compressors/dense.py", "exchange/routes/auto.py", "exchange/routes/route.py"],
        Walk([""] * 16, 174, 120, 307),
    ),
}


@pytest.mark.parametrize("name", ROADS)
def test_the_walk_of_one_update(name):
    algorithm, middle, most = ROADS[name]
    walk = walked(*update_of(algorithm))
    road = ["transforms/compressed_mean.py", "exchange/driver.py", "groups.py", *middle]
    assert [file for file in walk.files if file in road] == road
    found = Walk([""] * len(walk.files), *walk[1:])
    assert all(a <= b for a, b in zip((len(found.files), *found[1:]), (len(most.files), *most[1:]), strict=True)), walk


def gradients_of(algorithm):
    """One step of `value_and_grad` on a mesh, whose state has been made, and the shapes of its arguments."""
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2) + jnp.sum(params["v"] ** 2)
    grad_fn = jc.value_and_grad(loss, algorithm, mesh, AXIS, gradients="per_worker")
    return grad_fn, TREE, grad_fn.init(TREE), jax.ShapeDtypeStruct((8, 64), jnp.float32)


def local_updates_of(algorithm):
    """One step of `local_updates` among workers under vmap, and the shapes of its arguments."""
    tx = jc.local_updates(optax.sgd(0.1, 0.9), optax.sgd(0.7), algorithm, AXIS, every=4)
    state, axes = jc.init_state(tx, TREE, WORKERS, AXIS)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), TREE)
    return jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS), own, state, own


@pytest.mark.parametrize(("made", "most"), [(gradients_of, 25), (local_updates_of, 23)])
def test_the_files_of_what_is_built_on_it(made, most):
    algorithm, middle, _ = ROADS["error_feedback(top_k)"]
    files = walked(*made(algorithm)).files
    assert [file for file in files if file in middle] == middle
    assert len(files) <= most, files


def test_the_platform_is_asked_in_two_files():
    """`backend.py`, and the collectives."""
    asking = [file for file in PACKAGE.rglob("*.py") if "platform()" in file.read_text()]
    assert {file.relative_to(PACKAGE).as_posix() for file in asking} <= {"backend.py", "exchange/collectives.py"}
