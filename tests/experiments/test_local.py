"""`python -m experiments local`: its options, its arithmetic, and a short run."""

import json
import lzma

import jax
import numpy as np
import pytest
from programs import run_to

from experiments import local
from experiments.lib.cli import UserError
from experiments.lib.text import read_characters
from experiments.lib.transformer import Sizes, initial
from experiments.local import training
from experiments.local.methods import INNERS, NAMES, Setup, parse
from experiments.local.report import bytes_of, rounds_until, rows, seconds_of

SMALL = ("--width", 16, "--heads", 2, "--layers", 1, "--length", 16, "--batch", 2, "--workers", 2, "--every", 4)


def test_methods_are_a_compressor_and_times():
    assert len(set(NAMES)) == len(NAMES)
    setups = parse(["ddp:f32", "int4", "stream:sparse-loco", "int4"], [10, 30])
    assert [setup.label for setup in setups] == [
        "ddp:f32",
        "int4 H=10",
        "int4 H=30",
        "stream:sparse-loco H=10",
        "stream:sparse-loco H=30",
    ]
    assert setups[0].plain
    assert setups[-1][2:6] == (30, 3, 5, 0.5)
    assert parse(["stream:f32"], [2])[0][2:6] == (2, 2, 1, 0.5)
    with pytest.raises(UserError, match="unknown method 'nonsense'"):
        parse(["nonsense"], [10])


@jax.numpy_dtype_promotion("standard")  # as in a process of its own
def test_inner_optimizers_bring_their_rates_and_moments_their_rounds():
    setups = parse(["f32", "int2", "ddp:f32"], [10], ["adamw", "muon:0.02:1:0.5"], ["none", "3:6", "1:2:int8"])
    assert len({setup.label for setup in setups}) == len(setups) == 2 * (3 + 3 + 1)
    assert setups[0] == parse(["f32"], [10])[0]
    muon = setups[4]
    assert muon.label == "muon:0.02:1:0.5 f32 H=10 moments 3:6"
    assert muon.rates == ("muon", 0.02, 1.0, 0.5)
    assert muon.times()["moments"] == {"mu": 30, "nu": 60}
    assert "moments" not in setups[3].times()
    assert setups[5].moments == {"mu": 10, "nu": 20}
    assert setups[5].of_moments(0.01, 7).compressor.spec.name == "block_scaled(int8)"
    step = lambda setup: setup.outer(0.7, 0.9).update(np.float32(1), setup.outer(0.7, 0.9).init(np.float32(0)))[0]
    assert step(muon) == pytest.approx(-1.5)  # Nesterov's first step, with its own rates
    assert step(setups[0]) == pytest.approx(-0.7 * 1.9)
    for wrong in ("nadam", "muon:fast", "muon:0", "muon:1:1:1", "muon:1:1:0.5:3"):
        with pytest.raises(UserError, match=r"--inner takes OPTIMIZER\[:RATE.* with one of adamw, muon"):
            parse(["f32"], [10], [wrong])
    for wrong in ("3", "0:6", "3:6:nonsense", "3:6:int8:int8", "3:x"):
        with pytest.raises(UserError, match='--moments takes "none" or MU:NU'):
            parse(["f32"], [10], None, [wrong])


@pytest.mark.parametrize("name", INNERS)
@jax.numpy_dtype_promotion("standard")
def test_inner_optimizers_step_by_their_rate(name):
    """Updates are about as large with both, so that one grid of rates fits them."""
    start = initial(Sizes(5, 4, 16, 2, 1), 0)
    params = jax.tree.map(jax.numpy.asarray, start)
    inner = INNERS[name](0.01)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    updates, state = inner.update(grads, inner.init(params), params)
    sizes = [float(jax.numpy.sqrt(jax.numpy.mean(u**2))) for u in jax.tree.leaves(updates)]
    assert min(sizes) > 0.001
    assert max(sizes) < 0.02
    assert len(jax.tree.leaves(state)) == {"adamw": 21, "muon": 19}[name]


def test_codes_are_compared_with_whole_differences_of_the_same_optimizer():
    setups = parse(["f32", "int2"], [10], ["adamw", "muon:0.02"], ["none", "3:6"])
    known = {"seed": 0, "step": 100, "loss": 2.0, "sent_bytes": 1e7, "message_bytes": None, "route": "sum"}
    tests = dict(zip([setup.label for setup in setups], (2.0, 2.2, 1.0, 1.1, 2.4, 2.6, 1.5, 1.6), strict=True))
    results = [{**known, **setup._asdict(), "seconds": 0.1, "test": tests[setup.label]} for setup in setups]
    found = [row["vs f32 same H"] for row in rows(results, 4, 100.0)]
    assert found == ["+0.00 %", "+10.00 %", "+0.00 %", "+10.00 %", "+20.00 %", "+30.00 %", "+50.00 %", "+60.00 %"]


