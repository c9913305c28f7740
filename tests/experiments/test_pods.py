"""`python -m experiments pods`: which pods, which GPT, and bytes beside the planner's."""

import math

import jax
import pytest

from experiments import pods
from experiments.lib.cli import UserError
from experiments.lib.targets import lacks

SMALL = pods.Size(2, 256, 1024, 128)


def test_parameters_are_those_of_the_name():
    for name, size in pods.SIZES.items():
        shapes, cut = pods.gpt(size)
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) / 1e9 == pytest.approx(float(name), rel=0.3)
        assert all(x.shape[-1] % 256 == 0 for x in shapes.values())
        assert set(cut) == set(shapes)


@pytest.mark.parametrize("text", ["v5e:4x4", "1xv5e:4x4", "2xa100", "2xh100:4", "axv5e:2x2"])
def test_what_are_no_pods_is_refused(text):
    with pytest.raises(UserError, match=r"pods must be like|say 2xh100"):
        pods.pods_of(text)


@pytest.mark.parametrize(
    ("text", "dtype"), [("2xv5e:2x2", "f32"), ("4xh100", "bf16"), ("4xh100", "int4 + error feedback")]
)
def test_the_planner_counts_what_the_compiled_program_sends(text, dtype):
    each = pods.pods_of(text)
    if package := lacks(each.target):
        pytest.skip(f"compiling for {each.target} needs the package {package}")
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        row = pods.tried(each, SMALL, dtype)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert "error" not in row
    tiles = 4096 * len(pods.gpt(SMALL)[0]) if each.kind == "v5e" else 0
    assert row["planned"] <= row["dcn"] <= 1.01 * row["planned"] + tiles
    assert row["unknown"] == 0
    assert row["fits"]
