"""Kills processes of a training at random, resumes it, and compares what comes out with a run that nobody disturbed.

Parameters and optimizer state (memories, shifts, counters, keys) must be the same bit for bit, and so must every loss.
Options that are not listed here are those of `train`: --method, --steps, --checkpoint-every, ...
Writes to runs/NAME: a folder for each run, kills.json and table.md.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import Parser, UserError, at_least, choose_new, one_thread
from experiments.lib.folders import Journal, run_options, write_json
from experiments.lib.processes import Group, training_group
from experiments.lib.report import new_console, show

__all__ = ["Disturbed", "main", "newest", "step_of"]

# Short, with many checkpoints, so that many kills hit one that is being written.
TRAIN = ["--steps", "60", "--batch", "8", "--checkpoint-every", "7"]
HEAD = ["kill", "run", "process", "SIGKILL after step", "moment", "went on from step", "first cause named", "recovered"]
NOTES = """\
after step: the last one that was logged. moment: what was going on, as far as the folder shows. first cause named: the
message of the run says which process was killed. recovered: parameters, optimizer state and all losses of the finished
run are bit for bit those of the run without kills."""


def parser() -> Parser:
    p = Parser(prog="python -m experiments kills", description=(__doc__ or "").split("\n\n")[0])
    p.epilog = "All other options are those of train; python -m experiments train --help lists them."
    p.add_argument("--kills", type=at_least(1), default=20, help="how many")
    p.add_argument("--in-a-row", type=at_least(1), default=1, help="kills of one run")
    p.add_argument("--processes", type=at_least(1), default=3, help="processes of each run")
    p.add_argument("--reference-processes", type=at_least(1), help="of the run without kills; else as --processes")
    p.add_argument("--kill-seed", type=at_least(0), default=0, help="of the choice of processes and moments")
    run_options(p, "kills")
    return p


class Kill(NamedTuple):
    """One kill: of which process in which run, when, and what became of it."""

    run: int
    process: int
    step: int
    moment: str
    resumed: int
    named: bool
    recovered: bool = False


def main(arguments: Sequence[str]) -> int:
    one_thread()
    o, rest = parser().parse_known_args(arguments)
    folder, console = choose_new(o.runs, o.name, "kills"), new_console()
    reference = o.reference_processes or o.processes
    options = [*TRAIN, "--workers", str(o.processes), *rest]
    say = lambda words: console.print(words, highlight=False, soft_wrap=True)
    say(f"first a run in {reference} process{'es' * (reference > 1)} without kills; writing to {folder}")
    runs = Disturbed(folder, [reference, o.processes], options, random.Random(o.kill_seed), say)
    kills: list[Kill] = []
    while len(kills) < o.kills:
        number = 1 + max((kill.run for kill in kills), default=0)
        of_this = one(runs, number, min(o.in_a_row, o.kills - len(kills)))
        recovered = runs.outcome(number) == runs.outcome(0)
        kills += [kill._replace(recovered=recovered) for kill in of_this]
        end = "bit for bit the run without kills" if recovered else "NOT the run without kills"
        say(f"run {number}: {end} ({len(kills)} of {o.kills} kills)")
        write_json(folder / "kills.json", [kill._asdict() for kill in kills])
    good = sum(kill.recovered for kill in kills)
    yes = lambda value: "yes" if value else "NO"
    rows = [[str(i), *map(str, kill[:5]), *map(yes, kill[5:])] for i, kill in enumerate(kills, 1)]
    title = f"{folder.name}: {good} of {len(kills)} kills recovered bitwise"
    show(console, title, HEAD, rows, NOTES, folder / "table.md")
    return 0 if good == len(kills) and all(kill.named for kill in kills) else 1


def one(runs: "Disturbed", number: int, kills: int) -> list[Kill]:
    """One run: killed so many times, resumed after each, and finished."""
    done: list[Kill] = []
    run, journal = runs.folder / f"run-{number}", Journal(runs.folder / f"run-{number}")
    while len(done) < kills:
        victim, delay = runs.draw.randrange(runs.processes[1]), runs.draw.uniform(0, 0.1)
        group = runs.start(number, resume=bool(done))
        message = ""
        if runs.until_a_moment(group, number, kills - len(done)):
            time.sleep(delay)
            moment = "writing a checkpoint" if list(run.glob("checkpoints/*/*tmp*")) else "training"
            group.processes[victim].kill()
            step, message = step_of(journal), runs.last_words(group)
        if not message:  # it was finished before its time came
            if not done:
                raise UserError("the run is too short to be killed; give it more --steps")
            break
        named = message.startswith(f"process {victim} was killed by SIGKILL")
        done.append(Kill(number, victim, step, moment, newest(run), named))
        runs.say(f"run {number}: process {victim} killed after step {step} ({moment}), goes on from {newest(run)}")
    runs.finish(number, resume=bool(done))
    return done


class Disturbed:
    """Runs of the same training, of which run 0 is left alone, and made when this is.

    processes: of run 0, and of each other run. options: of train. draw: of processes and moments.
    """

    def __init__(
        self, folder: Path, processes: list[int], options: list[str], draw: random.Random, say: Callable[[str], None]
    ):
        self.folder, self.processes, self.options, self.draw, self.say = folder, processes, options, draw, say
        self.folder.mkdir(parents=True)
        self.finish(0, resume=False)
        self.last_step = step_of(Journal(folder / "run-0"))

    def start(self, number: int, resume: bool) -> Group:
        name = f"run-{number}"
        words = ["train", *self.options, "--log-every", "1", "--runs", str(self.folder), "--name", name]
        run = self.folder / name
        if resume and (run / "config.json").is_file():
            words.append("--resume")
        return training_group(words, self.processes[number > 0], run / "logs", quiet=True)

    def finish(self, number: int, resume: bool) -> None:
        if not (self.folder / f"run-{number}" / "results.json").is_file():
            self.start(number, resume).wait()

    def until_a_moment(self, group: Group, number: int, left: int) -> bool:
        """Waits for a random moment of a run, for which so many disturbances are left. False: it was over before."""
        journal, first = Journal(self.folder / f"run-{number}"), newest(self.folder / f"run-{number}") + 1
        # On average the disturbances divide what is left of the run equally.
        room = max(0, self.last_step - 2 - first)
        target = first + self.draw.randint(0, min(room, 2 * room // (left + 1)))
        if group.end_or(lambda: step_of(journal) >= target):
            return True
        group.wait()  # raises what failed
        return False

    def last_words(self, group: Group, until: Callable[[], bool] = lambda: False) -> str:
        """The message with which a group ends, if it fails; it is stopped when something else has happened before."""
        try:
            if group.end_or(until):
                group.kill()
            else:
                group.wait()
        except UserError as error:
            return str(error)
        return ""

    def outcome(self, number: int) -> Any:
        """Everything that must be the same: bits of the state, losses of all steps."""
        run = self.folder / f"run-{number}"
        (row,) = json.loads((run / "results.json").read_text())
        losses = {line["step"]: line["loss"] for line in Journal(run).lines()}
        return row["sha256"], row["sha256_optimizer"], row["accuracy"], losses


def step_of(journal: Journal) -> int:
    lines = journal.lines()
    return lines[-1]["step"] if lines else 0


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name) for path in run.glob("checkpoints/*/*") if path.name.isdigit()), default=0)
