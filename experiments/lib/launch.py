"""Starting processes, ending them, and ending with the one that started us."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

__all__ = ["die_with_parent", "end_all", "ending_with_parent", "free_port"]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_all(processes: Iterable[subprocess.Popen]) -> None:
    """Kills those that still run, waits for all, and closes the pipes to their input."""
    processes = list(processes)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                process.stdin.close()


def die_with_parent(reads_input: bool = False) -> None:
    """Ends this process when the one that started it is gone, however it went.

    On Linux the kernel does; elsewhere the pipe to its standard input closes then, which is watched unless this process
    reads it itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if reads_input:
        return

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ending_with_parent(words: Sequence[str]) -> list[str]:
    """A command that ends with the process that starts it, on Linux; elsewhere it may stay behind."""
    return [sys.executable, "-m", "experiments.lib.launch", *words] if sys.platform == "linux" else list(words)


if __name__ == "__main__":
    die_with_parent(reads_input=True)
    os.execvp(sys.argv[1], sys.argv[1:])
