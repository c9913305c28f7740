"""Compressed means in the trainers that people have, in their packages."""

import jax
import numpy as np
import pytest

import jaxcomp as jc
from experiments.__main__ import main


@pytest.fixture(scope="module")
def rounds():
    pytest.importorskip("drjax")
    from experiments.trainers import rounds

    return rounds


@pytest.mark.parametrize("name", ["whole parameters", "parameters over fsdp 2", "fragments, merged a round later"])
def test_identity_is_the_mean_of_drjax(rounds, name):
    with jax.numpy_dtype_promotion("standard"):
        own, same, fewer = (
            rounds.trained(rounds.FORMS[name], algorithm, 4)
            for algorithm in (None, jc.direct(jc.identity()), jc.error_feedback(jc.top_k(0.05)))
        )
    for a, b in zip(jax.tree.leaves(own["params"]), jax.tree.leaves(same["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    sent = [found["axes"]["clients"] for found in (own, same, fewer)]
    assert sent[1] <= 1.01 * sent[0]
    assert sent[2] < sent[0] / 3
    assert own["axes"].get("fsdp") == fewer["axes"].get("fsdp")


def test_a_trainer_that_is_not_installed_is_left_out_by_name(monkeypatch, capsys):
    monkeypatch.setattr("experiments.trainers.find_spec", lambda name: None)
    assert main(["trainers", "maxtext"]) == 0
    assert "maxtext: left out, its package is not installed" in capsys.readouterr().out
