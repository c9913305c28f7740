"""Error and speed against bits, on a tiny setting: table and plots come out, and releases are what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_inside

from experiments.quantizers import error_of, main, quantizers, seconds_of
from experiments.quantizers.released import RELEASED


@pytest.mark.slow
def test_table_and_figure(tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        options = ["--log2-size", "11", "--workers", "3", "--steps", "1", "--log2-timed", "11"]
        options += ["--repeats", "1", "--only", "NVFP4 as"]
        assert main([*options, "--markdown", str(tmp_path / "q.md"), "--plot", str(tmp_path / "q.png")]) == 0
    (row,) = [line for line in (tmp_path / "q.md").read_text().splitlines() if line.startswith("| block_scaled")]
    bits, *errors, compress, decompress, speed = map(float, row.strip("| ").split(" | ")[1:])
    assert bits == round(4.5 + 32 / 2048, 3)
    assert len(errors) == 5
    assert all(0 < error < 0.01 for error in errors)
    assert min(compress, decompress, speed) >= 0  # on a busy machine they may round to zero
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("q.png", "q-speed.png"))


@pytest.mark.slow
def test_words_choose_families_and_quantizers(capsys):
    names = lambda *words: [q.name for q in quantizers(2048, words)]
    assert names("nvfp4 AS") == ["block_scaled(nvfp4)"]
    assert names("TORCHFT int8") == ["torchft int8"]
    assert names("DRIVE and", "prime") == [*names("drive AND"), "prime uint8"]
    result = run_inside(capsys, "quantizers", "--only", "dithering", "nonsense")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--only nonsense: no quantizer" in result.stderr
    assert all(words in result.stderr for words in ("MX, best scale;", "torchft, released"))


@pytest.mark.slow
def test_means_of_workers_lose_little(key, seed):
    """Of the code with the fewest bits of each family, some of which have no bound."""
    xs = jnp.asarray(np.random.default_rng(seed).standard_normal((3, 2048)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        first = {q.family: q for q in reversed(quantizers(2048)) if "released" not in q.family}
        errors = {q.name: error_of(q, np.asarray(xs), key) for q in first.values()}
    assert all(0 < error < 1 for error in errors.values()), errors


def test_releases_have_one_time(seed):
    with jax.numpy_dtype_promotion("standard"):
        chosen = quantizers(2048, ["(e4m3", ", released"])
        seconds = seconds_of(chosen, 2048, 1, seed)
    assert [len(times) for times in seconds] == [2, *[1] * len(RELEASED)]


def test_releases_lose_little(key, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(2048), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        found = {release.name: release.run(key, x) for release in RELEASED}
    error = {name: float(jnp.sum(jnp.square(x_hat - x)) / jnp.sum(jnp.square(x))) for name, x_hat in found.items()}
    assert 0.005 < error["qgZ int4, groups of 128"] < 0.03
    assert 1e-5 < error["torchft int8"] < error["torchft e4m3"] < 1e-3
    assert error["prime uint8"] < 1e-3
    assert error["CGX min-max 8"] < error["CGX min-max 4"] < error["CGX min-max 2"] < 1.5
