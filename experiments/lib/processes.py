"""Processes that work together: started together, joined by `jax.distributed`, and stopped all at once.

A process that fails says why and ends at once; its peers then lose their connection to it and fail, too. How each ended
(see `ALONE`) tells the first cause from the rest, and that is what the user gets to see.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.lib.cli import UserError
from experiments.lib.errors import line_of
from experiments.lib.launch import end_all, free_port, handling, start

__all__ = ["STOPPED", "Failed", "Group", "agree", "farewell", "join", "leave", "or_die", "stopping", "training_group"]

# How the failure of another process looks from here.
LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "gloo", "unavailable")
LOST += ("heartbeat", "deadline_exceeded", "coordination", "peer", "barrier")
USER, DEFECT, ALONE = 2, 1, 3  # exit status: the user can mend it; it is a defect; others were lost before
RANKS = {USER: 1, DEFECT: 1, ALONE: 2, -signal.SIGABRT: 3}  # a kill is first, what JAX does when left alone last
STOPPED = 130
PATIENCE = 30.0  # seconds that processes have to stop together, before they are killed
LEAVING = 5.0  # seconds that JAX's farewell may take, and twice that for process 0
HEARTBEAT, SHUTDOWN = 20, 30  # seconds after which JAX ends processes that lost one another; 100 and 300 if not given
SILENT = 5.0  # seconds that a process waits for the others without a word
LAST_SECONDS = 2.0  # that processes have to say why they failed, and to clear up
TAIL = 15  # lines of a log that are shown


class Failed(UserError):
    """A process failed; str() says which and why, in one line, and the end of its log where it was a defect."""


# ------------------------------------------------------------------------------------------------
# Within a process


def leave(error: BaseException) -> NoReturn:
    """Says why this process fails, and ends it at once: an orderly way out would wait for processes that are gone."""
    if isinstance(error, KeyboardInterrupt):
        os._exit(STOPPED)
    line = line_of(error)
    status = USER
    if line is None:
        line = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".removesuffix(": ")
        status = ALONE if any(word in line.lower() for word in LOST) else DEFECT
    with contextlib.suppress(OSError):  # the disk of the log may be full
        if status == DEFECT:
            traceback.print_exception(error)
        print(f"error: {'lost the other processes: ' * (status == ALONE)}{line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def or_die() -> Iterator[None]:
    """Leaves the process at any error."""
    try:
        yield
    except BaseException as error:
        leave(error)


def join(coordinator: str | None, number: int | None, process: int | None, patience: float = 300.0) -> None:
    """Joins the others: at a coordinator, or wherever JAX finds one in the environment of the cluster.

    Says so while it waits. After `patience` seconds it ends this process with one line, as JAX itself would abort.
    """
    import jax

    # Gloo's greetings go to the standard error; what the program itself prints stays where it was.
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(out, "w", buffering=1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"at {coordinator}" if coordinator else "in the environment of this cluster"
    others = "process 0" if process else "process 1" if number == 2 else "the other processes"
    waiting = f"waiting for {others} {where}, for at most {patience:g} s (--patience)"
    late = UserError(f"waited {patience:g} s for {others} {where} (--patience)")
    timers = [threading.Timer(SILENT, print, [waiting], {"file": sys.stderr, "flush": True})]
    timers += [threading.Timer(patience, leave, [late])]
    try:
        for timer in timers:
            timer.daemon = True
            timer.start()
        if coordinator:
            check_address(coordinator, process)
        seconds, detection = int(patience) + 60, "deactivate" if coordinator else None
        jax.distributed.initialize(
            coordinator,
            number,
            process,
            cluster_detection_method=detection,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except (ValueError, RuntimeError) as error:
        hint = "" if coordinator else "; name it: --coordinator HOST:PORT --num-processes N --process-id I"
        raise UserError(f"found no other processes {where}: {str(error).splitlines()[0].rstrip('.')}{hint}") from None
    finally:
        for timer in timers:
            timer.cancel()


def check_address(coordinator: str, process: int | None) -> None:
    """That the host of a coordinator has an address, and that process 0 can listen at its port: JAX might crash."""
    host, _, port = coordinator.rpartition(":")
    what = f"{host} has no address"
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
        if process == 0:
            what = f"cannot listen at port {port}"
            socket.create_server(("", int(port))).close()
    except OSError as error:
        raise UserError(f"--coordinator {coordinator}: {what}: {error.strerror}") from None


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
        except UserError as error:
            content = {"error": str(error)}
    text = np.frombuffer(json.dumps(content).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if jax.process_index() == 0 else np.zeros(length, np.uint8)
    content = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).astype(np.uint8).tobytes())
    if "error" in content:
        raise UserError(content["error"])
    return content["value"]


@contextlib.contextmanager
def stopping(alone: bool) -> Iterator[Callable[[int], bool]]:
    """Has SIGINT and SIGTERM end a training after a step that all processes agree on; another SIGINT at once.

    With others, JAX itself catches SIGTERM, which is what clusters send before they take a machine away. Yields a
    function that says whether to stop after a step: to be asked after each, on all processes.
    """
    from jax.experimental import multihost_utils

    asked: list[int] = []  # no Event, whose lock a second signal could find taken by the first
    # JAX has all stop at the call after the last one so far. Steps begin anew with each job, and a run that goes on
    # begins late: the step that follows the last one might never come.
    calls = itertools.count(1)

    def ask(number: int, _: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if alone:
            asked.append(number)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    with handling(ask, *((signal.SIGINT, signal.SIGTERM) if alone else (signal.SIGINT,))):
        yield lambda step: bool(asked) if alone else multihost_utils.reached_preemption_sync_point(next(calls))


def farewell(status: int) -> int:
    """Waits until all are ready to leave; from then on this process ends within seconds. Returns its exit status.

    Where a SIGTERM reaches one process while another already leaves, JAX's own farewell takes three minutes: the one
    waits for the other to agree on a step to stop after, and the other for the one to leave as well.
    """
    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    sync_global_devices("farewell")
    sys.stdout.flush()
    sys.stderr.flush()
    # Process 0 is the last: JAX aborts those that lose their coordinator.
    timer = threading.Timer(LEAVING * (1 if jax.process_index() else 2), os._exit, [status])
    timer.daemon = True
    timer.start()
    return status


# ------------------------------------------------------------------------------------------------
# Starting them here


class Group:
    """Processes that start and end together, one for each command.

    They do not see the terminal's Ctrl-C: the one who started them stops them. What they print to the standard error
    goes to logs, which are there until all are ended.

    output: of process i, as `subprocess.Popen` takes it; None: to its log, too.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        output: Callable[[int], Any] = lambda i: None,
        **options: Any,
    ):
        self.logs = Path(tempfile.mkdtemp())
        self.processes: list[subprocess.Popen] = []
        try:
            for i, words in enumerate(commands):
                with self.log(i).open("w") as log:
                    pipes = {"stdin": subprocess.PIPE, "stdout": output(i) or log, "stderr": log}
                    self.processes.append(start(words, env={**os.environ, **(environment or {})}, **pipes, **options))
        except BaseException:
            self.kill()
            raise

    def log(self, process: int) -> Path:
        return self.logs / f"process-{process}.log"

    def wait(self) -> None:
        """Waits for all to end; on SIGINT and SIGTERM has them stop after a common step. One that fails stops all.

        Raises:
            KeyboardInterrupt: they were stopped; if process 0 ended with `STOPPED`, it has said how to go on.
        """
        # Noted, not raised: an exception in the middle of `Popen.poll` would leave its lock taken for ever.
        asked: list[int] = []
        with handling(lambda number, _: asked.append(number), signal.SIGINT, signal.SIGTERM):
            try:
                if self.end_or(lambda: bool(asked) or STOPPED in self.codes()):
                    self.stop(at_once=lambda: len(asked) > 1)
                elif self.failed():
                    raise self.failure()
                if asked or any(self.codes()):
                    raise KeyboardInterrupt
            finally:
                self.kill()

    def stop(self, at_once: Callable[[], bool]) -> None:
        """Has all stop after a common step, if they can within `PATIENCE` seconds; raises what fails meanwhile."""
        if STOPPED not in self.codes():
            self.processes[0].send_signal(signal.SIGTERM)  # JAX tells the others
        end = time.monotonic() + PATIENCE
        self.end_or(lambda: at_once() or time.monotonic() > end)
        codes = [code for code in self.codes() if code is not None]
        # What is left alone fails, too; and SIGTERM ends one that has not joined the others yet.
        if not {STOPPED, -signal.SIGTERM} & {*codes} and any(code and RANKS.get(code, 0) <= 1 for code in codes):
            raise self.failure()

    def end_or(self, happens: Callable[[], bool]) -> bool:
        """Waits until all have ended, one has failed, or something happens; whether that was it."""
        while not self.failed() and not all(code is not None for code in self.codes()):
            if happens():
                return True
            time.sleep(0.01)
        return False

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def failed(self) -> bool:
        return any(code not in (None, 0, STOPPED) for code in self.codes())

    def kill(self) -> None:
        end_all(self.processes)
        shutil.rmtree(self.logs, ignore_errors=True)

    def failure(self) -> UserError:
        """The first cause, once those that fail have had time to say why."""

        def cause() -> tuple[int, int]:
            ended = [(code, i) for i, code in enumerate(self.codes()) if code not in (None, 0, STOPPED)]
            return min(ended, key=lambda end: RANKS.get(end[0], 0), default=(0, 0))

        # Who has lost the others may be first; and those that fail alike may still have to clear up.
        settled = lambda code: None not in self.codes() if code == USER else RANKS.get(code, 0) <= 1
        end = time.monotonic() + LAST_SECONDS
        while not settled(cause()[0]) and time.monotonic() < end:
            time.sleep(0.05)
        code, i = cause()
        message, lines = self.last_words(i)
        if code < 0 and code != -signal.SIGABRT:
            name = signal.Signals(-code).name
            more = " (out of memory?)" if name == "SIGKILL" else ""
            return Failed(f"process {i} was killed by {name}{more}; all were stopped")
        if code == USER and message:
            return UserError(message)
        tail = "".join(f"\n  {line}" for line in lines[-TAIL:])
        return Failed(f"process {i} failed: {message or f'exit status {code}'}; all were stopped. Its log ends:{tail}")

    def last_words(self, i: int) -> tuple[str, list[str]]:
        """The last error that a process has written, without its name in front, and all lines of its log."""
        lines = [line for line in self.log(i).read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"(error|[\w.]*(Error|Exception|Interrupt)): ", line)]
        return next(iter(reversed(named or lines)), "").removeprefix("error: "), lines


def training_group(arguments: Sequence[str], number: int, quiet: bool = False) -> Group:
    """Processes of `python -m experiments` with the same arguments that find each other.

    quiet: process 0 does not print to the terminal, either.
    """
    joins = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(number), "--process-id"]
    words = [sys.executable, "-m", "experiments", *arguments, *joins]
    # Several processes share a few cores here, whatever accelerators there are.
    output = lambda i: None if i or quiet else sys.__stdout__
    return Group([[*words, str(i)] for i in range(number)], {"JAX_PLATFORMS": "cpu"}, output)
