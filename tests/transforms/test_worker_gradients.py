"""Losses as people write them: masked, with statistics, keywords, values of each example; what does not fit says so.

The oracle is the loss of the whole batch in float64: with r = x w - y, shares p_i and masks m,
L = sum_i p_i sum m r^2 / sum_i p_i sum m, and its gradient by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import assert_close as close
from worlds import mesh_of

import jaxcomp as jc

pytestmark = pytest.mark.usefixtures("standard_promotion")
DENSE = jc.direct(jc.identity())
N, B, T, D = 4, 16, 6, 5
RNG = np.random.default_rng(0)
LENGTHS = np.array([6, 6, 5, 6, 1, 0, 2, 1, 0, 0, 0, 0, 3, 1, 6, 2])  # of each example; the third worker has no token
X, Y = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, T))
M = np.arange(T) < LENGTHS[:, None]
W = RNG.normal(size=D)
BATCH = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32), jnp.asarray(M)
PARAMS = jnp.asarray(W, jnp.float32)


def whole(weights=None, x=X, y=Y, m=M):
    """Loss and gradient of the whole batch, float64."""
    share = np.ones(N) if weights is None else np.asarray(weights, float)
    m = m * np.repeat(share, len(x) // N)[:, None]
    r = x @ W - y
    return (m * r**2).sum() / m.sum(), 2 * np.einsum("bt,btd->d", m * r, x) / m.sum()


def masked(w, x, y, m):
    return jnp.sum(m * (x @ w - y) ** 2) / jnp.sum(m)


def counted(w, x, y, m):
    return masked(w, x, y, m), jnp.sum(m)


def joint(w, x, y, m):
    return jc.mean_over((x @ w - y) ** 2, m, "data")


FORMS = {
    "function": (masked, {"weight": lambda x, y, m: m.sum()}),
    "returned": (counted, {"weight": True}),
    "mean_over": (joint, {}),
}


def on(mesh, tree, spec=None):
    return jax.device_put(tree, NamedSharding(mesh, P() if spec is None else spec))


assert_close = functools.partial(close, rtol=2e-5)


def step_of(grad_fn, params, batch, mesh=None, **named):
    mesh = mesh_of() if mesh is None else mesh
    params, batch = on(mesh, params), on(mesh, batch, P("data"))
    return jax.jit(lambda p, s, *b: grad_fn(p, s, *b, **named))(params, grad_fn.init(params), *batch)


# ------------------------------------------------------------------------------------------------
# Token-weighted losses


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", [None, [1, 2, 0, 5]], ids=["alike", "weights"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_masked_loss_is_that_of_the_whole_batch(form, weights, parts):
    """On a mesh, under vmap, and at a single worker; without it, the mean of means is far away."""
    loss, options = FORMS[form]
    grad_fn = jc.value_and_grad(loss, DENSE, weights=weights, micro_batches=parts, **options)
    if form == "mean_over" and parts > 1:
        with pytest.raises(ValueError, match=r"see one of them alone. Return \(loss, weight\) instead"):
            step_of(grad_fn, PARAMS, BATCH)
        return
    want = whole(weights)
    assert_close(step_of(grad_fn, PARAMS, BATCH)[:2], want)
    if weights:
        state, axes = jc.init_state(grad_fn, PARAMS, N, "data")
        rows = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), BATCH)
        many = jax.vmap(grad_fn, in_axes=(None, axes, 0, 0, 0), out_axes=(None, None, axes), axis_name="data")
        assert_close(jax.jit(many)(PARAMS, state, *rows)[:2], want)
        return
    alone = jc.value_and_grad(loss, DENSE, axis_name=None, micro_batches=parts, **options)
    assert_close(jax.jit(alone)(PARAMS, alone.init(PARAMS), *BATCH)[:2], whole())
    if form == "function":
        plain = jc.value_and_grad(lambda *a: jnp.nan_to_num(masked(*a)), DENSE, micro_batches=parts)
        assert abs(step_of(plain, PARAMS, BATCH)[0] - want[0]) > 0.1 * want[0]


def test_what_each_worker_sends():
    """n W_i grad l_i / sum W: in the units of the whole gradient; nothing of a worker without tokens."""
    mesh = mesh_of()
    grad_fn = jc.worker_value_and_grad(masked, mesh, weight=FORMS["function"][1]["weight"])
    rows_of = jax.jit(lambda *of: jax.tree.map(lambda x: getattr(x, "rows", x), grad_fn(*of)))
    loss, rows = rows_of(PARAMS, *BATCH)
    cut = lambda i: slice(4 * i, 4 * i + 4)
    counts = np.array([M[cut(i)].sum() for i in range(N)])
    r = X @ W - Y
    each = [2 * np.einsum("bt,btd->d", M[cut(i)] * r[cut(i)], X[cut(i)]) for i in range(N)]
    assert_close(rows, N * np.stack(each) / counts.sum())
    assert_close(loss, whole()[0])
    assert not np.any(rows[2])
    nothing = rows_of(PARAMS, *BATCH[:2], jnp.zeros_like(BATCH[2]))
    assert not any(np.any(x) for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("form", ["function", "returned"])
def test_a_weight_beside_a_sum_over_the_workers_in_the_loss(form):
    """Say of a synchronized BatchNorm: its transpose adds the gradients of all workers' losses, each with its weight,
    also at the worker without a token. One that is weighed afterwards is some per cent off.
    """

    def loss(axis, w, x, y, m):
        h = x @ w
        centre = jnp.mean(h) if axis is None else jax.lax.pmean(jnp.mean(h), axis)
        out = jnp.sum(m * (jnp.tanh(h - centre) - y) ** 2) / jnp.maximum(jnp.sum(m), 1)
        return (out, jnp.sum(m)) if axis and form == "returned" else out

    weight = True if form == "returned" else lambda x, y, m: m.sum()
    found = step_of(jc.value_and_grad(functools.partial(loss, "data"), DENSE, weight=weight), PARAMS, BATCH)[:2]
    assert_close(found, jax.jit(jax.value_and_grad(functools.partial(loss, None)))(PARAMS, *BATCH))


def test_mean_over_by_hand_and_with_a_mask_that_is_trained():
    """In a shard_map with types, and where what entries count depends on the parameters: d(S/W), not dS/W."""
    soft = lambda w, x, y, m: jc.mean_over((x @ w - y) ** 2, jax.nn.sigmoid(x @ w) * m, "data") + jnp.sum(w**2)
    want = jax.jit(jax.value_and_grad(soft))(PARAMS, *BATCH)
    assert_close(step_of(jc.value_and_grad(soft, DENSE), PARAMS, BATCH)[:2], want)
    tx, mesh = jc.compressed_mean(DENSE, "data"), mesh_of()
    state, specs = jc.init_state(tx, PARAMS, mesh, "data")

    def step(w, state, *batch):
        loss, grads = jax.value_and_grad(soft)(jc.per_worker(w, "data"), *batch)
        return jax.lax.pmean(loss, "data"), tx.update(grads, state)[0]

    ins = (P(), specs, P("data"), P("data"), P("data"))
    assert_close(
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=(P(), P())))(PARAMS, state, *BATCH), want
    )
    run = jc.methods.rounds(jc.methods.descend(DENSE, 0.1), "data", weights=[1, 2, 0, 5])
    rows = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), BATCH)
    one = lambda *batch: run.point(run.step(run.init(PARAMS), lambda w: jax.grad(joint)(w, *batch))[0])
    mapped = jax.jit(jax.vmap(one, axis_name="data", out_axes=None))
    assert_close(mapped(*rows), W - 0.1 * whole([1, 2, 0, 5])[1])
    with pytest.raises(ValueError, match=r"axis must be \('data',\), that of the workers; got 'batch'"):
        step_of(jc.value_and_grad(lambda w, x: jc.mean_over(x @ w, axis="batch"), DENSE), PARAMS, BATCH[:1])
    with pytest.raises(ValueError, match=r"the mask must broadcast to the shape \(3,\) of x; got \(2,\)"):
        jc.mean_over(jnp.ones(3), jnp.ones(2))
    empty = jc.mean_over(jnp.full(3, jnp.nan), jnp.zeros(3))
    assert (float(empty), jc.mean_over(jnp.array([True, False])).dtype) == (0, jnp.float32)


def test_a_compiled_loss_is_traced_again_where_it_is_refused():
    """`jax.jit` inside of the loss, with arguments of the same shapes."""
    compiled = jax.jit(joint)
    half = jax.tree.map(lambda x: x[::2], BATCH)
    step_of(jc.value_and_grad(compiled, DENSE), PARAMS, half)
    with pytest.raises(ValueError, match="see one of them alone"):
        step_of(jc.value_and_grad(compiled, DENSE, micro_batches=2), PARAMS, BATCH)


def test_weights_in_sixteen_bits_and_with_a_dynamic_scale():
    """The scaled loss counts as the other does; a worker without tokens (0 / 0) is no overflow."""
    loss, options = FORMS["function"]
    grad_fn = jc.value_and_grad(loss, DENSE, loss_scale=jc.DynamicScale(), **options)
    found, grads, state = step_of(grad_fn, PARAMS, BATCH)
    assert_close((found, grads), whole())
    assert bool(state.loss_scale.finite)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, *BATCH[:2]))
    grad_fn = jc.value_and_grad(loss, DENSE, micro_batches=2, **options)
    _, grads, _ = step_of(grad_fn, half[0], (*half[1:], BATCH[2]))
    assert grads.dtype == jnp.bfloat16
    assert_close(grads.astype(jnp.float32), whole()[1], rtol=0.05, atol=0.05)


def test_a_weight_that_does_not_take_what_the_loss_takes_is_named():
    loss = lambda params, x, rate=None: jnp.mean((x @ params) ** 2)
    grad_fn = jc.value_and_grad(loss, DENSE, weight=lambda x: jnp.sum(x))
    with pytest.raises(
        TypeError, match=r"weight is called .*'rate'. Let it take the rest, weight=lambda \*batch, \*\*named"
    ):
        grad_fn(PARAMS, grad_fn.init(PARAMS), BATCH[0], rate=1.0)
    step = jc.local_steps(loss, optax.sgd(0.1), optax.sgd(1.0), DENSE, every=2)
    with pytest.raises(TypeError, match="give it the loss itself"):
        jc.check_loss(step, PARAMS, BATCH[:1])


# ------------------------------------------------------------------------------------------------
# Local steps


def local_oracle(every, steps, rate=0.1):
    """The shared point after `steps` of SGD at each worker, differences weighted by the tokens of the round."""
    point = W.copy()
    for start in range(0, steps, every):
        own, counts = np.tile(point, (N, 1)), np.zeros(N)
        for t in range(start, start + every):
            x, y, m = (np.roll(z, 3 * t, 0).reshape(N, -1, *z.shape[1:]) for z in (X, Y, M))
            for i in range(N):
                if m[i].sum():
                    r = x[i] @ own[i] - y[i]
                    own[i] -= rate * 2 * np.einsum("bt,btd->d", m[i] * r, x[i]) / m[i].sum()
                    counts[i] += m[i].sum()
        point = point - (counts[:, None] * (point - own)).sum(0) / counts.sum()
    return point


@pytest.mark.parametrize("every", [1, 2])
def test_local_steps_count_tokens(every):
    """With one step they are those of the whole batch; nothing crosses in between."""
    mesh, weight = mesh_of(), FORMS["function"][1]["weight"]
    make = jc.local_steps(masked, optax.sgd(0.1), optax.sgd(1.0), DENSE, mesh, every=every, weight=weight)
    own, state = make.init(on(mesh, PARAMS))
    step = jax.jit(make)
    for t in range(4):
        batch = on(mesh, jax.tree.map(lambda x: jnp.roll(x, 3 * t, 0), BATCH), P("data"))  # noqa: B023
        losses, own, state = step(own, state, *batch)
    assert_close(state.point, local_oracle(every, 4), rtol=1e-4)
    assert (losses.shape, step._cache_size()) == ((N,), 1)
    if every == 1:
        assert_close(local_oracle(1, 1), W - 0.1 * whole()[1])
    else:
        rows = [row for row in jc.ledger(step, own, state, *batch).rows if row.sent_bytes]
        assert all(row.branch for row in rows)
    with pytest.raises(ValueError, match="in local steps it would exchange at every step"):
        jax.eval_shape(jc.local_steps(joint, optax.sgd(0.1), optax.sgd(1.0), DENSE, mesh, every=2), own, state, *BATCH)


def test_local_updates_with_fragments_that_are_on_their_way():
    """Each difference has the tokens of the steps in which it grew, also where it waits."""
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    make = lambda **more: jc.local_updates(
        optax.sgd(1.0), optax.sgd(1.0), DENSE, "data", every=2, fragments=2, delay=1, **more
    )
    grads, counts = RNG.normal(size=(6, N, 7)).astype(np.float32), RNG.integers(0, 5, (6, N)).astype(np.float32)

    def run(tx, weighted):
        state, axes = jc.init_state(tx, params, N, "data")
        own = jax.tree.map(lambda x: jnp.tile(x, (N, 1)), params)

        def one(own, state, g, w):
            g = {"a": g[:3], "b": g[3:]}
            updates, state = tx.update(g, state, own, **({"weight": w} if weighted else {}))
            return optax.apply_updates(own, updates), state

        step = jax.jit(jax.vmap(one, in_axes=(0, axes, 0, 0), out_axes=(0, axes), axis_name="data"))
        for g, w in zip(grads, counts, strict=True):
            own, state = step(own, state, g, w if weighted == "unequal" else jnp.ones(N))
        return state.point

    assert_close(run(make(weighted=True), "equal"), run(make(), False))
    found = run(make(weighted=True), "unequal")
    theta, own, since = np.zeros(7), np.zeros((N, 7)), np.zeros((2, N))
    parts, waiting, taken = (slice(0, 3), slice(3, 7)), np.zeros((N, 7)), np.zeros((2, N))
    for t in range(1, 7):
        after, since = own - grads[t - 1], since + counts[t - 1]
        for p, part in enumerate(parts):
            due = (p + 1) % 2  # merged at t mod 2 = due, taken the step before
            if t > 1 and t % 2 == due:
                theta[part] -= (taken[p][:, None] * waiting[:, part]).sum(0) / taken[p].sum()
                after[:, part] = theta[part]
            if (t + 1) % 2 == due:
                base = theta[part]
                waiting[:, part], taken[p], since[p] = base - (own - grads[t - 1])[:, part], since[p], 0
        own = after
    assert_close(np.concatenate([found["a"], found["b"]]), theta, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="with weighted=True update needs weight=, a number"):
        run(make(weighted=True), False)
    with pytest.raises(ValueError, match="weighted goes with one axis"):
        jc.local_updates(optax.sgd(1.0), optax.sgd(1.0), None, {"a": DENSE, "b": DENSE}, every=2, weighted=True)


# ------------------------------------------------------------------------------------------------
# check_loss


class Normed(nnx.Module):
    def __init__(self, axis=None):
        self.norm = nnx.BatchNorm(D, axis_name=axis, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(D, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(self.norm(x))[..., 0]


def contrast(w, x, y, m, axis=None):
    z = x[:, 0] * w
    others = jax.lax.all_gather(z, axis, tiled=True) if axis else z
    return jnp.mean(jax.nn.logsumexp(z @ others.T, axis=1) - jnp.sum(z * z, axis=1))


CHECKED = {
    "masked": (masked, {}, r"Tell that number: weight=lambda .* counts the workers' parts as \[0\.\d+, "),
    "weight": (masked, {"weight": FORMS["function"][1]["weight"]}, None),
    "mean_over": (joint, {}, None),
    "sum": (lambda w, x, y, m: jnp.sum(m * (x @ w - y) ** 2), {}, r"is a sum over the examples.*axis_size\('data'\)"),
    "scaled": (lambda w, x, y, m: 3.0 * jax.lax.axis_size("data") * jnp.mean((x @ w - y) ** 2), {}, "times the sum"),
    "contrastive": (contrast, {}, r"compares examples .* jax\.lax\.all_gather\(z, 'data', tiled=True\)"),
    "gathered": (functools.partial(contrast, axis="data"), {}, None),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_loss_says_which_kind_it_is(name):
    loss, options, wrong = CHECKED[name]
    m = BATCH[2].at[8:12, 0].set(True)  # every worker has a token
    check = lambda: jc.check_loss(loss, PARAMS, (*BATCH[:2], m), mesh_of(), **options)
    if wrong is None:
        assert check().gradient_error < 1e-4
    else:
        with pytest.raises(ValueError, match=wrong):
            check()


def test_check_loss_of_batch_norm_and_of_auxiliary_values():
    """It leaves the model as it is; what `value_and_grad` made brings its own options."""
    mesh, loss = mesh_of(), lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    with pytest.raises(ValueError, match=r"BatchNorm is exact .*axis_name='data'"):
        jc.check_loss(loss, Normed(), BATCH[:2], mesh, wrt=nnx.Param)
    model = Normed("data")
    assert jc.check_loss(loss, model, BATCH[:2], mesh, wrt=nnx.Param).gradient_error < 1e-4
    np.testing.assert_array_equal(model.norm.mean[...], 0)
    with_aux = lambda w, x, y, m: (masked(w, x, y, m), {"n": jnp.sum(m, dtype=jnp.float32)})
    for kind in ("mean", "sum"):
        grad_fn = jc.value_and_grad(
            with_aux, DENSE, mesh, has_aux=True, aux={"n": kind}, weight=FORMS["function"][1]["weight"]
        )
        if kind == "sum":
            assert jc.check_loss(grad_fn, PARAMS, BATCH).loss == pytest.approx(whole()[0])
        else:
            with pytest.raises(ValueError, match=r"auxiliary values\['n'\] of the whole batch are not those that aux="):
                jc.check_loss(grad_fn, PARAMS, BATCH)


# ------------------------------------------------------------------------------------------------
# What is batch


def test_what_is_batch_is_not_guessed():
    """Class weights whose length divides, a table beside the batch, an array that lies whole: refused."""
    mesh, table = mesh_of(), jnp.arange(8.0)
    loss = lambda w, x, y, c: jnp.mean((x @ w - y) ** 2) + jnp.mean(c * w[0])
    refused = lambda match=None: pytest.raises(ValueError, match=match)
    grad_fn = jc.value_and_grad(loss, DENSE, mesh)
    state = grad_fn.init(on(mesh, PARAMS))
    with refused() as caught:
        jax.eval_shape(grad_fn, PARAMS, state, *BATCH[:2], table)
    assert "It is 16 in batch[0] and 8 in batch[2], so one of them is no batch" in str(caught.value)
    assert "by keyword or in a closure; or say which arguments are batch, batch=(0, 1)" in str(caught.value)
    cut, lies = on(mesh, BATCH[:2], P("data")), on(mesh, jnp.arange(16.0))
    with refused(r"batch\[2\] lies whole on every worker, and batch\[0\] is cut over \('data',\)"):
        grad_fn(PARAMS, state, *cut, lies)
    want = jax.jit(jax.value_and_grad(loss))(PARAMS, *BATCH[:2], lies)
    said = jc.value_and_grad(loss, DENSE, mesh, batch=(0, 1))
    assert_close(said(PARAMS, state, *cut, lies)[:2], want)
    by_name = jc.value_and_grad(loss, DENSE, mesh, batch=("x", "y"), micro_batches=2)
    assert_close(by_name(PARAMS, state, x=cut[0], y=cut[1], c=lies)[:2], want)
    assert_close(grad_fn(PARAMS, state, *cut, c=lies)[:2], want)
    with refused(r"no argument of the loss is cut, so each of the 4 workers would compute the same.*batch=\("):
        grad_fn(PARAMS, state, x=cut[0], y=cut[1], c=lies)
    none = jc.value_and_grad(loss, DENSE, mesh, batch=())
    assert_close(none(PARAMS, state, x=cut[0], y=cut[1], c=lies)[:2], want)
    with refused(r"micro_batches cuts them along their leading axis; got lengths \[16, 8\]"):
        jax.eval_shape(
            jc.value_and_grad(loss, DENSE, axis_name=None, micro_batches=2), PARAMS, state, *BATCH[:2], table
        )
    with pytest.raises(TypeError, match="batch names the argument 'z', which was not given"):
        jc.value_and_grad(loss, DENSE, mesh, batch="z")(PARAMS, state, *cut, lies)
    with pytest.raises(TypeError, match=r"batch must be numbers of positional and names .* got 1\.5"):
        jc.value_and_grad(loss, DENSE, mesh, batch=1.5)
    make = jc.local_steps(loss, optax.sgd(0.1), optax.sgd(1.0), DENSE, mesh, every=2)
    with refused(r"It is 16 in batch\[0\] and 8 in batch\[2\]"):
        make(*make.init(PARAMS), *BATCH[:2], table)
    with pytest.raises(ValueError, match="no argument of the loss is cut"):
        jc.worker_value_and_grad(loss, mesh)(PARAMS, x=cut[0], y=cut[1], c=lies)


@pytest.mark.parametrize("options", [{}, {"batch": (0, 1)}, {"micro_batches": 2}])
def test_a_mask_that_is_no_batch_is_named_where_it_does_not_fit(options):
    """JAX's sentence is on shapes alone."""
    mesh, loss = mesh_of(), lambda w, x, y, *, m: masked(w, x, y, m)
    grad_fn = jc.value_and_grad(loss, DENSE, mesh, **options)
    part = 4 // options.get("micro_batches", 1)
    with pytest.raises((TypeError, ValueError), match="shape") as caught:
        jax.eval_shape(grad_fn, PARAMS, grad_fn.init(PARAMS), *BATCH[:2], m=BATCH[2])
    (note,) = [note for note in caught.value.__notes__ if "examples" in note]
    assert f"{part} of the 16 examples of the batch, and with all of the argument 'm'" in note
    assert "say so: batch=(0, 1, 'm')" in note
    jax.eval_shape(
        jc.value_and_grad(loss, DENSE, mesh, **{**options, "batch": (0, 1, "m")}),
        *(PARAMS, grad_fn.init(PARAMS), *BATCH[:2]),
        m=BATCH[2],
    )
    for named in ({"m": BATCH[2][:3]}, {"m": BATCH[2], "x": 1}):  # another fault
        with pytest.raises((TypeError, ValueError)) as caught:
            jax.eval_shape(grad_fn, PARAMS, grad_fn.init(PARAMS), *BATCH[:2], **named)
        assert not any("examples" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_mask_beside_a_single_example_is_spread_over_nothing():
    """Each worker has one example, and shapes fit: a warning, unless it is said what is batch."""
    mesh, loss = mesh_of(), lambda w, x, y, *, m: masked(w, x, y, m)
    x, y, m = (each[:N] for each in BATCH)
    grad_fn = jc.value_and_grad(loss, DENSE, mesh)
    state = grad_fn.init(PARAMS)
    match = r"one of the 4 examples .* argument 'm', .* say batch=\(0, 1, 'm'\); if it does not, batch=\(0, 1\)"
    with pytest.warns(UserWarning, match=match):
        jax.eval_shape(grad_fn, PARAMS, state, x, y, m=m)
    for said in ((0, 1), (0, 1, "m")):  # warnings are errors here
        jax.eval_shape(jc.value_and_grad(loss, DENSE, mesh, batch=said), PARAMS, state, x, y, m=m)
    jax.eval_shape(grad_fn, PARAMS, state, x, y, m=m[:1])


def test_an_explicit_mesh_says_what_is_batch_inside_of_jit():
    mesh = mesh_of(kind=AxisType.Explicit)
    loss = lambda w, x, c: jnp.mean((x @ w) ** 2) + jnp.mean(c)
    with jax.set_mesh(mesh):
        grad_fn = jc.value_and_grad(loss, DENSE)
        params, x, c = on(mesh, PARAMS), on(mesh, BATCH[0][:, 0], P("data")), on(mesh, jnp.arange(16.0))
        state = grad_fn.init(params)
        with pytest.raises(ValueError, match=r"batch\[1\] lies whole"):
            jax.jit(grad_fn)(params, state, x, c)
        assert_close(jax.jit(grad_fn)(params, state, x, c=c)[0], loss(PARAMS, BATCH[0][:, 0], c))


# ------------------------------------------------------------------------------------------------
# Auxiliary values


def test_auxiliary_values_of_each_kind_by_path():
    """With a mask they are those of the whole batch, in its order, also with micro-batches."""

    def loss(w, x, y, m, count, seen):
        r = x @ w - y
        counted = jnp.sum(m)
        aux = {
            "logits": r,
            "accuracy": jnp.sum(m * (r > 0)) / counted,
            "stats": {"mean": jnp.mean(x, (0, 1))},
            "count": count + 1,
            "seen": seen,
            "tokens": counted,
        }
        return jnp.sum(m * r**2) / counted, aux

    aux = {"accuracy": "mean", "stats": "unweighted", "count|seen": "equal", "logits": "concat", "tok": "sum"}
    want = jax.jit(loss)(PARAMS, *BATCH, jnp.int32(2**30), jnp.bool_(True))[1]
    for parts in (1, 2):
        grad_fn = jc.value_and_grad(
            loss, DENSE, has_aux=True, aux=aux, micro_batches=parts, weight=lambda x, y, m, **_: m.sum()
        )
        (value, found), *_ = step_of(grad_fn, PARAMS, BATCH, count=jnp.int32(2**30), seen=jnp.bool_(True))
        assert_close(value, whole()[0])
        assert_close(found, want)
        assert (found["count"].dtype, found["seen"].dtype) == (jnp.int32, jnp.bool_)


def test_values_of_each_example_have_no_mean():
    """By what changes with the batch, not by a length that happens to be the same."""
    out = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
    by_example = lambda w, x, y: (out(w, x, y), x @ w)
    with pytest.raises(ValueError, match=r"are one for each example of this worker.*say aux=\"concat\""):
        step_of(jc.value_and_grad(by_example, DENSE, has_aux=True), PARAMS, BATCH[:2])
    flat = lambda w, x, y: (out(w, x, y), {"flat": (x @ w).reshape(-1)})
    with pytest.raises(ValueError, match=r"values\['flat'\] of shape \(12,\) are one for each example"):
        step_of(jc.value_and_grad(flat, DENSE, has_aux=True, micro_batches=2), PARAMS, BATCH[:2])
    four = lambda w, x, y: (out(w, x, y), jnp.stack([jnp.mean(x)] * 4))  # each worker has four examples
    (_, found), *_ = step_of(jc.value_and_grad(four, DENSE, has_aux=True), PARAMS, BATCH[:2])
    assert_close(found, np.full(4, X.mean()))
    counts = lambda w, x, y: (out(w, x, y), jnp.int32(3))
    with pytest.raises(ValueError, match='"equal" if they are the same on all workers'):
        step_of(jc.value_and_grad(counts, DENSE, has_aux=True), PARAMS, BATCH[:2])
    with pytest.raises(ValueError, match=r'aux="concat" is for values of each example; got of shape \(\)'):
        step_of(jc.value_and_grad(counts, DENSE, has_aux=True, aux="concat"), PARAMS, BATCH[:2])
    with pytest.raises(ValueError, match="aux must say what becomes of 'flat'"):
        step_of(jc.value_and_grad(flat, DENSE, has_aux=True, aux={"logits": "concat"}), PARAMS, BATCH[:2])
    with pytest.raises(TypeError, match=r"the loss must return a number; got a tuple\. Say has_aux=True"):
        step_of(jc.value_and_grad(counts, DENSE), PARAMS, BATCH[:2])


# ------------------------------------------------------------------------------------------------
# Keywords, keys, models


def test_keywords_that_are_no_arrays_and_keys():
    """As `jax.value_and_grad` takes them; a key is another one for each worker, or refused where no type tells."""

    def loss(w, x, y, *, train, reduce, key=None, depth=1):
        assert train is True
        for _ in range(depth):
            x = x * 1.0
        noise = 0 if key is None else jax.random.uniform(key)
        return getattr(jnp, reduce)((x @ w - y) ** 2), noise

    mesh, grad_fn = mesh_of(), jc.value_and_grad(loss, DENSE, mesh_of(), has_aux=True, aux="each")
    state, batch = grad_fn.init(PARAMS), on(mesh, BATCH[:2], P("data"))
    (value, _), *_ = grad_fn(PARAMS, state, *batch, train=True, reduce="mean", depth=2)
    assert_close(value, np.mean((X @ W - Y) ** 2))
    (_, draws), *_ = grad_fn(PARAMS, state, *batch, train=True, reduce="mean", key=jax.random.key(0))
    assert len(set(np.asarray(draws).tolist())) == N
    same = jc.value_and_grad(loss, DENSE, mesh, has_aux=True, aux="each", keys=())
    (_, draws), *_ = same(PARAMS, state, *batch, train=True, reduce="mean", key=jax.random.key(0))
    assert len(set(np.asarray(draws).tolist())) == 1
    with pytest.raises(TypeError, match=r"'key' looks like a random key.*keys='key' gives each worker its own; keys="):
        grad_fn(PARAMS, state, *batch, train=True, reduce="mean", key=jax.random.PRNGKey(0))
    own = jc.local_steps(loss, optax.sgd(0.1), optax.sgd(1.0), DENSE, mesh, every=2, has_aux=True)
    (_, draws), *_ = own(*own.init(PARAMS), *batch, train=True, reduce="mean", key=jax.random.key(0))
    assert len(set(np.asarray(draws).tolist())) == N


class Dropped(nnx.Module):
    def __init__(self):
        self.dense, self.head = (nnx.Linear(D, n, rngs=nnx.Rngs(n)) for n in (D, 1))
        self.norm, self.dropout = nnx.BatchNorm(D, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.head(self.dropout(self.norm(self.dense(x)), rngs=rngs))[..., 0]


FILTERS = {
    "tuple": ((nnx.LoRAParam, nnx.Param), {"dense", "head", "norm"}),
    "all": (nnx.All(nnx.Param, nnx.PathContains("head")), {"head"}),
    "path": (nnx.PathContains("dense"), {"dense"}),
    "function": (lambda path, node: isinstance(node, nnx.Param) and path[-1] == "bias", {"dense", "head", "norm"}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILTERS)
def test_filters_of_nnx_and_rngs_by_keyword(name):
    """Chosen as `nnx.grad` chooses; counters of `nnx.Rngs` move, and each worker drops other entries."""
    wrt, chosen = FILTERS[name]
    mesh, model, rngs = mesh_of(), Dropped(), nnx.Rngs(dropout=1)
    loss = lambda model, x, y, rngs: (jnp.mean((model(x, rngs) - y) ** 2), jnp.mean(model.dropout(y, rngs=rngs) == 0))
    grad_fn = jc.value_and_grad(loss, DENSE, mesh, wrt=wrt, has_aux=True, aux="each")
    state = grad_fn.init(model)
    step = nnx.jit(lambda model, state, rngs, *batch: grad_fn(model, state, *batch, rngs=rngs))
    (_, dropped), grads, state = step(model, state, rngs, *BATCH[:2])
    assert {path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(grads)} == chosen
    want = jax.tree.structure(nnx.to_pure_dict(nnx.state(model, wrt)))
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(grads, wrt))) == want
    assert int(rngs.dropout.count[...]) == 2
    assert len(set(np.asarray(dropped).tolist())) > 1
    assert np.any(model.norm.mean[...] != 0)
    worker = jc.worker_value_and_grad(loss, mesh, wrt=wrt, has_aux=True, aux="each")
    own = nnx.jit(lambda *of: [x.rows for x in jax.tree.leaves(worker(*of[:3], rngs=of[3])[1])])
    assert {x.shape[0] for x in own(model, *BATCH[:2], rngs)} == {N}
    with pytest.raises(ValueError, match="wrt must choose some of the parameters; there is no"):
        jc.value_and_grad(loss, DENSE, mesh, wrt=nnx.LoRAParam).init(model)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "steps", "activation"], meta_fields=["name"]
)
class Whole:
    """As a module of Equinox: functions and counters among its leaves."""

    def __init__(self, weights, steps, activation, name):
        self.weights, self.steps, self.activation, self.name = weights, steps, activation, name


