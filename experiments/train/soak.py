"""Trainings that are disturbed at random and resumed, against the same training that nobody disturbs.

Processes are killed; once the disk is full (no file may grow beyond 64 kB, which looks alike); once a checkpoint is
corrupted; and in all trainings a batch holds NaN once, for which all workers skip a step together. Every disturbance
must end in one sentence, which names the process that was killed, and the run must go on from there to the same
parameters, optimizer state (memories, shifts, counters, keys) and losses, bit for bit. Options that are not listed here
are those of `train`. Writes to runs/NAME: all runs, soak.json and table.md.
"""

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import Parser, UserError, at_least, choose_new, one_thread
from experiments.lib.folders import Journal, run_options, write_json
from experiments.lib.processes import Group, training_group
from experiments.lib.report import new_console, show
from experiments.lib.run import parser_of

__all__ = ["main"]

KILL, FULL, CORRUPTED = "kill", "full disk", "corrupted checkpoint"
ROOM = 2**16  # bytes of a file while the disk is full: enough to say why a process fails
COLUMNS = {
    "run": "{run}",
    "disturbance": "{what}",
    "after step": "{step}",
    "moment": "{moment}",
    "goes on from": "{resumed}",
    "what it said": "{said:.200}",
    "recovered": lambda event: "yes" if event.recovered else "NO",
}
NOTES = """\
after step: the last one that was logged. moment: what was going on, as far as the folder shows. goes on from: the
newest checkpoint. what it said: the message of the run. recovered: parameters, optimizer state and all losses of the
finished run are bit for bit those of the run without disturbances."""


class Event(NamedTuple):
    """What was done to which run, when, and what the run said to it. named: it said so of a kill."""

    run: int
    what: str
    step: int
    moment: str
    resumed: int
    said: str
    named: bool
    recovered: bool = False


def parser() -> Parser:
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
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    o, rest = parser().parse_known_args(arguments)
    folder, console = choose_new(o.runs, o.name, "soak"), new_console()
    draw = random.Random(o.soak_seed)
    say = lambda words: console.print(words, highlight=False, soft_wrap=True, markup=False)
    options = ["--steps", o.steps, "--checkpoint-every", max(5, o.steps // 50), "--batch", 8, "--workers", o.processes]
    names = [KILL] * o.kills
    if not o.kills_only:
        options += ["--nonfinite", "skip", "--spoil", draw.randint(3, o.steps - 3)]
        names += [FULL, CORRUPTED]
        draw.shuffle(names)
    reference = o.reference_processes or o.processes
    say(f"{o.steps} steps, first without disturbances in {reference} processes; writing to {folder}")
    runs = Disturbed(folder, [reference, o.processes], [*map(str, options), *rest], draw, say)
    undisturbed, events, number = runs.outcome(0), [], 0
    while names:
        number += 1
        done = runs.disturbed(number, names[: o.in_a_row])
        recovered = repr(runs.outcome(number)) == repr(undisturbed)  # one loss may be NaN
        events += [event._replace(recovered=recovered) for event in done]
        write_json(folder / "soak.json", [event._asdict() for event in events])
        # What came too late for a run falls to the next one, unless a single run has all.
        names = names[len(done) :] if o.in_a_row else []
    good = sum(event.recovered for event in events)
    title = f"{folder.name}: {good} of {len(events)} disturbances in {o.steps} steps recovered bitwise"
    show(console, title, COLUMNS, events, NOTES, folder / "table.md")
    return int(good < len(events) or not all(event.named for event in events))


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
        self.last_step = step_of(self.run(0))

    def run(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    def start(self, number: int, resume: bool) -> Group:
        run = self.run(number)
        words = ["train", *self.options, "--log-every", "1", "--runs", str(self.folder), "--name", run.name]
        if resume and (run / "config.json").is_file():
            words.append("--resume")
        return training_group(words, self.processes[number > 0], run / "logs", quiet=True)

    def finish(self, number: int, resume: bool) -> None:
        if not (self.run(number) / "results.json").is_file():
            self.start(number, resume).wait()

    def disturbed(self, number: int, names: list[str]) -> list[Event]:
        """One run, disturbed at random moments, resumed after each, and finished."""
        run, done = self.run(number), []
        for left, name in zip(range(len(names), 0, -1), names, strict=True):
            group = self.start(number, resume=bool(done))
            if not self.until_a_moment(group, run, left):
                break
            time.sleep(self.draw.uniform(0, 0.1))
            moment = "writing a checkpoint" if list(run.glob("checkpoints/*/*tmp*")) else "training"
            victim = self.draw.randrange(len(group.processes))
            if name == KILL:
                group.processes[victim].kill()
            step, said = step_of(run), self.said_to(name, group, number)
            if not said and name == KILL:  # it was finished before its time came
                break
            if "\n" in said:
                raise UserError(f"{name} after step {step} ended in more than one sentence: {said}")
            named = name != KILL or said.startswith(f"process {victim} was killed by SIGKILL")
            event = Event(number, name, step, moment, newest(run), said.replace(f"{self.folder}/", ""), named)
            done.append(event)
            self.say(f"run {number}, after step {step} ({moment}): {name}; {event.said:.150}")
        if not done:
            raise UserError("the run is too short to be disturbed; give it more --steps")
        self.finish(number, resume=True)
        return done

    def until_a_moment(self, group: Group, run: Path, left: int) -> bool:
        """Waits for a random moment of a run, for which so many disturbances are left. False: it was over before."""
        first = newest(run) + 1
        # On average the disturbances divide what is left of the run equally.
        room = max(0, self.last_step - 2 - first)
        target = first + self.draw.randint(0, min(room, 2 * room // (left + 1)))
        if group.end_or(lambda: step_of(run) >= target):
            return True
        group.wait()  # raises what failed
        return False

    def said_to(self, name: str, group: Group, number: int) -> str:
        """What the run says to a disturbance, which is made unless it is a kill."""
        if name == CORRUPTED:
            group.kill()
            return self.corrupt(number)
        if name == FULL:
            for process in group.processes:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
        return last_words(group)

    def corrupt(self, number: int) -> str:
        """Flips a bit in the largest file of the newest checkpoint, tries to resume, and mends it again."""
        run, backup = self.run(number), self.folder / "kept"
        files = [path for path in run.glob("checkpoints/*/[0-9]*/**/*") if path.is_file()]
        if not files:
            return "nothing: there was no checkpoint yet"
        path = max(files, key=lambda path: path.stat().st_size)
        first, lines = newest(run), run / "metrics.jsonl"
        shutil.copytree(run / "checkpoints", backup)
        content = bytearray(path.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content)
        before = lines.read_bytes()
        said = last_words(self.start(number, resume=True), lambda: newest(run) > first)
        shutil.rmtree(run / "checkpoints")
        backup.rename(run / "checkpoints")
        lines.write_bytes(before)
        return said

    def outcome(self, number: int) -> Any:
        """Everything that must be the same: bits of the state, losses of all steps."""
        (row,) = json.loads((self.run(number) / "results.json").read_text())
        losses = {line["step"]: line["loss"] for line in Journal(self.run(number)).lines()}
        return row["sha256"], row["sha256_optimizer"], row["accuracy"], losses


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


def step_of(run: Path) -> int:
    """The last step that was logged."""
    lines = Journal(run).lines()
    return lines[-1]["step"] if lines else 0


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name) for path in run.glob("checkpoints/*/*") if path.name.isdigit()), default=0)
