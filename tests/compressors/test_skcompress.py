"""SKCompress: the oracle value for value, the sketch against its theory, every edge, and contraction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles_skcompress as oracles
import pytest
from jitted import roundtrip

import jaxcomp as jc
from jaxcomp.base import State, residual
from jaxcomp.compressors.minmax_sketch import Shape, insert, list_of, places, query
from jaxcomp.compressors.quantiles import means, of_product, sort_floats
from jaxcomp.hashing import multiply_high
from jaxcomp.packing import unpack
from jaxcomp.payloads import Sketch, Sparse, decode_message, encode_message, sketch_bits

MODES = ["quantile", "recentred", "paper"]
SAFE = ["quantile", "recentred"]
EVERYTHING = jc.top_k(1.0)  # whatever is not zero; quicker to compile than a threshold


@functools.cache
def run_of(mode, size, options):
    """Jitted: (x, key) -> payload, x_hat, seeds."""
    compressor = jc.skcompress(EVERYTHING, mode=mode, **({"power": 0} | dict(options)))
    like = jax.ShapeDtypeStruct((size,), jnp.float32)

    @jax.jit
    def run(x, key):
        state = compressor.init(key, like)
        payload, _ = compressor.compress(key, x, state)
        draw, rows = state.shared[1], dict(options).get("rows", 2)
        seeds = jnp.zeros((0,), jnp.uint32)
        if draw:
            seeds = draw.words(rows)
        return payload, compressor.decompress(payload, state.shared, like), seeds

    return run


def compressed(mode, x, key, **options):
    payload, x_hat, seeds = run_of(mode, len(x), tuple(sorted(options.items())))(jnp.asarray(x), key)
    return payload, np.float64(x_hat), [int(seed) for seed in seeds]


def oracle_of(mode, x, seeds, *, buckets=64, groups=8, rows=2, columns=0.3):
    keys = [int(key) for key in np.flatnonzero(x)]
    values = [float(x[key]) for key in keys]
    if mode == "quantile":
        found = oracles.quantile(values, buckets)
    else:
        build = oracles.released if mode == "paper" else oracles.recentred
        found = build(keys, values, buckets, groups, seeds, round(1000 * columns))
    want = np.zeros(len(x))
    want[keys] = found["values"]
    return want, found | {"keys": np.array(keys)}


def vector(kind, seed, d=700):
    rng = np.random.default_rng(seed)
    x = {
        "normal": lambda: rng.standard_normal(d),
        "heavy": lambda: np.sign(rng.standard_normal(d)) * np.exp(2 * rng.standard_normal(d)),
        "sparse": lambda: np.where(rng.random(d) < 0.3, rng.standard_t(3, d), 0),
        "positive": lambda: rng.exponential(size=d),
        "negative": lambda: -rng.exponential(size=d),
        "mostly-negative": lambda: rng.exponential(size=d) * np.where(rng.random(d) < 0.97, -1, 1),
        "few-values": lambda: rng.choice([-2.0, -1.0, 0.5, 3.0], d),
        "two-values": lambda: rng.choice([-2.0, 3.0], d),
        "equal": lambda: np.full(d, -0.1),
        "one-positive": lambda: np.concatenate([-rng.exponential(size=d - 1), [5.0]]),
    }[kind]()
    return x.astype(np.float32)


KINDS = [
    "normal",
    "heavy",
    "sparse",
    "positive",
    "negative",
    "mostly-negative",
    "few-values",
    "two-values",
    "equal",
    "one-positive",
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_values_are_the_oracle(mode, kind, key, seed):
    x = vector(kind, seed)
    payload, x_hat, seeds = compressed(mode, x, key, buckets=64)
    assert isinstance(payload, Sketch)
    want, _ = oracle_of(mode, x, seeds)
    np.testing.assert_allclose(x_hat, want, rtol=2e-6, atol=0)
    assert np.array_equal(x_hat != 0, x != 0) or mode == "paper"  # a midpoint may be zero


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 16, "rows": 3, "columns": 0.5},
        pytest.param({"groups": 32, "rows": 1, "columns": 1.25}, marks=pytest.mark.slow),
        pytest.param({"groups": 64, "columns": 0.1}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("mode", ["recentred", "paper"])
def test_shapes_of_the_sketch_are_the_oracle(mode, options, key, seed):
    x = vector("sparse", seed)
    _, x_hat, seeds = compressed(mode, x, key, buckets=64, **options)
    np.testing.assert_allclose(x_hat, oracle_of(mode, x, seeds, **options)[0], rtol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_quantiles_are_the_oracle(kind, key, seed):
    """Values on the very edge of a bucket may fall to either side; their bucket then differs from the oracle's."""
    x = vector(kind, seed)
    payload, x_hat, _ = compressed("quantile", x, key, buckets=64, power=1.0)
    values = np.float64(x[np.flatnonzero(x)])
    found = oracles.weighted(values, 64, 1.0)
    bucket = np.asarray(unpack(payload.cells, 700))[: len(values)]
    assert np.mean(bucket != found["bucket"]) < 0.01
    np.testing.assert_allclose(x_hat[np.flatnonzero(x)], oracles.means_of(values, bucket), rtol=2e-6)
    np.testing.assert_array_equal(np.sign(x_hat), np.sign(x))


