"""Compiles MaxText's training step ahead of time, and prints a line of what it is: bytes by axis, memory, seconds.

    JAXCOMP="sparse_loco()" python -m experiments.pods.step base.yml name=value ...

Without JAXCOMP it is MaxText's own; with it docs/examples/trainers/maxtext_diloco.py stands in MaxText's place.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import jax
from absl import app
from maxtext.trainers.pre_train import train_compile  # pyright: ignore[reportMissingImports]

import jaxcomp as jc

FILE = Path(__file__).parents[2] / "docs" / "examples" / "trainers" / "maxtext_diloco.py"


def told(fn: Any, args: Any, kwargs: Any, mesh: Any, *rest: Any, jit: Any = train_compile.jit_and_compile) -> Any:
    """`jit_and_compile` of MaxText, which prints what it made."""
    begun = time.perf_counter()
    made = jit(fn, args, kwargs, mesh, *rest)
    seconds, book, memory = time.perf_counter() - begun, jc.ledger(made), made.memory_analysis()
    placed = rest[0][0].params
    shards = jax.tree.map(lambda x, at: [list(at.shard_shape(x.shape)), x.dtype.name], args[0].params, placed)
    line = {
        "axes": {"+".join(names): sent for names, sent in book.by_axes(mesh).items()},
        "unknown": book.unknown_bytes,
        "held": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "seconds": seconds,
        "chips": mesh.size,
        "shards": jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, list)),
    }
    print("STEP", json.dumps(line), flush=True)
    return made


if __name__ == "__main__":
    train_compile.jit_and_compile = told
    if os.environ.get("JAXCOMP"):
        sys.argv = [str(FILE), *sys.argv[1:]]
        runpy.run_path(str(FILE), run_name="__main__")
    else:
        app.run(train_compile.main)