def test_keys_of_scanned_layers_are_each_workers_own():
    """An NNX model whose layers are stacked holds arrays of keys."""
    rngs = nnx.Rngs(0).split(3)
    keys = nnx.state(rngs)
    key_of = lambda keys: next(x for x in jax.tree.leaves(keys) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    drawn = lambda keys: jax.vmap(jax.random.uniform)(key_of(keys))
    assert key_of(keys).shape == (3,)
    model = {"w": nnx.Param(PARAMS), "keys": rngs}
    loss = lambda model, x, y: (jnp.mean((x @ model["w"][...] - y) ** 2), drawn(nnx.state(model["keys"])))
    grad_fn = jc.value_and_grad(loss, DENSE, mesh_of(), wrt=nnx.Param, has_aux=True, aux="each")
    (_, found), *_ = grad_fn(model, grad_fn.init(model), *on(mesh_of(), BATCH[:2], P("data")))
    assert len(set(np.asarray(found).ravel().tolist())) == 3 * N


def test_a_model_with_leaves_that_are_no_arrays():
    """`wrt` as Equinox has it, a function of a leaf; gradients have None elsewhere."""
    model = Whole(PARAMS, jnp.int32(3), jnp.tanh, "net")
    loss = lambda model, x, y: jnp.mean((model.activation(x @ model.weights) - y) ** 2) + 0 * model.steps
    is_inexact = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    grad_fn = jc.value_and_grad(loss, DENSE, mesh_of(), wrt=is_inexact)
    value, grads, _ = grad_fn(model, grad_fn.init(model), *BATCH[:2])
    want = jax.value_and_grad(lambda w: loss(Whole(w, 3, jnp.tanh, ""), *BATCH[:2]))(PARAMS)
    assert_close((value, grads.weights), want)
    assert (grads.steps, grads.activation, grads.name) == (None, None, "net")
    with pytest.raises(TypeError, match=r"parameters must be arrays; got .* wrt=eqx\.is_inexact_array"):
        jc.value_and_grad(loss, DENSE, mesh_of()).init(model)


# ------------------------------------------------------------------------------------------------
# A GPT with a masked loss, sharded in every way

LAYERS, WIDTH, HEADS, SYMBOLS = 2, 16, 2, 11
SHAPES = {
    "embed": (SYMBOLS, WIDTH),
    "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
    "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
}
GPT = {name: jnp.asarray(0.3 * RNG.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
TOKENS = jnp.asarray(RNG.integers(0, SYMBOLS, (B, 9)), jnp.int32)
KEPT = jnp.asarray(np.arange(8) < np.maximum(LENGTHS, 1)[:, None], jnp.float32)
TENSOR = {"qkv": P(None, None, None, "model"), "out": P(None, "model"), "up": P(None, None, "model")}
MESHES = {
    "data": ((4,), ("data",), {}),
    "tensor": ((2, 2), ("data", "model"), {**TENSOR, "down": P(None, "model")}),
    "fsdp": ((4,), ("data",), {"qkv": P(None, "data"), "up": P(None, "data"), "down": P(None, "data")}),
    "data x fsdp": ((2, 2), ("data", "fsdp"), {"qkv": P(None, "fsdp"), "up": P(None, "fsdp"), "down": P(None, "fsdp")}),
}


def gpt(params, tokens, kept):
    """The mean over the tokens that are kept."""

    def block(x, layer):
        q, k, v = jnp.einsum("btw,wchd->cbthd", x, layer["qkv"])
        x += jnp.einsum("bthd,hdw->btw", jax.nn.dot_product_attention(q, k, v, is_causal=True), layer["out"])
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], {k: v for k, v in params.items() if k != "embed"})
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens[:, 1:])
    return jnp.sum(losses * kept) / jnp.sum(kept)