def test_weights_are_worth_it_where_tails_are_heavy(key, seed):
    x = vector("heavy", seed)
    error = lambda power: np.sum((x - compressed("quantile", x, key, buckets=16, power=power)[1]) ** 2)
    assert error(1.0) < 0.5 * error(0)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_signs_and_errors_are_what_they_promise(kind, key, seed):
    """Keys are exact and ascend in their lists; in safe modes the error is orthogonal to what is sent."""
    x = vector(kind, seed)
    for mode in MODES:
        payload, x_hat, *_ = compressed(mode, x, key, buckets=64)
        n = int(np.sum(payload.counts))
        keys = np.asarray(payload.keys)
        np.testing.assert_array_equal(np.sort(keys[:n]), np.flatnonzero(x))
        np.testing.assert_array_equal(keys[n:], len(x))
        for part in np.split(keys[:n], np.cumsum(payload.counts)[:-1]):
            assert np.all(np.diff(part) > 0)
            assert len(set(np.sign(x[part]))) <= (1 if mode == "recentred" else 2)
        if mode in SAFE:
            np.testing.assert_array_equal(np.sign(x_hat), np.sign(x))
            size, kept = np.sum(np.float64(x) ** 2), np.sum(x_hat**2)
            assert np.sum((x - x_hat) ** 2) / size == pytest.approx(1 - kept / size, abs=1e-5)
            assert kept / size >= jc.skcompress(EVERYTHING, mode=mode, buckets=64).spec.alpha(len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_buckets_are_never_farther_from_zero(kind, key, seed):
    """In the oracle, to whose values the library is held; and no decoded value is beyond its group's largest."""
    x = vector(kind, seed)
    payload, x_hat, seeds = compressed("recentred", x, key, buckets=64)
    _, found = oracle_of("recentred", x, seeds)
    assert np.all(found["decoded_distance"] <= found["distance"])
    for part in np.split(np.asarray(payload.keys)[: np.sum(payload.counts)], np.cumsum(payload.counts)[:-1]):
        assert np.all(np.abs(x_hat[part]) <= np.abs(x[part]).max(initial=0) * (1 + 1e-6))
    _, x_hat, seeds = compressed("paper", x, key, buckets=64)
    _, found = oracle_of("paper", x, seeds)
    assert np.all(np.abs(found["decoded"] - found["zero"]) <= np.abs(found["bucket"] - found["zero"]))
    if 0 < found["zero"] < found["total"] - 1:
        single = [set(np.sign(found["bucket"][found["group"] == g] - found["zero"])) for g in range(8)]
        flips = np.sign(found["decoded"] - found["zero"]) * np.sign(found["bucket"] - found["zero"]) < 0
        assert not np.any(flips[np.array([not {-1, 1} <= single[g] for g in found["group"]])])


# ------------------------------------------------------------------------------------------------
# The sketch against section 2 of the theory


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("columns", "rows", "width"), [(0.3, 2, 32), (0.2, 2, 32), (0.5, 3, 32), (1.0, 2, 8), (0.3, 1, 128)]
)
def test_sketch_is_right_as_often_as_theory_says_and_decays_as_much(columns, rows, width, key):
    """Mean over seeds of the share that is read right, and of the loss in buckets, within three standard errors."""
    count, draws = 2048, 200
    shape = Shape(rows, columns)
    keys = jnp.arange(count, dtype=jnp.int32) * 37
    ranks = jnp.arange(count, dtype=jnp.int32) % width
    counts = jnp.array([count])

    @jax.jit
    @jax.vmap
    def losses(key):
        where = places(keys, list_of(counts, count), counts, shape, jax.random.bits(key, (rows,), jnp.uint32))
        loss = ranks - query(insert(where, ranks, shape.size(count, 1), width), where)
        return jnp.mean(loss == 0), jnp.mean(loss), jnp.min(loss)

    right, loss, least = (np.float64(part) for part in losses(jax.random.split(key, draws)))
    t = oracles.columns_of(count, round(1000 * columns))
    each = count // width
    nearer = [(i + 1) * each for i in range(width)]
    want_right = np.mean([oracles.chance_correct(j * each, t, rows) for j in range(width)])
    want_loss = np.mean([oracles.mean_decay(nearer[:j], t, rows) for j in range(width)])
    assert least.min() >= 0
    assert abs(right.mean() - want_right) < 3 * right.std(ddof=1) / np.sqrt(draws)
    assert abs(loss.mean() - want_loss) < 3 * loss.std(ddof=1) / np.sqrt(draws)


