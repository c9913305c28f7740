"""Compressed means in the trainers that people have, in their packages."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxcomp as jc
from experiments.__main__ import main

STEPS = Path(__file__).parents[2] / "docs" / "examples" / "trainers"


@pytest.fixture(scope="module")
def rounds():
    pytest.importorskip("drjax")
    from experiments.trainers import rounds

    return rounds


@pytest.mark.parametrize("name", ["parameters over fsdp 2", "fragments, merged a round later"])
def test_identity_is_the_mean_of_drjax(rounds, name):
    with jax.numpy_dtype_promotion("standard"):
        own, same, fewer = (
            rounds.trained(rounds.FORMS[name], algorithm, 3)
            for algorithm in (None, jc.direct(jc.identity()), jc.error_feedback(jc.top_k(0.05)))
        )
    for a, b in zip(jax.tree.leaves(own["params"]), jax.tree.leaves(same["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    sent = [found["axes"]["clients"] for found in (own, same, fewer)]
    assert sent[1] <= 1.01 * sent[0]
    assert sent[2] < sent[0] / 3
    assert own["axes"].get("fsdp") == fewer["axes"].get("fsdp")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("micro", [None, 2])
def test_identity_is_the_step_of_tunix_also_with_its_gradient_accumulation(micro, tmp_path):
    pytest.importorskip("tunix")
    from experiments.trainers import peft

    with jax.numpy_dtype_promotion("standard"):
        own, same = (peft.trained(name, 3, micro) for name in ("Tunix's own", "identity"))
        assert peft.restored("int4 + error feedback", tmp_path, micro)
    np.testing.assert_allclose(same["losses"], own["losses"], rtol=1e-5)
    assert same["axes"]["fsdp"] * (micro or 1) == pytest.approx(own["axes"]["fsdp"], rel=0.01)


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory):
    pytest.importorskip("maxtext")
    from experiments.trainers import pretrain

    with pretrain.MaxText(tmp_path_factory.mktemp("maxtext"), pretrain.made_lines(500)) as trainer:
        yield trainer


@pytest.mark.parametrize("form", ["step, data 2 of fsdp 2, text", "the same, 2 micro-batches"])
def test_identity_is_the_step_of_maxtext_on_lines_of_unequal_lengths(maxtext, form):
    from experiments.trainers.pretrain import CASES

    cases = {case.method: case for case in CASES if case.form == form}
    own, same, fewer = (
        maxtext.trained(cases[name], 6) for name in ("MaxText's own", "identity", "int4 + error feedback")
    )
    assert list(own["losses"]) == list(range(6))
    np.testing.assert_allclose(list(same["losses"].values()), list(own["losses"].values()), rtol=1e-5)
    sent = [sum(v for names, v in row["axes"].items() if "data" in names.split("+")) for row in (own, same, fewer)]
    assert sent[1] <= sent[0]
    assert sent[2] < sent[1] / 7


def test_the_exchange_of_maxtexts_step_is_in_its_checkpoints(maxtext):
    from experiments.trainers.pretrain import RESTORED

    assert maxtext.restored(next(case for case in RESTORED if case.axis == "data"), 6, 3)


def test_a_trainer_that_is_not_installed_is_left_out_by_name(monkeypatch, capsys):
    monkeypatch.setattr("experiments.trainers.find_spec", lambda name: None)
    assert main(["trainers", "maxtext"]) == 0
    assert "maxtext: left out, its package is not installed" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_kauldrons_step_with_the_mean_in_the_optimizer(monkeypatch):
    pytest.importorskip("kauldron")
    from etils import enp  # pyright: ignore[reportMissingImports]
    from kauldron import kd, kontext  # pyright: ignore[reportMissingImports]
    from kauldron.train import train_step  # pyright: ignore[reportMissingImports]

    class Model(nn.Module):
        x: kontext.Key = "batch.x"

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))

    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    batch = {"x": x, "y": 2 * x[:, :8]}
    like = jax.tree.map(lambda a: enp.ArraySpec(shape=a.shape, dtype=a.dtype), batch)
    batch = kd.sharding.device_put(batch, kd.sharding.FIRST_DIM)

    def trained(*mean):
        losses = {"l2": kd.losses.L2(preds="preds", targets="batch.y")}
        step = kd.train.TrainStep(
            model=Model(),
            optimizer=optax.chain(*mean, optax.adam(1e-2)),
            rng_streams=kd.train.RngStreams(seed=0),
            sharding=kd.sharding.ShardingStrategy(),
            init_transform=kd.ckpts.NoopTransform(),
            aux=kd.train.Auxiliaries(losses=losses, metrics={}, summaries={}),
        )
        state, found = step.init(like), []
        for _ in range(8):
            state, aux = step.step(state, batch, return_losses=True)
            found.append(float(aux.compute().loss_values["losses/l2"]))
        sent = jc.ledger(lambda *args: step.step(*args), state, batch)
        return found, sent.by_axes(kd.sharding.DEVICES_MESH)["devices",]

    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(kd.sharding.DEVICES_MESH):
        own, whole = trained()
        monkeypatch.setattr(train_step, "jax", train_step.jax)  # as it was, after this test
        runpy.run_path(str(STEPS / "kauldron_step.py"))
        same, _ = trained(jc.compressed_mean(jc.direct(jc.identity()), "devices"))
        fewer, sent = trained(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), "devices"))
    np.testing.assert_allclose(same, own, rtol=1e-5)
    assert sent < whole / 2
    assert fewer[-1] < fewer[0] / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_train_state_that_is_replicated_under_pmap():
    """The loop of HuggingFace's Flax scripts: without lax.pmean(grad, "batch"), and the mean first in the optimizer."""
    x = jax.random.normal(jax.random.key(0), (4, 8, 64))
    y = x @ jax.random.normal(jax.random.key(1), (64, 32))

    def loss_fn(params, x, y):
        return jnp.mean((x @ params["kernel"] - y) ** 2)

    def trained(tx, mean):
        def step(state, x, y):
            grad = jax.grad(loss_fn)(state.params, x, y)
            return state.apply_gradients(grads=jax.lax.pmean(grad, "batch") if mean else grad)

        params = {"kernel": jnp.zeros((64, 32))}
        state = jax_utils.replicate(TrainState.create(apply_fn=None, params=params, tx=tx))
        many = jax.pmap(step, "batch")
        for _ in range(5):
            state = many(state, x, y)
        return np.asarray(state.params["kernel"])

    dense = trained(optax.sgd(0.5), True)
    same, fewer = (
        trained(optax.chain(jc.compressed_mean(algorithm, "batch"), optax.sgd(0.5)), False)
        for algorithm in (jc.direct(jc.identity()), jc.error_feedback(jc.top_k(0.1)))
    )
    np.testing.assert_allclose(same, dense, rtol=1e-5, atol=1e-6)
    assert np.array_equal(fewer[0], fewer[3])
    loss = lambda kernel: float(loss_fn({"kernel": kernel[0]}, x, y))
    assert loss(fewer) < 0.9 * float(jnp.mean(y**2))
