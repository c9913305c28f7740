"""Starting processes, and ending them with all that they started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["end_all", "free_port", "handling", "start"]

# What becomes the program: only a process itself can ask the kernel to end it with its parent, and JAX forbids a fork.
GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(words: Sequence[str], **options: Any) -> subprocess.Popen:
    """A process in a process group of its own, which on Linux ends with the thread that started it, however that ends.

    The terminal's Ctrl-C does not reach it. options: of `subprocess.Popen`.
    """
    if sys.platform == "linux":
        words = [sys.executable, "-ISc", GUARD, str(os.getpid()), *map(str, words)]
    return subprocess.Popen(words, start_new_session=True, **options)


@contextlib.contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    """With this handler for these signals."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_all(processes: Iterable[subprocess.Popen], patience: float = 0.0) -> None:
    """Ends those of `start` that still run with their groups, waits for all, and closes the pipes to their input.

    patience: seconds that they have to end by themselves, before they are killed.
    """
    processes = list(processes)
    if patience:
        signal_all(processes, signal.SIGTERM)
        end = time.monotonic() + patience
        # Without waiting for them: their numbers stay theirs, and whatever they have started can still be ended.
        still = lambda p: os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        while time.monotonic() < end and any(p.returncode is None and still(p) for p in processes):
            time.sleep(0.02)
    signal_all(processes, signal.SIGKILL)
    for process in processes:
        reap(process)
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                process.stdin.close()


def reap(process: subprocess.Popen) -> None:
    """Waits for a process without its lock, as `Popen.wait` would.

    A signal whose handler raises, as Ctrl-C's does, may come when `Popen.poll` has just taken the lock and is not yet
    where it would give it back. Nobody ever gets it again then, and `wait` would wait for ever.
    """
    if process.returncode is None:
        try:
            _, status = os.waitpid(process.pid, 0)
        except ChildProcessError:  # the interrupted call has, and what it heard is lost
            status = 0
        process.returncode = os.waitstatus_to_exitcode(status)


def signal_all(processes: Iterable[subprocess.Popen], number: int) -> None:
    """To the groups of processes that nobody has waited for, so that their numbers are still theirs."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
