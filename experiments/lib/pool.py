"""Processes that work together: started together, asked together, and stopped together."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.lib.cli import UserError
from experiments.lib.launch import end_all, start

__all__ = ["Pool", "answer", "note", "or_die", "requests"]

ANSWER, NOTE = "answer ", "note "


class Pool:
    """A context with one process for each command; on leaving it, none is left.

    Where one fails the others, which wait for it, are stopped, and its error is the one that is shown.
    A process prints one line `answer JSON` for each line of JSON that it reads, and may print notes about its progress.
    They do not see the terminal's Ctrl-C: the one who started them stops them.

    Args:
        commands: one for each process.
        environment: variables that they get besides ours.
        show: takes the notes of process 0.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = lambda _: None,
    ):
        self.commands, self.environment, self.show = commands, {**os.environ, **(environment or {})}, show
        self.processes: list[subprocess.Popen] = []
        self.lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def __enter__(self) -> "Pool":
        self.errors = [tempfile.TemporaryFile("w+") for _ in self.commands]  # noqa: SIM115
        try:
            for i, (words, errors) in enumerate(zip(self.commands, self.errors, strict=True)):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                process = start(words, env=self.environment, text=True, **pipes)
                self.processes.append(process)
                threading.Thread(target=self.read, args=(i, process.stdout), daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        end_all(self.processes)
        for errors in self.errors:
            errors.close()

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
                raise self.failure(i)
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
                raise self.failure(i)
        return printed

    def next_line(self, timeout: float) -> tuple[int, str | None]:
        try:
            return self.lines.get(timeout=timeout)
        except queue.Empty:
            raise UserError(f"nothing was heard of the workers for {timeout:g} s") from None

    def failure(self, i: int) -> UserError:
        code = self.processes[i].wait()
        self.errors[i].seek(0)
        said = [line for line in self.errors[i].read().splitlines() if line.strip()]
        named = [line for line in said if re.match(r"(error|[\w.]*(Error|Exception|Interrupt)): ", line)]
        reason = next(iter(reversed(named or said)), "").removeprefix("error: ")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        return UserError(f"worker {i} {how}: {reason}" if reason else f"worker {i} {how}")


# ------------------------------------------------------------------------------------------------
# In the processes


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def answer(content: Any) -> None:
    print(ANSWER + json.dumps(content), flush=True)


def note(text: str) -> None:
    print(NOTE + text, flush=True)


@contextlib.contextmanager
def or_die() -> Iterator[None]:
    """Ends the process at an error without a farewell to the others, for whom it would wait: first comes the cause."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