def test_order_of_keys_plays_no_part(key, seed):
    rng = np.random.default_rng(seed)
    shape, counts = Shape(2, 0.3), jnp.array([500])
    keys, ranks = np.sort(rng.choice(10_000, 500, replace=False)).astype(np.int32), rng.integers(0, 32, 500)
    seeds = jax.random.bits(key, (2,), jnp.uint32)
    order = rng.permutation(500)

    def read(keys, ranks):
        where = places(jnp.asarray(keys), list_of(counts, 500), counts, shape, seeds)
        table = insert(where, jnp.asarray(ranks, jnp.int32), shape.size(500, 1), 32)
        return np.asarray(table), np.asarray(query(table, where))

    (table, found), (other, turned) = read(keys, ranks), read(keys[order], ranks[order])
    np.testing.assert_array_equal(table, other)
    np.testing.assert_array_equal(found[order], turned)


@pytest.mark.parametrize("size", [1, 3, 65_536, 65_537, 10**6 + 3, 2**31, 2**32 - 1])
def test_multiply_high(size, seed):
    words = np.random.default_rng(seed).integers(0, 2**32, 2000, dtype=np.uint64)
    words[:3] = [0, 1, 2**32 - 1]
    got = multiply_high(jnp.asarray(words.astype(np.uint32)), jnp.uint32(size))
    np.testing.assert_array_equal(got, [int(word) * size >> 32 for word in words])


@pytest.mark.parametrize("n", [0, 1, 7, 10**6, 2**31 - 1])
def test_products_do_not_overflow(n):
    for i, q in ((0, 5), (3, 5), (2**14 - 1, 2**14), (2**14, 2**14), (2**15 - 1, 2**15)):
        assert int(of_product(jnp.int32(n), i, q)) == n * i // q


def test_floats_are_sorted(seed):
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.standard_normal(500), [0, np.inf, 1e-38, -1e-38, 3e38, -3e38]]).astype(np.float32)
    np.testing.assert_array_equal(sort_floats(jnp.asarray(x)), np.sort(x))


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 1e38])
def test_means_neither_overflow_nor_cancel(scale):
    values = np.array([1, 1, 1, 3, -1, -3, 0.1, 2e-7, 2e-7], np.float32) * np.float32(scale)
    bucket = np.array([0, 0, 0, 1, 2, 2, 5, 3, 3], np.int32)
    got = np.float64(means(jnp.asarray(values), jnp.asarray(bucket), 5)) / scale
    np.testing.assert_allclose(got, [1, 3, -2, 2e-7, 0], rtol=1e-6)


# ------------------------------------------------------------------------------------------------
# Edges


def at_ends():
    """Keys 0 and d - 1 among others; the greatest possible key is in test_wire, where no vector is needed."""
    x = np.zeros(700, np.float32)
    x[[0, 699]], x[100:200] = [3, -4], np.linspace(-1, 1, 100)
    return x


