"""DCGD+, DIANA+, ADIANA+, ISEGA+ and MARINA+ against their float64 recursions, in every world, and their theory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles_smoothness as oracle
import pytest
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of

import jaxcomp as jc

N, D, L2 = 4, 6, 0.05
_rng = np.random.default_rng(3)
A = _rng.standard_normal((N, 9, D)) * np.geomspace(0.3, 2, D)
B = np.sign(_rng.standard_normal((N, 9)))
S = jc.smoothness.glm(list(A), l2=L2)
ROOTS = [(S.matrix_root[i], S.matrix_inv_root[i]) for i in range(N)]
GRADIENTS = [lambda x, i=i: oracle.logistic_gradient(A[i], (B[i] + 1) / 2, L2, x) for i in range(N)]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def gradient_of(a, b):
    loss = lambda x: jnp.mean(jnp.logaddexp(0.0, -b * (a @ x))) + L2 / 2 * jnp.sum(x**2)
    return jax.grad(loss)


def in_vmap(run, count, x):
    make = lambda _: run.init(x)
    axes = jc.state.state_axes(jax.eval_shape(run.init, x))
    state = jax.jit(jax.vmap(make, axis_name=AXIS, out_axes=axes))(jnp.arange(N))

    def step(state, a, b):
        return run.step(state, gradient_of(a, b))

    step = jax.jit(jax.vmap(step, in_axes=(axes, 0, 0), out_axes=(axes, 0), axis_name=AXIS))
    return rounds_of(run, step, state, count)


def in_shard_map(run, count, x):
    mesh = mesh_of(N)
    state, specs = jc.init_state(run, x, mesh, AXIS)

    def step(state, a, b):
        state, bits = run.step(state, gradient_of(a[0], b[0]))
        return state, bits[None]

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS), P(AXIS)), out_specs=(specs, P(AXIS))))
    return rounds_of(run, step, state, count)


def rounds_of(run, step, state, count):
    points, bits = [], []
    for _ in range(count):
        state, sent = jax.block_until_ready(step(state, jnp.asarray(A), jnp.asarray(B)))
        points.append(np.asarray(run.point(state)))
        bits.append(np.asarray(sent))
    return np.stack(points), np.stack(bits), state


def compressors():
    p = jc.smoothness.probabilities(S.diag, 2.0, method="diana+", workers=N, mu=L2)
    h = jc.smoothness.steps(S.diag, 4.0, method="diana+", workers=N, mu=L2)
    per_block = jc.smoothness.block_steps(S.diag, 8.0, 2)
    return {
        "bernoulli": jc.precondition(jc.bernoulli(p, per_worker=True), S),
        "varying": jc.precondition(jc.dithering(steps=h, per_worker=True), S),
        "blocks": jc.precondition(jc.dithering(steps=per_block, blocks=2, per_worker=True), S),
        "uniform-inf": jc.precondition(jc.dithering(2, norm="inf"), S),
        "ternary": jc.precondition(jc.dithering(1), S),
        "natural": jc.precondition(jc.natural(), S),
        "rand_k": jc.precondition(jc.rand_k(k=3), S),
        "shared": jc.precondition(jc.rand_k(k=3), jc.smoothness.dense_of(np.mean(S.matrix_root @ S.matrix_root, 0))),
    }


IDENTITY = jc.precondition(jc.identity(), S)
X0 = np.linspace(1, -1, D)
STEPS = jc.theory.adiana(smoothness=2.0, mu=L2, workers=N, variance=4.0, omega=0.5)


def coins_of(run, count, x, chance):
    """The coins that a method tosses, from the key in its state."""
    state = run.init(x).shared.algorithm
    return [
        bool(jax.random.bernoulli(jax.random.fold_in(jax.random.wrap_key_data(state.coin.key), t), chance))
        for t in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [in_vmap, in_shard_map])
def test_methods_with_the_identity_are_their_recursions(world):
    """With everything sent the random draws play no part, and every formula can be followed."""
    x = jnp.asarray(X0)
    send_all = lambda i, t, *u: u[-1]
    alpha = 0.3
    run = jc.methods.rounds(jc.methods.descend(jc.diana(IDENTITY, alpha=alpha), 0.2), AXIS)
    want, shifts = oracle.descent(GRADIENTS, ROOTS, send_all, X0, 0.2, alpha, 5)
    points, bits, state = world(run, 5, x)
    np.testing.assert_allclose(points[-1], want, rtol=1e-9)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.algorithm.shift, (N, D)), shifts, rtol=1e-9)
    np.testing.assert_array_equal(bits, 64 * D)
    steps = STEPS._replace(alpha=0.4, q=0.5)
    run = jc.methods.rounds(jc.methods.adiana(IDENTITY, steps), AXIS)
    numbers = (steps.eta, steps.theta_1, steps.theta_2, steps.gamma, steps.beta, steps.alpha)
    want = oracle.adiana(GRADIENTS, ROOTS, send_all, X0, numbers, coins_of(run, 8, x, 0.5), 8)
    points, bits, _ = world(run, 8, x)
    np.testing.assert_allclose(points[-1], want, rtol=1e-9)
    np.testing.assert_array_equal(bits, 2 * 64 * D)
    run = jc.methods.rounds(jc.methods.marina(IDENTITY, 0.2, 0.5), AXIS)
    coins = [True, *coins_of(run, 8, x, 0.5)[1:]]
    points, _, state = world(run, 8, x)
    np.testing.assert_allclose(points[-1], oracle.marina(GRADIENTS, ROOTS, send_all, X0, 0.2, coins[1:8]), rtol=1e-9)
    run = jc.methods.rounds(jc.methods.isega(np.ones((N, D)), S, 0.2), AXIS)
    masks = np.ones((5, N, D), bool)
    want, _ = oracle.isega(GRADIENTS, ROOTS, masks, np.ones((N, D)), X0, 0.2)
    np.testing.assert_allclose(world(run, 5, x)[0][-1], want, rtol=1e-9)


METHODS = [
    lambda c: jc.methods.descend(jc.diana(c), 0.05),
    lambda c: jc.methods.adiana(c, STEPS._replace(alpha=1 / (1 + c.spec.omega(D)))),
    lambda c: jc.methods.marina(c, 0.05, 0.4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("i", "name"), list(enumerate(compressors())), ids=list(compressors()))
def test_worlds_agree(i, name):
    """Every compressor, and every method with two or three of them."""
    run = jc.methods.rounds(METHODS[i % 3](compressors()[name]), AXIS)
    a, b = in_vmap(run, 4, jnp.asarray(X0)), in_shard_map(run, 4, jnp.asarray(X0))
    np.testing.assert_allclose(a[0], b[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(a[1], b[1])
    for leaf in jax.tree.leaves(b[2].shared):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(set(copies)) == 1


@pytest.mark.slow
def test_plans_per_worker_go_through_trees():
    """flat and per_leaf of a compressor with plans per worker do what the compressor does to the vector."""
    c = compressors()["varying"]
    gradients = jnp.asarray(np.random.default_rng(1).standard_normal((N, D)))
    results = []
    for algorithm, shape in (
        (jc.diana(c), lambda g: g),
        (jc.diana(jc.flat(c)), lambda g: {"a": g[:2], "b": g[2:].reshape(2, 2)}),
        (jc.diana(jc.per_leaf(c, dense_below=0)), lambda g: (g,)),
    ):
        tx = jc.compressed_mean(algorithm, AXIS, seed=1)
        step = lambda g, tx=tx, shape=shape: tx.update(shape(g), tx.init(shape(g)))[0]
        direction = jax.jit(jax.vmap(step, axis_name=AXIS, out_axes=None))(gradients)
        results.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(direction)]))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)
    # Leaves have keys of their own, so the draws differ; the mean of the workers' gradients does not.
    assert np.linalg.norm(results[2] - gradients.mean(0)) < 3 * np.linalg.norm(gradients.mean(0))


@pytest.mark.slow
def test_isega_overwrites_what_it_sampled():
    """The recursion with the masks that were drawn, read off the shifts."""
    p = jc.smoothness.probabilities(S.diag, 2.0, method="diana+", workers=N, mu=L2)
    run = jc.methods.rounds(jc.methods.isega(p, S, 0.1), AXIS)
    x = jnp.asarray(X0)
    masks, old = [], np.zeros((N, D))
    for count in range(1, 5):
        _, _, state = in_vmap(run, count, x)
        shift = np.reshape(state.local.algorithm.shift, (N, D))
        white = np.stack([ROOTS[i][1] @ (shift[i] - old[i]) for i in range(N)])
        masks.append(np.abs(white) > 1e-12)
        old = shift
    points, _, state = in_vmap(run, 4, x)
    want, shifts = oracle.isega(GRADIENTS, ROOTS, masks, p, X0, 0.1)
    np.testing.assert_allclose(points[-1], want, rtol=1e-8)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.shift, (N, D)), shifts, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.shared.algorithm.shift, np.mean(shifts, axis=0), rtol=1e-8, atol=1e-10)


def optimum():
    x = np.zeros(D)
    for _ in range(20000):
        x = x - 0.5 * np.mean([g(x) for g in GRADIENTS], axis=0)
    return x


def distances(method, count):
    run = jc.methods.rounds(method, AXIS)
    best = jnp.asarray(optimum())

    def worker(a, b):
        def body(state, _):
            state, bits = run.step(state, gradient_of(a, b))
            return state, (jnp.sum((run.point(state) - best) ** 2), bits)

        return jax.lax.scan(body, run.init(jnp.zeros(D)), length=count)[1]

    far, _ = jax.jit(jax.vmap(worker, axis_name=AXIS))(jnp.asarray(A), jnp.asarray(B))
    return np.asarray(far[0]) / float(jnp.sum(best**2))


@pytest.mark.slow
def test_methods_converge_at_their_theoretical_steps():
    p = jc.smoothness.probabilities(S.diag, 2.0, method="diana+", workers=N, mu=L2)
    v = max(jc.smoothness.sparsification_variance(d, q) for d, q in zip(S.diag, p, strict=True))
    given = {
        "smoothness": jc.smoothness.mean_lambda_max(S),
        "workers": N,
        "mu": L2,
        "variance": v,
    }
    c = jc.precondition(jc.bernoulli(p, per_worker=True), S)
    omega = float(np.max(1 / p - 1))
    paper, tight = (jc.theory.diana(omega=omega, tight=tight, **given) for tight in (False, True))
    assert tight.gamma > paper.gamma
    assert tight.rate >= paper.rate
    for steps in (paper, tight):
        far = distances(jc.methods.descend(jc.diana(c), steps.gamma), 4000)
        # The proven rate bounds the expectation; a single run stays below it by far.
        assert far[-1] < max(1e-20, 100 * (1 - steps.rate) ** 4000)
    isega = jc.theory.isega(smallest_probability=float(p.min()), **given)
    assert distances(jc.methods.isega(p, S, isega.gamma), 4000)[-1] < 1e-8
    adiana = jc.theory.adiana(omega=omega, **given)
    assert distances(jc.methods.adiana(c, adiana), 8000)[-1] < 1e-8
    dcgd = jc.theory.dcgd(**given)
    far = distances(jc.methods.descend(jc.direct(c), dcgd.gamma), 4000)
    best = optimum()
    noise = np.mean([v * np.sum((ROOTS[i][1] @ GRADIENTS[i](best)) ** 2) for i in range(N)])
    ball = 2 * dcgd.gamma / (L2 * N) * noise / np.sum(best**2)
    assert np.mean(far[2000:]) < ball
    full = jc.theory.marina(
        smoothness=given["smoothness"],
        workers=N,
        variance=float(np.linalg.eigvalsh(v * np.mean(S.matrix_root @ S.matrix_root, 0))[-1]),
        full=0.3,
    )
    assert distances(jc.methods.marina(c, full.gamma, 0.3), 4000)[-1] < 1e-8


@pytest.mark.sampled
@pytest.mark.parametrize("aware", [False, True])
def test_marina_finds_a_stationary_point_of_a_non_convex_loss(aware):
    """Logistic loss and weight sum_j x_j^2 / (1 + x_j^2), whose curvature lies in weight [-1/2, 2]."""
    weight, full = 0.1, 0.3
    bend = lambda x: weight * jnp.sum(x**2 / (1 + x**2))
    matrices = [root @ root + 2 * weight * np.eye(D) for root in S.matrix_root]
    L = np.linalg.eigvalsh(np.mean(matrices, 0))[-1]
    if aware:
        operator = jc.smoothness.stack([jc.smoothness.dense_of(matrix) for matrix in matrices])
        p = jc.smoothness.probabilities(operator.diag, 2.0)
        c = jc.precondition(jc.bernoulli(p, per_worker=True), operator)
        each = [jc.smoothness.sparsification_variance(d, q) for d, q in zip(operator.diag, p, strict=True)]
        variance = np.linalg.eigvalsh(np.mean([v * m for v, m in zip(each, matrices, strict=True)], 0))[-1]
    else:
        c = jc.bernoulli(2 / D)
        variance = (D / 2 - 1) * max(np.linalg.eigvalsh(m)[-1] for m in matrices) ** 2
    steps = jc.theory.marina(smoothness=L, workers=N, variance=variance, full=full)
    run = jc.methods.rounds(jc.methods.marina(c, steps.gamma, full), AXIS)

    def worker(a, b):
        gradient = lambda x: gradient_of(a, b)(x) + jax.grad(bend)(x)

        def body(state, _):
            state, _ = run.step(state, gradient)
            return state, jnp.sum(jax.lax.pmean(gradient(run.point(state)), AXIS) ** 2)

        return jax.lax.scan(body, run.init(2 * jnp.ones(D)), length=1500)[1]

    squares = jax.jit(jax.vmap(worker, axis_name=AXIS))(jnp.asarray(A), jnp.asarray(B))[0]
    assert squares[-1] < 1e-12 * squares[0]


def test_marina_with_a_prox_solves_the_composite_problem():
    """|x|_1 pulls coordinates to zero exactly, and the rest to where the gradient is the weight."""
    prox, full = jc.prox.l1(0.05), 0.3
    p = jc.smoothness.probabilities(S.diag, 2.0)
    c = jc.precondition(jc.bernoulli(p, per_worker=True), S)
    run = jc.methods.rounds(jc.methods.marina(c, 0.05, full, prox=prox), AXIS)

    def worker(a, b):
        body = lambda state, _: (run.step(state, gradient_of(a, b))[0], None)
        return run.point(jax.lax.scan(body, run.init(jnp.ones(D)), length=3000)[0])

    x = np.asarray(jax.jit(jax.vmap(worker, axis_name=AXIS))(jnp.asarray(A), jnp.asarray(B)))[0]
    g = np.mean([gradient(x) for gradient in GRADIENTS], axis=0)
    np.testing.assert_allclose(g[x != 0], -0.05 * np.sign(x[x != 0]), atol=1e-6)
    assert np.all(np.abs(g[x == 0]) <= 0.05 + 1e-9)


def test_identities():
    """A multiple of the identity whitens nothing: DIANA+ is DIANA; everything sent: it is gradient descent."""
    scalar = jc.smoothness.stack([jc.smoothness.diagonal_of(np.full(D, 0.25))] * N)
    for c in (jc.dithering(2), jc.bernoulli(np.linspace(0.3, 0.9, D))):
        plain = in_vmap(jc.methods.rounds(jc.methods.descend(jc.diana(c), 0.1), AXIS), 5, jnp.asarray(X0))[0]
        white = in_vmap(
            jc.methods.rounds(jc.methods.descend(jc.diana(jc.precondition(c, scalar)), 0.1), AXIS), 5, jnp.asarray(X0)
        )[0]
        np.testing.assert_allclose(plain, white, rtol=1e-6, atol=1e-9)
    x = X0
    for _ in range(5):
        x = x - 0.2 * np.mean([g(x) for g in GRADIENTS], axis=0)
    for algorithm in (jc.direct(IDENTITY), jc.diana(IDENTITY)):
        got = in_vmap(jc.methods.rounds(jc.methods.descend(algorithm, 0.2), AXIS), 5, jnp.asarray(X0))[0][-1]
        np.testing.assert_allclose(got, x, rtol=1e-9)


def test_optax_transform_is_the_same_method():
    c = compressors()["varying"]
    tx = optax.chain(jc.compressed_mean(jc.diana(c), AXIS, seed=5), optax.sgd(0.1))

    def worker(a, b):
        def body(carry, _):
            x, state = carry
            updates, state = tx.update(gradient_of(a, b)(x), state)
            return (optax.apply_updates(x, updates), state), None

        (x, _), _ = jax.lax.scan(body, (jnp.asarray(X0), tx.init(jnp.asarray(X0))), length=6)
        return x

    x = jax.jit(jax.vmap(worker, axis_name=AXIS))(jnp.asarray(A), jnp.asarray(B))[0]
    method = jc.methods.rounds(jc.methods.descend(jc.diana(c), 0.1), AXIS, seed=5)
    np.testing.assert_allclose(x, in_vmap(method, 6, jnp.asarray(X0))[0][-1], rtol=1e-9)


@pytest.mark.slow
def test_composite_steps_reach_the_composite_optimum():
    """l1: the optimum of proximal gradient descent with exact gradients, and zeros where it has zeros."""
    prox = jc.prox.l1(0.05)
    x = np.zeros(D)
    for _ in range(5000):
        x = np.asarray(prox(jnp.asarray(x - 0.3 * np.mean([g(x) for g in GRADIENTS], axis=0)), 0.3))
    assert 0 < np.sum(x == 0) < D
    c = compressors()["varying"]
    found = [
        in_scan(jc.methods.descend(jc.diana(c), 0.1, prox=prox), 3000),
        in_scan(jc.methods.adiana(c, STEPS._replace(alpha=1 / (1 + c.spec.omega(D))), prox=prox), 6000),
    ]
    for got in found:
        np.testing.assert_allclose(got, x, atol=1e-6)


def in_scan(method, count):
    run = jc.methods.rounds(method, AXIS)

    def worker(a, b):
        body = lambda state, _: (run.step(state, gradient_of(a, b))[0], None)
        return run.point(jax.lax.scan(body, run.init(jnp.zeros(D)), length=count)[0])

    return np.asarray(jax.jit(jax.vmap(worker, axis_name=AXIS, out_axes=None))(jnp.asarray(A), jnp.asarray(B)))


BAD = [
    (lambda: jc.methods.adiana(jc.top_k(0.1), STEPS), "adiana needs an unbiased compressor"),
    (lambda: jc.methods.adiana(jc.natural(), jc.theory.StepSizes(0.1)), "adiana needs the step sizes of"),
    (lambda: jc.methods.marina(jc.top_k(0.1), 0.1, 0.5), "marina needs an unbiased compressor"),
    (lambda: jc.methods.marina(jc.natural(), 0.1, 0.0), r"full must be in \(0, 1\]; got 0.0"),
    (lambda: jc.methods.descend(jc.direct(jc.natural()), 0), "step_size must be above 0 and finite; got 0"),
    (lambda: jc.methods.isega(np.ones(D), S, -1), "step_size must be above 0 and finite; got -1"),
    (lambda: jc.methods.rounds(jc.methods.marina(jc.natural(), 0.1, 0.5), AXIS, via="pigeon"), "via must be one of"),
    (lambda: jc.bernoulli([0.5], per_worker=True), "a row of probabilities per worker"),
    (lambda: jc.dithering(steps=[0.5], per_worker=True), "a row of steps for each worker"),
    (lambda: jc.prox.l1(-1), "weight must be at least 0"),
    (lambda: jc.prox.box(1, 0), "low must be at most high"),
    (
        lambda: in_vmap(
            jc.methods.rounds(
                jc.methods.descend(jc.direct(jc.precondition(jc.identity(), jc.smoothness.row(S, slice(0, 3)))), 0.1),
                AXIS,
            ),
            1,
            jnp.asarray(X0),
        ),
        "plans of 3 workers for 4 workers",
    ),
    (
        lambda: jc.precondition(jc.identity(), S).compress(
            jax.random.key(0),
            jnp.zeros(D),
            jc.precondition(jc.identity(), S).init(jax.random.key(0), jax.ShapeDtypeStruct((D,), jnp.float64)),
        ),
        "plans of 4 workers; pick one with base.for_worker",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
