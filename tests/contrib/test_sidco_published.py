"""SIDCo as published: the number of stages adapts as the state machine of the paper, or of its code, does."""

import numpy as np
import oracles
import pytest
from thresholds import DATA, run

import jaxcomp as jc


@pytest.mark.sampled
@pytest.mark.parametrize("adapt", ["paper", "climb"])
@pytest.mark.parametrize(("data", "law"), [("gamma", "exponential"), ("laplace", "pareto"), ("normal", "exponential")])
def test_stage_adaptation_is_the_state_machine(adapt, data, law, key, seed):
    rng = np.random.default_rng(seed)
    draw = {**DATA, "normal": lambda rng, d: rng.standard_normal(d)}[data]
    xs = [draw(rng, 5000).astype(np.float32) for _ in range(30)]
    compressor = jc.sidco(0.01, law=law, adapt=adapt, capacity=20)
    stages, direction, last, total, history, got = 1, 1, 0.0, 0.0, [], []
    for round_, (x, (payload, state)) in enumerate(zip(xs, run(compressor, xs, key), strict=True)):
        sent = int(np.sum(np.asarray(payload.indices) < 5000))
        eta = oracles.sidco(x, 0.01, law=law, stages=stages)
        above = np.sum(np.abs(np.float64(x)) > eta)
        assert abs(sent - above) <= 1 if above else 50 <= sent <= 62  # none is not an option
        sent = above
        total += sent / 50
        if round_ % 5 == 4:
            mean, total = total / 5, 0.0
            if adapt == "climb" and last > 0 and abs(mean - 1) > abs(last - 1):
                direction = -direction
            stages += -direction if mean > 1.2 else direction if mean < 0.8 else 0
            stages, last = min(max(stages, 1), 7), mean  # ceil(log2(1 / 0.01)) = 7
        history.append(stages)
        got.append(int(state.local.memory.stages))
    assert got == history
    if (adapt, data) == ("paper", "gamma"):
        assert set(history) == {1}  # the published rule can never add the stages that would help
    elif data != "laplace":
        assert max(history) > 1
