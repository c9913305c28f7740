"""Runs MaxText's train module, or a file that stands beside it, and prints the ledger of its step.

    python -m experiments.trainers.told FILE base.yml name=value ...

DiLoCo within a slice: MaxText 0.2.5 restores its checkpoints by dcn_diloco_parallelism, which is one there.
"""

import json
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import maxtext.trainers.diloco.utils.spmd_diloco_checkpointing as saved  # pyright: ignore[reportMissingImports]
from maxtext.utils import train_utils  # pyright: ignore[reportMissingImports]

import jaxcomp as jc


class Told:
    """What MaxText takes for its jitted step, or for that lowered: compiled, it prints its ledger."""

    def __init__(self, inner: Any, mesh: Any):
        self.inner, self.mesh = inner, mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)

    def lower(self, *args: Any) -> Any:
        return Told(self.inner.lower(*args), self.mesh)

    def compile(self, **kwargs: Any) -> Any:
        made = self.inner.compile(**kwargs)
        axes = jc.ledger(made).by_axes(self.mesh)
        print("LEDGER", json.dumps({"+".join(names): sent for names, sent in axes.items()}), flush=True)
        return made


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


if __name__ == "__main__":
    train_utils.jit_train_step = told
    saved.to_diloco_checkpoint_dict = within_a_slice(saved.to_diloco_checkpoint_dict)
    saved.from_diloco_checkpoint_dict = within_a_slice(saved.from_diloco_checkpoint_dict)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
