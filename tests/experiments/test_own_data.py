"""Data of the user's own: a folder of idx files with images of another size, and a text of another alphabet."""

import json
import struct

import jax
import numpy as np
import pytest
from programs import run_to

import jaxcomp as jc
from experiments import layouts
from experiments.lib.text import text_of
from experiments.network.training import LENGTH, data_of


@pytest.fixture
def images(tmp_path):
    """Three classes of images of 12 x 16 pixels, told apart by where they are bright."""
    rng = np.random.default_rng(0)
    for stem, count in (("train", 120), ("t10k", 30)):
        labels = (np.arange(count) % 3).astype(np.uint8)
        pixels = rng.integers(0, 90, (count, 12, 16), dtype=np.uint8)
        for i, label in enumerate(labels):
            pixels[i, 4 * label : 4 * label + 4] += 150
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            shape = struct.pack(f">{values.ndim}I", *values.shape)
            (tmp_path / f"{stem}-{kind}-ubyte").write_bytes(
                b"\0\0\x08" + bytes([values.ndim]) + shape + values.tobytes()
            )
    return tmp_path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Ärger über öde Übungen; " * 200)
    return path


@pytest.mark.slow
def test_training_on_a_folder_of_images(images):
    short = ("--model", "cnn", "--workers", 2, "--steps", 30, "--batch", 16, "--method", "top-k", "--ratio", 0.1)
    run_to(0, "train", "--data", "mnist", "--data-dir", images, *short, "--runs", images, "--name", "r")
    (row,) = json.loads((images / "r" / "results.json").read_text())
    assert row["accuracy"] > 0.9


def test_windows_of_a_text(text):
    data = data_of("text", text)
    assert data.name == "own.txt"
    assert data.train_x.shape[1:] == data.train_y.shape[1:] == (LENGTH,)
    assert data.num_classes == text_of(text).characters == len(set(text.read_bytes()))
    np.testing.assert_array_equal(data.train_x[:, 1:], data.train_y[:, :-1])


@pytest.mark.slow
def test_a_transformer_on_a_text(text):
    task = layouts.transformer(text)
    assert task.name == "transformer, own.txt"
    with jax.numpy_dtype_promotion("standard"):
        found = layouts.train(task, jc.error_feedback(jc.top_k(0.1)), 2, [0])
    assert np.isfinite(found["losses"]).all()
    assert found["compile_seconds"] > found["step_seconds"] > 0
    assert set(layouts.layouts(task.params)) == {"tree", "leaf", "apart", "chunks"}
