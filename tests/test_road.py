"""The road of one gradient: which files it enters, and in which order.

What is counted: the files of the package in which a function is called while one update is traced. Not counted, and
listed here, are the vocabulary (functions of arrays and collectives, which know of no compressor, algorithm or route;
they stand in the text of the road as those of `jax.numpy` and `jax.lax` do) and the side exit that counts bytes and
bits, which changes nothing that is sent. That they know nothing of the road is held by a test.
"""

import ast
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from worlds import AXIS

import jaxcomp as jc

PACKAGE = Path(jc.__file__).parent
VOCABULARY = (
    "arrays.py",
    "backend.py",
    "floats.py",
    "backend_cpu.py",
    "base.py",
    "select.py",
    "norms.py",
    "packing.py",
    "codes/arrays.py",
    "exchange/placement.py",
    "exchange/varying.py",
    "exchange/collectives.py",
    "exchange/lanes.py",
)
SIDE_EXIT = ("exchange/counts.py", "payloads/")
ROADS = {
    "error_feedback(top_k)": (
        jc.error_feedback(jc.top_k(0.01)),
        [
            "transforms/compressed_mean.py",
            "exchange/runner.py",
            "layout.py",
            "algorithms/error_feedback.py",
            "compressors/vector.py",
            "compressors/sparsify.py",
            "exchange/routes/auto.py",
            "exchange/mean.py",
        ],
    ),
    "direct(identity)": (
        jc.direct(jc.identity()),
        [
            "transforms/compressed_mean.py",
            "exchange/runner.py",
            "layout.py",
            "algorithms/direct.py",
            "compressors/vector.py",
            "compressors/dense.py",
            "exchange/routes/auto.py",
            "exchange/routes/sum.py",
            "exchange/mean.py",
        ],
    ),
}


def files_entered(function, *args):
    """Files of the package in which a function is called while `function` is traced, in the order of the first call."""
    entered, inside = {}, f"{PACKAGE}{os.sep}"

    def note(frame, event, _):
        if event == "call" and (name := frame.f_code.co_filename).startswith(inside):
            entered.setdefault(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        jax.make_jaxpr(function)(*args)
    finally:
        sys.setprofile(before)
    return [Path(name).relative_to(PACKAGE).as_posix() for name in entered]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROADS)
def test_the_files_of_one_update(name):
    algorithm, road = ROADS[name]
    tx = jc.compressed_mean(algorithm, AXIS)
    grads = {"w": jnp.ones((2, 400, 500)), "b": jnp.ones((2, 10)), "v": jnp.ones((2, 300, 300))}
    state = jax.jit(jax.vmap(tx.init, axis_name=AXIS))(grads)
    entered = files_entered(jax.vmap(tx.update, axis_name=AXIS), grads, state)
    assert [file for file in entered if not file.startswith((*VOCABULARY, *SIDE_EXIT))] == road


def imports_of(path):
    """Modules of the package that a file imports, as paths."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxcomp."):
            yield node.module.removeprefix("jaxcomp.").replace(".", "/")


def test_the_vocabulary_knows_nothing_of_the_road():
    allowed = {*(file.removesuffix(".py") for file in VOCABULARY), "payloads", "codes"}
    for file in VOCABULARY:
        assert set(imports_of(PACKAGE / file)) <= allowed, file
