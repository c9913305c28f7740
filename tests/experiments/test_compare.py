"""The experiments as a user runs them: commands, errors, interruption and resumption."""

import gzip
import json
import signal
import struct
import subprocess
import time

import numpy as np
import pytest
from programs import ROOT, command, run, run_inside

from experiments.lib import data
from experiments.lib.cli import UserError
from experiments.lib.launch import start


def short(folder, name, *more):
    return ("compare", "--runs", folder, "--name", name, "--workers", 2, "--steps", 40, "--batch", 8, *more)


def test_compare_writes_everything(tmp_path, capsys):
    result = run(
        *short(tmp_path, "r", "--methods", "dense-f32", "dense-bf16", "sidco", "--seeds", 0, 1, "--log-every", 5)
    )
    assert result.returncode == 0, result.stderr
    for words in ("dense-bf16", "vs bf16", "test accuracy", "lane B", "compare.png"):
        assert words in result.stdout
    folder = tmp_path / "r"
    assert (folder / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((folder / "config.json").read_text())["steps"] == 40
    rows = json.loads((folder / "results.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [
        (method, seed) for method in ("dense-f32", "dense-bf16", "sidco") for seed in (0, 1)
    ]
    by_method = {row["method"]: row for row in rows}
    assert by_method["dense-f32"]["lane_bytes"] == 4 * by_method["dense-f32"]["parameters"]
    assert by_method["sidco"]["sent_bytes"] < by_method["dense-bf16"]["sent_bytes"] / 5
    assert all(np.isfinite(row["loss"]) and 0 <= row["accuracy"] <= 1 for row in rows)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if (line["method"], line["seed"]) == ("sidco", 1)]
    assert steps == [1, 5, 10, 15, 20, 25, 30, 35, 40]
    assert run_inside(capsys, *short(tmp_path, "r")).stderr.startswith(
        f"error: {folder} exists; continue it with --resume"
    )


def cut_short(metrics, lines, kill, *arguments):
    """Sends a signal once there are so many lines of metrics; returns what was printed."""
    process = start(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") >= lines):
        time.sleep(0.01)
    process.send_signal(kill)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (130 if kill == signal.SIGINT else -signal.SIGKILL), output
    return output


@pytest.mark.slow
def test_resume_gives_bitwise_the_same_parameters(tmp_path):
    """Interrupted in the first job, killed after that, resumed: nothing of it is to be seen in the outcome."""
    options = ("--methods", "sidco", "diana", "--seeds", 3, "--log-every", 3, "--checkpoint-every", 7, "--steps", 120)
    assert run(*short(tmp_path, "whole", *options)).returncode == 0
    metrics, resume = tmp_path / "cut" / "metrics.jsonl", ("compare", "--runs", tmp_path, "--name", "cut", "--resume")
    output = cut_short(metrics, 6, signal.SIGINT, *short(tmp_path, "cut", *options))
    assert f"continue with --resume --runs {tmp_path} --name cut" in output
    assert (tmp_path / "cut" / "compare.png").is_file()
    assert not (tmp_path / "cut" / "results.json").is_file()  # it was stopped within the first job
    cut_short(metrics, 25, signal.SIGKILL, *resume)
    assert not (tmp_path / "cut" / "results.json").is_file()
    resumed = run(*resume, "--steps", 120)
    assert resumed.returncode == 0, resumed.stderr

    def outcome(name):
        rows = json.loads((tmp_path / name / "results.json").read_text())
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return (
            {row["method"]: (row["sha256"], row["accuracy"]) for row in rows},
            {(line["method"], line["step"]): line["loss"] for line in lines},
            len(lines),
        )

    assert outcome("cut") == outcome("whole")


@pytest.mark.slow
def test_compare_in_processes_gives_bitwise_what_train_does(tmp_path):
    options = ("--steps", 8, "--batch", 8, "--runs", tmp_path)
    many = run("compare", *options, "--name", "many", "--processes", 2, "--methods", "sidco", "diana", "--seeds", 3, 1)
    assert many.returncode == 0, many.stderr
    assert "compare.png" in many.stdout
    assert run("train", *options, "--name", "one", "--workers", 2, "--method", "diana", "--seed", 3).returncode == 0
    rows = json.loads((tmp_path / "many" / "results.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [("sidco", 3), ("sidco", 1), ("diana", 3), ("diana", 1)]
    (one,) = json.loads((tmp_path / "one" / "results.json").read_text())
    for key in ("loss", "accuracy", "sent_bytes", "sha256", "sha256_optimizer"):
        assert rows[2][key] == one[key], key
    again = run("compare", "--runs", tmp_path, "--name", "many", "--resume")
    assert again.stdout.startswith(f"{tmp_path}/many is finished\n")


def test_resume_refuses_other_options(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(json.dumps({"steps": 40, "lr": 0.001, "data_dir": None}))
    result = run("compare", "--runs", tmp_path, "--name", "r", "--resume", "--steps", 50)
    assert result.stderr == f"error: {tmp_path}/r was started with --steps 40, not 50; leave it out\n"


def test_help_lists_every_option():
    result = run("compare", "--help")
    assert result.returncode == 0
    for option in ("--data-dir", "--alpha", "--seeds", "--resume", "(default: ", "sidco: threshold by SIDCo-E"):
        assert option in result.stdout
    assert "compare" in run("--help").stdout


# ------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("workers", [1, 7])
def test_split_gives_each_example_to_one_worker(alpha, workers, seed):
    labels = np.random.default_rng(seed).integers(0, 10, 500)
    parts = data.split(labels, workers, alpha, seed)
    assert len(parts) == workers
    assert min(map(len, parts)) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(500))


def test_small_alpha_gives_different_label_mixes(seed):
    labels = np.random.default_rng(seed).integers(0, 10, 5000)

    def imbalance(alpha):
        parts = data.split(labels, 5, alpha, seed)
        return np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])

    assert imbalance(None) < 0.2 < imbalance(0.1)


def test_more_workers_than_examples():
    with pytest.raises(UserError, match="5 workers for 3 examples"):
        data.split(np.zeros(3, int), 5, None, 0)
    assert [len(part) for part in data.split(np.zeros(3, int), 3, 0.01, 0)] == [1, 1, 1]


def test_batches_depend_on_seed_and_step_alone():
    parts = [np.arange(10), np.arange(10, 13)]
    batch = data.batch_of(parts, 4, 1, 2)
    np.testing.assert_array_equal(batch, data.batch_of(parts, 4, 1, 2))
    assert not np.array_equal(batch, data.batch_of(parts, 4, 1, 3))
    assert set(batch[:4]) <= set(parts[0])
    assert set(batch[4:]) <= set(parts[1])


def idx(values):
    return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def test_idx_files_plain_and_gzipped(tmp_path):
    rng = np.random.default_rng(0)
    for stem, count in (("train", 6), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8)))
    loaded = data.load("mnist", tmp_path)
    assert loaded.train_x.shape == (6, 28, 28, 1)
    assert loaded.test_y.tolist() == [0, 1, 2]
    np.testing.assert_allclose(loaded.test_x[..., 0], (images / 255 - 0.1307) / 0.3081, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file"),
        (b"\0\0\x08\3\0\0", "is not an idx file"),
        (b"\0\0\x08\1\0\0\0\5abc", r"holds 3 values, its header says \(5,\)"),
        (b"\0\0\x0d\1\0\0\0\1abcd", "is not an idx file of bytes"),
    ],
)
def test_broken_idx_files(content, message, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=message):
        data.read_idx(tmp_path / "x")


def test_digits_need_no_download():
    loaded = data.load("digits")
    assert loaded.train_x.shape[1:] == (8, 8, 1)
    assert len(loaded.train_y) + len(loaded.test_y) == 1797
    assert loaded.num_classes == 10
