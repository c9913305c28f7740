"""Experiments on a machine with a single device: what they need in one sentence, and how they run on it."""

from types import SimpleNamespace

import jax
import pytest
from programs import run_inside

CPU = "or on virtual CPU devices with JAX_PLATFORMS=cpu\n"
MANY = {
    "compare": ("4 workers need 4", "--workers 1"),
    "compare --workers 2": ("2 workers need 2", "--workers 1"),
    "train --workers 3": ("3 workers need 3", "--workers 1"),
    "bench step": ("2 workers need 2", "--workers 1"),
    "bench trees": ("2 workers need 2", "--workers 1"),
    "sharded": ("--mesh 2 2 needs 4", "--mesh 1 1"),
    "overlap": ("2 workers need 2", "--topology v5e:2x2, which compiles only"),
    "attack": ("attack combinations needs 4", "--only messages statistics"),
}
ONE = {
    "compare --workers 1 --steps 2 --batch 4 --methods sidco --seeds 0": "| 1 |",
    "bench step --workers 1 --layers 1 --rounds 1 --only direct(identity)": "| direct(identity) |",
    "bench trees --workers 1 --layers 1 --times 1 --only dagc": "| error_feedback(dagc) |",
    "sharded --mesh 1 1 --layout fsdp --methods dense-f32 --steps 1 --width 16": "| fsdp |",
}


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """One device, whatever is asked for; `alone(device)` says which."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    return lambda device: monkeypatch.setattr(jax, "devices", lambda *_: [device])


@pytest.mark.parametrize("words", MANY)
def test_too_few_devices_are_named_with_the_options_that_run_on_them(words, alone, tmp_path, capsys):
    alone(SimpleNamespace(platform="gpu", process_index=0))
    result = run_inside(capsys, *words.split())
    need, cure = MANY[words]
    assert result.returncode == 2
    assert result.stderr == f"error: {need} devices, and there is 1 (gpu): run with {cure}, {CPU}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ONE)
def test_one_device_suffices(words, alone, standard_promotion, capsys):
    alone(jax.devices("cpu")[0])
    result = run_inside(capsys, *words.split())
    assert result.returncode == 0, result.stderr
    for part in ONE[words].strip("| ").split():
        assert part in result.stdout
