"""One method with one seed, trained from its newest checkpoint to the end: by one process, or by many in step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.lib.folders import Journal
from experiments.lib.training import Checkpoints, State, Trainer, fingerprint

__all__ = ["WINDOW", "Job", "Stopped", "train_one"]

WINDOW = 5  # logged steps that a loss is averaged over


class Job(NamedTuple):
    """One method with one seed."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"


class Stopped(KeyboardInterrupt):
    """Stopped between two steps, all processes after the same one."""


def train_one(
    trainer: Trainer,
    job: Job,
    options: dict[str, Any],
    folder: Path,
    journal: Journal,
    parts: list[np.ndarray],
    show: Callable[[int, str], None],
    stop_after: Callable[[int], bool] = lambda step: False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Trains one job from its newest checkpoint to the end.

    Args:
        options: steps, log_every, test_every, checkpoint_every, check_every: steps between comparisons of what must be
            equal on all workers (0: never). With them, what is saved is compared before, too.
        parts: examples of each worker.
        show: takes a step and a few words for the progress bar; say: a line about where a run goes on.
        stop_after: whether all processes stop after this step; asked after each one.

    Returns:
        The row of results; on a process whose journal does not write, hashes alone.

    Raises:
        Stopped: after a checkpoint was written.
        jc.replicas.ReplicaDrift: the workers no longer agree.
    """
    checkpoints = Checkpoints(folder / "checkpoints" / job.name)
    workers, sent = trainer.mesh.size, trainer.ledger.total_bytes
    start, first, before = taken_up(trainer, checkpoints, job.seed)
    if first:
        others = f"; what {before['workers']} workers remembered is shared by {workers}"
        say(f"goes on from step {first}" + (others if before["workers"] != workers else ""))
    journal.keep(lambda line: (line["method"], line["seed"]) != job or line["step"] <= first)
    state, shown = start, 0.0
    try:
        for step, loss, seconds, state in trainer.steps(start, parts, job.seed, first, options["steps"]):
            ends = step == options["steps"]
            due = lambda what: options[what] and (ends or step % options[what] == 0)  # noqa: B023
            saves = due("checkpoint_every")
            if due("check_every") or (options["check_every"] and saves):
                trainer.check(state, step)
            sent_bytes = before["sent_bytes"] + sent * (step - first)  # with as many workers as there were
            if due("log_every") or step == 1:
                line = {"method": job.method, "seed": job.seed, "step": step, "loss": loss}
                line |= measured(trainer, state) | {"sent_bytes": sent_bytes, "seconds": seconds}
                if journal.writes and due("test_every"):
                    line["accuracy"] = trainer.test(state)[1]
                journal.add(line)
            if time.monotonic() - shown > 0.1 or ends:
                shown = time.monotonic()
                show(step, f"loss {loss:.3f}, {sent_bytes / 1e6:.2f} MB sent")
            stops = stop_after(step)  # asked after every step, as all processes have to ask alike
            if saves or stops:
                checkpoints.save(step, state, {"workers": workers, "sent_bytes": sent_bytes})
            if stops and not ends:
                raise Stopped
    finally:
        if jax.process_count() == 1:  # others may be gone, and closing waits for them
            checkpoints.close()
    checkpoints.close()
    bits = {"sha256": state.params, "sha256_optimizer": state.optimizer}
    bits = {name: fingerprint(trainer.whole(tree)) for name, tree in bits.items()}
    lines = [line for line in journal.lines() if (line["method"], line["seed"]) == job]
    return summary(trainer, job, lines, state) | {"steps": options["steps"]} | bits if journal.writes else bits


def summary(trainer: Trainer, job: Job, lines: list[dict[str, Any]], state: State) -> dict[str, Any]:
    """The row of results of a finished job, from its lines of metrics."""
    test_loss, accuracy = trainer.test(state)
    return {
        "method": job.method,
        "seed": job.seed,
        "loss": float(np.mean([line["loss"] for line in lines[-WINDOW:]])),
        "test_loss": test_loss,
        "accuracy": accuracy,
        "lane_bytes": lines[-1]["lane_bytes"],
        "code_bits": float(np.mean([line["code_bits"] for line in lines])),
        "sent_bytes": trainer.ledger.total_bytes,
        "seconds": float(np.median([line["seconds"] for line in lines[1:] or lines])),
        "parameters": trainer.num_params,
    }


def taken_up(trainer: Trainer, checkpoints: Checkpoints, seed: int) -> tuple[State, int, dict[str, Any]]:
    """The state to go on from, for the workers there are now; its step, and what was saved with it."""
    fresh, step, workers = trainer.initial_state(seed), checkpoints.latest(), trainer.mesh.size
    if not step:
        return fresh, 0, {"workers": workers, "sent_bytes": 0.0}
    about = checkpoints.about(step)
    others = None if about["workers"] == workers else about["workers"]
    state = checkpoints.restore(step, trainer.abstract_state(fresh.params, others), about)
    return trainer.taken_over(state, seed) if others else state, step, about


def measured(trainer: Trainer, state: State) -> dict[str, float]:
    """What the exchange of the last step cost and lost, and how many steps were skipped so far."""
    line = {key: float(value) for key, value in trainer.info(state.optimizer)._asdict().items()}
    return line | ({"skipped": int(state.optimizer.skipped)} if trainer.options["nonfinite"] == "skip" else {})
