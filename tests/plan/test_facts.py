"""The file of a plan: what it keeps, and what is said of one that was edited wrongly."""

import json
import math

import pytest
from plan_worlds import facts_of

from jaxcomp.plan.facts import from_text, leaves_of, leaves_to_text, read_file, to_text


def test_the_file_says_what_was_measured():
    facts = facts_of(1e-8)
    text = to_text(facts)
    assert from_text(text) == facts
    edited = from_text(text.replace('"per_byte": 1e-08', '"per_byte": 1e-05'))
    assert edited.fits["data"]["all_gather"].per_byte == 1e-5
    nested, older = "[" * 100_000, text.replace('"version": 2', '"version": 7')
    for broken in ("", "{}", nested, older, text.replace('"latency"', '"lag"')):
        with pytest.raises(ValueError, match=r"plan: f.json must hold what a plan has measured; "):
            from_text(broken, "f.json")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("latency", math.inf, "latency of all_gather must be a number >= 0; got inf"),
        ("covariance", [1], "covariance of all_gather must be three numbers"),
        ("covariance", [10**400, 0, 0], "must hold what a plan has measured"),
        ("ratios", [[2, 1.0, math.nan]], "ratios of all_gather must be a number"),
        pytest.param("gradient", 10**400, "gradient must be a number >= 0; got 1000", id="gradient-huge"),
        ("overlap", 7, "overlap must be a number in .0, 1.; got 7"),
        ("sizes", {}, "sizes must be the axes"),
        ("sizes", {"data": 0}, "sizes of data must be an integer in .1, 2.31.; got 0"),
        ("about", 3, "must hold what a plan has measured"),
        ("about", {"candidates": ["f32", 1]}, "candidates of about must be a list of names; got .'f32', 1."),
        ("fits", {"": {}}, "fits must be of axes of sizes, data; got ''"),
        ("fits", {"data": {"broadcast": {}}}, "kind must be one of"),
        ("trials", {"options": {}, "seconds": {"f32": -1}, "digest": ""}, "trials of f32 must be a number >= 0"),
        ("version", "2", "version must be 2; got '2'"),
    ],
)
def test_what_was_edited_wrongly_is_named(place, value, said):
    plain = json.loads(to_text(facts_of(1e-8)))
    inner = plain if place in {**plain, "trials": None} else plain["fits"]["data"]["all_gather"]
    inner[place] = value
    with pytest.raises(ValueError, match=f"plan: f.json .*{said}"):
        from_text(json.dumps(plain), "f.json")


def test_leaves_of_every_float_but_none_other_and_none_too_large():
    facts = lambda leaves: facts_of(1e-8)._replace(about={"leaves": leaves})
    floats = ["float16[3]", "bfloat16[]", "float32[2,0]", "float64[4]"]
    assert leaves_to_text(leaves_of(facts(floats))) == floats
    words = r"leaves in f.json must be like float32\[784,10\], with a dtype of float16, bfloat16, .*; got"
    for strange in (3, ["float31[3]"], ["float32[" + "9" * 400 + "]"], ["object[3]"], ["1f4[3]"]):
        with pytest.raises(ValueError, match=words):
            leaves_of(facts(strange), "f.json")
    with pytest.raises(ValueError, match=r"fewer than 2\^40 entries each; got 'float32\[99999999,99999999\]'"):
        leaves_of(facts(["float32[99999999,99999999]"]))


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "f", tmp_path):
        with pytest.raises(ValueError, match="must be a file of text"):
            read_file(path)
    assert read_file(tmp_path / "none") is None
