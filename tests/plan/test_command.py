"""`jaxcomp plan`: recommendations, and plans from a file."""

import json

import pytest
from plan_worlds import F32, SPARSE, machine, plan_of, work

from jaxcomp.cli import main
from jaxcomp.plan.candidates import default_candidates

NAMED = {each.name: each for each in default_candidates()}


@pytest.fixture
def file_of(monkeypatch, tmp_path):
    """Writes the file of a plan with these candidates, whose `about` is edited."""

    def write(*candidates, **about):
        machine(monkeypatch, 1e-7, {each.name: work(1e-3, 0.5) for each in candidates})
        path = tmp_path / "plan.json"
        plan_of(list(candidates), cache=path)
        plain = json.loads(path.read_text())
        plain["about"] |= about
        path.write_text(json.dumps(plain))
        return ["plan", "--facts", str(path)]

    return write


def test_it_knows_leaves_buckets_and_local_updates(file_of, capsys):
    """power_sgd needs shapes; what a plan has measured of an algorithm holds for its buckets and local updates."""
    command = file_of(NAMED["f32"], NAMED["sidco(0.01)+ef"], NAMED["power_sgd(2)"])
    assert main([*command, "--max-every", "4"]) == 0
    text = capsys.readouterr().out
    for said in ("power_sgd(2)", "sidco(0.01)+ef, H=4", "an exchange every 4 steps", "all leaves are one bucket"):
        assert said in text


def test_it_names_what_it_does_not_know(file_of, capsys):
    """Candidates of one's own, and local updates, are left out by name; without a compressed one there is no advice."""
    sparse = NAMED["sidco(0.01)+ef"]
    own = [F32, SPARSE, SPARSE._replace(name="mine"), sparse, sparse.with_every(4)]
    assert main(file_of(*own)) == 0
    printed = capsys.readouterr().out
    assert "\nnot known here, left out: top_k; mine\n" in printed
    assert "\nmore steps than --max-every 1, left out: sidco(0.01)+ef, H=4\n" in printed
    assert main(file_of(*own[:3])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "must hold a compressed candidate that this command knows by name" in err
    assert "not known here, left out: top_k; mine" in err


@pytest.mark.parametrize(("name", "value"), [("candidates", 3), ("leaves", ["float128[3]"])])
def test_it_has_one_line_for_a_file_that_was_edited_wrongly(name, value, file_of, capsys):
    assert main(file_of(F32, **{name: value})) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: plan: ")
    assert said.count("\n") == 1
    assert name in said


@pytest.mark.parametrize("name", ["none.json", "bad.json"])
def test_it_refuses_what_is_no_file_of_a_plan(name, tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{}")
    assert main(["plan", "--facts", str(tmp_path / name)]) == 2
    assert "has written" in (said := capsys.readouterr().err) or "must hold what a plan has measured" in said


def test_it_recommends(capsys):
    assert main(["plan", "--parameters", "100K", "--workers", "2", "--rate", "10mbit"]) == 0
    printed = capsys.readouterr().out
    assert "power_sgd" not in printed  # a number of entries has no matrices
    assert "compress: " in printed
    assert "pays below" in printed


LATER = "not allowed with argument --facts; edit that file instead"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "fast"], "--rate: must be a rate such as 100mbit or 10gbit; got 'fast'"),
        (["--latency", "1h"], "--latency: must be a time such as 1ms, 20us or 0.5s; got '1h'"),
        (["--parameters", "many"], "--parameters: must be a number of entries in [1, 2^40) such as 1e7 or 10M"),
        (["--max-error=nan"], "--max-error: must be a number >= 0; got 'nan'"),
        (["--bogus", "1"], "unrecognized arguments: --bogus 1"),
        (["--workers", "8", "--facts", "f"], f"argument --workers: {LATER}"),
        (["--rate", "10mbit", "--facts", "f"], f"argument --rate: {LATER}"),
    ],
)
def test_options_that_are_refused(options, said, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *options])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: jaxcomp plan ")
    assert said in printed
