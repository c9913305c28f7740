"""The scoreboard: time to a loss against the best dense exchange."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from experiments.lib.models import Ngrams
from experiments.lib.run import Run
from experiments.network.mesh import Workers
from experiments.network.methods import AXIS, trained_by, trained_name
from experiments.network.scoreboard import best_dense, parser, report, scored_name, step_seconds, to_loss


def row(method, steps, seconds, model="mlp"):
    known = {"losses": [0.1], "ledger_bytes": 1e6, "parameters": 1000, "equal": True}
    known |= {"payload_bytes": [1.01e6, 1.02e6], "said_bytes": [1e6, 1e6]}
    return {"model": model, "method": method, "steps": steps, "step_seconds": seconds, **known}


ROWS = [
    row("psum-f32", [100, 200], [2.0, 0.1]),
    row("dense-bf16:two_shot", [100, 200], [1.0, 0.2]),
    row("top-k", [300, 300], [0.1, 0.2]),
    row("sidco", [300, None], [0.1, 0.1]),
]


def test_time_to_the_loss_is_mean_steps_times_a_step():
    assert to_loss(ROWS[0])[0] == pytest.approx(300.0)
    assert np.isnan(to_loss(ROWS[3])).all()
    assert best_dense(ROWS, "mlp") == pytest.approx([150.0, 15.0])


def test_a_step_is_the_slowest_workers_and_the_first_does_not_count():
    answers = [{"seconds": [9.0, 10.0, 11.0, 12.0]}, {"seconds": [1.0, 3.0, 11.5, 12.5]}]
    assert step_seconds(answers, 1) == pytest.approx(1.0)  # ends at 9, 10, 11.5, 12.5
    assert step_seconds(answers, 2) == pytest.approx(1.25)  # rounds end at 10 and 12.5


def test_the_table_says_where_it_pays_where_it_loses_and_where_even(tmp_path):
    run = Run(parser(), ["--rates", "10mbit", "none", "--runs", str(tmp_path), "--name", "s"], "scoreboard")
    run.options.methods = [r["method"] for r in ROWS]
    report(run, ROWS)
    table = (tmp_path / "s" / "table.md").read_text()
    found = {
        cells[1]: cells[4:]
        for cells in ([cell.strip() for cell in text.strip("|").split("|")] for text in table.splitlines())
        if len(cells) > 6
    }
    assert found["top-k"][:2] == ["5 x", "0.25 x"]
    assert found["top-k"][2].endswith("bit/s")
    assert found["psum-f32"][:2] == ["0.5 x", "1 x"]
    assert found["sidco"][:2] == ["-", "-"]
    losses = (tmp_path / "s" / "losses.md").read_text()
    assert "| mlp | sidco | 0.1000 | 300, missed | 1,000,000 | 1,010,000 - 1,020,000 |" in losses
    assert all(text in losses for text in (f"jax {jax.__version__}", "Seeds 0", "Command: python -m experiments"))
    links = (tmp_path / "s" / "links.md").read_text()
    assert "| mlp | psum-f32 | 2000.0 | 100.0 | 5.0 % | 1.010 - 1.020 |" in links
    assert (tmp_path / "s" / "scoreboard.png").stat().st_size > 10_000


def test_only_the_scoreboard_takes_methods_that_do_not_stop_at_a_loss():
    assert scored_name("overlap-int4@20") == "overlap-int4@20"
    assert scored_name("stream-int4@20") == trained_name("stream-int4@20")
    with pytest.raises(argparse.ArgumentTypeError, match="the scoreboard takes it"):
        trained_name("overlap-int4@20")
    for wrong in ("overlap-int4", "local-int4@0", "local-other@5"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            scored_name(wrong)


def test_ngrams_see_the_characters_before_and_nothing_after():
    model = Ngrams((8,), 30, rngs=nnx.Rngs(0))
    x = jnp.arange(16).reshape(2, 8) % 30
    logits = model(x)
    assert logits.shape == (2, 8, 30)
    changed = np.asarray(model(x.at[0, 3].set(29)) != logits).any(-1)
    assert changed.tolist() == [[False] * 3 + [True] * 4 + [False], [False] * 8]  # the 4-grams that it is in


@pytest.mark.parametrize("method", ["psum-f32", "top-k", "demo"])
def test_states_lie_on_the_mesh_whether_they_hold_a_mean_or_not(method):
    workers = Workers()
    params = workers.replicate({"w": np.ones((40, 30), np.float32)})
    state, specs = workers.start(trained_by(method, 0.01, 7, "adam", 1e-3), params)
    assert (specs == P()) == (method == "psum-f32")
    assert all(set(leaf.sharding.mesh.axis_names) == {AXIS} for leaf in jax.tree.leaves(state))
