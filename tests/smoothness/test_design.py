"""Operators, probabilities, steps and variances: the oracle file, enumeration, and numerical optimizers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles_smoothness as oracle
import pytest
from scipy.optimize import minimize

import jaxcomp as jc
from jaxcomp import smoothness

FILE = json.loads((Path(__file__).parents[1] / "smoothness_oracle.json").read_text())
N, D, MU = FILE["n"], FILE["d"], FILE["mu"]
A = [np.array(a) for a in FILE["A"]]
CUTS = {"n": N, "mu": MU}
each_node = pytest.mark.parametrize("i", range(N))


def assert_close(got, want):
    """Equal to eight digits."""
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8)


def diagonal(i):
    return np.diag(FILE["nodes"][i]["L"])


@each_node
def test_matrix_and_roots_are_those_of_the_file(i):
    node = FILE["nodes"][i]
    matrix = oracle.glm_matrix(A[i], 1 / 4, MU)
    assert_close(matrix, node["L"])
    operator = smoothness.dense_of(matrix)
    assert_close(operator.matrix_root, node["L_sqrt"])
    assert_close(operator.matrix_inv_root, node["L_isqrt"])
    assert_close(operator.diag, diagonal(i))
    assert_close(operator.lambda_max, node["eig"][-1])
    assert_close(smoothness.operator.pseudo_roots(matrix)[2], node["eig"])
    gradient = oracle.logistic_gradient(A[i], np.array(FILE["b"][i]), MU, np.zeros(D))
    assert_close(gradient, node["grad_at_0"])
    assert_close(operator.inv_root(gradient), node["u_at_0"])


@each_node
def test_probabilities_are_those_of_the_file(i):
    diag, want = diagonal(i), FILE["nodes"][i]
    for method, key in (("dcgd+", "dcgd_plus_sparse"), ("diana+", "diana_plus_sparse")):
        p = smoothness.probabilities(diag, FILE["tau"], method=method, workers=N, mu=MU)
        assert_close(p, want[key]["p"])
        assert_close(p.sum(), FILE["tau"])
        assert_close(smoothness.sparsification_variance(diag, p), want[key]["calL"])
        assert_close(smoothness.sparsification_variance(np.ones(D), p), want[key]["omega"])
    assert_close(want["diana_plus_sparse"]["rho"], np.max((1 / p - 1) * (1 + diag / (N * MU))))


@each_node
@pytest.mark.parametrize("key", ["dcgd_plus_quant", "diana_plus_quant", "dcgd_plus_quant_beta6"])
def test_steps_and_bounds_are_those_of_the_file(i, key):
    diag, want = diagonal(i), FILE["nodes"][i][key]
    beta = 6 if key.endswith("6") else FILE["beta"]
    h = smoothness.steps(diag, beta, method="diana+" if "diana" in key else "dcgd+", workers=N, mu=MU)
    assert_close(h, want["h"])
    assert_close(smoothness.expected_nonzeros(h), beta)
    for bound, name in (("norm", "calL_norm"), ("quarter", "calL_quarter"), ("dual", "calL_dual")):
        assert_close(smoothness.dithering_variance(diag, h, bound=bound), want[name])
    for bound, name in (("norm", "omega_norm"), ("dual", "omega_dual")):
        if name in want:
            assert_close(smoothness.dithering_variance(np.ones(D), h, bound=bound), want[name])


@each_node
def test_block_steps_are_those_of_the_file(i):
    diag, node = diagonal(i), FILE["nodes"][i]
    options = {"beta": 3.5, "blocks": 2, "workers": N, "mu": MU}
    want = node["block_dcgd_plus"]
    assert_close(smoothness.block_steps(diag, rule="released", **options), want["h_code"])
    h = smoothness.block_steps(diag, **options)
    assert_close(h, want["h_exact"])
    assert_close(h * want["N"], want["delta_exact"])
    lengths = np.array([1, 2])
    assert_close(np.sum(1 / h**2 + np.sqrt(lengths) / h), 1.5)
    want = node["block_diana_plus"]
    h = smoothness.block_steps(diag, rule="released", method="diana+", **options)
    assert_close(h, want["h"])
    assert_close(want["delta"], h * np.array(want["A"]))
    assert_close(smoothness.block_variance(diag, h, bound="norm"), want["calL"])
    assert_close(max(h * np.sqrt(lengths)), want["omega"])
    h = smoothness.block_steps(diag, method="diana+", **options)
    assert_close(np.sum(1 / h**2 + np.sqrt(lengths) / h), 1.5)


@each_node
def test_figures_of_the_specification(i):
    """Those that stand in its text, to the digits it prints."""
    matrix, diag = np.array(FILE["nodes"][i]["L"]), diagonal(i)
    options = {"workers": N, "mu": MU}
    exact = smoothness.probabilities(diag, 1.5, method="exact", **options)
    total = smoothness.sparsification_variance(np.ones(D), exact) + smoothness.sparsification_variance(diag, exact) / (
        N * MU
    )
    # The specification's optimum came from a grid; the search finds a slightly better one.
    assert [2.929724, 2.597226][i] * (1 - 1e-4) < total <= [2.929724, 2.597226][i]
    assert_close(exact.sum(), 1.5)
    if i == 0:
        assert smoothness.rand_k_variance(matrix, 2) == pytest.approx(0.3050711769, abs=1e-10)
    safe = smoothness.operator.safe_factor(matrix, np.diag(1 / np.sqrt(diag)))
    assert safe == pytest.approx([1.3402069087, 1.2206837074][i], abs=1e-10)
    eigen = smoothness.eigenbasis(matrix)
    p = smoothness.probabilities(eigen.diag, 1.5)
    rho = smoothness.sparsification_variance(eigen.diag, p)
    assert rho == pytest.approx([0.2363705156, 0.2099624467][i], abs=1e-10)


def test_rank_deficient_matrix():
    features = np.array([[1.0, 1, 0], [0, 0, 2]])
    matrix = oracle.glm_matrix(features, 1 / 4, 0.0)
    operator = smoothness.dense_of(matrix)
    assert_close(operator.matrix_root, [[0.25, 0.25, 0], [0.25, 0.25, 0], [0, 0, np.sqrt(0.5)]])
    assert_close(operator.matrix_inv_root, [[1, 1, 0], [1, 1, 0], [0, 0, np.sqrt(2)]])
    assert_close(operator.matrix_root @ operator.matrix_inv_root, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])


# ------------------------------------------------------------------------------------------------
# Enumeration and numerical optimizers


def random_case(seed, d=5):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((7, d)) * np.geomspace(0.3, 3, d)
    return features.T @ features / 28 + 0.05 * np.eye(d), rng.standard_normal(d)


def test_sparsification_variance_is_attained_for_every_vector(seed):
    """With the probabilities of DCGD+ the error is exactly rho |v|^2_(L^-1)."""
    matrix, v = random_case(seed)
    _, inverse = oracle.roots(matrix)
    p = smoothness.probabilities(np.diag(matrix), 2.0)
    rho = smoothness.sparsification_variance(np.diag(matrix), p)
    assert_close(oracle.sparsification_error(inverse @ v, p, matrix), rho * v @ np.linalg.solve(matrix, v))
    scaled = smoothness.probabilities(9 * np.diag(matrix), 2.0)
    assert_close(scaled, p)


def test_rand_k_variance_by_enumeration(seed):
    matrix, _ = random_case(seed)
    d = len(matrix)
    masks = [mask for mask, _ in oracle.enumerate_sparsification(np.full(d, 0.5)) if mask.sum() == 2]
    second = np.mean([np.outer(mask, mask) for mask in masks], axis=0)
    single = np.diag(second)
    weight = second / np.outer(single, single) - 1
    assert_close(smoothness.rand_k_variance(matrix, 2), np.linalg.eigvalsh(weight * matrix)[-1])


@pytest.mark.parametrize("method", ["dcgd+", "diana+", "exact"])
def test_no_optimizer_finds_better_probabilities(method, seed):
    matrix, _ = random_case(seed)
    diag, tau, scale = np.diag(matrix), 1.7, 3 * 0.05
    goal = {
        "dcgd+": lambda t: np.max(t * diag),
        "diana+": lambda t: np.max(t * (1 + diag / scale)),
        "exact": lambda t: np.max(t) + np.max(t * diag) / scale,
    }[method]
    ours = goal(1 / smoothness.probabilities(diag, tau, method=method, workers=3, mu=0.05) - 1)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        start = rng.dirichlet(np.ones(5)) * tau
        fit = minimize(
            lambda p: goal(1 / np.clip(p, 1e-4, 1) - 1),
            np.clip(start, 1e-2, 1),
            method="SLSQP",
            bounds=[(1e-3, 1)] * 5,
            constraints={"type": "eq", "fun": lambda p: p.sum() - tau},
        )
        p = np.clip(fit.x, 1e-4, 1)
        assert goal(1 / (p * tau / p.sum()) - 1) >= ours * (1 - 1e-6)


@pytest.mark.parametrize("method", ["dcgd+", "diana+"])
def test_no_optimizer_finds_better_steps(method, seed):
    matrix, _ = random_case(seed)
    diag, beta, scale = np.diag(matrix), 1.7, 3 * 0.05
    weights = diag**2 if method == "dcgd+" else 1 + (diag / scale) ** 2
    goal = lambda h: np.sqrt(np.sum(weights * h**2))
    ours = goal(smoothness.steps(diag, beta, method=method, workers=3, mu=0.05))
    fit = minimize(
        lambda s: goal(1 / s),
        np.full(5, beta / np.sqrt(5)),
        method="SLSQP",
        bounds=[(1e-3, None)] * 5,
        constraints={"type": "eq", "fun": lambda s: np.sum(s**2) - beta**2},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert goal(1 / fit.x) == pytest.approx(ours, rel=1e-5)


def test_equal_block_steps_spend_the_budget():
    """Specification, section 3.1: plain blocks have one rule."""
    d, blocks, beta = 8, 4, 9.0
    size, c = d / blocks, beta / blocks - 1
    for rule in ("exact", "released"):
        h = smoothness.block_steps(np.ones(d), beta, blocks, method="uniform", rule=rule)
        assert_close(h, np.full(blocks, (np.sqrt(size) + np.sqrt(size + 4 * c)) / (2 * c)))


def test_no_optimizer_finds_better_block_steps(seed):
    matrix, _ = random_case(seed, d=7)
    diag, blocks, beta = np.diag(matrix), 3, 9.0
    h = smoothness.block_steps(diag, beta, blocks)
    norms = np.array([np.linalg.norm(part) for part in (diag[:2], diag[2:4], diag[4:])])
    lengths = np.array([2, 2, 3])
    spent = lambda h: blocks + np.sum(1 / h**2 + np.sqrt(lengths) / h)
    assert_close(spent(h), beta)
    rng = np.random.default_rng(seed)
    for _ in range(200):  # any other point of the budget has a larger maximum
        other = h * np.exp(0.3 * rng.standard_normal(3))
        low, high = 1e-3, 1e3
        for _ in range(100):
            middle = np.sqrt(low * high)
            low, high = (middle, high) if spent(middle * other) > beta else (low, middle)
        assert np.max(high * other * norms) >= np.max(h * norms) * (1 - 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("beta", [0.8, 3.0, 12.0])
def test_dual_bound_holds_and_is_nearly_attained(beta, seed):
    matrix, _ = random_case(seed)
    diag = np.diag(matrix)
    h = smoothness.steps(diag, beta)
    dual = smoothness.dithering_variance(diag, h)
    assert dual <= smoothness.dithering_variance(diag, h, bound="norm") * (1 + 1e-12)
    assert dual <= smoothness.dithering_variance(diag, h, bound="quarter") * (1 + 1e-12)
    rng = np.random.default_rng(seed)
    # The worst vectors sit on a grid cell: entries (m + r) h of unit norm. Random ones and a local search.
    worst = 0.0
    for _ in range(60):
        start = np.abs(rng.standard_normal(5)) ** rng.uniform(0.2, 2)
        found = minimize(
            lambda x: -oracle.dithering_error(x / np.linalg.norm(x), h, diag),
            start,
            method="Nelder-Mead",
            options={"maxiter": 600},
        )
        worst = max(worst, -found.fun)
    assert worst <= dual * (1 + 1e-9)
    assert worst >= 0.9 * dual
    # Grid of the infinity norm: |x|_inf <= |x|_2, so the same bound.
    for _ in range(50):
        x = rng.standard_normal(5)
        assert oracle.dithering_error(x / np.linalg.norm(x), h, diag, np.inf) <= dual * (1 + 1e-9)


def test_expected_nonzeros(seed):
    rng = np.random.default_rng(seed)
    h, x = rng.uniform(0.1, 0.6, 6), rng.standard_normal(6)
    levels = np.stack([oracle.dither(x, h, rng.random(6))[0] for _ in range(20000)])
    exact = smoothness.expected_nonzeros(h, x)
    assert np.mean(np.sum(levels != 0, 1)) == pytest.approx(exact, rel=0.02)
    assert exact <= smoothness.expected_nonzeros(h) + 1e-12


# ------------------------------------------------------------------------------------------------
# Forms


def test_every_form_applies_its_matrix_and_bounds_the_given_one(seed):
    rng = np.random.default_rng(seed)
    matrix, v = random_case(seed, d=7)
    values, vectors = np.linalg.eigh(matrix)
    sigma = values[-3:] - values[-4]
    vectors = vectors[:, -3:]
    base = values[-4]
    rotation = np.linalg.qr(rng.standard_normal((7, 7)))[0]
    forms = {
        "dense": smoothness.dense_of(matrix),
        "diagonal": smoothness.diagonal_of(
            np.diag(matrix), smoothness.operator.safe_factor(matrix, np.diag(1 / np.sqrt(np.diag(matrix))))
        ),
        "low_rank": smoothness.LowRank(vectors, sigma, base, base + vectors**2 @ sigma, base + sigma[-1]),
        "block": smoothness.blocks_of(matrix, 3),
        "eigenbasis": smoothness.eigenbasis(matrix),
        "rotated": smoothness.rotate(matrix, rotation),
    }
    with jax.enable_x64(True):
        for name, form in forms.items():
            root = np.stack([np.asarray(form.root(jnp.asarray(e))) for e in np.eye(7)], axis=1)
            inverse = np.stack([np.asarray(form.inv_root(jnp.asarray(e))) for e in np.eye(7)], axis=1)
            np.testing.assert_allclose(root @ inverse, np.eye(7), atol=1e-10, err_msg=name)
            bound = root @ root.T
            assert np.linalg.eigvalsh(bound - matrix)[0] > -1e-10, name
            assert np.linalg.eigvalsh(bound)[-1] == pytest.approx(float(form.lambda_max), rel=1e-9), name
            np.testing.assert_allclose(np.diag(root.T @ root), form.diag, rtol=1e-9, err_msg=name)
            jitted = jax.jit(lambda s, v: s.root(s.inv_root(v)))(jax.tree.map(jnp.asarray, form), jnp.asarray(v))
            np.testing.assert_allclose(jitted, v, rtol=1e-9)


@pytest.mark.slow
def test_softmax_form_bounds_the_hessian(seed):
    """Boehning: the Hessian of cross-entropy is below the form, everywhere."""
    rng = np.random.default_rng(seed)
    features, classes, l2 = rng.standard_normal((6, 3)), 4, 0.1
    inner = smoothness.dense_of(oracle.glm_matrix(features, 1 / 2, l2))
    form = smoothness.Softmax(inner, np.float64(l2), np.zeros(classes))

    def loss(w):
        logits = jnp.asarray(features) @ w.reshape(classes, 3).T
        return jnp.mean(jax.nn.logsumexp(logits, axis=1)) + 0.5 * l2 * jnp.sum(w**2)

    with jax.enable_x64(True):
        d = 3 * classes
        root = np.stack([np.asarray(form.root(jnp.asarray(e))) for e in np.eye(d)], axis=1)
        inverse = np.stack([np.asarray(form.inv_root(jnp.asarray(e))) for e in np.eye(d)], axis=1)
        np.testing.assert_allclose(root @ inverse, np.eye(d), atol=1e-10)
        np.testing.assert_allclose(np.diag(root @ root), form.diag, rtol=1e-10)
        assert np.linalg.eigvalsh(root @ root)[-1] == pytest.approx(float(form.lambda_max))
        for scale in (0, 1, 5):
            hessian = jax.hessian(loss)(scale * jnp.asarray(rng.standard_normal(d)))
            assert np.linalg.eigvalsh(root @ root - np.asarray(hessian))[0] > -1e-10


def test_zero_entries_of_the_diagonal():
    p = smoothness.probabilities([1.0, 0.0, 2.0], 1.0)
    assert_close(p[[0, 2]].sum(), 1.0)
    assert p[1] == min(p[[0, 2]])
    assert_close(smoothness.probabilities([1.0, 0.0, 2.0], 2.0), 1.0)
    h = smoothness.steps([1.0, 0.0, 2.0], 1.0)
    assert np.isfinite(h).all()
    assert_close(np.linalg.norm(1 / h[[0, 2]]), 1.0)
    assert np.isfinite(smoothness.block_steps([1.0, 0.0, 2.0, 1.0], 9.0, 4)).all()


WIDE = [
    ([1e38, 1e-38], 1.5, [1, 0.5]),
    ([1e100, 1e-100], 1.5, [1, 0.5]),
    ([1e308, 1.0], 0.5, [0.5, 0]),
    ([1e308, 1e308, 1e308], 0.75, [0.25] * 3),
    ([1e15, 1e-38, 1e-38, 1e-38], 2, [1, 1 / 3, 1 / 3, 1 / 3]),
    ([1e308, 1e-320, 0.0], 1.5, [1, 0.5, 0.5]),
    ([1.0, 1.0], 1e-300, [5e-301] * 2),
]
METHODS = [
    ("dcgd+", {}),
    *[(method, {"workers": 2, "mu": mu}) for method in ("diana+", "exact") for mu in (1e-3, 1e3)],
]


@pytest.mark.parametrize(("diag", "tau", "want"), WIDE, ids=[str(diag) for diag, _, _ in WIDE])
def test_diagonals_of_any_range_keep_the_budget(diag, tau, want):
    used = np.array(diag) > 0
    for method, constants in METHODS:
        p = smoothness.probabilities(diag, tau, method=method, **constants)
        assert np.all((p > 0) & (p <= 1)), (method, p)
        np.testing.assert_allclose(p[used].sum(), tau, rtol=1e-12)
        if method == "dcgd+":
            np.testing.assert_allclose(p, want, rtol=1e-12, atol=1e-307)
        if method != "exact":
            h = smoothness.steps(diag, 1.5, method=method, **constants)
            assert np.all(np.isfinite(h) & (h > 0)), (method, h)
            np.testing.assert_allclose(np.linalg.norm(1 / h[used]), 1.5, rtol=1e-12)


def test_a_factor_of_the_diagonal_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    diag = 10.0 ** rng.uniform(-4, 4, 9)
    for power in (-1000, -200, 200, 1000):
        scaled = np.ldexp(diag, power)
        assert_close(smoothness.probabilities(scaled, 3.3), smoothness.probabilities(diag, 3.3))
        assert_close(smoothness.steps(scaled, 3.3), smoothness.steps(diag, 3.3))
    assert_close(smoothness.steps([1e-320, 1.0], 1.5)[1], 2 / 3)


BAD = [
    (lambda: smoothness.probabilities([1.0], 0), "probabilities: tau must be above 0; got 0"),
    (lambda: smoothness.probabilities([1.0], "a"), "probabilities: tau must be above 0; got 'a'"),
    (lambda: smoothness.probabilities([1.0], None), "probabilities: tau must be above 0; got None"),
    (lambda: smoothness.probabilities([1.0, 2.0], 1, method="exact", workers=2, mu="a"), "mu > 0; got 2 and a"),
    (lambda: smoothness.probabilities([1.0, 2.0], 1, method="exact", workers=2, mu=np.inf), "mu > 0; got 2 and inf"),
    (lambda: smoothness.steps([1.0], "a"), "steps: beta must be above 0; got 'a'"),
    (lambda: smoothness.block_steps([1.0, 2.0], "a", 2), "above the number of blocks, 2; got a"),
    (lambda: smoothness.sparsification_variance([1, 0], [0.5, 0]), r"p must be in (0, 1.; got .0.5, 0."),
    (lambda: smoothness.sparsification_variance([1], [1.5]), r"p must be in (0, 1.; got .1.5."),
    (lambda: smoothness.probabilities([[0.0, 0.0]], 1), "is zero: there is nothing to send"),
    (lambda: smoothness.probabilities([1.0, 2.0], 1, method="best"), "got 'best'"),
    (lambda: smoothness.probabilities([1.0, 2.0], 1, method="diana+"), "needs workers >= 1 and mu > 0; got None"),
    (lambda: smoothness.steps([-1.0], 1), "finite and at least 0"),
    (lambda: smoothness.steps([1.0], -1), "steps: beta must be above 0; got -1"),
    (lambda: smoothness.block_steps([1.0, 2.0], 2.0, 2), "above the number of blocks, 2; got 2.0"),
    (lambda: smoothness.rotate(np.eye(2), 2 * np.eye(2)), "rotation must be an orthogonal matrix"),
    (lambda: smoothness.diagonal_of([-1.0, 1.0]), "a diagonal must be .d., finite and at least 0"),
    (lambda: smoothness.rand_k_variance(np.eye(3), 5), r"k must be in 1 .. 3; got 5"),
    (lambda: smoothness.glm(np.eye(2) * 1j), "features must be real"),
    (lambda: smoothness.glm([]), "features must be .rows, features."),
    (lambda: smoothness.glm(np.eye(2), form="block", blocks=0), "needs blocks in 1 .. 2; got 0"),
    (lambda: smoothness.exact_probabilities([1.0, 0.0], 0.5, max), "needs diag above 0"),
    (lambda: smoothness.block_steps([1.0, 2.0], 9.0, 2, rule="x"), 'rule must be "exact" or "released"'),
    (lambda: smoothness.dense_of([[1.0, 0], [0, -1.0]]), "positive semidefinite; smallest eigenvalue -1"),
    (lambda: smoothness.dense_of([[np.nan]]), "finite square matrix"),
    (lambda: smoothness.stack([]), "at least one operator"),
    (lambda: jc.precondition(jc.top_k(0.1), smoothness.diagonal_of([1.0])), "precondition needs an unbiased"),
    (lambda: jc.precondition(jc.flat(jc.natural()), smoothness.diagonal_of([1.0])), "acts on trees"),
    (lambda: jc.precondition(jc.natural(), np.eye(2)), "must be an operator; got ndarray"),
    (
        lambda: jc.roundtrip(
            jc.precondition(jc.natural(), smoothness.diagonal_of([1.0])), jnp.ones(3), key=jax.random.key(0)
        ),
        "operators of 1 entries for an array of 3",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("+", r"\+")):
        make()
