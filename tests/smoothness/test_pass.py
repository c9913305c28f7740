"""The preprocessing pass: sources, splits, forms from data, files, resumption, and bad input."""

import bz2
import json
import lzma
import subprocess
import sys

import numpy as np
import oracles_smoothness as oracle
import pytest
import scipy.io
import scipy.sparse

import jaxcomp as jc
from jaxcomp import cli, smoothness
from jaxcomp.smoothness import estimate, sources

LOWNER = 1e-9


def data(seed, m=60, d=12):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, d)) * (rng.random((m, d)) < 0.5) * np.geomspace(0.2, 2, d)
    return rows, np.where(rng.random(m) < 0.5, -1.0, 1.0)


def matrix_of(operator):
    root = np.stack([np.asarray(operator.root(e), np.float64) for e in np.eye(operator.diag.shape[-1])], axis=1)
    return root @ root.T


def write_libsvm(path, rows, labels):
    lines = []
    for row, label in zip(rows, labels, strict=True):
        lines.append(" ".join([f"{label:g}", *(f"{j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v)]))
    text = ("\n".join(lines) + "\n").encode()
    opener = {".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(text)


def write(path, rows, labels):
    """A file of the kind that its name says. Returns the labels where it does not hold them."""
    if path.name.endswith("sparse.npz"):
        scipy.sparse.save_npz(path, scipy.sparse.csr_matrix(rows))
        return labels
    if path.suffix == ".npy":
        np.save(path, rows)
        return labels
    if path.suffix == ".npz":
        np.savez(path, X=rows, y=labels)
    elif path.suffix == ".mat":
        scipy.io.savemat(path, {"A": rows, "b": labels[:, None]})
    else:
        write_libsvm(path, rows, labels)
    return None


@pytest.mark.parametrize(("loss", "curvature"), [("logistic", 0.25), ("squared", 1.0), ("huber", 1.0)])
@pytest.mark.parametrize("sparse", [False, True])
def test_dense_form_is_the_formula(loss, curvature, sparse, seed):
    rows, _ = data(seed)
    given = scipy.sparse.csr_matrix(rows) if sparse else rows
    S = smoothness.glm(given, loss=loss, l2=0.01)
    want = oracle.glm_matrix(rows, curvature, 0.01)
    np.testing.assert_allclose(S.matrix_root @ S.matrix_root, want, atol=1e-12)
    np.testing.assert_allclose(S.diag, np.diag(want), rtol=1e-12)


FORMS = {
    "diagonal": {"form": "diagonal"},
    "low_rank": {"form": "low_rank", "rank": 4},
    "low_rank-full": {"form": "low_rank", "rank": 12},
    "block": {"form": "block", "blocks": 3},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_every_form_is_above_the_matrix(name, sparse, streamed, seed, monkeypatch):
    if streamed:  # the paths for many features and many rows
        monkeypatch.setattr(estimate, "EXACT_FEATURES", 0)
        monkeypatch.setattr(estimate, "EXACT_ROWS", 10)
    rows, _ = data(seed)
    S = smoothness.glm(scipy.sparse.csr_matrix(rows) if sparse else rows, l2=0.01, **FORMS[name])
    want = oracle.glm_matrix(rows, 0.25, 0.01)
    bound = preprocess_matrix(S)
    assert np.linalg.eigvalsh(bound - want)[0] >= -LOWNER
    assert np.linalg.eigvalsh(bound)[-1] == pytest.approx(float(S.lambda_max), rel=1e-6)
    np.testing.assert_allclose(np.diag(bound), S.diag, rtol=1e-6)
    assert float(S.lambda_max) < 12 * np.linalg.eigvalsh(want)[-1]
    if name == "low_rank-full" and not streamed:
        np.testing.assert_allclose(bound, want, atol=1e-9)


def preprocess_matrix(S):
    """M in float64, from the fields (methods compute in JAX's default precision)."""
    if isinstance(S, smoothness.Diagonal):
        return np.diag(S.diag)
    if isinstance(S, smoothness.LowRank):
        return S.vectors @ np.diag(S.sigma) @ S.vectors.T + S.base * np.eye(len(S.diag))
    size = S.matrix_root.shape[1]
    whole = np.zeros((len(S.matrix_root) * size,) * 2)
    for b, root in enumerate(S.matrix_root):
        whole[b * size : (b + 1) * size, b * size : (b + 1) * size] = root @ root
    return whole[: len(S.diag), : len(S.diag)]


def test_certified_diagonal_is_near_the_least_constant(seed):
    """On nonnegative data the bound of Collatz and Wielandt closes in on the exact one."""
    rng = np.random.default_rng(seed)
    rows = (rng.random((80, 15)) < 0.3) * 1.0
    exact = estimate.ExactDiagonalCollector(15, 0.25, 0.01)
    certified = estimate.DiagonalCollector(15, 0.25, 0.01)
    for one in (exact, certified):
        for done in range(one.passes):
            if done:
                one.next_pass()
            for start in range(0, 80, 25):
                one.add(rows[start : start + 25])
    low, high = float(exact.finish().factor), float(certified.finish().factor)
    assert low <= high * (1 + 1e-12) < 1.05 * low * (1 + 1e-12)


def test_rank_deficient_low_rank_is_the_pseudo_inverse():
    rows = np.array([[1.0, 1, 0], [0, 0, 2]])
    S = smoothness.glm(rows, form="low_rank", rank=3)
    dense = smoothness.glm(rows)
    np.testing.assert_allclose(preprocess_matrix(S), [[0.125, 0.125, 0], [0.125, 0.125, 0], [0, 0, 0.5]], atol=1e-12)
    for e in np.eye(3):
        np.testing.assert_allclose(S.inv_root(e), dense.matrix_inv_root @ e, atol=1e-6)


def test_splits(seed):
    rng = np.random.default_rng(seed)
    norms, labels = rng.random(103), rng.integers(0, 3, 103)
    for split in ("contiguous", "sorted", "iid"):
        owner = smoothness.assign(split, norms, labels, 10, seed=seed)
        np.testing.assert_array_equal(np.bincount(owner[owner >= 0]), 10)
    owner = smoothness.assign("sorted", norms, labels, 10)
    assert max(norms[owner == 0]) <= min(norms[owner == 9])
    owner = smoothness.assign("dirichlet", norms, labels, 4, seed=1, concentration=1.0)
    assert np.all(owner >= 0)
    assert len(np.unique(owner)) == 4


@pytest.mark.parametrize("suffix", ["", ".xz", ".bz2", ".npy", ".npz", ".mat", "sparse.npz"])
def test_every_file_gives_the_same_operators(suffix, tmp_path, seed):
    rows, labels = data(seed)
    rows[0, -1] = 0.7  # so that LIBSVM text sees every feature
    path = tmp_path / f"data{suffix}"
    given = write(path, rows, labels)
    source = smoothness.open_source(path, given)
    S = smoothness.preprocess(source, tmp_path / "out.npz", workers=3, l2=0.01, split="sorted", scale=True)
    scaled = rows / np.maximum(np.abs(rows).max(1), 1e-300)[:, None]
    order = np.argsort(np.linalg.norm(scaled, axis=1), kind="stable")[:60].reshape(3, 20)
    want = np.stack([oracle.glm_matrix(scaled[part], 0.25, 0.01) for part in order])
    np.testing.assert_allclose(S.matrix_root @ S.matrix_root, want, atol=1e-10)
    mean = np.linalg.eigvalsh(want.mean(0))[-1]
    assert smoothness.describe(tmp_path / "out.npz")["mean_lambda_max"] == pytest.approx(mean)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["dense", "diagonal", "low_rank", "block"])
def test_interrupted_pass_goes_on(form, tmp_path, seed, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_ROWS", 7)
    monkeypatch.setattr(estimate, "EXACT_FEATURES", 0)
    rows, labels = data(seed)
    given = scipy.sparse.csr_matrix(rows) if form == "low_rank" else rows
    options = {"workers": 3, "l2": 0.01, "form": form, "rank": 3, "blocks": 3, "split": "iid", "keep_every": 0.0}
    whole = smoothness.preprocess(smoothness.open_source(given, labels), tmp_path / "whole.npz", **options)
    seen = []

    def stop(what, done, total):
        seen.append(what)
        if what.startswith("pass") and done >= 35:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smoothness.preprocess(smoothness.open_source(given, labels), tmp_path / "cut.npz", show=stop, **options)
    assert (tmp_path / "cut.npz.partial").is_file()
    done = []
    again = smoothness.preprocess(
        smoothness.open_source(given, labels),
        tmp_path / "cut.npz",
        show=lambda what, rows, total: done.append((what, rows)),
        **options,
    )
    first_pass = [rows for what, rows in done if what.startswith("pass 1 of")]
    assert min(first_pass) > 28  # it did not start over
    for a, b in zip(again, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert not (tmp_path / "cut.npz.partial").exists()


def test_file_checks(tmp_path, seed):
    rows, labels = data(seed)
    path, out = tmp_path / "a", tmp_path / "s.npz"
    write_libsvm(path, rows, labels)
    assert cli.main(["smoothness", str(path), "--workers", "2", "--l2", "0.1", "--out", str(out)]) == 0
    S = smoothness.load(out, shape=(2, 12), data=path)
    assert S.diag.dtype == np.float64
    about = smoothness.describe(out)
    assert (about["workers"], about["loss"], about["l2"], about["split"]) == (2, "logistic", 0.1, "contiguous")
    assert about["library"] == jc.__version__
    with pytest.raises(ValueError, match=r"holds shape \(2, 12\); expected \(3, 12\)"):
        smoothness.load(out, shape=(3, 12))
    other = tmp_path / "b"
    write_libsvm(other, rows[1:], labels[1:])
    with pytest.raises(ValueError, match="was made from other data"):
        smoothness.load(out, data=other)
    (tmp_path / "junk.npz").write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match=r"not a file of smoothness.save"):
        smoothness.load(tmp_path / "junk.npz")
    with np.load(out) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    np.savez(tmp_path / "old.npz", **(arrays | {"header": np.array(json.dumps(header | {"version": 99}))}))
    with pytest.raises(ValueError, match="format version 99; this library reads 1"):
        smoothness.load(tmp_path / "old.npz")
    del arrays["array_1"]
    np.savez(tmp_path / "torn.npz", **arrays)
    with pytest.raises(ValueError, match="is damaged"):
        smoothness.load(tmp_path / "torn.npz")


def test_softmax_file(tmp_path, seed):
    rows, _ = data(seed)
    labels = np.arange(60) % 3
    out = tmp_path / "s.npz"
    S = smoothness.preprocess(smoothness.open_source(rows, labels), out, workers=2, loss="softmax", l2=0.1)
    again = smoothness.load(out)
    assert S.diag.shape == (2, 36)
    np.testing.assert_array_equal(again.diag, S.diag)
    assert type(again).__name__ == "Softmax"


def test_labels_belong_to_what_a_file_was_made_from(tmp_path, seed):
    rows, _ = data(seed)
    out, options = tmp_path / "s.npz", {"workers": 2, "loss": "softmax", "l2": 0.1}
    smoothness.preprocess(smoothness.open_source(rows, np.arange(60) % 3), out, **options)
    with pytest.raises(ValueError, match="was made from other data or options"):
        smoothness.preprocess(smoothness.open_source(rows, np.arange(60) % 5), out, **options)
    assert smoothness.load(out, data=rows).diag.shape == (2, 36)


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".npz", ".mat", "-sparse.npz"])
def test_labels_of_their_own_replace_those_of_the_data(suffix, tmp_path, seed):
    rows, labels = data(seed)
    path, own = tmp_path / f"x{suffix}", tmp_path / "own.npy"
    np.save(own, np.arange(60.0))
    write(path, rows, labels)
    source = smoothness.open_source(path, own)
    np.testing.assert_array_equal(np.concatenate([y for _, y in source.chunks()]), np.arange(60.0))
    np.save(own, np.arange(59.0))
    with pytest.raises(ValueError, match=r"59 labels for (at least )?60 rows"):
        list(smoothness.open_source(path, own).chunks())


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".mat"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:90] + bytes(9) + b[99:], lambda b: b""])
def test_damaged_files_are_named(suffix, damage, tmp_path, seed):
    rows, labels = data(seed)
    path = tmp_path / f"x{suffix}"
    write(path, rows, labels)
    path.write_bytes(damage(path.read_bytes()))
    try:  # what is damaged may still be numbers, which a pass then checks
        (chunk,) = smoothness.open_source(path, labels).chunks()
        assert chunk[0].shape[0] == 60
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_damaged_operators_are_named_and_a_damaged_partial_pass_starts_again(tmp_path, seed):
    rows, labels = data(seed)
    out, source = tmp_path / "o.npz", smoothness.open_source(rows, labels)
    want = smoothness.preprocess(source, out, workers=2, l2=0.1)
    content = out.read_bytes()
    out.with_name("o.npz.partial").write_bytes(content[: len(content) // 2])
    for broken in (content[: len(content) // 2], content[:1000] + bytes(50) + content[1050:], b""):
        out.write_bytes(broken)
        with pytest.raises(ValueError, match=r"is damaged|is not a file"):
            smoothness.load(out)
    out.unlink()
    got = smoothness.preprocess(source, out, workers=2, l2=0.1)
    np.testing.assert_array_equal(got.diag, want.diag)


def test_a_long_sketch_does_not_depend_on_chunks(monkeypatch, seed):
    monkeypatch.setattr(estimate, "EXACT_ROWS", 10)
    rows, _ = data(seed)
    operators = []
    for cuts in ([60], [7, 20, 21, 60], range(1, 61)):
        one = estimate.LowRankCollector(12, 0.25, 0.1, 4)
        for start, end in zip([0, *cuts][:-1], cuts, strict=True):
            one.add(rows[start:end])
        operators.append(one.finish())
    for other in operators[1:]:
        np.testing.assert_array_equal(other.diag, operators[0].diag)


def test_long_libsvm_text_is_read_twice_rather_than_kept(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(sources, "KEPT_BYTES", 100)
    rows, labels = data(seed)
    write_libsvm(tmp_path / "a.txt", rows, labels)
    for given in (None, 12):
        source = smoothness.open_source(tmp_path / "a.txt", num_features=given)
        got = np.concatenate([part.toarray() for part, _ in source.chunks()])
        np.testing.assert_allclose(got, rows[:, : got.shape[1]])
    with pytest.raises(ValueError, match="beyond num_features = 3"):
        smoothness.open_source(tmp_path / "a.txt", num_features=3)


BAD = [
    (lambda: ("labels", np.full(60, 3.0), {}), r"needs labels -1/\+1, 0/1 or 1/2; got 3"),
    (lambda: ("labels", np.full(60, np.nan), {}), "labels must be finite"),
    (lambda: ("rows", np.full((60, 12), np.nan), {}), "features must be finite; got NaN"),
    (lambda: ("rows", np.zeros((60, 12)), {"l2": 0.0}), r"the squares of all features are zero, .*give l2 \(--l2\)"),
    (lambda: ("rows", np.full((60, 12), 1e-200), {"l2": 0.0}), "the squares of all features are zero"),
    (lambda: ("rows", np.full((60, 12), 1e200), {}), r"at most 1e\+140 in magnitude.*got 1e\+200. Scale them"),
    (lambda: ("rows", np.full((60, 12), np.inf), {"scale": True}), "features must be finite"),
    (lambda: ("same", None, {"workers": 61}), "61 workers for 60 rows; each needs at least one"),
    (lambda: ("same", None, {"l2": -1.0}), "l2 must be finite and at least 0; got -1.0"),
    (lambda: ("same", None, {"split": "odd"}), "split must be one of contiguous, sorted, iid, dirichlet"),
    (lambda: ("same", None, {"form": "cube"}), "form must be one of dense, diagonal, low_rank, block"),
    (lambda: ("same", None, {"form": "low_rank"}), "needs rank, an integer of at least 1; got None"),
    (lambda: ("same", None, {"loss": "hinge"}), "loss must be one of logistic"),
    (
        lambda: ("same", None, {"split": "dirichlet", "workers": 20, "concentration": 1e-3}),
        "without rows; raise its concentration",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(change, message, tmp_path, seed):
    rows, labels = data(seed)
    what, value, options = change()
    rows, labels = (value if what == "rows" else rows), (value if what == "labels" else labels)
    with pytest.raises(ValueError, match=message):
        smoothness.preprocess(
            smoothness.open_source(rows, labels), tmp_path / "o.npz", **({"workers": 2, "l2": 0.1} | options)
        )
    assert not (tmp_path / "o.npz").exists()


WRONG = {
    "1 1:1 4000000000:2": "{}: feature 4000000000 is beyond 2147483646, the largest that can be read",
    "1 1:1 100000000:2": '{}: smoothness: form "dense" of 100000000 features makes a matrix of 100000000 x 100000000',
    "1 1:1e200": "{}: smoothness: features must be at most 1e+140 in magnitude",
    "1 1:0": "{}: the squares of all features are zero",
}


@pytest.mark.parametrize("text", WRONG)
def test_data_that_no_matrix_can_be_made_of_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text(f"{text}\n-1 2:{0 if text.endswith(':0') else 1}\n")
    assert cli.main(["smoothness", str(path), "--workers", "1", "--out", str(tmp_path / "o.npz")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: " + WRONG[text].format(path))
    assert said.count("\n") == 1
    assert not (tmp_path / "o.npz").exists()


def test_a_worker_without_data_of_its_own_prints_no_nan(tmp_path, capsys):
    rows = np.vstack([np.zeros((3, 3)), np.eye(3)])
    np.savez(tmp_path / "a.npz", X=rows, y=np.array([1, -1] * 3))
    assert cli.main(["smoothness", str(tmp_path / "a.npz"), "--workers", "2", "--out", str(tmp_path / "o.npz")]) == 0
    assert "nan" not in capsys.readouterr().out


def test_command_line(tmp_path, seed):
    rows, labels = data(seed)
    write_libsvm(tmp_path / "a.xz", rows, labels)

    def run(*more):
        command = [sys.executable, "-m", "jaxcomp.cli", "smoothness", str(tmp_path / "a.xz"), *map(str, more)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    good = run("--workers", 3, "--form", "low_rank", "--rank", 2, "--l2", 0.1, "--out", tmp_path / "o.npz")
    assert good.returncode == 0, good.stderr
    assert "LowRank, 3 workers x 12 entries" in good.stdout
    bad = run("--workers", 4, "--l2", 0.1, "--out", tmp_path / "o.npz")
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: ")
    assert bad.stderr.count("\n") == 1
    assert "was made from other data or options" in bad.stderr
