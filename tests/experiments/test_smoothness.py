"""The smoothness experiments as a user runs them, and the runner against a plain loop."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_to

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.skcompress.problems import read
from experiments.smoothness import upload_bits
from experiments.smoothness.problems import make_problem
from experiments.smoothness.runner import AXIS, gradient_of, run_setup
from experiments.smoothness.setups import make_setup


@pytest.fixture(scope="module")
def problem():
    return make_problem(None, workers=4, l2=0.05)


def test_problem_is_what_it_says(problem):
    """Contiguous workers of rows sorted by norm; the optimum has a zero gradient; L bounds the Hessian there."""
    norms = np.linalg.norm(problem.features, axis=2)
    assert np.all(norms.max(1)[:-1] <= norms.min(1)[1:])
    assert np.max(np.abs(problem.features)) == 1
    a = (problem.features * problem.labels[..., None]).reshape(-1, problem.d)
    s = 1 / (1 + np.exp(a @ problem.optimum))
    gradient = -a.T @ s / len(a) + problem.l2 * problem.optimum
    assert np.linalg.norm(gradient) < 1e-14
    hessian = (a * (s * (1 - s))[:, None]).T @ a / len(a) + problem.l2 * np.eye(problem.d)
    assert np.linalg.eigvalsh(hessian)[-1] <= problem.L


@pytest.mark.slow
def test_batched_runs_are_single_runs(problem):
    """Two budgets and two seeds at once give what the library gives one by one.

    Levels have the width of the finest budget, which rounds units of the others in another place.
    """
    with jax.enable_x64(True):
        setup = make_setup(problem, "diana+ varying", [0.25, 1.0])
        curves = run_setup(problem, setup, [3, 4], target=0.0, max_rounds=20, chunk=10)
        for b, share in enumerate((0.25, 1.0)):
            single = make_setup(problem, "diana+ varying", [share])
            rounds = jc.methods.rounds(single.make(single.steps[0]), AXIS, seed=jax.random.key(4))

            def worker(features, labels, rounds=rounds):
                def body(state, _):
                    state, bits = rounds.step(state, gradient_of(features, labels, problem.l2))
                    return state, (rounds.point(state), bits)

                return jax.lax.scan(body, rounds.init(jnp.zeros(problem.d)), length=20)[1]

            points, bits = jax.jit(jax.vmap(worker, axis_name=AXIS))(problem.features, problem.labels)
            errors = np.sum((np.asarray(points[0]) - problem.optimum) ** 2, 1) / np.sum(problem.optimum**2)
            bits = np.cumsum(np.asarray(bits, np.float64).mean(0))
            np.testing.assert_allclose(curves.errors[b, 1], errors, rtol=1e-6 if b else 0.1)
            np.testing.assert_allclose(curves.up[b, 1], bits, rtol=1e-6 if b else 0.1)


@pytest.mark.slow
def test_aware_needs_fewer_bits_and_uploads_its_roots(problem):
    with jax.enable_x64(True):
        made = [make_setup(problem, label, [0.25]) for label in ("diana uniform", "diana+ varying")]
        plain, aware = (run_setup(problem, s, [0], target=1e-6, max_rounds=3000).bits_to(1e-6)[0, 0] for s in made)
        short = make_setup(problem, "diana uniform", [1 / 16])
        sparse = run_setup(problem, short, [0], target=0.0, max_rounds=50).up
    assert aware < plain / 1.5
    assert sparse[0, 0, -1] / 50 < 32 + 64  # Elias-coded: fewer than the two bits an entry of a code of fixed width
    assert upload_bits(made[0], problem.d) == 0
    assert upload_bits(made[1], problem.d) == 32 * (64 * 65 / 2 + 64)


def test_blocks_save_rounds_in_proportion_to_workers_as_one_norm_does():
    """The setting in which the bound of blocks is tight: n strong coordinates, one of each worker, in n blocks."""
    n, d = 4, 64
    with jax.enable_x64(True):
        problem = make_problem(None, n, 1e-3, own=d)
        bound = {}
        for name in ("diana uniform", "diana+ uniform", "diana+ block"):
            (steps,) = make_setup(problem, name, [1 / n]).steps
            bound[name] = 1 / min(float(steps.gamma) * problem.l2, float(steps.alpha) / 2)
    peaks = np.argmax(np.asarray(problem.smoothness.diag), axis=1)
    np.testing.assert_array_equal(peaks // (d // n), np.arange(n))
    assert 2 * problem.L_max / n > problem.L
    assert bound["diana uniform"] > n * bound["diana+ block"]
    assert bound["diana uniform"] > n * bound["diana+ uniform"]
    with pytest.raises(UserError, match="--own 8 is for at most as many workers; got 9"):
        make_problem(None, 9, own=8)


SHORT = ("--l2", 0.1, "--workers", 4, "--rounds", 200, "--seeds", 0, "--target", 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("study", ["all", "variants"])
def test_studies_write_everything(study, tmp_path):
    budgets = ("--budgets", 0.5, 1)
    names = {
        "all": ["dcgd rand", "diana+ varying", "adiana+ block"],
        "variants": ["diana+ varying", "diana+ uniform, rotated", "diana+ varying, low rank d/8"],
    }[study]
    only = ("--only", *names)
    result = run_to(0, "smoothness", study, "--runs", tmp_path, "--name", "r", *SHORT, *budgets, *only)
    assert "diana+ varying" in result.stdout
    assert "+ upload" in result.stdout
    folder = tmp_path / "r"
    assert (folder / "curves-4.png").read_bytes()[:4] == b"\x89PNG"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["budget"] for row in rows} <= {0.5, 1.0}
    assert all(row["bits"] > 0 and row["floor"] >= 0 for row in rows)
    assert sorted(row["method"] for row in rows) == sorted(names)


@pytest.mark.slow
def test_workers_study_plots_against_n(tmp_path):
    options = ("--l2", 0.1, "--workers", 2, 4, *SHORT[4:], "--budgets", 1)
    run_to(0, "smoothness", "workers", "--runs", tmp_path, "--name", "r", *options)
    assert (tmp_path / "r" / "workers.png").is_file()


@pytest.mark.slow
def test_networks(tmp_path):
    result = run_to(
        0, "smoothness", "networks", "--runs", tmp_path, "--name", "r", "--rounds", 3, "--seeds", 0, "--budgets", 0.1
    )
    for words in ("layer-wise", "diagonal", "networks.png", "refresh"):
        assert words in result.stdout


def test_any_file_of_rows_is_a_data_set(tmp_path):
    """The same rows as LIBSVM text and as .npz are the same problem here and in `skcompress`."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((12, 3)).round(3), np.arange(12) % 2
    text = [
        f"{label} " + " ".join(f"{j + 1}:{v:g}" for j, v in enumerate(row)) for label, row in zip(y, X, strict=True)
    ]
    (tmp_path / "a.txt").write_text("\n".join(text) + "\n")
    np.savez(tmp_path / "b.npz", X=X, y=y)
    one, other = (make_problem(tmp_path / name, 3) for name in ("a.txt", "b.npz"))
    np.testing.assert_allclose(one.features, other.features)
    np.testing.assert_allclose(one.optimum, other.optimum, rtol=1e-6)
    one, other = (read(tmp_path / name) for name in ("a.txt", "b.npz"))
    for mine, its in zip(one[1:], other[1:], strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6)
    np.savez(tmp_path / "one.npz", X=X, y=np.ones(12))
    np.savez(tmp_path / "wide.npz", X=np.ones((2, 5000)), y=y[:2])
    for name, message in {"one": "two classes are needed", "wide": "has 5,000 features"}.items():
        with pytest.raises(UserError, match=message):
            make_problem(tmp_path / f"{name}.npz", 1)


@pytest.mark.parametrize("line", ["1 1:nan 2:1", "1 1:0.5 2:-inf", "nan 1:1"])
def test_files_hold_finite_numbers(line, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"0 1:1\n{line}\n1 2:3\n")
    for reader in (lambda: make_problem(path, 1), lambda: read(path)):
        with pytest.raises(UserError, match=r"a\.txt holds NaN or infinity"):
            reader()
