"""Gloo's thread out of the way of those that compute."""

import os
import subprocess
import sys

import pytest

from experiments.lib.gloo import calm

WORKER = """
import os, select, sys, threading, time
from experiments.lib.gloo import calm
poll, done = select.epoll(), threading.Event()
waits = ((poll.poll, (5.0,)), (done.wait, ()))
threads = [threading.Thread(target=wait, args=args, daemon=True) for wait, args in waits]
for thread in threads:
    thread.start()
found = calm()
print(found, *(os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE for thread in threads),
      os.sched_getscheduler(threading.get_native_id()) == os.SCHED_IDLE)
done.set()
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="policies of threads are Linux'")


def said(**environment):
    others = {name: value for name, value in os.environ.items() if name != "GLOO_SPINS"}
    words = [sys.executable, "-c", WORKER]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**others, **environment})
    return done.stdout.split()


@linux
def test_only_the_thread_that_waits_for_sockets_makes_room():
    """One thread waits in epoll, one for a lock, and one asks."""
    assert said() == ["1", "True", "False", "False"]


@linux
def test_it_may_be_left_as_it_is():
    assert said(GLOO_SPINS="1") == ["0", "False", "False", "False"]


def test_without_such_policies_nothing_changes(monkeypatch):
    monkeypatch.delattr(os, "SCHED_IDLE", raising=False)
    assert calm() == 0
