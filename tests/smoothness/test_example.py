"""The worked example of the specification: its step sizes, one step of DIANA+, its dithering."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles_smoothness as oracle
import pytest

import jaxcomp as jc
from jaxcomp.base import Round, State, answered, for_worker
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.axes import Placement
from jaxcomp.exchange.binding import exchange_of
from jaxcomp.exchange.driver import _Turn
from jaxcomp.groups import groups_of

FILE = json.loads((Path(__file__).parents[1] / "smoothness_oracle.json").read_text())
MU = FILE["mu"]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def example():
    S = jc.smoothness.stack([jc.smoothness.dense_of(node["L"]) for node in FILE["nodes"]])
    p = jc.smoothness.probabilities(S.diag, FILE["tau"], method="diana+", workers=2, mu=MU)
    return S, p


def constants(S, p=None, h=None):
    variance = jc.smoothness.sparsification_variance if p is not None else None
    if p is not None:
        v = [variance(diag, row) for diag, row in zip(S.diag, p, strict=True)]
        omega = max(variance(np.ones(3), row) for row in p)
    else:
        bound = jc.smoothness.dithering_variance
        v = [bound(diag, row, bound="norm") for diag, row in zip(S.diag, h, strict=True)]
        omega = max(min(bound(np.ones(3), row, bound="norm"), np.sum(row**2)) for row in h)
    L = jc.smoothness.mean_lambda_max(S)
    return {"smoothness": L, "workers": 2, "mu": MU, "variance": max(v), "omega": omega}


def steps_of(method, given):
    """DCGD has no shifts to learn, so its step sizes do not depend on omega."""
    if method == "dcgd":
        given = {name: value for name, value in given.items() if name != "omega"}
    return getattr(jc.theory, method)(**given)


def test_step_sizes_are_those_of_the_file():
    S, p = example()
    want = FILE["stepsizes"]
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-8)
    close(constants(S, p)["smoothness"], FILE["L_global"])
    dcgd = jc.smoothness.probabilities(S.diag, FILE["tau"])
    close(steps_of("dcgd", constants(S, dcgd)).gamma, want["dcgd_plus_sparse"])
    diana = steps_of("diana", constants(S, p))
    close(diana.gamma, want["diana_plus_sparse"])
    close(diana.alpha, want["alpha_diana_plus_sparse"])
    h = jc.smoothness.steps(S.diag, FILE["beta"])
    close(steps_of("dcgd", constants(S, h=h)).gamma, want["dcgd_plus_quant"])
    h = jc.smoothness.steps(S.diag, FILE["beta"], method="diana+", workers=2, mu=MU)
    diana = steps_of("diana", constants(S, h=h))
    close(diana.gamma, want["diana_plus_quant"])
    close(diana.alpha, want["alpha_diana_plus_quant"])
    adiana, want = steps_of("adiana", constants(S, p)), FILE["adiana_plus_sparse"]
    names = {"q": "q", "eta": "eta", "theta_1": "th1", "theta_2": "th2", "gamma": "gamma", "beta": "beta"}
    for ours, theirs in names.items():
        close(getattr(adiana, ours), want[theirs])
    close(adiana.alpha, want["alpha"])
    # Figures in the text of the specification: uniform sampling, and the baseline of the released code.
    uniform = {"smoothness": FILE["L_global"], "workers": 2, "mu": MU, "omega": 1.0, "variance": FILE["L_max"]}
    assert steps_of("dcgd", uniform).gamma == pytest.approx(0.9022289464, abs=1e-10)
    assert steps_of("diana", uniform).gamma == pytest.approx(0.4194525247, abs=1e-10)
    released = jc.theory.diana_released(smoothness_max=FILE["L_max"], workers=2, omega=1.0)
    assert released.gamma == pytest.approx(0.7838871007, abs=1e-10)


def test_one_step_of_diana_plus_is_that_of_the_file():
    """Keys are searched whose draws are the masks of the file; the rest is the library."""
    S, p = example()
    algorithm = jc.diana(jc.precondition(jc.bernoulli(p, per_worker=True), S))
    want = FILE["diana_plus_one_step"]
    x = jnp.zeros(3)
    run = exchange_of("example", algorithm, Placement("data"), "gather", jax.random.key(0))
    groups = groups_of(run.layout, x)
    here = Round(jax.random.key(0), groups.groups, each_of(algorithm, groups.groups), 0, 2)
    state = algorithm.init(here, groups.like)
    gradients = jnp.asarray([node["grad_at_0"] for node in FILE["nodes"]])

    def drawn(key, worker):
        ((c,), (own,)) = here.compressors, state.compressor
        _, key = jax.random.split(key)  # as a round does, which keeps the other one for its route
        own = State(own.local, for_worker(c, own.shared, worker, 2))
        return c.compress(key, gradients[worker], own)[0].indices

    def key_of(worker):
        keys = jax.random.split(jax.random.key(worker), 500)
        indices = np.asarray(jax.jit(jax.vmap(lambda key: drawn(key, worker)))(keys))
        masks = np.stack([np.isin(np.arange(3), row) for row in indices])
        return keys[int(np.argmax(np.all(masks == np.array(want["masks"][worker], bool), axis=1)))]

    def update(key, gradient):
        index = jax.lax.axis_index("data")
        now, turn = here._replace(key=key, index=index), _Turn(run, run._way(groups, 2, gradient), index, State(), None)
        return answered(algorithm.update(now, (gradient,), state), turn.answer)

    direction, after = jax.jit(jax.vmap(update, axis_name="data"))(jnp.stack([key_of(0), key_of(1)]), gradients)
    (direction,) = direction
    np.testing.assert_allclose(after.shift.local[0], want["h1"], rtol=1e-8, atol=1e-9)
    np.testing.assert_array_equal(direction[0], direction[1])
    gamma = steps_of("diana", constants(S, p)).gamma
    np.testing.assert_allclose(x - gamma * direction[0], want["x1"], rtol=1e-8)


def test_dithering_of_the_example():
    """Levels, values and bits that the specification prints."""
    u = np.array(FILE["nodes"][0]["u_at_0"])
    noise = np.array([0.3, 0.6, 0.9])
    for beta, levels, bits, variance in ((1.5, (1, 0, 1), 40, 0.0759168859), (6, (4, 1, 1), 46, 0.0097138644)):
        h = jc.smoothness.steps(np.diag(FILE["nodes"][0]["L"]), beta)
        got, _ = oracle.dither(u, h, noise)
        np.testing.assert_array_equal(np.abs(got), levels)
        assert oracle.elias_bits(got) == bits
        diag = np.diag(FILE["nodes"][0]["L"])
        assert oracle.dithering_error(u, h, diag) == pytest.approx(variance, abs=1e-10)
