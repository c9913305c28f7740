"""Workers that answer requests: each on a line of JSON, all asked at once."""

import contextlib
import gc
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.cli import UserError
from experiments.lib.gloo import warm_up
from experiments.lib.processes import Group, or_die

__all__ = ["ONE_PROCESS", "Pool", "Tasks", "answer", "note", "or_die", "requests", "serve"]

ANSWER, NOTE = "answer ", "note "
ONE_PROCESS = "one process"  # in place of an address: all workers are devices of it


class Pool:
    """A context with one process for each command; on leaving it, none is left.

    A process prints one line `answer JSON` for each line of JSON that it reads, and may print notes about its progress;
    show takes those of process 0.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = lambda _: None,
    ):
        self.commands, self.environment, self.show = commands, environment, show
        self.lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def __enter__(self) -> "Pool":
        self.logs = tempfile.TemporaryDirectory()
        piped = lambda _: subprocess.PIPE
        self.group = Group(self.commands, Path(self.logs.name), self.environment, piped, text=True)
        self.processes = self.group.processes
        for i, process in enumerate(self.processes):
            threading.Thread(target=self.read, args=(i, process.stdout), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.group.kill()
        self.logs.cleanup()

    def read(self, i: int, stream: Any) -> None:
        with stream:
            for line in stream:
                self.lines.put((i, line.rstrip("\n")))
        self.lines.put((i, None))

    def ask(self, timeout: float = 600.0, **request: Any) -> list[Any]:
        """Has every process do the same; their answers."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # its end is in the queue
                process.stdin.write(json.dumps(request) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
                process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        return self.hear(timeout)

    def hear(self, timeout: float = 600.0) -> list[Any]:
        """One answer of every process: to what was asked, or that it is ready."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.processes):
            i, line = self.next_line(timeout)
            if line is None:
                self.processes[i].wait()
                raise self.group.failure()
            if line.startswith(ANSWER):
                answers[i] = json.loads(line[len(ANSWER) :])
            elif line.startswith(NOTE) and i == 0:
                self.show(line[len(NOTE) :])
        return [answers[i] for i in range(len(answers))]

    def wait(self, timeout: float = 600.0) -> list[list[str]]:
        """Until all have ended; the lines that each printed."""
        printed: list[list[str]] = [[] for _ in self.processes]
        running = set(range(len(self.processes)))
        while running:
            i, line = self.next_line(timeout)
            if line is not None:
                printed[i].append(line)
                continue
            running.discard(i)
            if self.processes[i].wait():
                raise self.group.failure()
        return printed

    def next_line(self, timeout: float) -> tuple[int, str | None]:
        try:
            return self.lines.get(timeout=timeout)
        except queue.Empty:
            raise UserError(f"nothing was heard of the workers for {timeout:g} s") from None


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
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(address, workers, number)
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
