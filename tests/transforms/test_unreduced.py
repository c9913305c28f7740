"""Gradients that JAX leaves unreduced: of the loss of the whole batch, called once, as plain JAX has it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close, mesh_of

import jaxcomp as jc
from jaxcomp.exchange.state import means_in

DENSE = jc.direct(jc.identity())
RNG = np.random.default_rng(0)
array = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
X, Y, M = array(16, 6, 5), array(16, 6), jnp.asarray(np.arange(6) < RNG.integers(1, 7, (16, 1)), jnp.float32)
V, W, LABELS, TABLE = array(5), array(5, 3), jnp.asarray(RNG.integers(0, 3, (16, 6))), jnp.asarray([1.0, 0.2, 3.0])


def masked(w, x, y, m):
    return jnp.sum(m * (x @ w - y) ** 2) / jnp.sum(m)


def normalized(w, x):
    h = x @ w
    out = (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-3)
    return jnp.mean(out**3), h.mean((0, 1))


def contrast(w, x):
    z = x[:, 0] @ w
    return jnp.mean(jax.nn.logsumexp(jnp.einsum("id,jd->ij", z, z, out_sharding=P("data", None)), axis=1))


def class_weights(w, x, labels, table):
    each = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)[..., 0]
    return jnp.mean(each * table.at[labels].get(out_sharding=P("data", None)))


LOSSES = {
    "masked": (masked, V, (X, Y, M), {}, {}),
    "sum": (lambda w, x, y: jnp.sum((x @ w - y) ** 2) + jnp.sum(w * w), V, (X, Y), {}, {}),
    "contrastive": (contrast, W, (X,), {}, {}),
    "statistics": (normalized, W, (X,), {}, {"has_aux": True}),
    "class weights": (class_weights, W, (X, LABELS), {"table": TABLE}, {}),
}


grid = functools.partial(mesh_of, kind=AxisType.Explicit)
close = functools.partial(assert_close, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_is_that_of_the_whole_batch(name):
    """Its gradient crosses once, in the exchange; what else crosses are the sums that the loss takes. On Explicit axes
    it is taken so without being said."""
    loss, params, batch, named, options = LOSSES[name]
    mesh = grid()
    with jax.set_mesh(mesh):
        params, batch, named = jax.device_put(params, P()), jax.device_put(batch, P("data")), jax.device_put(named, P())
        want = jax.jit(jax.value_and_grad(loss, **options))(params, *batch, **named)
        grad_fn = jc.value_and_grad(loss, DENSE, **options)
        state = grad_fn.init(params)
        step = jax.jit(lambda *a, **k: grad_fn(*a, **k))
        found, grads, _ = step(params, state, *batch, **named)
        close((found, grads), want)
        sizes = [np.prod(row.shape) for row in jc.ledger(step, params, state, *batch, **named).rows]
        assert name == "contrastive" or sizes.count(params.size) == 1
        if name == "masked":
            two = jc.value_and_grad(loss, DENSE, gradients="unreduced", micro_batches=2, weight=lambda x, y, m: m.sum())
            close(jax.jit(two)(params, state, *batch)[:2], want)


@pytest.mark.parametrize("way", ["tensor", "fsdp"])
def test_sharded_parameters_and_what_is_remembered(way):
    """The messages of `gradients="per_worker"` with a weight, for three steps of error feedback."""
    mesh = grid((2, 2)) if way == "tensor" else grid()
    specs = {"a": P(None, "model"), "b": P("model")} if way == "tensor" else {"a": P(None, "data"), "b": P("data")}
    with jax.set_mesh(mesh):
        params = {"a": array(5, 256), "b": array(256, 8)}
        params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
        x, m = jax.device_put((X[:, 0], M[:, 0] + jnp.arange(16.0)), P("data"))

        def loss(p, x, m):
            out = jnp.einsum("bi,ij->bj", x, p["a"], out_sharding=None if way == "fsdp" else P(*of(x), "model"))
            out = jnp.einsum("bi,ij->bj", jnp.tanh(out), p["b"], out_sharding=P(*of(x), None))
            return jnp.sum(m[:, None] * out**2) / jnp.sum(m)

        of = lambda x: jax.typeof(x).sharding.spec[:1]
        algorithm = jc.error_feedback(jc.top_k(0.1))
        each = [
            jc.value_and_grad(loss, algorithm, gradients="unreduced"),
            jc.value_and_grad(loss, algorithm, gradients="per_worker", weight=lambda x, m: m.sum()),
        ]
        states, steps = [grad_fn.init(params) for grad_fn in each], [jax.jit(grad_fn) for grad_fn in each]
        for _ in range(3):
            (l1, g1, s1), (l2, g2, s2) = (step(params, s, x, m) for step, s in zip(steps, states, strict=True))
            states = [s1, s2]
            close((l1, g1), (l2, g2), rtol=1e-4, atol=1e-5)
        memories = [[m.local.algorithm.memory for m in means_in(s)] for s in states]
        close(*memories, rtol=1e-4, atol=1e-4)
        assert steps[0]._cache_size() == 1


def test_what_it_does_not_do_says_so():
    mesh = mesh_of()
    grad_fn = jc.value_and_grad(masked, DENSE, mesh, gradients="unreduced")
    with pytest.raises(ValueError, match=r"needs axes of type Explicit; 'data' is Auto.*gradients=\"per_worker\""):
        grad_fn(V, grad_fn.init(V), X, Y, M)
    with pytest.raises(ValueError, match='gradients must be "auto", "per_worker" or "unreduced"; got \'dense\''):
        jc.value_and_grad(masked, DENSE, gradients="dense")
    mesh = grid()
    with jax.set_mesh(mesh):
        params, batch = jax.device_put(V, P()), jax.device_put((X, Y, M), P("data"))
        weighed = jc.value_and_grad(masked, DENSE, gradients="unreduced", weights=[1, 2, 3, 4])
        with pytest.raises(ValueError, match="weighs its parts itself"):
            jax.eval_shape(weighed, params, weighed.init(params), *batch)


IMAGES, KERNEL = jnp.ones((16, 4, 4, 3)), jnp.ones((2, 2, 3, 4))
REFUSED = {
    "mul": (lambda w, x: jnp.mean((x * w) ** 2), V, X),
    "add": (lambda p, x: jnp.mean(jax.nn.relu(jax.jit(jnp.add)(x @ p[0], p[1]))), (W, V[:3]), X),
    "conv_general_dilated": (
        lambda w, x: jnp.mean(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ),
        KERNEL,
        IMAGES,
    ),
    "": (lambda w, labels: jnp.mean(w[labels] ** 2), W, LABELS),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_the_operation_that_jax_refuses_is_named_with_both_cures(operation):
    """Also inside of a function that is compiled by itself; and that plain JAX refuses the loss, where it does."""
    loss, params, batch = REFUSED[operation]
    with jax.set_mesh(grid()):
        params, batch = jax.device_put(params, P()), jax.device_put(batch, P("data"))
        grad_fn = jc.value_and_grad(loss, DENSE, gradients="unreduced")
        with pytest.raises(Exception, match=r"reduced|pspec|out_sharding") as caught:
            jax.eval_shape(grad_fn, params, grad_fn.init(params), batch)
        if operation:  # else not even the part of a worker can be differentiated
            grad_fn = jc.value_and_grad(loss, DENSE)
            with pytest.warns(UserWarning, match=f"each worker's part of the batch.* It refuses {operation}. Say "):
                jax.eval_shape(grad_fn, params, grad_fn.init(params), batch)
    note = caught.value.__notes__[0]
    assert (f"It refuses {operation}. " if operation else "refuses the loss as well (Use `.at[...].get(") in note
    assert "out_sharding=" in note
    assert 'gradients="per_worker"' in note
