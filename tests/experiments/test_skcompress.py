"""The experiments of SKCompress on tiny settings: tables, plots and numbers come out, errors fit on a line."""

import json

import jax
import numpy as np
import pytest
from programs import run_to

from experiments.lib.cli import UserError
from experiments.skcompress import problems
from experiments.skcompress.sizes import main, measure_raw


def libsvm(path, rows):
    lines = [f"{label} " + " ".join(f"{j + 1}:{v:g}" for j, v in entries) for label, entries in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_sizes(tmp_path):
    rng = np.random.default_rng(0)
    draw = lambda: sorted({int(j): rng.random() + 0.1 for j in rng.integers(0, 2999, 20)}.items())
    data = libsvm(tmp_path / "rows.txt", [(1 + i % 4, [*draw(), (2999 + i % 2, 1.0)]) for i in range(300)])
    out = tmp_path / "s"
    options = ("--data", data, "--batch", 100, "--steps", 4)
    result = run_to(0, "skcompress", "sizes", *options, "--runs", tmp_path, "--name", "s")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    of = lambda row: (row["keys"] + row["values"] + row["tables"]) / row["nonzeros"]
    found = {row["method"]: row for row in rows}
    assert of(found["f32 keys + values"]) == of(found["Adam"]) == 8
    assert of(found["quantile, 16 buckets"]) * 1.3 < of(found["SKCompress as released"])
    assert found["quantile, 16 buckets"]["error"] < found["SKCompress as released"]["error"]
    assert found["+ Huffman"]["values"] < found["+ MinMaxSketch, recentred"]["values"]
    assert (out / "sizes.png").stat().st_size > 1000
    assert all(name in result.stdout for name in ("zlib -9", "what each part is worth".capitalize(), "sizes.png"))


@pytest.mark.slow
def test_sizes_of_narrow_data(tmp_path):
    """Of short vectors some methods send the values as they are: they count as such, and nothing is lost."""
    rng = np.random.default_rng(0)
    draw = lambda: sorted({int(j): rng.random() + 0.1 for j in rng.integers(0, 99, 10)}.items())
    data = libsvm(tmp_path / "rows.txt", [(i % 2, [*draw(), (99 + i % 2, 1.0)]) for i in range(100)])
    options = ["--data", str(data), "--batch", "20", "--steps", "3", "--runs", str(tmp_path), "--name", "s"]
    with jax.numpy_dtype_promotion("standard"):
        assert main(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "s" / "metrics.jsonl").read_text().splitlines()]
    found = {row["method"]: row for row in rows}
    for plain in ("SKCompress as released", "+ Huffman"):
        assert found[plain]["values"] == 4 * found[plain]["nonzeros"]
        assert (found[plain]["error"], found[plain]["keys"] > 0) == (0, True)
    assert 0 < found["quantile, 16 buckets"]["values"] < found["SKCompress as released"]["values"]


@pytest.mark.slow
def test_training(tmp_path):
    out = tmp_path / "t"
    options = ("--problems", "svm", "network", "--optimizers", "sgd", "--steps", 3, "--batch", 50, "--workers", 2)
    result = run_to(0, "skcompress", "training", *options, "--runs", tmp_path, "--name", "t")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_method = {line["method"]: line for line in lines if line["problem"] == "svm"}
    assert by_method["dense f32"]["bytes"][-1] == 3 * 4 * (1 << 17)
    assert by_method["dense f32"]["loss"] == pytest.approx(by_method["f32 keys + values"]["loss"], rel=1e-4)
    assert all(np.isfinite(line["loss"]).all() and line["loss"][-1] < line["loss"][0] for line in lines)
    assert (out / "svm-sgd.md").is_file()
    assert (out / "training.png").stat().st_size > 1000
    assert "loss at equal bytes" in result.stdout


@pytest.mark.slow
def test_bench(tmp_path):
    result = run_to(0, "bench", "skcompress", "--nonzeros", 2000, "--repeats", 1, "--markdown", tmp_path / "b.md")
    assert "One jnp.sort of 2,000 floats" in result.stdout
    assert "recentred" in (tmp_path / "b.md").read_text()


def test_synthetic_rows_are_skewed_as_they_say():
    rows = problems.synthetic(rows=20_000, d=4096, fields=8, skew=1.0, positive=0.3, seed=1)
    assert rows.indices.shape == rows.values.shape == (20_000, 8)
    assert np.all(np.diff(rows.indices, axis=1) > 0)
    np.testing.assert_allclose(np.sum(rows.values**2, 1), 1, rtol=1e-5)
    assert abs(np.mean(rows.labels == 1) - 0.3) < 0.1
    counts = np.sort(np.bincount(rows.indices.reshape(-1), minlength=rows.d))[::-1]
    share = counts[:41].sum() / counts.sum()
    assert share > 0.5  # a hundredth of the features make up more than half of the entries
    assert np.mean(counts[:4000] == 0) < 0.2
    even = problems.synthetic(rows=20_000, d=4096, fields=8, skew=0.01, seed=1)
    even_counts = np.sort(np.bincount(even.indices.reshape(-1), minlength=rows.d))[::-1]
    assert even_counts[:41].sum() < counts[:41].sum()


def test_rows_are_read_and_scaled(tmp_path):
    path = libsvm(tmp_path / "x.txt", [(1, [(0, 3.0), (4, 4.0)]), (5, [(2, 7.0)]), (9, [])])
    rows = problems.read(path)
    assert (rows.d, rows.labels.tolist()) == (5, [-1, -1, 1])
    np.testing.assert_allclose(rows.values, [[0.6, 0.8], [1, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(rows.indices[0], [0, 4])
    with pytest.raises(UserError, match="no file"):
        problems.read(tmp_path / "y.txt")


@pytest.mark.parametrize("kind", problems.LOSSES)
def test_gradients_are_those_of_the_formulas(kind, seed):
    """Against NumPy, row by row; and sparse: only features that occur in the batch."""
    rows = problems.synthetic(rows=50, d=400, fields=5, seed=seed)
    problem = problems.linear(rows, kind)
    params, batch = np.random.default_rng(seed).standard_normal(400).astype(np.float32), np.array([3, 7, 7, 30])
    want, loss = np.zeros(400), 0.0
    for i in batch:
        margin = rows.labels[i] * np.float64(params)[rows.indices[i]] @ np.float64(rows.values[i])
        each, slope = {
            "logistic": (np.log1p(np.exp(-margin)), -1 / (1 + np.exp(margin))),
            "svm": (max(0, 1 - margin), -float(margin < 1)),
            "regression": ((1 - margin) ** 2 / 2, margin - 1),
        }[kind]
        loss += each / len(batch)
        np.add.at(want, rows.indices[i], slope * rows.labels[i] * rows.values[i] / len(batch))
    present = np.unique(rows.indices[batch])
    want[present] += problems.L2 * params[present]
    np.testing.assert_allclose(problem.gradient(params, problem.data, batch), want, rtol=1e-4, atol=1e-6)
    assert float(problem.loss(params, problem.data, batch)) == pytest.approx(loss, rel=1e-5)


def test_raw_messages():
    x = np.zeros(1000, np.float32)
    x[::10] = np.arange(100) - 50.5
    plain, *packed = measure_raw(x)
    assert plain.bytes == 800
    assert {row.method for row in packed} >= {"zlib -9"}
    assert all(0 < row.bytes < 800 and row.error == 0 for row in packed)
