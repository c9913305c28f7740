"""Processes with other options find that out where the state is made, and one process alone can read a state."""

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.lib import launch
from jaxcomp.exchange.agreement import Differs, check_equal, differences

ROOT = Path(__file__).parents[2]
SAID = {  # by process 1, whose workers are 2 and 3
    "levels": "algorithm.compressor.levels is 5 ON, and 7",
    "block": "algorithm.compressor.block_size is 256 ON, and 128",
    "ratio": "algorithm.compressor.ratio is 0.02 ON, and 0.01",
    "decay": "algorithm.decay is 0.9 ON, and not given",
    "compressor": "algorithm.compressor is sidco ON, and top_k",
    "algorithm": "algorithm is ef21 ON, and error_feedback",
    "parts": r"algorithm.parts is \['b', '.'\] ON, and \['b', 'w'\]",
    "seed": r"seed is \[0, 1\] ON, and \[0, 0\]",
    "via": "via is gather ON, and auto",
    "weights": r"weights is \[0.4, 0.2, 0.2, 0.2\] ON, and \[0.25, 0.25, 0.25, 0.25\]",
    "buckets": "bucket_bytes is 1048576 ON, and 1024",
    "layout": "algorithm.compressor is per_leaf ON, and flat",
    "every": "every is 5 ON, and 4",
    "outer": "outer is an optimizer with the first steps .* ON, and an optimizer .*",
    "value_and_grad": "algorithm.compressor.levels is 5 ON, and 7",
    "optimizer": "optimizer state is int32.* at .*count.* ON, and without arrays",
    "rate": r"optimizer state at .*'learning_rate'\] is 0.2 ON, and 0.1",
    "version": r"jaxcomp is 0.1.9 ON, and \S+",
}


@pytest.fixture(scope="module")
def rows():
    """What each of two processes printed: case -> row."""
    address = f"127.0.0.1:{launch.free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{i}.txt") for i in range(2)]
        command = [sys.executable, str(Path(__file__).with_name("agreement_worker.py")), address]
        each = []
        try:
            for i, file in enumerate(files):
                with file.open("w") as out:
                    each.append(launch.start([*command, str(i)], stdout=out, stderr=out))
            for process in each:
                process.wait(timeout=240)
        finally:
            launch.end_all(each)
        texts = [file.read_text() for file in files]
    found = [[json.loads(line) for line in text.splitlines() if line.startswith('{"case"')] for text in texts]
    assert all(found), texts[0][-3000:]
    return [{row["case"]: row for row in one} for one in found]


@pytest.mark.parametrize("case", SAID)
def test_an_option_that_differs_is_named_in_both_processes(case, rows):
    said = SAID[case].replace(" ON", r" on workers 2, 3 \(process 1\)")
    for row in (process[case] for process in rows):
        assert re.match(f"(init|init_state|check_options): {said} on workers 0, 1", row["said"]), row["said"]
        assert row["seconds"] < 5  # a quiet machine takes 0.2


def test_equal_options_are_no_news(rows):
    for process in rows:
        assert process["equal"]["said"] is None
        assert process["equal again"]["said"] is None


def test_a_state_that_is_made_in_a_program_of_the_users_is_compared_there(rows):
    """Both processes stop, and both say what they have."""
    assert "compressed_mean: algorithm on worker 2 differs from process 0" in rows[0]["inside"]["said"]
    assert "compressed_mean: algorithm on worker 0 differs from process 1" in rows[1]["inside"]["said"]
    for process, levels in zip(rows, (7, 5), strict=True):
        assert f"algorithm.compressor.levels: {levels}" in process["inside"]["said"]


def test_one_process_alone_reads_what_its_workers_sent(rows):
    shown, lanes, numbers, characters, memory = rows[0]["report"]["said"]
    assert "lane_bytes           1,600 B" in shown
    assert lanes == [1600.0, 1600.0]  # of the two workers of this process
    assert numbers["rounds"], numbers["workers"] == (1, 4)
    assert numbers["sent_bytes"] == 3 * 1600
    assert characters > 100
    assert memory == [4, 2000]


def test_differences_are_few_and_the_first_ones():
    who = [f"worker {i}" for i in range(3)]
    assert differences([{"a": "1"}] * 3, who) is None
    each = [{key: str(i == 1) for key in "abcde"} for i in range(3)]
    found = differences(each, who)
    assert found.startswith("a is True on worker 1, and False on worker 0; b is")
    assert found.endswith("; and 2 options more")
    with pytest.raises(Differs, match=r"init_state: a is True on worker 1.*Build the exchange with the same options"):
        check_equal("init_state", each, who)