def test_bytes_and_seconds_follow_the_exchanges():
    setup = Setup("stream:int4 H=6", "int4", 6, 3, 2, 0.5)
    assert [rounds_until(t, setup) for t in (1, 2, 4, 6, 12)] == [0, 0, 1 / 3, 2 / 3, 5 / 3]
    line = {"step": 12, "message_bytes": 300, "sent_bytes": 7.0, "route": "gather"}
    assert bytes_of(line, setup, 4) == pytest.approx(1500)
    assert bytes_of({**line, "route": "sum"}, setup, 4) == 7.0
    # An exchange of 0.4 s hides behind two steps of 0.1 s but for 0.2 s; each round has three of them.
    assert seconds_of(setup, 12, 0.1, 3 * 0.4 * 1e6 / 8, 1.0) == pytest.approx(1.2 + 2 * 3 * 0.2)


def test_times_of_all_rows_are_of_one_machine():
    """A step without an exchange is as fast as that of the fastest curve, whatever ran beside the others."""
    setups = parse(["f32", "int8"], [10])
    known = {"seed": 0, "step": 100, "loss": 2.0, "test": 2.0, "sent_bytes": 1e7, "message_bytes": None, "route": "sum"}
    results = [
        {**known, **setup._asdict(), "seconds": seconds} for setup, seconds in zip(setups, (0.1, 0.4), strict=True)
    ]
    table = rows(results, 4, 100.0)
    assert [row["s"] for row in table] == ["10.8", "10.8"]  # 100 steps of 0.1 s, 10 MB at 100 Mbit/s


def test_a_folder_of_texts_is_one_text(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"xyz" * 400)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"abc" * 400))
    codes, characters = read_characters(tmp_path)
    assert characters == 6
    np.testing.assert_array_equal(codes[:3], [0, 1, 2])
    np.testing.assert_array_equal(codes[-3:], [3, 4, 5])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.txt"):
        read_characters(tmp_path / "empty")


@pytest.mark.slow
def test_a_run_writes_everything(tmp_path):
    options = ("--methods", "ddp:f32", "f32", "stream:sparse-loco", "--steps", 12, "--name", "whole")
    whole = run_to(0, "local", "--runs", tmp_path, *SMALL, *options)
    for words in ("stream:sparse-loco H=4", "vs ddp:f32", "local.png"):
        assert words in whole.stdout
    folder = tmp_path / "whole"
    assert (folder / "local.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads((folder / "results.json").read_text())
    assert [row["label"] for row in rows] == ["ddp:f32", "f32 H=4", "stream:sparse-loco H=4"]
    assert rows[1]["sent_bytes"] == rows[0]["sent_bytes"] / 4
    assert all(np.isfinite([row["loss"], row["test"]]).all() for row in rows)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == 3 * [1, 10, 12]


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # as in a process of its own
def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, capsys):
    """Stopped in the second curve after its checkpoint: the first is not trained again, the second from there."""
    options = [*map(str, SMALL), "--methods", "f32", "int4", "--steps", "12", "--checkpoint-every", "5"]
    options += ["--runs", str(tmp_path)]
    assert local.main([*options, "--name", "whole"]) == 0
    drawn, windows = [], training.windows

    def stopping(codes, number, length, seed, step):
        drawn.append(step)
        if step == 8 and drawn.count(8) == 2:
            raise KeyboardInterrupt
        return windows(codes, number, length, seed, step)

    monkeypatch.setattr(training, "windows", stopping)
    assert local.main([*options, "--name", "cut"]) == 130
    assert "go on with --resume" in capsys.readouterr().out
    drawn.clear()
    assert local.main(["--runs", str(tmp_path), "--name", "cut", "--resume"]) == 0
    assert [step for step in drawn if step] == [*range(6, 13)]
    timeless = lambda row: {key: value for key, value in row.items() if key != "seconds"}
    for file in ("whole", "cut"):
        assert (tmp_path / file / "local.png").is_file()
    whole, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut"))
    assert list(map(timeless, cut)) == list(map(timeless, whole))
    whole, cut = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut"))
    assert [timeless(json.loads(line)) for line in cut] == [timeless(json.loads(line)) for line in whole]
