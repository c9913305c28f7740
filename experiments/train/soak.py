"""Trainings of which processes are killed at random, and resumed, against the same training that nobody disturbs.

In all of them a batch holds NaN once, for which all workers skip a step together. Every kill must end in one sentence,
which names the process, and the run must go on from there to the same parameters, optimizer state (memories, shifts,
counters, keys) and losses, bit for bit. Options that are not listed here are those of `train`. Writes to runs/NAME: all
runs, soak.json and table.md.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.cli import Parser, UserError, at_least, choose_new, one_thread
from experiments.lib.folders import Journal, run_options, write_json
from experiments.lib.processes import Group, training_group
from experiments.lib.report import new_console, show
from experiments.lib.run import parser_of

__all__ = ["main"]

COLUMNS = {
    "run": "{run}",
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


def parser() -> Parser:
    p = parser_of("soak", __doc__)
    p.epilog = "All other options are those of train; python -m experiments train --help lists them."
    p.add_argument("--steps", type=at_least(20), default=10_000, help="steps of the training")
    p.add_argument("--processes", type=at_least(2), default=4, help="processes, with a worker each")
    p.add_argument("--reference-processes", type=at_least(1), help="of the run that is left alone; else as --processes")
    p.add_argument("--kills", type=at_least(1), default=10, help="processes that are killed")
    p.add_argument("--kills-only", action="store_true", help="no batch holds NaN")
    p.add_argument("--in-a-row", type=at_least(1), default=None, help="kills in one run; without it all of them")
    p.add_argument("--soak-seed", type=at_least(0), default=0, help="of the choice of processes and moments")
    run_options(p, "soak")
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    o, rest = parser().parse_known_args(arguments)
    folder, console, draw = choose_new(o.runs, o.name, "soak"), new_console(), random.Random(o.soak_seed)
    words = ["train", "--steps", o.steps, "--checkpoint-every", max(5, o.steps // 50), "--batch", 8, "--log-every", 1]
    if not o.kills_only:
        words += ["--nonfinite", "skip", "--spoil", draw.randint(3, o.steps - 3)]
    words += ["--workers", o.processes, *rest, "--runs", folder]

    def start(run: Path, processes: int = o.processes) -> Group:
        resume = ["--resume"] if (run / "config.json").is_file() else []
        return training_group([*map(str, words), "--name", run.name, *resume], processes, quiet=True)

    reference = o.reference_processes or o.processes
    console.print(f"{o.steps} steps, first undisturbed in {reference} processes; writing to {folder}", highlight=False)
    folder.mkdir(parents=True)
    start(folder / "run-0", reference).wait()
    undisturbed, events, number = outcome(folder / "run-0"), [], 0
    while len(events) < o.kills:
        number += 1
        run, wanted = folder / f"run-{number}", o.kills - len(events)
        done = killed(run, start, min(wanted, o.in_a_row or wanted), step_of(folder / "run-0"), draw)
        recovered = repr(outcome(run)) == repr(undisturbed)  # one loss may be NaN
        events += [event | {"run": number, "recovered": recovered} for event in done]
        write_json(folder / "soak.json", events)
    good = sum(event["recovered"] for event in events)
    title = f"{folder.name}: {good} of {len(events)} disturbances in {o.steps} steps recovered bitwise"
    show(console, title, COLUMNS, events, NOTES, folder / "table.md")
    return int(not all(event["recovered"] and event["named"] for event in events))


def killed(
    run: Path, start: Callable[[Path], Group], kills: int, last_step: int, draw: random.Random
) -> list[dict[str, Any]]:
    """One run, of which a process is killed at random moments; resumed after each, and finished.

    Returns:
        What was done when, and what the run said to it; fewer than `kills` where the run was over before.
    """
    done = []
    for left in range(kills, 0, -1):
        group, first = start(run), newest(run) + 1
        # On average the kills divide what is left of the run equally.
        room = max(0, last_step - 2 - first)
        target = first + draw.randint(0, min(room, 2 * room // (left + 1)))
        if group.end_or(lambda target=target: step_of(run) >= target):
            time.sleep(draw.uniform(0, 0.1))
        moment = "writing a checkpoint" if list(run.glob("checkpoints/*/*tmp*")) else "training"
        victim = draw.randrange(len(group.processes))
        group.processes[victim].kill()
        try:
            group.wait()
            break  # it was finished before
        except UserError as error:
            said = str(error)
        if "\n" in said:
            raise UserError(f"a kill after step {step_of(run)} ended in more than one sentence: {said}")
        named = said.startswith(f"process {victim} was killed by SIGKILL")
        done.append({"step": step_of(run), "moment": moment, "resumed": newest(run), "said": said, "named": named})
    if not done:
        raise UserError("the run is too short to be disturbed; give it more --steps")
    if not (run / "results.json").is_file():
        start(run).wait()
    return done


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
