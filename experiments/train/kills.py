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
from experiments.lib.processes import Failed, Group
from experiments.lib.report import new_console, show

__all__ = ["main"]

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
    p.add_argument(
        "--reference-processes",
        type=at_least(1),
        default=None,
        help="of the run without kills; else as many as --processes",
    )
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
    folder = choose_new(o.runs, o.name, "kills")
    console = new_console()
    reference = o.reference_processes or o.processes
    options = [*TRAIN, "--workers", str(o.processes), *rest]
    say = lambda words: console.print(words, highlight=False, soft_wrap=True)
    runs = Killed(folder, [reference, o.processes], options, random.Random(o.kill_seed), say)
    console.print(f"first a run in {reference} process{'es' * (reference > 1)} without kills; writing to {folder}")
    runs.one(0, 0)
    kills: list[Kill] = []
    while len(kills) < o.kills:
        number = 1 + max((kill.run for kill in kills), default=0)
        of_this = runs.one(number, min(o.in_a_row, o.kills - len(kills)))
        recovered = runs.outcome(number) == runs.outcome(0)
        kills += [kill._replace(recovered=recovered) for kill in of_this]
        end = "bit for bit the run without kills" if recovered else "NOT the run without kills"
        say(f"run {number}: {end} ({len(kills)} of {o.kills} kills)")
        write_json(folder / "kills.json", [kill._asdict() for kill in kills])
    good = sum(kill.recovered for kill in kills)
    title = f"{folder.name}: {good} of {len(kills)} kills recovered bitwise"
    rows = [
        [str(i), *map(str, (k.run, k.process, k.step, k.moment, k.resumed)), *(yes(x) for x in (k.named, k.recovered))]
        for i, k in enumerate(kills, 1)
    ]
    show(console, title, HEAD, rows, NOTES, folder / "table.md")
    return 0 if good == len(kills) and all(kill.named for kill in kills) else 1


def yes(value: bool) -> str:
    return "yes" if value else "NO"


class Killed:
    """Runs of the same training, each killed now and then.

    Args:
        folder: for all runs; run 0 is the one without kills.
        processes: of run 0, and of each other run.
        options: of train.
        draw: of processes and moments.
        say: prints a line.
    """

    def __init__(
        self,
        folder: Path,
        processes: list[int],
        options: list[str],
        draw: random.Random,
        say: Callable[[str], None],
    ):
        self.folder, self.processes, self.options, self.draw, self.say = folder, processes, options, draw, say
        self.folder.mkdir(parents=True)

    def one(self, number: int, kills: int) -> list[Kill]:
        """One run: killed so many times, resumed after each, and finished."""
        run, done = self.folder / f"run-{number}", []
        while len(done) < kills:
            group = self.start(number, resume=bool(done))
            killed = self.kill(group, run, number, kills - len(done))
            if killed is None:  # it was finished before its time came
                if not done:
                    raise UserError("the run is too short to be killed; give it more --steps")
                break
            done.append(killed)
        if not (run / "results.json").is_file():
            self.start(number, resume=bool(done)).wait()
        return done

    def start(self, number: int, resume: bool) -> Group:
        name = f"run-{number}"
        words = ["train", *self.options, "--log-every", "1", "--runs", str(self.folder), "--name", name]
        run = self.folder / name
        if resume and (run / "config.json").is_file():
            words.append("--resume")
        return Group(words, self.processes[number > 0], run / "logs", quiet=True)

    def kill(self, group: Group, run: Path, number: int, left: int) -> Kill | None:
        """Waits for a random moment and kills a random process; so many kills are left for this run. None: too late."""
        victim, journal, first = self.draw.randrange(self.processes[1]), Journal(run), newest(run) + 1
        # On average the kills divide what is left of the run equally.
        room = max(0, self.last_step() - 2 - first)
        target = first + self.draw.randint(0, min(room, 2 * room // (left + 1)))
        delay = self.draw.uniform(0, 0.1)
        while step_of(journal) < target:
            if group.failed() or all(code == 0 for code in group.codes()):
                group.wait()  # raises what failed
                return None
            time.sleep(0.005)
        time.sleep(delay)
        moment = "writing a checkpoint" if list(run.glob("checkpoints/*/*tmp*")) else "training"
        group.processes[victim].kill()
        step, message = step_of(journal), ""
        try:
            group.wait()
        except Failed as error:
            message = str(error)
        if not message:
            return None
        named = message.startswith(f"process {victim} was killed by SIGKILL")
        kill = Kill(number, victim, step, moment, newest(run), named)
        self.say(f"run {number}: process {victim} killed after step {step} ({moment}), goes on from {kill.resumed}")
        return kill

    def last_step(self) -> int:
        return Journal(self.folder / "run-0").lines()[-1]["step"]

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
