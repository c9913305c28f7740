"""The last round as plain numbers, and names in profiles."""

import contextlib
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from worlds import AXIS, N, mesh_of

import jaxcomp as jc

PARAMS = {"b": jnp.zeros(5), "v": jnp.zeros((30, 50)), "w": jnp.zeros((40, 30))}


def after_a_round(algorithm, **options):
    tx = optax.chain(jc.compressed_mean(algorithm, AXIS, **options), optax.adam(1e-3))
    state, axes = jc.init_state(tx, PARAMS, N, AXIS)
    step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
    grads = jax.tree.map(lambda p: jnp.ones((N, *p.shape)), PARAMS)
    return state, jax.jit(step)(grads, state)[1]


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


STEPS = {
    "error_feedback(top_k)": (jc.error_feedback(jc.top_k(0.1)), "auto", {"auto/sum", "auto/gather"}),
    "diana(dithering)": (jc.diana(jc.dithering(7)), "gather", {"gather"}),
    "direct(bf16)": (jc.direct(jc.cast("bfloat16")), "sum", {"sum"}),
    "power_sgd": (jc.power_sgd(2), "auto", {"sum"}),
}


def compiled(algorithm, via):
    tx = jc.compressed_mean(algorithm, AXIS, via)
    mesh = mesh_of(2)
    state, specs = jc.init_state(tx, PARAMS, mesh, AXIS)
    one = lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state)
    P = jax.sharding.PartitionSpec
    step = jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), PARAMS)
    return jax.jit(step).lower(grads, state).compile().as_text()


@pytest.mark.parametrize("name", STEPS)
def test_profiles_have_names_and_programs_no_more_instructions(name, monkeypatch):
    algorithm, via, routes = STEPS[name]
    text = compiled(algorithm, via)
    parts = ("jc_encode", "jc_decode", "jc_layout") if algorithm.compressor is not None else ()
    for part in (*parts, *(f"jc_exchange_{route}" for route in routes)):
        assert f"/{part}/" in text, part
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    jax.clear_caches()  # of programs within, which keep their names
    plain = compiled(algorithm, via)
    assert "jc_" not in re.sub(r"source_file=\S+", "", plain)
    operations = lambda text: sorted(re.findall(r"= \S+ ([\w-]+)\(", text))
    assert operations(plain) == operations(text)