CASES = {
    "zero": np.zeros(700),
    "one": np.eye(1, 700, 17)[0] * -2,
    "two": np.eye(1, 700, 17)[0] - np.eye(1, 700, 400)[0],
    "equal": np.full(700, 7.0),
    "ends": at_ends(),
    "dense": np.linspace(1, 2, 700),
    "tiny": 1e-30 * np.linspace(-1, 1, 700),
    "huge": 3e38 * np.linspace(-1, 1, 700),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_edges(mode, name, key):
    x = CASES[name].astype(np.float32)
    payload, x_hat, _ = compressed(mode, x, key, buckets=64)
    assert np.isfinite(x_hat).all()
    assert all(np.isfinite(np.float64(leaf)).all() for leaf in payload)
    assert int(np.sum(payload.counts)) == np.count_nonzero(x)
    if name in ("zero", "one", "equal"):
        np.testing.assert_array_equal(x_hat, x)
    elif mode != "paper":
        assert np.sum((x_hat / np.abs(x).max() - x / np.abs(x).max()) ** 2) <= np.sum((x / np.abs(x).max()) ** 2)


@pytest.mark.parametrize("mode", MODES)
def test_non_finite_entries_are_not_sent(mode, key, seed):
    x = vector("normal", seed)
    bad = x.copy()
    bad[[3, 77, 600]] = [np.nan, np.inf, -np.inf]
    clean = np.where(np.isfinite(bad), bad, 0)
    payload, x_hat, *_ = compressed(mode, bad, key, buckets=64)
    np.testing.assert_array_equal(x_hat, compressed(mode, clean, key, buckets=64)[1])
    assert int(np.sum(payload.counts)) == len(x) - 3


@pytest.mark.parametrize("mode", ["quantile", pytest.param("recentred", marks=pytest.mark.slow)])
def test_overflow_stays_in_the_residual_and_is_counted(mode, key, seed):
    x = vector("normal", seed)
    compressor = jc.skcompress(mode=mode, buckets=32, room=0.2)

    @jax.jit
    def run(x, key):
        state = compressor.init(key, x)
        payload, local = compressor.compress(key, x, state)
        sent = compressor.decompress(payload, state.shared, jax.ShapeDtypeStruct(x.shape, jnp.float32))
        return sent, residual(compressor, x, payload, state.shared), local

    sent, rest, local = run(jnp.asarray(x), key)
    sent, rest = np.float64(sent), np.float64(rest)
    room = int(0.2 * len(x))
    assert int(local.overflow) == len(x) - room
    np.testing.assert_array_equal(np.sort(np.flatnonzero(sent)), np.sort(np.argsort(-np.abs(x))[:room]))
    np.testing.assert_allclose(sent + rest, x, rtol=1e-6, atol=1e-7)


def test_short_messages_are_sent_as_they_are(key):
    x = jnp.arange(40.0)
    x_hat, payload = roundtrip(jc.skcompress(jc.top_k(k=10), buckets=16), x, key)
    assert isinstance(payload, Sparse)
    np.testing.assert_array_equal(x_hat, jnp.where(x >= 30, x, 0))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sparsifier",
    [
        jc.top_k(0.2),
        pytest.param(jc.sidco(0.2), marks=pytest.mark.slow),
        pytest.param(jc.contrib.hard_threshold(1.0, room=0.4), marks=pytest.mark.slow),
        pytest.param(jc.contrib.dgc(0.2), marks=pytest.mark.slow),
        jc.bernoulli(0.3),
        jc.dagc([3, 1], 0.2),
    ],
    ids=lambda c: c.spec.name if isinstance(c, jc.Compressor) else None,
)
def test_takes_any_sparsifier_and_keeps_its_choice(sparsifier, key, seed):
    x = jnp.asarray(vector("normal", seed))
    compressor = jc.skcompress(sparsifier, buckets=8)
    shared_key, private_key = jax.random.split(key)
    state = compressor.init(shared_key, x)
    shared = state.shared if compressor.for_worker is None else compressor.for_worker(state.shared, 0, 2)
    payload, _ = jax.jit(compressor.compress)(private_key, x, State(state.local, shared))
    alone, _ = jax.jit(sparsifier.compress)(private_key, x, State(state.local, shared[0]))
    np.testing.assert_array_equal(payload.keys, alone.indices)


