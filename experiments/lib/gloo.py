"""Gloo's thread, kept out of the way of those that compute.

What comes before its receiver has asked for it stays in the socket, and gloo's thread looks at it again and again until
then: it spins, on a core on which the receiver could compute. Linux lets it finish its slice, so a message that takes
0.1 ms waits for up to 4, now and then or always, by which core each thread is on. With the policy SCHED_IDLE that
thread runs where no other wants to. GLOO_SPINS=1 in the environment leaves it as it is, to compare.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["calm", "warm_up"]

SETTLED_SECONDS = 0.1  # after which the threads that compute sleep
EPOLL = {"22", "232", "281", "441"}  # system calls: epoll_pwait of arm64, epoll_wait, epoll_pwait and epoll_pwait2


def warm_up() -> None:
    """One exchange of all processes, which starts gloo's thread, and `calm`."""
    from jax.experimental.multihost_utils import sync_global_devices

    sync_global_devices("gloo")
    calm()


def calm() -> int:
    """Sets SCHED_IDLE for every thread but the caller's that waits in epoll or runs; how many. To be called at rest.

    Where there is no such policy, or it may not be set, nothing changes.
    """
    if not hasattr(os, "SCHED_IDLE") or os.environ.get("GLOO_SPINS"):
        return 0
    time.sleep(SETTLED_SECONDS)
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, IndexError):  # it has ended, or may not be looked at
            call = (task / "syscall").read_text().split()[0]
            if int(task.name) != threading.get_native_id() and call in {"running", *EPOLL}:
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
                found += 1
    return found
