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
        options: steps, log_every, test_every, checkpoint_every; perhaps check_every, steps between comparisons of
            what must be equal on all workers (0: never). What is saved is compared before, too.
        parts: examples of each worker.
        show: takes a step and a few words for the progress bar; say: a line about where a run goes on.
        stop_after: whether all processes stop after this step; asked after each one.

    Returns:
        The row of results; on a process whose journal does not write, hashes alone.

    Raises:
        Stopped: after a checkpoint was written.
        jc.ReplicaDrift: the workers no longer agree.
    """
    checkpoints = Checkpoints(folder / "checkpoints" / job.name)
    check_every = options.get("check_every", 0)
    workers = trainer.mesh.size
    state = trainer.initial_state(job.seed)
    first = checkpoints.latest() or 0
    sent = trainer.ledger.total_bytes
    about = {"workers": workers, "base_step": 0, "base_bytes": 0.0, "step_bytes": sent}
    if first:
        before = checkpoints.about(first)
        state, about = taken_up(trainer, checkpoints, first, before, state, job.seed)
        others = f"; what {before['workers']} workers remembered is shared by {workers}"
        say(f"goes on from step {first}" + (others if before["workers"] != workers else ""))
    sent_by = lambda step: about["base_bytes"] + sent * (step - about["base_step"])
    journal.keep(lambda line: (line["method"], line["seed"]) != job or line["step"] <= first)
    reached, shown = first, 0.0
    try:
        for now in trainer.steps(state, parts, job.seed, first, options["steps"]):
            reached, state = now.step, now.state
            ends, due = now.step == options["steps"], lambda every: every and now.step % every == 0  # noqa: B023
            saves = due(options["checkpoint_every"]) or ends
            if check_every and (due(check_every) or saves):
                trainer.check(state, now.step)
            if due(options["log_every"]) or ends or now.step == 1:
                line = {"method": job.method, "seed": job.seed, "step": now.step, "loss": now.loss}
                line |= measured(trainer, state) | {"sent_bytes": sent_by(now.step), "seconds": now.seconds}
                if journal.writes and options["test_every"] and (due(options["test_every"]) or ends):
                    line["accuracy"] = trainer.test(state)[1]
                journal.add(line)
            if time.monotonic() - shown > 0.1 or ends:
                shown = time.monotonic()
                show(now.step, f"loss {now.loss:.3f}, {sent_by(now.step) / 1e6:.2f} MB sent")
            stops = stop_after(now.step)  # asked after every step, as all processes have to ask alike
            if saves:
                checkpoints.save(now.step, state, about)
            if stops and not ends:
                raise Stopped
    except Stopped:  # no other interrupt: it may have come while a step donated the state
        checkpoints.save(reached, state, about)
        raise
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


def taken_up(
    trainer: Trainer, checkpoints: Checkpoints, step: int, about: dict[str, Any], fresh: State, seed: int
) -> tuple[State, dict[str, Any]]:
    """The state of a checkpoint, for the workers there are now; and what is to be kept with it."""
    workers = trainer.mesh.size
    if about["workers"] == workers:
        return checkpoints.restore(step, trainer.abstract_state(fresh.params), about), about
    old = checkpoints.restore(step, trainer.abstract_state(fresh.params, about["workers"]), about)
    # What a step sends depends on the number of workers: the account goes on from here.
    spent = about["base_bytes"] + about["step_bytes"] * (step - about["base_step"])
    now = {"workers": workers, "base_step": step, "base_bytes": spent, "step_bytes": trainer.ledger.total_bytes}
    return trainer.taken_over(old, seed), about | now


def measured(trainer: Trainer, state: State) -> dict[str, float]:
    """What the exchange of the last step cost and lost, and how many steps were skipped so far."""
    line = {key: float(value) for key, value in trainer.info(state.optimizer)._asdict().items()}
    return line | ({"skipped": int(state.optimizer.skipped)} if trainer.nonfinite == "skip" else {})
