"""`python -m experiments pods`: which pods, which GPT, and bytes beside the planner's."""

import math

import jax
import pytest

import jaxcomp as jc
from experiments import pods
from experiments.__main__ import main
from experiments.lib.cli import UserError
from experiments.pods import maxtext


def test_parameters_are_those_of_the_name():
    for name, size in pods.SIZES.items():
        shapes, cut = pods.gpt(size)
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) / 1e9 == pytest.approx(float(name), rel=0.3)
        assert all(x.shape[-1] % 256 == 0 for x in shapes.values())
        assert set(cut) == set(shapes)


@pytest.mark.parametrize("text", ["65xh100", "0xv5e:4x4", "2xa100", "2xh100:4", "axv5e:2x2"])
def test_what_are_no_pods_is_refused(text):
    with pytest.raises(UserError, match=r"pods must be like|say 2xh100"):
        pods.pods_of(text)


def test_maxtext_is_left_out_by_name_where_it_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("experiments.pods.maxtext.find_spec", lambda name: None)
    assert main(["pods", "maxtext", "--runs", str(tmp_path)]) == 0
    assert "maxtext: left out, maxtext is not installed" in capsys.readouterr().out
    with pytest.raises(UserError, match="--slices must be at least 2; got 1"):
        maxtext.main(["--slices", "1", "--runs", str(tmp_path)])
    for words in maxtext.METHODS.values():
        assert not words or jc.from_config(words)
