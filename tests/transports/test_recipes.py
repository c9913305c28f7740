"""The files of docs/examples/sites that need nothing but this package, as processes, some of which are killed."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from experiments.lib import launch

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "sites"
pytestmark = pytest.mark.slow


class Group:
    """Processes, each with what it printed."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []

    def start(self, script, *words):
        file = self.folder / f"{len(self.processes)}.txt"
        with file.open("w") as out:
            command = [sys.executable, str(FOLDER / script), *map(str, words)]
            self.processes.append(launch.start(command, stdout=out, stderr=out, cwd=self.folder))
        return len(self.processes) - 1

    def text(self, i):
        return (self.folder / f"{i}.txt").read_text()

    def wait_for(self, i, words, seconds=60):
        end = time.monotonic() + seconds
        while words not in self.text(i):
            assert time.monotonic() < end, self.text(i)[-2000:]
            time.sleep(0.05)

    def end(self, *which):
        for i in which:
            assert self.processes[i].wait(timeout=100) == 0, self.text(i)[-2000:]


@pytest.fixture
def group(tmp_path):
    group = Group(tmp_path)
    yield group
    launch.end_all(group.processes)


def address():
    return f"127.0.0.1:{launch.free_port()}"


def test_diloco(group):
    where = address()
    for number in range(2):
        group.start("diloco.py", where, 2, number)
    group.end(0, 1)
    for number in range(2):
        first, last = map(float, re.search(r"loss from ([\d.]+) to ([\d.]+)", group.text(number)).groups())
        assert last < first / 5


def test_elastic(group):
    """One of three processes is killed; the others make the step again on two devices, and reach the optimum."""
    where = address()
    for number in range(3):
        group.start("elastic.py", where, 3, number, 200)
    group.wait_for(2, "step 0: 3 devices")
    time.sleep(1.0)
    group.processes[2].send_signal(signal.SIGKILL)
    group.end(0, 1)
    for number in range(2):
        assert re.search(r"step (\d+): ProcessFailureError, again[^!]*step \1: 2 devices", group.text(number))
        first, last = map(float, re.search(r"distance ([\d.]+) to ([\d.]+)", group.text(number)).groups())
        assert last < first / 10


def test_members(group):
    """The server and a member are killed in the middle and started again; the other member is not."""
    pytest.importorskip("grpc")
    where = address()
    server, ann, bob = (group.start("members.py", name, where) for name in ("server", "ann", "bob"))
    group.wait_for(server, "round 3")
    for i in (server, bob):
        group.processes[i].send_signal(signal.SIGKILL)
    server, bob = (group.start("members.py", name, where) for name in ("server", "bob"))
    group.end(server, ann, bob)
    assert re.search(r"round 20: [12] used", group.text(server))
    assert "2 used" in group.text(server)
