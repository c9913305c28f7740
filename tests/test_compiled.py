"""What is made where in a compiled program, and how often it is traced and compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from experiments.bench.trees import temporary, update_of
from jaxcomp.backend import cut_apart, shared_program
from jaxcomp.backend_cpu import FEW

ROWS = jnp.arange(24.0).reshape(4, 6)


def counting():
    """A function that is called, and the shapes for which it was traced."""
    traced = []

    def both(x, like):
        traced.append(x.shape)
        return {"double": 2 * x, "ones": jnp.ones(like.shape, like.dtype)}

    return shared_program(both), traced


def test_equal_shapes_are_traced_once_and_stay_calls():
    function, traced = counting()
    like = jax.ShapeDtypeStruct((3,), jnp.int32)

    def several(x):
        return [function(row, like) for row in x] + [function(x[0, :2], like)]

    program = jax.jit(several).lower(ROWS).compile()
    assert traced == [(6,), (2,)]
    calls = [line for line in program.as_text().splitlines() if " call(" in line and "inlineable" in line]
    assert len(calls) == 5
    for row, out in zip([*ROWS, ROWS[0, :2]], program(ROWS), strict=True):
        np.testing.assert_array_equal(out["double"], 2 * row)
        assert (out["ones"].shape, out["ones"].dtype) == ((3,), jnp.int32)


@pytest.mark.parametrize(("how", "calls"), [("plain", 2), ("vmap", 2), ("grad", 4)])
def test_what_is_within_a_call_is_none(how, calls):
    """`jnp.where` and the like are functions with calls of their own, which are inlined as ever."""
    inner = shared_program(lambda x: jnp.where(x > 0, jnp.clip(x, 0, 1), x))
    both = lambda x: inner(x) + inner(x + 1)
    run = {"plain": both, "vmap": jax.vmap(both), "grad": jax.grad(lambda x: jnp.sum(both(x)))}[how]
    text = jax.jit(run).lower(ROWS).compile().as_text()
    assert sum("inlineable" in line and " call(" in line for line in text.splitlines()) == calls


@pytest.mark.parametrize("how", ["eager", "vmap", "grad", "scan"])
def test_a_called_function_is_the_function(how):
    plain = lambda x: jnp.sum(jnp.sin(x) * x)
    function = shared_program(plain)
    run = {
        "eager": lambda f: f(ROWS),
        "vmap": lambda f: jax.jit(jax.vmap(f))(ROWS),
        "grad": lambda f: jax.jit(jax.grad(f))(ROWS),
        "scan": lambda f: jax.jit(lambda x: jax.lax.map(f, x))(ROWS),
    }[how]
    np.testing.assert_allclose(run(function), run(plain), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [3, FEW + 2])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_pieces_follow_one_another(count, lead):
    sizes = [1 + i % 4 for i in range(count)]
    x = jnp.arange(float(np.prod((*lead, sum(sizes) + 5)))).reshape(*lead, sum(sizes) + 5)
    for run in (lambda f: f(x), lambda f: jax.jit(f)(x)):
        pieces = run(lambda x: cut_apart(x, sizes))
        assert [piece.shape for piece in pieces] == [(*lead, size) for size in sizes]
        np.testing.assert_array_equal(jnp.concatenate(pieces, -1), x[..., : sum(sizes)])


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [
        (jc.diana(jc.dithering(7)), 0.5),  # four bits an entry: its own, those of two workers, and a vector
        (jc.methods.ef_bv(jc.dithering(7)), 0.5),
        (jc.methods.ef_bv(jc.top_k(0.01)), 2.1),  # the gradient as a vector, and what is sent of it
        (jc.ef21(jc.top_k(0.01), whole_start=False), 2.1),
        (jc.contrib.momentum_correction(jc.contrib.dgc(0.01)), 2.1),  # its own as a vector, and the direction
    ],
    ids=["diana", "ef_bv", "ef_bv top_k", "ef21", "dgc"],
)
def test_states_are_written_in_place(algorithm, gradients):
    """On CPU, where they are donated and come back in the order in which they came."""
    like = {f"{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(12)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    step, shapes = update_of(lambda: algorithm, like, mesh)
    program = step.lower(*shapes).compile()
    assert float(temporary(program, like)) <= gradients
    copies = re.findall(r"f32\[([\d,]+)\]\S* copy\(", program.as_text())
    assert [x for x in copies if np.prod([int(n) for n in x.split(",")]) >= 2**18] == []
