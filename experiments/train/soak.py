"""Trainings that are disturbed at random and resumed, against the same training that nobody disturbs.

Processes are killed; once the disk is full (no file may grow beyond 64 kB, which looks alike); once a checkpoint is
corrupted; and in all trainings a batch holds NaN once, for which all workers skip a step together. Every disturbance
must end in one sentence, which names the process that was killed, and the run must go on from there to the same
parameters, optimizer state (memories, shifts, counters, keys) and losses, bit for bit. Options that are not listed here
are those of `train`. Writes to runs/NAME: all runs, soak.json and table.md.
"""

import contextlib
import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.cli import UserError, at_least, choose_new, one_thread
from experiments.lib.folders import Journal, run_options, write_json
from experiments.lib.processes import Group, training_group
from experiments.lib.report import new_console, show
from experiments.lib.run import parser_of

__all__ = ["main"]

KILL, FULL, CORRUPTED = "kill", "full disk", "corrupted checkpoint"
MARKS = {FULL: "; make room", CORRUPTED: " cannot be read: "}  # of what is said to each
UNHARMED = "nothing: the bit was none of the state"
PATIENCE = 3  # runs in a row that are over before they are disturbed
ROOM = 2**16  # bytes of a file while the disk is full: enough to say why a process fails
COLUMNS = {
    "run": "{run}",
    "disturbance": "{what}",
    "after step": "{step}",
    "moment": "{moment}",
    "goes on from": "{resumed}",
    "what it said": "{said:.200}",
    "recovered": lambda event: "yes" if event["recovered"] else "NO",
}
NOTES = """\
after step: the last one that was logged. moment: what was going on, as far as the folder shows. goes on from: the
newest checkpoint. what it said: the message of the run. recovered: parameters, optimizer state and all losses of the
finished run are bit for bit those of the run without disturbances."""


