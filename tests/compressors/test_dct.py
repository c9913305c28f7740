"""Cosine transforms of blocks, and DeMo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip
from worlds import AXIS, run_shard_map, vmap_step

import jaxcomp as jc
from jaxcomp.compressors.dct import backward, cosines, cut_of, dct_of_blocks, forward


def pieces(n, chunk):
    """Slices of an axis: ceil(n / chunk) of equal length but the last."""
    side = -(-n // -(-n // chunk))
    return [slice(i, i + side) for i in range(0, n, side)], side


def wave(size):
    """DCT-II in float64 from its definition."""
    k, i = np.mgrid[:size, :size]
    return np.where(k == 0, np.sqrt(1 / size), np.sqrt(2 / size)) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))


def in_blocks(x, chunk, each):
    """Float64: each(block of a matrix, filled up with zeros), put together again; [rows, columns] filled up, too."""
    (rows, a), (columns, b) = pieces(x.shape[0], chunk), pieces(x.shape[1], chunk)
    padded = np.pad(x, ((0, a * len(rows) - x.shape[0]), (0, b * len(columns) - x.shape[1])))
    row = lambda i: [each(padded[i : i + a, j : j + b]) for j in range(0, padded.shape[1], b)]
    return np.block([row(i) for i in range(0, len(padded), a)])


def coefficients(x, chunk, k):
    """Float64 oracle: of each block of a matrix the k largest cosine coefficients, and zeros in the place of others."""

    def kept(block):
        q = wave(block.shape[0]) @ block @ wave(block.shape[1]).T
        order = np.argsort(-np.abs(q).reshape(-1), kind="stable")
        return np.where(np.isin(np.arange(q.size), order[:k]).reshape(q.shape), q, 0)

    return in_blocks(x, chunk, kept)


def back(q, chunk, shape):
    """Float64 oracle: blocks of coefficients as the matrix of this shape."""
    a, b = (pieces(n, chunk)[1] for n in shape)
    out = np.zeros(q.shape)
    for i in range(0, q.shape[0], a):
        for j in range(0, q.shape[1], b):
            out[i : i + a, j : j + b] = wave(a).T @ q[i : i + a, j : j + b] @ wave(b)
    return out[: shape[0], : shape[1]]


def top_of_blocks(x, chunk, k):
    return back(coefficients(x, chunk, k), chunk, x.shape)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (67,), (5, 67), (2, 3, 17, 9), (0, 4)])
def test_the_transform_is_orthonormal_and_comes_back(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    cut = cut_of(shape, 16)
    q = forward(jnp.asarray(x), cut)
    assert q.shape == (cut.size,)
    assert cut.size <= max(x.size * (1 + 1 / 16) ** 2, x.size)
    np.testing.assert_allclose(np.sum(np.square(np.float64(q))), np.sum(np.square(np.float64(x))), rtol=1e-5)
    np.testing.assert_allclose(backward(q, cut, shape), x, atol=1e-5)
    np.testing.assert_allclose(cosines(9), wave(9), atol=1e-12)


def test_blocks_equal_the_definition(key, seed):
    x = np.random.default_rng(seed).standard_normal((40, 67)).astype(np.float32)
    compressor = dct_of_blocks(jc.top_k(k=5), 32)
    x_hat, payload = jax.jit(lambda x: jc.roundtrip(compressor, x, key=key))(x)
    np.testing.assert_allclose(x_hat, top_of_blocks(np.float64(x), 32, 5), atol=1e-5)
    # Blocks of 20 x 23: five coefficients and their places of 9 bits in each of six
    assert payload.values.shape == (30,)
    assert payload.words.shape == (9, 1)


@pytest.mark.slow
def test_smooth_matrices_gather_in_few_coefficients(key):
    x = jnp.sin(jnp.arange(128.0) / 20)[:, None] * jnp.cos(jnp.arange(128.0) / 30)
    error = lambda c: float(jnp.sum((roundtrip(c, x, key)[0] - x) ** 2) / jnp.sum(x**2))
    assert error(jc.dct(jc.top_k(0.01))) < 1e-3 < 0.5 < error(jc.top_k(0.01))


@pytest.mark.parametrize(("mean", "weights"), [("all", None), ("senders", None), ("senders", (3.0, 2.0, 0.0))])
def test_demo_is_its_algorithm(mean, weights, seed):
    """The release divides a coefficient by how many workers sent it; with weights, by the sum of theirs."""
    n, shape, rounds, chunk, k = 3, (40, 48), 4, 16, 8
    grads = np.random.default_rng(seed).standard_normal((rounds, n, *shape)).astype(np.float32)
    tree = lambda g: {"b": g[..., 0], "v": g[..., :40, :40], "w": g}
    tx = jc.demo(0.1, AXIS, decay=0.9, k=k, chunk=chunk, weight_decay=0.5, mean=mean, weights=weights)
    params = tree(jnp.ones(shape))
    state, step = vmap_step(tx, params, n)
    shares = np.full(n, 1 / n) if weights is None else np.array(weights) / np.sum(weights)
    delta = np.zeros((n, *shape))
    for g in grads:
        updates, state = step(state, tree(jnp.asarray(g)))
        delta = 0.9 * delta + g
        sent = np.stack([coefficients(d, chunk, k) for d in delta])
        delta -= np.stack([back(q, chunk, shape) for q in sent])
        total = np.tensordot(shares, sent, 1)
        if mean == "senders":
            by = np.tensordot(shares, sent != 0, 1)
            total = total / np.where(by > 0, by, 1)
        direction = back(total, chunk, shape)
        clear = np.abs(direction) > 1e-5  # where rounding does not decide the sign
        want = -0.1 * (np.sign(direction) + 0.5)
        np.testing.assert_allclose(updates["w"][clear], want[clear], rtol=1e-5)
        mean_of_b = np.tensordot(shares, g, 1)[:, 0]
        np.testing.assert_allclose(updates["b"], -0.1 * (np.sign(mean_of_b) + 0.5), rtol=1e-5)
    memory = state[0].local.algorithm.memory[-1]
    np.testing.assert_allclose(np.reshape(memory, delta.shape), delta, atol=1e-4)


def test_the_mean_over_senders_needs_their_messages():
    with pytest.raises(ValueError, match=r'via="two_shot" cuts all leaves together .* use via="gather"'):
        jc.demo(0.1, AXIS, via="two_shot")


def test_demo_under_shard_map(seed):
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 2, 3, 33, 40)), jnp.float32)
    got, _ = run_shard_map(jc.demo(0.1, AXIS, k=4, chunk=16), jnp.zeros((3, 33, 40)), grads)
    assert np.all(np.isin(np.abs(got), [0, np.float32(0.1)]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jc.dct(jc.top_k(0.1), 0), r"dct: chunk must be an integer in 1 \.\. 1024; got 0"),
        (lambda: jc.dct(jc.flat(jc.top_k(0.1))), "acts on trees"),
        (lambda: jc.demo(0.1, AXIS, decay=2.0), "demo: decay must be in"),
        (lambda: jc.demo(0.1, AXIS, mean="sender"), "demo: mean must be 'senders' or 'all'; got 'sender'"),
        (lambda: jc.demo(0.1, AXIS, k=0), "demo: k must be an integer of at least 1"),
    ],
)
def test_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_vector_of_no_entries():
    assert jc.roundtrip(jc.dct(jc.top_k(k=4), chunk=16), jnp.zeros((0,)), key=jax.random.key(0))[0].shape == (0,)
