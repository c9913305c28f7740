"""The attacks find what is wrong where something is, and nothing where nothing is."""

import numpy as np
import pytest
from programs import run

import jaxcomp as jc
from experiments import attack
from experiments.attack import combinations, draw, messages, statistics
from experiments.bench import wire
from jaxcomp.wire.frame import seal


def test_every_kind_of_record_is_attacked():
    known = messages.cases(np.random.default_rng(0))
    assert messages.missing_kinds(known) == set()
    assert messages.missing_kinds(known[:1])
    for case in known[:: len(known) // 20]:
        tried = messages.judge(case.body, measure=True)
        assert (tried.payload is not None, tried.fell) == (True, None), case.name


def test_an_error_that_is_no_refusal_falls(monkeypatch):
    def broken(data):
        raise IndexError("9")

    monkeypatch.setattr(jc.wire, "decode", broken)
    assert wire.decoded(seal(b"\x01")) == (None, "IndexError: 9")


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
    assert combinations.differ([x], [x]) is None
    assert "1 of 1 arrays differ" in combinations.differ([x], [np.nextafter(x, 2)])
    assert combinations.far([x], [x * 1.5]) is not None
    for expression, known in (("jc.top_k(2.0)", True), ("jc.top_k(nonsense)", False)):
        with pytest.raises((ValueError, NameError)) as raised:
            draw.made(expression)
        if known:
            assert combinations.foreign(raised.value) is None
    with pytest.raises(ValueError, match="shape") as raised:
        np.zeros(3).reshape(2, 2)
    assert "of tests" in combinations.foreign(raised.value) or "test_attack" in combinations.foreign(raised.value)


def test_a_short_attack_ends_in_a_table(tmp_path, capsys):
    table = tmp_path / "a.md"
    assert attack.main(["--only", "messages", "--messages", "300", "--markdown", str(table)]) == 0
    assert "Fell: nothing." in capsys.readouterr().out
    assert "| messages" in table.read_text()


@pytest.mark.slow
def test_all_attacks_for_a_while():
    result = run("attack", "--minutes", 3, "--seed", 1)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_a_short_soak_ends_in_the_same_bits(tmp_path):
    short = ("--steps", 30, "--processes", 2, "--kills", 1, "--method", "dithering")
    result = run("soak", *short, "--runs", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 of 3 disturbances in 30 steps recovered bitwise" in result.stdout
