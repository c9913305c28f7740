"""`jaxcomp plan`: recommendations, and plans from a file."""

import pytest
from plan_worlds import F32, NAMED, SPARSE, edited, plan_of, work

from jaxcomp.cli import main

SIDCO = NAMED["sidco(0.01)+ef"]


@pytest.fixture
def file_of(machine, tmp_path):
    """Writes the file of a plan with these candidates, whose `about` is edited."""

    def write(*candidates, **about):
        machine(1e-7, {each.name: work(1e-3, 0.5) for each in candidates})
        path = tmp_path / "plan.json"
        plan_of(list(candidates), cache=path)
        edited(path, lambda plain: plain["about"].update(about))
        return ["plan", "--facts", str(path)]

    return write


def test_a_plan_of_a_file_names_what_it_does_not_know(file_of, capsys):
    """Work that was measured of an algorithm holds for its buckets and local updates; candidates of one's own are left
    out by name; without a compressed one there is no advice."""
    own = [F32, SPARSE, SPARSE._replace(name="mine")]
    command = file_of(*own, SIDCO, NAMED["power_sgd(2)"])
    assert main([*command, "--max-every", "4"]) == 0
    printed = capsys.readouterr().out
    for said in ("power_sgd(2)", "sidco(0.01)+ef, H=4", "all leaves are one bucket"):
        assert said in printed
    assert "\nnot known here, left out: top_k; mine\n" in printed
    assert main(file_of(F32, SIDCO, SIDCO.with_every(4))) == 0
    assert "\nmore steps than --max-every 1, left out: sidco(0.01)+ef, H=4\n" in capsys.readouterr().out
    assert main(file_of(*own)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "must hold a compressed candidate that this command knows by name" in err


@pytest.mark.parametrize(("name", "value"), [("candidates", 3), ("leaves", ["float128[3]"])])
def test_it_has_one_line_for_a_file_that_was_edited_wrongly(name, value, file_of, capsys):
    assert main(file_of(F32, **{name: value})) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: plan: ")
    assert said.count("\n") == 1
    assert name in said


def test_it_recommends(tmp_path, capsys):
    assert main(["plan", "--parameters", "100K", "--workers", "2", "--rate", "10mbit"]) == 0
    printed = capsys.readouterr().out
    assert "compress: " in printed
    assert "2 workers, data 10 Mbit/s, computed for cpu" in printed
    links = ["--link", "ici=400Gbit/s,1us,8", "--link", "dcn=10Gbit/s,50us", "--workers", "16", "--machine", "v5e"]
    assert main(["plan", "--parameters", "1M", *links]) == 0
    printed = capsys.readouterr().out
    assert "16 workers, ici 400 Gbit/s, dcn 10 Gbit/s, computed for v5e" in printed
    assert "f32 over ici, sidco(0.01)+ef over dcn" in printed
    assert main(["plan", *links, "--rate", "1mbit"]) == 2
    assert "--link has the rate" in capsys.readouterr().err
    assert main(["plan", "--facts", str(tmp_path / "none.json")]) == 2
    assert "--facts must be a file that jc.plan(..., cache=FILE) has written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "fast"], "--rate: must be a rate such as 100mbit or 10gbit; got 'fast'"),
        (["--latency", "1h"], "--latency: must be a time such as 1ms, 20us or 0.5s; got '1h'"),
        (["--parameters", "many"], "--parameters: must be a number of entries in [1, 2^40) such as 1e7 or 10M"),
        (["--link", "10gbit"], "--link: must be NAME=RATE,LATENCY[,WIDTH]"),
        (["--max-error=nan"], "--max-error: must be a number >= 0; got 'nan'"),
        (["--bogus", "1"], "unrecognized arguments: --bogus 1"),
        (["--rate", "1mbit", "--facts", "f"], "--rate: not allowed with argument --facts; edit that file instead"),
    ],
)
def test_options_that_are_refused(options, said, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *options])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: jaxcomp plan ")
    assert said in printed
