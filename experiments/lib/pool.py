"""Workers that answer requests: each on a line of JSON, all asked at once."""

import contextlib
import gc
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.lib.cli import UserError
from experiments.lib.gloo import warm_up
from experiments.lib.processes import Group, join, or_die

__all__ = ["ONE_PROCESS", "Pool", "Tasks", "answer", "note", "or_die", "requests", "serve"]

ANSWER, NOTE = "answer ", "note "
ONE_PROCESS = "one process"  # in place of an address: all workers are devices of it


class Pool:
    """A context with one process for each command; on leaving it, none is left.

    A process prints one line `answer JSON` for each line of JSON that it reads, and may print notes about its progress;
    `show` takes those of process 0.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None):
        self.commands, self.environment = commands, environment
        self.show: Callable[[str], None] = lambda note: None
        self.lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def __enter__(self) -> "Pool":
        self.group = Group(self.commands, self.environment, output=lambda _: subprocess.PIPE, text=True)
        self.processes = self.group.processes
        for i, process in enumerate(self.processes):
            threading.Thread(target=self.read, args=(i, process.stdout), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.group.kill()

    def read(self, i: int, stream: Any) -> None:
        with stream:
            for line in stream:
                self.lines.put((i, line.rstrip("\n")))
        self.lines.put((i, None))

    def ask(self, timeout: float = 600.0, **request: Any) -> list[Any]:
        """Has every process do the same; their answers."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # its end is in the queue
                print(json.dumps(request), file=process.stdin, flush=True)
        return self.hear(timeout)

    def hear(self, timeout: float = 600.0) -> list[Any]:
        """One answer of every process: to what was asked, or that it is ready."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.processes):
            try:
                i, line = self.lines.get(timeout=timeout)
            except queue.Empty:
                raise UserError(f"nothing was heard of the workers for {timeout:g} s") from None
            if line is None:
                self.processes[i].wait()
                raise self.group.failure()
            if line.startswith(ANSWER):
                answers[i] = json.loads(line.removeprefix(ANSWER))
            elif line.startswith(NOTE) and i == 0:
                self.show(line.removeprefix(NOTE))
        return [answers[i] for i in range(len(answers))]


# ------------------------------------------------------------------------------------------------
# In the processes


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def answer(content: Any) -> None:
    print(ANSWER + json.dumps(content), flush=True)


def note(text: str) -> None:
    print(NOTE + text, flush=True)


def serve(address: str, workers: int, number: int, do: Callable[..., Any]) -> None:
    """Joins the other workers and answers `do(**request)` until there are no more requests."""
    import jax

    with or_die():
        if address == ONE_PROCESS:
            jax.config.update("jax_num_cpu_devices", workers)
        else:
            join(address, workers, number)
            warm_up()
        answer("ready")
        for request in requests():
            answer(do(**request))


class Tasks:
    """What to `serve`: a request named like a maker begins a task, any other is a method of the present one.

    makers: each makes a task, whose `described` is the answer.
    """

    def __init__(self, **makers: Callable[..., Any]):
        self.makers, self.task = makers, None

    def __call__(self, what: str, **request: Any) -> Any:
        if what not in self.makers:
            return getattr(self.task, what)(**request)
        self.task = None
        gc.collect()  # what the last one held
        self.task = self.makers[what](**request)
        return self.task.described
