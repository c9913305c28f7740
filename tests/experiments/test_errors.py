"""Disks that are full, files that cannot be written, contents that are damaged, processes that never come: one line."""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess

import pytest
from programs import ROOT, command, run, run_to

from experiments import __main__ as program
from experiments import federated, local, train
from experiments.lib import folders
from experiments.lib.cli import UserError
from experiments.lib.errors import line_of, reading
from experiments.lib.folders import Journal, goes_on, read_results
from experiments.train import compare

STORE = (
    'RESOURCE_EXHAUSTED: Error writing "params/1" in OCDBT database at local file "/r/5/": Failed to write 9 bytes to '
    "file 5: No space left on device [os_error_code='28']"
)


def from_another():
    try:
        raise ValueError(STORE)
    except ValueError as error:
        raise RuntimeError("a checkpoint failed") from error


LINES = {
    "full": (OSError(errno.ENOSPC, "No space left on device", "/r/a"), "/r/a: no space left on device; make room"),
    "refused": (PermissionError(errno.EACCES, "Permission denied", "/r"), "/r: permission denied"),
    "of a store": (ValueError(STORE), "/r/5/: no space left on device; make room"),
    "of several": (
        ExceptionGroup("two", [KeyError(1), ValueError(STORE)]),
        "/r/5/: no space left on device; make room",
    ),
    "of a user": (UserError("as it is"), "as it is"),
    "a lost peer": (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
    "a defect": (KeyError("x"), None),
}


@pytest.mark.parametrize("name", LINES)
def test_what_a_user_can_mend_is_one_line(name):
    error, line = LINES[name]
    assert line_of(error) == line


def test_an_error_says_what_it_came_from():
    with pytest.raises(RuntimeError) as raised:
        from_another()
    assert line_of(raised.value) == "/r/5/: no space left on device; make room"


def test_a_defect_while_an_error_is_handled_is_not_taken_for_it():
    def broken():
        try:
            open("/nowhere/at/all")  # noqa: SIM115
        except OSError:
            return {}["x"]

    with pytest.raises(KeyError) as raised:
        broken()
    assert line_of(raised.value) is None
    with pytest.raises(KeyError), goes_on(ROOT, ROOT):
        broken()


def test_contents_that_another_library_reads_are_named():
    line = r"^checkpoint 5 cannot be read: a bad magic; remove it$"
    with pytest.raises(UserError, match=line), reading("checkpoint 5", "remove it"):
        raise RuntimeError("a bad\n magic")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_bytes(text.encode("latin-1"))
    for main in (train.main, compare.main):
        with pytest.raises(UserError, match=r"r/config\.json cannot be read: .*start a new run with another --name$"):
            main(["--resume", "--name", "r", "--runs", str(tmp_path)])


EDITED = {
    "data": ("dagits", "argument --data: invalid choice: 'dagits' .choose from "),
    "steps": ("many", "argument --steps: must be an integer of at least 1; got 'many'"),
    "lr": ([1], r"argument --lr: must be a number above 0; got '\[1\]'"),
    "batch": (True, "argument --batch: must be an integer of at least 1; got 'true'"),
    "seed": ("3", "seed must be as the option --seed; got '3'"),
    "ratio": (None, r"argument --ratio: must be a number in \(0, 1\]; got 'null'"),
    "colour": (1, "colour is no option"),
    "resume": (True, "resume is no option"),
}


@pytest.mark.parametrize("key", EDITED)
def test_a_config_with_a_wrong_value_is_named(key, tmp_path):
    value, message = EDITED[key]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(json.dumps({"steps": 40, "data_dir": None, key: value}))
    with pytest.raises(UserError, match=rf"r/config\.json cannot be read: {message}.*; start a new run with another"):
        train.main(["--resume", "--name", "r", "--runs", str(tmp_path)])


def test_options_that_a_run_keeps_are_read_again(tmp_path):
    for each in (train.parser(), compare.Comparison.parser(), local.parser(), federated.parser()):
        options = vars(each.parse_args([]))
        if "data_dir" in options:
            options["data_dir"] = tmp_path
        folders.write_config(tmp_path, options)
        folders.check_options(json.loads((tmp_path / "config.json").read_text()), each, options)


ROW = dict.fromkeys(train.RESULT, 1) | dict.fromkeys(("method", "sha256", "sha256_optimizer"), "a")
ROWS = {
    "": "cannot be read: ",
    "{}": "cannot be read: it must hold a JSON list",
    "1": "cannot be read: it must hold a JSON list",
    "[1]": "row 1, cannot be read: it must hold an object; got 1",
    '[{"loss": 1.0}]': "row 1, cannot be read: method must be text; got nothing",
    json.dumps([ROW, ROW | {"loss": "nan"}]): "row 2, cannot be read: loss must be a number; got 'nan'",
    json.dumps([ROW | {"seed": True}]): "row 1, cannot be read: seed must be an integer; got True",
}


@pytest.mark.parametrize("content", ROWS)
def test_damaged_results_are_named(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=rf"results\.json,? {ROWS[content]}.*; remove it"):
        read_results(tmp_path / "results.json", train.RESULT)
    (tmp_path / "results.json").write_text(json.dumps([ROW]))
    assert read_results(tmp_path / "results.json", train.RESULT) == [ROW]


def test_damaged_metrics_are_named_with_their_line(tmp_path):
    journal = Journal(tmp_path)
    for step in range(3):
        journal.add({"method": "sidco", "seed": 0, "step": step, "loss": 1.0})
    whole = journal.path.read_text()
    journal.path.write_text(whole[:-9])  # what a full disk leaves
    assert len(journal.lines()) == 2
    journal.path.write_text(whole.replace('"step": 1', '"step": x'))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is damaged: "):
        journal.lines()
    for line, message in {"{}": "method must be text; got nothing", "[]": r"it must hold an object; got \[\]"}.items():
        journal.path.write_text(f"{line}\n")
        with pytest.raises(UserError, match=rf"metrics\.jsonl, line 1 is damaged: {message}; start a new run"):
            Journal(tmp_path, needs=train.LINE).lines()


@pytest.mark.parametrize("name", ["train", "compare"])
def test_runs_that_cannot_be_written(name, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        program.main([name, "--resume", "--name", "r", "--runs", str(tmp_path / "file" / "runs")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "compare"])
def test_new_runs_that_cannot_be_written(name, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(name, "--runs", tmp_path / "file" / "runs", "--steps", 1)
    assert (result.returncode, result.stderr) == (2, f"error: {tmp_path}/file/runs: not a directory\n")


# ------------------------------------------------------------------------------------------------
# Whole programs


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system with so little room; skips where none can be made."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def results(folder):
    (row,) = read_results(folder / "results.json")
    return {key: row[key] for key in ("loss", "accuracy", "sha256", "sha256_optimizer")}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(processes, tmp_path):
    short = ("--method", "dithering", "--batch", 8, "--steps", 14, "--checkpoint-every", 5, "--workers", 2)
    short += ("--processes", processes)
    run_to(0, "train", *short, "--runs", tmp_path, "--name", "whole")
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "1200k"):
        where = ("--runs", disk, "--name", "r")
        for more in ((), ("--resume",)):
            result = run(
                "train", *(() if more else short), *where, *more, *(("--processes", processes) if more else ())
            )
            assert result.returncode == 2, result.stderr
            assert "no space left on device; make room" in result.stderr
            assert result.stderr.count("\n") == 1, result.stderr
        subprocess.run(["mount", "-o", "remount,size=60m", str(disk)], check=True)
        run_to(0, "train", *where, "--resume", "--processes", processes)
        assert results(disk / "r") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line_or_gives_the_same_result(tmp_path):
    short = ("--method", "dithering", "--batch", 8, "--steps", 6, "--checkpoint-every", 3, "--workers", 1)
    run_to(0, "train", *short, "--runs", tmp_path, "--name", "r")
    whole = results(tmp_path / "r")
    (tmp_path / "r" / "results.json").unlink()
    files = sorted(path for path in (tmp_path / "r" / "checkpoints").rglob("*") if path.is_file())
    for path in files[:: max(1, len(files) // 6)]:
        kept = path.read_bytes()
        if kept:
            path.write_bytes(kept[: len(kept) // 2] + bytes([kept[len(kept) // 2] ^ 16]) + kept[len(kept) // 2 + 1 :])
        result = run("train", "--resume", "--runs", tmp_path, "--name", "r")
        if result.returncode == 0:
            assert results(tmp_path / "r") == whole
            (tmp_path / "r" / "results.json").unlink()
        else:
            assert result.returncode == 2, result.stderr
            assert result.stderr.count("\n") == 1, result.stderr
            assert "remove it, and the run starts again from its first step" in result.stderr
        path.write_bytes(kept)


WAITS = ("train", "--num-processes", 2, "--patience", 1)


@pytest.mark.parametrize("process", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_waiting_for_others_ends_with_a_line(process, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        if process == 0:
            taken = run(*WAITS, "--coordinator", f"127.0.0.1:{port}", "--process-id", 0, "--runs", tmp_path)
            assert taken.stderr.startswith(f"error: --coordinator 127.0.0.1:{port}: cannot listen at port {port}: ")
    result = run(*WAITS, "--coordinator", f"127.0.0.1:{port}", "--process-id", process, "--runs", tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"error: waited 1 s for process {1 - process} at 127.0.0.1:{port} (--patience)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_coordinator_without_an_address_is_refused(tmp_path):
    words = command(*WAITS, "--coordinator", "no.such.host.invalid:4711", "--process-id", 1, "--runs", tmp_path)
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stderr.startswith(
        "error: --coordinator no.such.host.invalid:4711: no.such.host.invalid has no address"
    )
