"""The folder of a run belongs to one process at a time."""

import json
import os
import subprocess
import sys
import threading

import pytest
from programs import ROOT, run

from experiments import train
from experiments.lib.cli import UserError, choose_new
from experiments.lib.folders import claimed

BUSY = rf"r is in use by process {os.getpid()} on .*; wait for it, or choose another --name$"


def begin(folder):
    (folder / "config.json").write_text(json.dumps({"steps": 40, "lr": 0.001, "data_dir": None}))


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    ready, found = threading.Barrier(8), []

    def start():
        ready.wait()
        with claimed(tmp_path, None, False, "train") as folder:
            found.append(folder.name)
            begin(folder)
            ready.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"train-{i}" for i in range(1, 9)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_until_its_run_has_ended(resume, tmp_path):
    if resume:
        (tmp_path / "r").mkdir()
        begin(tmp_path / "r")
    with claimed(tmp_path, "r", resume, "train"):
        with pytest.raises(UserError, match=BUSY), claimed(tmp_path, "r", resume, "train"):
            pass
        with pytest.raises(UserError, match=BUSY), claimed(tmp_path, "r", resume, "train"):
            pass  # refusing it has not released it
    assert (tmp_path / "r").exists() == resume  # nothing was written to the new one
    with claimed(tmp_path, "r", resume, "train") as folder:
        begin(folder)
    with pytest.raises(UserError, match="r exists; continue it with --resume"), claimed(tmp_path, "r", False, "train"):
        pass


def test_a_killed_run_holds_nothing(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from experiments.lib.folders import claimed\n"
        f"with claimed(Path({str(tmp_path)!r}), 'r', False, 'train') as folder:\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode < 0
    with claimed(tmp_path, "r", True, "train") as folder:
        assert str(os.getpid()) in (folder / "lock").read_text()


def test_train_and_compare_refuse_a_folder_in_use(tmp_path):
    (tmp_path / "r").mkdir()
    begin(tmp_path / "r")
    with claimed(tmp_path, "r", True, "train"):
        with pytest.raises(UserError, match=BUSY):
            train.main(["--processes", "2", "--resume", "--name", "r", "--runs", str(tmp_path)])
        result = run("compare", "--runs", tmp_path, "--name", "r", "--resume")
        assert result.returncode == 2
        assert f"r is in use by process {os.getpid()} on " in result.stderr
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["config.json", "lock"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "."])
def test_names_lead_nowhere_else(name, tmp_path):
    with pytest.raises(UserError, match=r"^--name must be a folder below --runs"):
        choose_new(tmp_path, name, "dagc")
