"""Processes that train together: joined by `jax.distributed`, started here or by a cluster, stopped all at once.

A process that fails writes down why before it goes; its peers then lose their connection to it and fail, too. The first
cause is what the user gets to see.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import UserError
from experiments.lib.errors import line_of
from experiments.lib.launch import end_all, free_port, start

__all__ = [
    "Failed",
    "Failure",
    "Group",
    "Interrupted",
    "agree",
    "first_cause",
    "leave",
    "stop_on_signals",
]

# How the failure of another process looks from here.
LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "gloo",
    "unavailable",
    "heartbeat",
)
LOST += ("deadline_exceeded", "coordination", "peer", "barrier")
PATIENCE = 30.0  # seconds that processes have to stop together, before they are killed
ROOM = 2**16  # bytes without which a process cannot say why it fails
TAIL = 15  # lines of a log that are shown


class Failed(Exception):
    """A process failed; str() says which and why, in one line and the end of its log."""


class Interrupted(KeyboardInterrupt):
    """Somebody asked for a stop."""


class Failure(NamedTuple):
    """When (seconds since the epoch) which process failed, with what; whether the user can mend it."""

    time: float
    process: int
    message: str
    user: bool

    @property
    def secondary(self) -> bool:
        """Whether it was only left alone by another that failed before."""
        return not self.user and any(word in self.message.lower() for word in LOST)


# ------------------------------------------------------------------------------------------------
# Within a process


def agree(decide: Callable[[], Any]) -> Any:
    """What process 0 decides (JSON), on all processes; a UserError of its, too."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return decide()
    content: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            content = {"value": decide()}
        except Exception as error:
            content = {"error": line_of(error)}
            if content["error"] is None:
                raise
    text = np.frombuffer(json.dumps(content).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if jax.process_index() == 0 else np.zeros(length, np.uint8)
    content = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).astype(np.uint8).tobytes())
    if "error" in content:
        raise UserError(content["error"])
    return content["value"]


def stop_on_signals(alone: bool) -> Callable[[int], bool]:
    """Has SIGINT and SIGTERM end the training after a step that all processes agree on; another SIGINT at once.

    With others, JAX itself catches SIGTERM, which is what clusters send before they take a machine away.

    Args:
        alone: there are no other processes.

    Returns:
        Whether to stop after a step; to be asked after each, on all processes.
    """
    from jax.experimental import multihost_utils

    asked = threading.Event()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def ask(*_: Any) -> None:
        signal.signal(signal.SIGINT, interrupt)
        if alone:
            asked.set()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, ask)
    if alone:
        signal.signal(signal.SIGTERM, ask)
    return (lambda step: asked.is_set()) if alone else multihost_utils.reached_preemption_sync_point


