"""A long training that is disturbed in every way there is, against the same training that nobody disturbs.

Processes are killed at random; once the disk is full (no file may grow beyond 64 kB, which looks alike); once a
checkpoint is corrupted; and in both trainings a batch holds NaN once, for which all workers skip a step together. Every
disturbance must end in one sentence, and the run must go on from there to the same parameters, optimizer state and
losses, bit for bit. Options that are not listed here are those of `train`.
Writes to runs/NAME: both runs, soak.json and table.md.
"""

import random
import resource
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from experiments.lib.cli import Parser, UserError, at_least, choose_new, one_thread
from experiments.lib.folders import Journal, run_options, write_json
from experiments.lib.processes import Group
from experiments.lib.report import new_console, show
from experiments.train.kills import Disturbed, newest, step_of

__all__ = ["main"]

HEAD = ["disturbance", "after step", "goes on from", "what it said"]
NOTES = """\
after step: the last one that was logged. goes on from: the newest checkpoint. what it said: the message of the run."""

ROOM = 2**16  # bytes of a file while the disk is full: enough to say why a process fails


class Event(NamedTuple):
    """What was done after which step, and what the run said to it."""

    what: str
    step: int
    resumed: int
    said: str


def parser() -> Parser:
    p = Parser(prog="python -m experiments soak", description=(__doc__ or "").split("\n\n")[0])
    p.epilog = "All other options are those of train; python -m experiments train --help lists them."
    p.add_argument("--steps", type=at_least(20), default=10_000, help="steps of the training")
    p.add_argument("--processes", type=at_least(2), default=4, help="processes, with a worker each")
    p.add_argument("--kills", type=at_least(1), default=10, help="processes that are killed")
    p.add_argument("--soak-seed", type=at_least(0), default=0, help="of the choice of processes and moments")
    run_options(p, "soak")
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    o, rest = parser().parse_known_args(arguments)
    folder, console = choose_new(o.runs, o.name, "soak"), new_console()
    draw = random.Random(o.soak_seed)
    say = lambda words: console.print(words, highlight=False, soft_wrap=True, markup=False)
    every = ["--steps", str(o.steps), "--checkpoint-every", str(max(5, o.steps // 50)), "--batch", "8"]
    spoiled = ["--nonfinite", "skip", "--spoil", str(draw.randint(3, o.steps - 3)), "--workers", str(o.processes)]
    say(f"{o.steps} steps in {o.processes} processes, first without disturbances; writing to {folder}")
    soak = Soak(folder, [o.processes, o.processes], [*every, *spoiled, *rest], draw, say)
    events = soak.disturbed(o.kills)
    same = repr(soak.outcome(0)) == repr(soak.outcome(1))  # one loss is NaN
    write_json(folder / "soak.json", [event._asdict() for event in events])
    end = "bit for bit the undisturbed run" if same else "NOT the undisturbed run"
    rows = [[e.what, str(e.step), str(e.resumed), e.said.replace(f"{folder}/", "")[:200]] for e in events]
    title = f"{folder.name}: {len(events)} disturbances in {o.steps} steps; {end}"
    show(console, title, HEAD, rows, NOTES, folder / "table.md")
    return int(not same)


class Soak(Disturbed):
    """Run 0 is left alone, run 1 is disturbed."""

    def disturbed(self, kills: int) -> list[Event]:
        """Run 1, disturbed at random moments and resumed after each."""
        self.run = self.folder / "run-1"
        names = ["kill"] * kills + ["full disk", "corrupted checkpoint"]
        self.draw.shuffle(names)
        done: list[Event] = []
        for number, name in enumerate(names):
            group = self.start(1, resume=bool(done))
            if not self.until_a_moment(group, 1, len(names) - number):
                break
            step, said = step_of(Journal(self.run)), self.disturb(name, group) or "nothing"
            if "\n" in said:
                raise UserError(f"{name} after step {step} ended in more than one sentence: {said}")
            done.append(Event(name, step, newest(self.run), said))
            self.say(f"after step {step}: {name}; {said.replace(str(self.folder) + '/', '')[:150]}")
        self.finish(1, resume=bool(done))
        return done

    def disturb(self, name: str, group: Group) -> str:
        """Does it, and returns what the run said."""
        if name == "corrupted checkpoint":
            group.kill()
            return self.corrupt()
        if name == "kill":
            group.processes[self.draw.randrange(len(group.processes))].kill()
        else:
            for process in group.processes:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
        return self.last_words(group)

    def corrupt(self) -> str:
        """Flips a bit in the largest file of the newest checkpoint, tries to resume, and mends it again."""
        files = [path for path in self.run.glob("checkpoints/*/[0-9]*/**/*") if path.is_file()]
        if not files:
            return "nothing: there was no checkpoint yet"
        path = max(files, key=lambda path: path.stat().st_size)
        first, lines, backup = newest(self.run), self.run / "metrics.jsonl", self.folder / "kept"
        shutil.copytree(self.run / "checkpoints", backup)
        content = bytearray(path.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content)
        before = lines.read_bytes()
        said = self.last_words(self.start(1, resume=True), lambda: newest(self.run) > first)
        shutil.rmtree(self.run / "checkpoints")
        backup.rename(self.run / "checkpoints")
        lines.write_bytes(before)
        return said
