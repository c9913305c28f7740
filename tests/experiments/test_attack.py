"""The attacks find what is wrong where something is, and nothing where nothing is."""

import json

import numpy as np
import pytest
from programs import run

import jaxcomp as jc
from experiments import attack
from experiments.attack import combinations, draw, messages, statistics


def test_a_claim_that_is_too_small_falls():
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    honest = jc.rand_k(0.25)
    assert statistics.measured(honest, x, 0, 1024) < 1
    claims = honest._replace(spec=honest.spec._replace(omega=lambda d: 1.0))
    assert statistics.measured(claims, x, 0, 1024) > 1
    biased = jc.top_k(0.25)
    assert statistics.measured(biased._replace(spec=biased.spec._replace(omega=lambda d: 3.0)), x, 0, 1024) > 1


def test_differences_of_bits_and_foreign_errors_are_found():
    x = np.ones(3, np.float32)
    assert draw.bits_of([x]) == draw.bits_of([x.copy()]) != draw.bits_of([np.nextafter(x, 2)])
    combinations.check_close([x], [x * 1.001])
    with pytest.raises(AssertionError):
        combinations.check_close([x], [x * 1.5])
    assert attack.verdict_of(lambda: draw.made("jc.top_k(2.0)")) == "refused"
    assert attack.verdict_of(lambda: draw.made("jc.top_k(0.5)")) == "held"
    assert "NameError" in attack.verdict_of(lambda: draw.made("jc.top_k(nonsense)"))
    assert "ValueError of " in attack.verdict_of(lambda: np.zeros(3).reshape(2))


def test_a_short_attack_ends_in_a_table(tmp_path, capsys):
    options = ["--only", "messages", "statistics", "--cases", "3", "--messages", "300"]
    assert attack.main([*options, "--runs", str(tmp_path), "--name", "a"]) == 0
    assert "Fell: nothing." in " ".join(capsys.readouterr().out.split())
    table = (tmp_path / "a" / "table.md").read_text()
    assert "| messages | 300 |" in table
    assert "| statistics | 3 |" in table


def test_what_falls_ends_the_table(tmp_path, capsys, monkeypatch):
    def broken(data):
        raise IndexError("9")

    messages.known()
    monkeypatch.setattr(jc.wire, "decode", broken)
    options = ["--only", "messages", "--messages", "2", "--runs", str(tmp_path)]
    assert attack.main(options) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "messages, case 0 (" in output
    assert "IndexError: 9" in output
    assert "Fell: 2." in output


def test_a_decoded_payload_that_does_not_come_back_falls(monkeypatch):
    payload = jc.payloads.Dense(np.ones(3, np.float32))
    messages.check_valid(payload)
    monkeypatch.setattr(jc.wire, "decode", lambda data: payload._replace(values=np.full(3, 2, np.float32)))
    with pytest.raises(AssertionError, match="encoded as fixed it comes back as something else"):
        messages.check_valid(payload)

    def refuses(payload, code):
        raise ValueError("what the library itself refuses")

    monkeypatch.setattr(jc.wire, "encode", refuses)
    with pytest.raises(AssertionError, match="encoded as fixed: ValueError: what the library"):
        messages.check_valid(payload)


@pytest.mark.slow
def test_all_attacks_for_a_while(tmp_path):
    result = run("attack", "--minutes", 3, "--seed", 1, "--runs", tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_a_short_soak_ends_in_the_same_bits(tmp_path):
    short = ("--steps", 30, "--processes", 2, "--kills", 1, "--method", "dithering")
    result = run("soak", *short, "--runs", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 of 3 disturbances in 30 steps recovered bitwise" in result.stdout
    (folder,) = tmp_path.iterdir()
    events = json.loads((folder / "soak.json").read_text())
    assert sorted(event["what"] for event in events) == ["corrupted checkpoint", "full disk", "kill"]
    assert all(event["named"] for event in events)
