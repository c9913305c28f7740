"""PowerSGD beside torch's hook, where torch is installed; without it the script says so."""

import importlib.util

import pytest

from experiments.peers import power_sgd


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_it_is_skipped(capsys):
    assert power_sgd.main([]) == 0
    assert "skipped: torch is not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_fifty_steps_of_torchs_hook(rank, capsys):
    pytest.importorskip("torch", reason="the peers are not installed")
    assert power_sgd.main(["--rank", str(rank)]) == 0
    assert "compressed from step 11: 0.weight, 1.weight, 2.weight" in capsys.readouterr().out
