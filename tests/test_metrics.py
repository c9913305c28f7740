"""The last round as plain numbers, and names in profiles."""

import contextlib
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from worlds import AXIS, N, mesh_of, mesh_step, vmap_step

import jaxcomp as jc
from jaxcomp.exchange.driver import add_counts
from jaxcomp.exchange.state import FIRST_COUNTS

PARAMS = {"b": jnp.zeros(5), "v": jnp.zeros((30, 50)), "w": jnp.zeros((40, 30))}


def after_a_round(algorithm, **options):
    tx = optax.chain(jc.compressed_mean(algorithm, AXIS, **options), optax.adam(1e-3))
    state, step = vmap_step(tx, PARAMS)
    return state, step(state, jax.tree.map(lambda p: jnp.ones((N, *p.shape)), PARAMS))[1]


def test_info_of_a_state_that_is_traced_in_part():
    """It is the same, though what is concrete is computed on the host; and shapes are refused by their name."""
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), None)
    _, state = tx.update(PARAMS["w"], tx.init(PARAMS["w"]))
    with_count = lambda count: dataclasses.replace(state, shared=state.shared._replace(count=count))
    found = jax.jit(lambda count: jc.info(with_count(count)))(jnp.int32(3))
    assert found.as_dict() == jc.info(with_count(jnp.int32(3))).as_dict()
    with pytest.raises(TypeError, match=r"info: the state holds shapes, jax\.ShapeDtypeStruct"):
        jc.info(jax.eval_shape(lambda: state))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("measure", [False, True])
def test_plain_numbers_of_a_round(measure):
    before, state = after_a_round(jc.error_feedback(jc.top_k(0.1)), measure=measure)
    numbers = jc.metrics(state, prefix="exchange/")
    assert all(type(value) in (int, float) for value in numbers.values())
    assert json.loads(json.dumps(numbers)) == numbers
    info, plain = jc.info(state), {name.removeprefix("exchange/"): value for name, value in numbers.items()}
    assert (plain.pop("rounds"), plain.pop("workers")) == (1, N)
    assert plain == {name: float(getattr(info, name)) for name in plain}
    assert {"lane_bytes", "code_bits", "sent_bytes", "achieved_ratio", "overflow"} <= set(plain)
    assert ("relative_error" in plain) == ("nonfinite" in plain) == measure
    assert jc.metrics(before)["rounds"] == 0
    with pytest.raises(TypeError, match="metrics: the state must hold numbers; call it outside of jit"):
        jax.jit(jc.metrics)(state)
    with pytest.raises(ValueError, match="there is no compressed_mean in this state"):
        jc.metrics(optax.adam(1e-3).init(PARAMS))


@pytest.mark.usefixtures("standard_promotion")
def test_totals_are_those_of_all_rounds():
    """Of messages whose length changes, beyond 2^24 bytes, and of local steps between two exchanges."""
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(jc.warm_up([0.5, 0.25, 0.1], 2))), AXIS, "ladder")
    state, step = vmap_step(tx, PARAMS)
    sent, bits = [], []
    for t in range(6):
        grads = jax.tree.map(lambda p, t=t: jax.random.normal(jax.random.key(t), (N, *p.shape)), PARAMS)
        state = step(state, grads)[1]
        sent, bits = [*sent, float(jc.info(state).sent_bytes)], [*bits, float(jc.info(state).code_bits)]
    found = jc.info(state).as_dict()
    assert len(set(sent)) > 1
    assert (found["rounds"], found["total_sent_bytes"], found["total_code_bits"]) == (6, sum(sent), sum(bits))
    assert json.loads(json.dumps(found)) == found
    round_, counts = FIRST_COUNTS._replace(sent_bytes=jnp.float32(2**23 + 1), since=()), FIRST_COUNTS
    for _ in range(100):
        counts = add_counts([round_], counts.since)
    assert counts.since.tolist() == [50, 0, 100, 0]
    tx = jc.local_updates(optax.sgd(0.1), optax.sgd(1.0), jc.direct(jc.identity()), AXIS, every=2)
    state, axes = jc.init_state(tx, PARAMS, N, AXIS)
    params = jax.tree.map(lambda p: jnp.zeros((N, *p.shape)), PARAMS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS))
    for t in range(5):
        _, state = step(params, state, params)
        sent[t] = float(jc.info(state).sent_bytes)
    assert jc.info(state).total_sent_bytes == sum(sent[:5]) == 2 * max(sent[:5])


STEPS = {
    "error_feedback(top_k)": (jc.error_feedback(jc.top_k(0.1)), "auto", {"auto/sum", "auto/gather"}),
    "diana(dithering)": (jc.diana(jc.dithering(7)), "gather", {"gather"}),
    "direct(bf16)": (jc.direct(jc.cast("bfloat16")), "sum", {"sum"}),
    "power_sgd": (jc.power_sgd(2), "auto", {"sum"}),
}


def lowered(algorithm, via):
    state, step = mesh_step(jc.compressed_mean(algorithm, AXIS, via), PARAMS, mesh_of(2))
    grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), PARAMS)
    jax.clear_caches()  # of programs within, which keep their names
    return step.lower(state, grads)


@pytest.mark.parametrize("name", STEPS)
def test_profiles_have_names_and_programs_no_more_instructions(name, monkeypatch):
    algorithm, via, routes = STEPS[name]
    program = lowered(algorithm, via)
    text = program.as_text(debug_info=True)
    parts = ("jc_encode", "jc_decode", "jc_layout") if algorithm.compressor is not None else ()
    for part in (*parts, *(f"jc_exchange_{route}" for route in routes)):
        assert re.search(rf'["/]{part}/', text), part
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    plain = lowered(algorithm, via)
    assert not re.search('["/]jc_', plain.as_text(debug_info=True))
    assert plain.as_text() == program.as_text()
