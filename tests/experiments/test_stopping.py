"""Signals at the worst moments: all processes end, and somebody says how to go on."""

import os
import signal
import subprocess
import sys

import pytest
from jax.experimental import multihost_utils
from programs import ROOT

from experiments import train
from experiments.lib import processes
from experiments.lib.launch import end_all, free_port, start


class Lock:
    """A process's lock that a signal follows the moment it is taken, before anybody can give it back."""

    def __init__(self, lock, signals=1):
        self.lock, self.signals = lock, signals

    def acquire(self, *arguments):
        taken = self.lock.acquire(*arguments)
        if taken and self.signals:
            self.signals -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return taken

    def release(self):
        self.lock.release()

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, as it does where nobody has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


STOPS = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit({status}))
print("ready", flush=True)
while True:
    signal.pause()
"""


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def of_code(*codes):
    group = processes.Group([[sys.executable, "-c", code] for code in codes], output=lambda i: subprocess.PIPE)
    for process in group.processes:
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
    return group


def test_an_interrupt_may_come_within_a_poll(sigint):
    """The lock of a process stays taken if an exception comes between taking it and the `try` after it."""
    group = of_code(STOPS.format(status=processes.STOPPED))
    (process,) = group.processes
    process._waitpid_lock = Lock(process._waitpid_lock)
    with pytest.raises(KeyboardInterrupt):
        group.wait()
    assert process.returncode == processes.STOPPED
    assert not process._waitpid_lock.lock.locked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_processes_end_whose_lock_is_lost(sigint):
    process = start(["sleep", "60"])
    process._waitpid_lock = Lock(process._waitpid_lock)
    with pytest.raises(KeyboardInterrupt):
        process.poll()
    assert process._waitpid_lock.lock.locked()
    assert process.poll() is None
    end_all([process])
    assert process.returncode == -signal.SIGKILL


def test_another_signal_ends_them_at_once(sigint, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 500.0)
    group = of_code(DEAF)
    (process,) = group.processes
    process._waitpid_lock = Lock(process._waitpid_lock, signals=2)
    with pytest.raises(KeyboardInterrupt):
        group.wait()
    assert process.returncode == -signal.SIGKILL


def test_who_does_not_stop_is_killed(sigint, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    group = of_code(STOPS.format(status=processes.STOPPED), STOPS.format(status=0))
    group.processes[0]._waitpid_lock = Lock(group.processes[0]._waitpid_lock)
    with pytest.raises(KeyboardInterrupt):
        group.wait()
    assert [process.returncode for process in group.processes] == [processes.STOPPED, -signal.SIGKILL]


def test_one_that_stops_by_itself_is_not_waited_for_by_the_others(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    group = of_code(STOPS.format(status=0), f"print('ready', flush=True)\nraise SystemExit({processes.STOPPED})")
    with pytest.raises(KeyboardInterrupt):
        group.wait()
    assert [process.returncode for process in group.processes] == [-signal.SIGKILL, processes.STOPPED]


def test_what_fails_while_they_stop_is_said(sigint):
    group = of_code(STOPS.format(status=processes.USER))
    group.log(0).write_text("error: the disk is full\n")
    group.processes[0]._waitpid_lock = Lock(group.processes[0]._waitpid_lock)
    with pytest.raises(processes.UserError, match=r"^the disk is full$"):
        group.wait()


class Ended:
    """A group that was interrupted."""

    def __init__(self, code):
        self.processes = [subprocess.CompletedProcess([], code)]

    def wait(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("code", [processes.STOPPED, -signal.SIGKILL])
@pytest.mark.parametrize("begun", [False, True])
def test_somebody_says_how_to_go_on(code, begun, tmp_path, monkeypatch, capsys):
    def group(*_):
        if begun:
            (tmp_path / "r").mkdir()
            (tmp_path / "r" / "config.json").write_text("{}")
        return Ended(code)

    monkeypatch.setattr(processes, "training_group", group)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    assert train.main(["--processes", "2", "--runs", str(tmp_path), "--name", "r"]) == processes.STOPPED
    how = f": what followed the newest checkpoint is lost; continue with --resume --runs {tmp_path} --name r"
    said = "" if code == processes.STOPPED else f"interrupted{how if begun else ''}\n"
    assert capsys.readouterr().err == said


def test_steps_are_counted_from_the_first_that_is_asked_about(monkeypatch):
    """JAX stops all at the count after the highest one: with the numbers of steps it might never come."""
    counts = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda count: counts.append(count) or False)
    with processes.stopping(alone=False) as stop_after:
        assert not any(stop_after(step) for step in (101, 102, 1, 2))
    assert counts == [1, 2, 3, 4]


# Process 0 hears of a SIGTERM when process 1 has said farewell already, but none has ended.
LEAVES = """
import atexit, os, signal, sys, time
from experiments.lib import processes
number = int(sys.argv[2])
with processes.or_die():
    processes.join(sys.argv[1], 2, number)
    with processes.stopping(alone=False) as stop_after:
        assert not stop_after(1)
        status = processes.farewell(processes.STOPPED)
if number == 0:
    time.sleep(1)  # the other is on its way out
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)  # in which JAX looks for signals
sys.exit(status)
"""


@pytest.mark.slow
def test_a_late_signal_does_not_keep_them():
    address = f"127.0.0.1:{free_port()}"
    words = [[sys.executable, "-c", LEAVES, address, str(i)] for i in range(2)]
    each = [start(some, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}) for some in words]
    try:
        # JAX's barrier alone takes 180 s.
        assert [process.wait(120) for process in each] == [processes.STOPPED] * 2
    finally:
        end_all(each)


@pytest.mark.parametrize(("status", "joined", "orderly"), [(0, False, True), (130, False, False), (130, True, True)])
def test_an_interrupted_program_is_not_taken_down_in_order(status, joined, orderly):
    """Where compiling was cut short, JAX crashes there; but other processes wait for a farewell."""
    lines = "import atexit, jax", "from experiments.__main__ import leave", "atexit.register(print, 'taken down')"
    lines += f"jax.distributed.is_initialized = lambda: {joined}", "print('said')", f"leave({status})"
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stdout == "said\n" + "taken down\n" * orderly