@functools.cache
def gpt_whole():
    return jax.jit(jax.value_and_grad(gpt))(GPT, TOKENS, KEPT)


@pytest.mark.sampled
@pytest.mark.parametrize("way", MESHES)
def test_a_gpt_with_a_masked_loss(way):
    """Loss and gradient of one device: in a step, with micro-batches, and in local steps."""
    shape, names, specs = MESHES[way]
    mesh = mesh_of(shape, names=names)
    params = {name: on(mesh, x, specs.get(name, P())) for name, x in GPT.items()}
    batch = on(mesh, (TOKENS, KEPT), P(names if way == "data x fsdp" else "data"))
    count = lambda tokens, kept: kept.sum()
    for parts in (1, 2):
        grad_fn = jc.value_and_grad(gpt, DENSE, weight=count, micro_batches=parts)
        assert_close(jax.jit(grad_fn)(params, grad_fn.init(params), *batch)[:2], gpt_whole())
    if way == "fsdp":
        return  # parameters that differ between workers are not cut over them
    loss = lambda params, *batch: (gpt(params, *batch), count(*batch))
    step = jc.local_steps(
        loss, optax.sgd(0.1), optax.sgd(1.0), DENSE, every=1, has_aux=True, weight=lambda *batch: count(*batch)
    )
    own, state = step.init(params)
    (losses, counts), _, state = jax.jit(step)(own, state, *batch)
    assert_close(np.sum(losses * counts) / np.sum(counts), gpt_whole()[0])
    assert_close(state.point, jax.tree.map(lambda x, g: x - 0.1 * g, GPT, gpt_whole()[1]))
