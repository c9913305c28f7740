"""Three processes of jax.distributed over its coordination service: one is killed, and joins again under its number."""

import json
import sys
from pathlib import Path

import pytest

from experiments.lib import launch


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What each process printed: case -> row; the process that joined again is number 3."""
    folder, address = tmp_path_factory.mktemp("coordination"), f"127.0.0.1:{launch.free_port()}"
    files, each = [folder / f"{i}.txt" for i in range(4)], []

    def start(number, file, part):
        words = [sys.executable, str(Path(__file__).with_name("coordination_worker.py")), address]
        with file.open("w") as out:
            each.append(launch.start([*words, str(number), str(folder), part], stdout=out, stderr=out))

    try:
        for number in range(3):
            start(number, files[number], "first")
        each[2].wait(timeout=120)
        (folder / "killed").touch()
        start(2, files[3], "again")
        for process in each[1:]:
            process.wait(timeout=120)
        (folder / "ended").touch()
        each[0].wait(timeout=120)
    finally:
        launch.end_all(each)
    texts = [file.read_text() for file in files]
    assert [process.returncode for process in each] == [0, 0, -9, 0], "\n".join(text[-1500:] for text in texts)
    found = [[json.loads(line) for line in text.splitlines() if line.startswith('{"case"')] for text in texts]
    return [{row["case"]: row for row in one} for one in found]


def test_the_coordinator_holds_two_rounds_at_most(rows):
    for process in rows[:3]:
        assert process["held"]["bytes"] < 2.1 * 3 * 250_000


def test_local_processes_reach_the_same_point(rows):
    points = {process["trained"]["point"] for process in rows[:3]}
    assert len(points) == 1
    assert points != {"00" * 800}


def test_the_others_go_on_and_name_who_was_killed(rows):
    for process, other in zip(rows[:2], "10", strict=True):
        assert process["missing"]["names"] == ["2"]
        said = f"no message of worker 2 within 1 s in exchange 0; {other} have sent theirs"
        assert said in process["missing"]["said"]


def test_who_joins_again_under_its_number_takes_part_in_rounds(rows):
    assert rows[0]["federated"]["used"] == 1
    assert rows[0]["federated"]["point"] == [-1.0, -2.0, -3.0]
