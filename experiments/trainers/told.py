"""Runs MaxText's train module, or a file that stands beside it, and prints the ledger of its step and all losses.

    python -m experiments.trainers.told

reads a line of JSON for each run, {"words": [FILE, "base.yml", "name=value", ...], "environment": {...}, "log": FILE},
and answers with ENDED and its exit status. MaxText is imported once: a run is a process that is forked from this one.

DiLoCo within a slice: MaxText 0.2.5 restores its checkpoints by dcn_diloco_parallelism, which is one there.
"""

import json
import os
import runpy
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import datasets  # noqa: F401  # what MaxText imports later  # pyright: ignore[reportMissingImports]
import maxtext.trainers.diloco.utils.spmd_diloco_checkpointing as saved  # pyright: ignore[reportMissingImports]
import maxtext.trainers.pre_train.train  # noqa: F401  # pyright: ignore[reportMissingImports]
from maxtext.utils import train_utils  # pyright: ignore[reportMissingImports]

import jaxcomp as jc


class Told:
    """MaxText's jitted step: compiled, it prints its ledger; called, the loss."""

    def __init__(self, step: Any, mesh: Any):
        self.step, self.mesh, self.lowered, self.program = step, mesh, None, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, *args: Any) -> Any:
        try:
            state, metrics = self.program(*args)  # or else it is compiled twice
        except TypeError:  # MaxText's DiLoCo is compiled for a state of another type than it makes
            self.program = self.step
            state, metrics = self.step(*args)
        print("LOSS", repr(float(metrics["scalar"]["learning/loss"])), flush=True)
        return state, metrics

    def lower(self, *args: Any) -> Any:
        self.lowered = self.step.lower(*args)
        return self

    def compile(self, **kwargs: Any) -> Any:
        assert self.lowered is not None
        self.program = self.lowered.compile(**kwargs)
        axes = jc.ledger(self.program).by_axes(self.mesh)
        print("LEDGER", json.dumps({"+".join(names): sent for names, sent in axes.items()}), flush=True)
        return self.program


def told(*args: Any, mesh: Any, jit: Any = train_utils.jit_train_step, **kwargs: Any) -> Any:
    return Told(jit(*args, mesh=mesh, **kwargs), mesh)


def within_a_slice(function: Any) -> Any:
    def run(*args: Any, config: Any = None) -> Any:
        if config is None:
            args, config = args[:-1], args[-1]
        names = ("diloco_outer_lr", "diloco_outer_momentum")
        options = {name: getattr(config, name) for name in names}
        return function(*args, config=SimpleNamespace(dcn_diloco_parallelism=config.num_diloco_replicas, **options))

    return run


def one(words: list[str], environment: dict[str, str], log: str) -> int:
    """A run, in a process that has forked."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(environment)
    train_utils.jit_train_step = told
    saved.to_diloco_checkpoint_dict = within_a_slice(saved.to_diloco_checkpoint_dict)
    saved.from_diloco_checkpoint_dict = within_a_slice(saved.from_diloco_checkpoint_dict)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.flush()  # before there are two of them
        child = os.fork()
        if not child:
            status = one(**json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print("ENDED", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
