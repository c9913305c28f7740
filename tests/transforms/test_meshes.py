"""Losses that name the axis of the workers in their sharding constraints."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import with_sharding_constraint as constrained
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close, assert_same

import jaxcomp as jc

DENSE = jc.direct(jc.identity())
AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
RNG = np.random.default_rng(0)
W, X = (jnp.asarray(RNG.normal(size=shape) / 8, jnp.float32) for shape in ((64, 64), (8, 64)))
SPEC = P(None, "model")
MASK = jnp.arange(8.0) % 3


def mesh_of(kinds):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds)


def loss(w, x, mask, batch="data"):
    hidden = constrained(x @ w, P(batch, "model"))
    return jc.mean_over(jnp.sum(constrained(hidden @ w.T, P(batch, None)) ** 2, 1), mask)


def placed(mesh):
    return jax.device_put(W, NamedSharding(mesh, P(None, "model"))), *jax.device_put(
        (X, MASK), NamedSharding(mesh, P("data"))
    )


def drawn(w, x, mask, batch="data", *, key):
    return loss(w, x, mask, batch) + jnp.sum(w * jax.random.normal(key, w.shape))


@pytest.mark.parametrize("loss", [loss, drawn])
def test_the_axis_of_the_workers_has_length_one_in_the_loss(loss):
    """As if the loss did not name it: the same gradients from the same collectives."""
    mesh = mesh_of(AUTO)
    with jax.set_mesh(mesh):
        w, x, mask = placed(mesh)
        found, books = [], []
        for batch in ("data", None):
            own = lambda w, x, mask, batch=batch, **key: loss(w, x, mask, batch, **key)
            grad_fn = jc.value_and_grad(own, jc.direct(jc.identity()), mesh)
            step, state = jax.jit(lambda *a, grad_fn=grad_fn, **k: grad_fn(*a, **k)), grad_fn.init(w)
            key = {"key": jax.random.key(1)} if loss is drawn else {}
            found.append(step(w, state, x, mask, **key)[:2])
            rows = jc.ledger(step, w, state, x, mask, **key).rows
            books.append([(row.op, row.shape, row.axes(mesh)) for row in rows])
        assert_same(*found)
        assert books[0] == books[1]
        if loss is not drawn:
            want = jax.jit(jax.value_and_grad(loss))(w, x, mask)
            assert_close(found[0], want, atol=1e-5)


def test_local_steps_take_such_a_loss():
    mesh = mesh_of(AUTO)
    found = []
    with jax.set_mesh(mesh):
        w, x, _ = placed(mesh)
        for batch in ("data", None):
            own = lambda w, x, batch=batch: jnp.mean(constrained(x @ w, P(batch, "model")) ** 2)
            steps = jc.local_steps(
                own, optax.sgd(0.1), optax.sgd(1.0), jc.direct(jc.identity()), mesh, every=2, param_specs=SPEC
            )
            own_params, state = steps.init(w)
            step = jax.jit(lambda p, s, x, steps=steps: steps(p, s, x))
            for _ in range(2):
                _, own_params, state = step(own_params, state, x)
            found.append(own_params)
    assert_same(*found)


def outs(w, x, mask):
    return jnp.mean(jnp.einsum("bi,ij->bj", x, w, out_sharding=P("data", "model")) ** 2) + 0 * jnp.sum(mask)


def summed(w, x, mask):
    return jax.lax.pmean(loss(w, x, mask), "data")


@pytest.mark.parametrize(
    ("kinds", "given", "loss", "cure"),
    [
        (AUTO, False, loss, r"Give the mesh with its devices, value_and_grad\(loss, algorithm, mesh\)"),
        (AUTO, True, summed, r"over it. Leave that axis out of the constraint: P\(None, 'model'\)"),
        (EXPLICIT, True, outs, 'Say gradients="unreduced"'),
        (AUTO[:1] + EXPLICIT[:1], True, outs, "over it. Leave that axis out"),
    ],
)
def test_where_that_cannot_be_one_sentence_has_the_cure(kinds, given, loss, cure):
    mesh = mesh_of(kinds)
    with jax.set_mesh(mesh):
        w, x, mask = placed(mesh)
        grad_fn = jc.value_and_grad(loss, DENSE, mesh if given else None, gradients="per_worker")
        state = grad_fn.init(w)
        with pytest.raises(ValueError, match=f"the loss names 'data', the axis of the workers.*{cure}"):
            jax.jit(grad_fn)(w, state, x, mask)
        if kinds == EXPLICIT:
            grad_fn = jc.value_and_grad(loss, DENSE)
            want = jax.value_and_grad(loss)(w, x, mask)
            assert_close(jax.jit(grad_fn)(w, state, x, mask)[:2], want, atol=1e-5)


@pytest.mark.parametrize("lookup", [True, False])
def test_a_lookup_where_xla_aborts_is_warned_of(lookup):
    """Nothing is compiled: XLA would end this process."""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    rows = lambda table, tokens: table[tokens] if lookup else jax.nn.one_hot(tokens, len(table)) @ table
    loss = lambda table, tokens: jnp.mean(rows(table, tokens) ** 2)
    grad_fn = jc.value_and_grad(loss, jc.direct(jc.identity()), mesh, param_specs=P("fsdp", "model"))
    warning = pytest.warns(UserWarning, match=r"rows of .* \(64, 64\), which is cut over \('fsdp', 'model'\)")
    with warning if lookup else nullcontext():
        jax.eval_shape(lambda table, x: grad_fn(table, grad_fn.init(table), x)[:2], W, jnp.zeros((8, 4), jnp.int32))


def test_parameters_that_are_gathered_whole_are_warned_of():
    spec = P(None, "data")
    for shape in ((2**10, 2**14), (2**9, 2**10)):
        large = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh_of(AUTO), spec))
        grad_fn = jc.value_and_grad(lambda w, x: jnp.sum(w) * jnp.sum(x), jc.direct(jc.identity()), mesh_of(AUTO))
        warning = pytest.warns(UserWarning, match=r"67 MB are cut over the workers \('data',\)")
        with warning if shape[0] == 2**10 else nullcontext():
            jax.eval_shape(lambda: grad_fn.init(large))  # noqa: B023