@pytest.mark.parametrize(
    "mode", ["recentred", *(pytest.param(m, marks=pytest.mark.slow) for m in ("quantile", "paper"))]
)
def test_messages_for_a_ladder_are_the_payload_bit_for_bit(mode, key, seed):
    payload, *_ = compressed(mode, vector("sparse", seed), key, buckets=64)

    @jax.jit
    def run(payload):
        message = encode_message(payload)
        return decode_message(message.words, payload), message.used, message.fits, sum(sketch_bits(payload))

    back, used, fits, bits = run(payload)
    assert fits
    for a, b in zip(payload, back, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # Levels and counts travel whole, each part begins at a word, and the table comes even where it does not pay.
    assert int(bits) / 32 - 4 < int(used) < int(bits) / 32 + 64 + 60 < jc.lane_bytes(payload) / 4
    assert not run(payload._replace(keys=payload.keys[::-1]))[2]


# ------------------------------------------------------------------------------------------------
# Contraction


def test_midpoints_can_expand(key):
    """Of 600 ones and 100 thousands the ones fill a bucket that reaches up to a thousand."""
    x = np.where(np.arange(700) < 600, 1, 1000).astype(np.float32)
    _, x_hat, *_ = compressed("paper", x, key, buckets=64)
    assert np.linalg.norm(x_hat - x) > 1.2 * np.linalg.norm(x)
    for algorithm in (jc.error_feedback, jc.direct, jc.contrib.momentum_correction):
        with pytest.raises(ValueError, match=r'take mode="recentred" or "quantile"'):
            algorithm(jc.per_leaf(jc.skcompress(jc.top_k(0.1), mode="paper")))


@pytest.mark.sampled
@pytest.mark.parametrize("mode", SAFE)
def test_error_feedback_converges(mode, key, seed):
    """Gradient descent on a quadratic, conditions 1 to 100; the memory stays bounded and the optimum is reached."""
    d = 600
    rng = np.random.default_rng(seed)
    curvature = jnp.asarray(np.geomspace(0.01, 1, d), jnp.float32)
    optimum = jnp.asarray(rng.standard_t(2, d), jnp.float32)
    mean = jc.compressed_mean(jc.error_feedback(jc.skcompress(jc.top_k(0.2), mode=mode, buckets=32)), None)

    def step(carry, _):
        x, state = carry
        direction, state = mean.update(curvature * (x - optimum), state)
        return (x - 0.2 * direction, state), jnp.linalg.norm(state.local.algorithm.memory[0])

    start = jnp.zeros(d)
    (x, _), memory = jax.jit(lambda c: jax.lax.scan(step, c, length=4000))((start, mean.init(start)))
    assert np.linalg.norm(x - optimum) < 0.01 * np.linalg.norm(optimum)
    assert memory.max() < 100 * memory[0]
    assert memory[-1] < memory[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jc.skcompress(mode="fixed"), "mode must be one of 'quantile', 'recentred', 'paper'; got 'fixed'"),
        (lambda: jc.skcompress(buckets=2**15), "buckets must be an integer in 2 .. 16384; got 32768"),
        (lambda: jc.skcompress(mode="recentred", groups=1), "groups must be an integer of at least 2"),
        (lambda: jc.skcompress(mode="recentred", buckets=20), "a multiple of groups; got 20 buckets in 8 groups"),
        (lambda: jc.skcompress(power=3), r"power must be in \[0, 2\]; got 3"),
        (lambda: jc.skcompress(rows=0), "rows must be an integer in 1 .. 16; got 0"),
        (lambda: jc.skcompress(columns=5), r"columns must be in \[1e-4, 4\] cells for each key; got 5"),
        (lambda: jc.skcompress(room=0), r"room must be in \(0, 1\]; got 0"),
        (lambda: jc.skcompress(jc.top_k(0.1), room=0.5), "room is for skcompress without a sparsifier"),
        (lambda: jc.skcompress(jc.per_leaf(jc.top_k(0.1))), "acts on trees"),
        (lambda: jc.skcompress(jc.rand_k(0.1)).init(jax.random.key(0), jnp.zeros(9)), r"rand_k\(0.1\) sends Dense"),
        (
            lambda: jc.skcompress(jc.narrow(jc.top_k(0.1), indices="uint16")).init(jax.random.key(0), jnp.zeros(9)),
            "values and 32-bit indices",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
