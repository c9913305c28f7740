"""PowerSGD beside torch's hook, where torch is installed; without it the script says so."""

import importlib.util

import pytest

from experiments.peers import power_sgd


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_it_is_skipped(capsys):
    assert power_sgd.main([]) == 0
    assert "skipped: torch is not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--rank", "1"], ["--rank", "2"], ["--no-error-feedback"], ["--batched"]], ids=str)
def test_fifty_steps_of_torchs_hook(options, capsys):
    pytest.importorskip("torch", reason="the peers are not installed")
    assert power_sgd.main(options) == 0
    what = "the bucket" if "--batched" in options else "0.weight, 1.weight, 2.weight"
    assert f"compressed from step 11: {what}" in capsys.readouterr().out