def leave(logs: Path | None, process: int, error: BaseException) -> None:
    """Ends this process because of an error, after writing it down for the others. Does not return.

    There is no orderly way out: JAX would wait for processes that are gone, or wait for this one.
    """
    line = line_of(error)
    user = line is not None
    message = describe(error) if line is None else line
    failure = Failure(time.time(), process, message, user)
    logs = logs if logs is not None and (logs.exists() or (logs.parent / "config.json").is_file()) else None
    with contextlib.suppress(OSError):  # the disk may be full
        if logs is not None:
            logs.mkdir(exist_ok=True)
            draft = logs / f"failed-{process}.tmp"
            draft.write_text(json.dumps(failure._asdict()))
            os.replace(draft, logs / f"failed-{process}.json")
    if failure.secondary:
        message = f"lost the other processes: {message}"
        time.sleep(1.0)  # the one that failed first may still be writing
        first = None if logs is None else first_cause(logs)
        if first is not None and not first.secondary:
            message = f"process {first.process} failed: {first.message}"
    elif not user:
        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # so may that of the logs
        print(f"error: {message}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(2 if user else 1)


def describe(error: BaseException) -> str:
    """An error on one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def first_cause(logs: Path) -> Failure | None:
    """What failed first, of what was written down: the earliest that is no consequence of another."""
    found = []
    for path in logs.glob("failed-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(Failure(**json.loads(path.read_text())))
    return min(found, key=lambda failure: (failure.secondary, failure.time), default=None)


# ------------------------------------------------------------------------------------------------
# Starting them here


class Group:
    """Local processes that start and end together.

    Args:
        arguments: the same for all; the address of the coordinator is added.
        number: how many.
        logs: folder for what they print; process 0 prints to the terminal.
        quiet: process 0 prints to its log, too.
        program: that the arguments are for.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        number: int,
        logs: Path,
        quiet: bool = False,
        program: Sequence[str] = (sys.executable, "-m", "experiments"),
    ):
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        for path in logs.glob("failed-*.json"):
            path.unlink()
        # Several processes share a few cores here, whatever accelerators there are.
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        joins = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(number), "--logs", str(logs)]
        self.processes: list[subprocess.Popen] = []
        try:
            for i in range(number):
                words = [*program, *arguments, *joins, "--process-id", str(i)]
                with self.log(i).open("w") as log:
                    out = None if i == 0 and not quiet else log
                    # Ctrl-C reaches this process alone, which then tells the others how to stop.
                    pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": log}
                    self.processes.append(start(words, env=environment, **pipes))
        except BaseException:
            self.kill()
            raise

    def log(self, process: int) -> Path:
        return self.logs / f"process-{process}.log"

    def wait(self) -> None:
        """Waits for all to end; on SIGINT and SIGTERM has them stop after a common step.

        Raises:
            UserError, Failed: one failed; then all are stopped.
            Interrupted: they were asked to stop, and did.
        """

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, interrupt) if in_main_thread() else None
        try:
            try:
                while any(code is None for code in self.codes()) and not self.failed():
                    time.sleep(0.02)
            except KeyboardInterrupt:
                self.stop()
                raise Interrupted from None
            if self.failed():
                raise self.failure()
            if any(self.codes()):
                raise Interrupted
        finally:
            self.kill()
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def failed(self) -> bool:
        return any(code not in (None, 0, 130) for code in self.codes())

    def stop(self) -> None:
        """Asks them to stop after a common step; waits until they have, or until a second interrupt."""
        with contextlib.suppress(ProcessLookupError):
            self.processes[0].send_signal(signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(code is None for code in self.codes()) and not self.failed():
            time.sleep(0.02)

    def kill(self) -> None:
        end_all(self.processes)

    def failure(self) -> Exception:
        """The first cause, once those that fail have had time to say why."""
        sudden = self.killed()
        end = time.monotonic() + 2.0
        while not sudden and time.monotonic() < end:
            first = first_cause(self.logs)
            if first is not None and not first.secondary:
                if first.user:
                    return UserError(first.message)
                return self.failed_with(first.process, first.message)
            time.sleep(0.05)
            sudden = self.killed()
        if sudden:
            name = signal.Signals(-self.processes[sudden[0]].returncode).name
            more = " (out of memory?)" if name == "SIGKILL" else ""
            return Failed(f"process {sudden[0]} was killed by {name}{more}; all were stopped")
        first = first_cause(self.logs)
        if first is None and shutil.disk_usage(self.logs).free < ROOM:
            return UserError(f"{self.logs}: no space left on device; make room")
        process = first.process if first else next(i for i, code in enumerate(self.codes()) if code not in (None, 0))
        return self.failed_with(
            process, first.message if first else f"exit status {self.processes[process].returncode}"
        )

    def killed(self) -> list[int]:
        """Processes that a signal ended, but for those that gave up because they were left alone (SIGABRT)."""
        return [i for i, code in enumerate(self.codes()) if code is not None and code < 0 and code != -signal.SIGABRT]

    def failed_with(self, process: int, message: str) -> Failed:
        lines = self.log(process).read_text(errors="replace").strip().splitlines()[-TAIL:]
        tail = "".join(f"\n  {line}" for line in lines)
        return Failed(f"process {process} failed: {message}; all were stopped. {self.log(process)} ends:{tail}")


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