def main(arguments: Sequence[str]) -> int:
    one_thread()
    p = parser_of("soak", __doc__)
    p.epilog = "All other options are those of train; python -m experiments train --help lists them."
    p.add_argument("--steps", type=at_least(20), default=10_000, help="steps of the training")
    p.add_argument("--processes", type=at_least(2), default=4, help="processes, with a worker each")
    p.add_argument("--reference-processes", type=at_least(1), help="of the run that is left alone; else as --processes")
    p.add_argument("--kills", type=at_least(1), default=10, help="processes that are killed")
    p.add_argument("--kills-only", action="store_true", help="no full disk, no corrupted checkpoint, no NaN")
    p.add_argument("--in-a-row", type=at_least(1), default=None, help="disturbances of one run; without it all of them")
    p.add_argument("--soak-seed", type=at_least(0), default=0, help="of the choice of processes and moments")
    run_options(p, "soak")
    o, rest = p.parse_known_args(arguments)
    folder, console, draw = choose_new(o.runs, o.name, "soak"), new_console(), random.Random(o.soak_seed)
    words = ["train", "--steps", o.steps, "--checkpoint-every", max(5, o.steps // 50), "--batch", 8, "--log-every", 1]
    left = [KILL] * o.kills
    if not o.kills_only:
        words += ["--nonfinite", "skip", "--spoil", draw.randint(3, o.steps - 3)]
        left += [FULL, CORRUPTED]
        draw.shuffle(left)
    words += ["--workers", o.processes, *rest, "--runs", folder]

    def start(run: Path, processes: int = o.processes) -> Group:
        resume = ["--resume"] if (run / "config.json").is_file() else []
        return training_group([*map(str, words), "--name", run.name, *resume], processes, quiet=True)

    reference = o.reference_processes or o.processes
    console.print(f"{o.steps} steps, first undisturbed in {reference} processes; writing to {folder}")
    folder.mkdir(parents=True)
    start(folder / "run-0", reference).wait()
    undisturbed, events, number, idle = outcome(folder / "run-0"), [], 0, 0
    while left:
        number += 1
        run = folder / f"run-{number}"
        done = disturbed(run, start, left[: o.in_a_row], step_of(folder / "run-0"), draw)
        left = left[len(done) :]  # what came too late for a run falls to the next one
        idle = 0 if done else idle + 1
        if idle == PATIENCE:
            raise UserError(f"{idle} runs in a row were over before they were disturbed; give them more --steps")
        recovered = repr(outcome(run)) == repr(undisturbed)  # one loss may be NaN
        events += [event | {"run": number, "recovered": recovered} for event in done]
        write_json(folder / "soak.json", events)
    good = sum(event["recovered"] for event in events)
    title = f"{folder.name}: {good} of {len(events)} disturbances in {o.steps} steps recovered bitwise"
    show(console, title, COLUMNS, events, NOTES, folder / "table.md")
    return int(not all(event["recovered"] and event["named"] for event in events))


def disturbed(
    run: Path, start: Callable[[Path], Group], names: Sequence[str], last_step: int, draw: random.Random
) -> list[dict[str, Any]]:
    """One run, disturbed at random moments; resumed after each disturbance, and finished.

    Returns:
        What was done when, and what the run said to it; fewer than `names` where the run was over before.
    """
    done = []
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        group, first = start(run), newest(run) + 1
        # On average the disturbances divide what is left of the run equally.
        room = max(0, last_step - 2 - first)
        target = first + draw.randint(0, min(room, 2 * room // (left + 1)))
        least = 1 if name == CORRUPTED else 0
        if not group.end_or(lambda target=target, least=least: step_of(run) >= target and newest(run) >= least):
            group.wait()  # raises what failed
            break
        time.sleep(draw.uniform(0, 0.1))
        moment = "writing a checkpoint" if list(run.glob("checkpoints/*/*tmp*")) else "training"
        victim, mark = draw.randrange(len(group.processes)), MARKS.get(name, "")
        if name == KILL:
            group.processes[victim].kill()
            mark = f"process {victim} was killed by SIGKILL"
        said = said_to_damage(run, group, start, draw) if name == CORRUPTED else said_to(name, group)
        if not said:
            break  # it was finished before
        if "\n" in said:
            raise UserError(f"{name} after step {step_of(run)} ended in more than one sentence: {said}")
        event = {"what": name, "step": step_of(run), "moment": moment, "resumed": newest(run)}
        done.append(event | {"said": said.replace(f"{run.parent}/", ""), "named": mark in said or said == UNHARMED})
    if not (run / "results.json").is_file():
        start(run).wait()
    return done


def said_to(name: str, group: Group) -> str:
    """What a run says to a kill, or to a disk that is full from now on."""
    for process in group.processes if name == FULL else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
    return last_words(group)


def said_to_damage(run: Path, group: Group, start: Callable[[Path], Group], draw: random.Random) -> str:
    """Stops a run, flips a bit in the largest file of its newest checkpoint, and resumes it: what it says.

    A checkpoint that cannot be read is removed, as the run advises.
    """
    group.kill()
    if (run / "results.json").is_file():
        return ""
    step = newest(run)
    path = max(filter(Path.is_file, run.glob(f"checkpoints/*/{step}/**/*")), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    said = last_words(start(run), lambda: newest(run) > step)
    if MARKS[CORRUPTED] in said:
        shutil.rmtree(next(run.glob(f"checkpoints/*/{step}")))
    return said or UNHARMED


def last_words(group: Group, until: Callable[[], bool] = lambda: False) -> str:
    """The message with which a group ends, if it fails; it is stopped when something else has happened before."""
    try:
        if group.end_or(until):
            group.kill()
        else:
            group.wait()
    except UserError as error:
        return str(error)
    return ""


def outcome(run: Path) -> Any:
    """Everything that must be the same: bits of the state, losses of all steps."""
    (row,) = json.loads((run / "results.json").read_text())
    losses = {line["step"]: line["loss"] for line in Journal(run).lines()}
    return row["sha256"], row["sha256_optimizer"], row["accuracy"], losses


def step_of(run: Path) -> int:
    """The last step that was logged."""
    lines = Journal(run).lines()
    return lines[-1]["step"] if lines else 0


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name) for path in run.glob("checkpoints/*/*") if path.name.isdigit()), default=0)
