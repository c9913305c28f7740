"""SIDCo: thresholds against the float64 oracle, stage adaptation, corners, schedules, narrow lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from thresholds import DATA, SIZE, compressed, run
from variants import variants
from worlds import vmap_step

import jaxcomp as jc
from jaxcomp.select import every

KINDS = {
    "E": {"law": "exponential"},
    "P": {"law": "pareto"},
    "GP": {"law": "gamma"},
    "GP-approximate": {"law": "gamma", "quantile": "approximate"},
}


@functools.cache
def sidco(*args, **options):
    """One compressor for each setting, so that it is compiled once for all data."""
    return jc.sidco(*args, **options)


SETTINGS = [(0.3, 3, None), (0.1, 1, None), (0.1, 2, None), (0.002, 4, None), (0.1, 1, "count"), (0.01, 3, "count")]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", variants(SETTINGS, [(0.3, 3, None), (0.002, 4, None), (0.01, 3, "count")]), ids=str)
def test_selects_what_the_oracle_threshold_selects(kind, setting, key, seed):
    ratio, stages, adapt = setting
    compressor = sidco(ratio, stages=stages, adapt=adapt, capacity=5, **KINDS[kind])
    for draw in DATA.values():
        x = draw(np.random.default_rng(seed), SIZE).astype(np.float32)
        eta = oracles.sidco(x, ratio, stages=stages, counted=adapt == "count", **KINDS[kind])
        above = np.abs(np.float64(x)) > eta
        # Entries within rounding of the threshold may fall on either side.
        edge = np.abs(np.abs(np.float64(x)) - eta) < 3e-4 * eta
        _, x_hat = compressed(compressor, x, key)
        capacity = min(SIZE, 5 * int(ratio * SIZE))
        assert above.sum() > 0
        if above.sum() <= capacity - edge.sum():
            np.testing.assert_array_equal((x_hat != 0)[~edge], above[~edge])
        np.testing.assert_array_equal(x_hat[x_hat != 0], x[x_hat != 0])


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "run"), [(1 << 16, 1), (1 << 18, 4)])
@pytest.mark.parametrize("kind", ["E", "P", "GP"])
def test_a_sample_corrects_its_threshold_first(kind, size, run, key, seed):
    """Laws fitted to one in 15 entries; the sample moves the threshold, and then all entries are counted."""
    sample, ratio = size >> 4, 0.01
    stride = max(1, size // sample - 1) | 1
    assert every(jnp.arange(size), stride).shape[0] == (size // (run * stride) * run if run > 1 else -(-size // stride))
    compressor = sidco(ratio, sample=sample, capacity=5, **KINDS[kind])
    for name, draw in DATA.items():
        x = draw(np.random.default_rng(seed), size).astype(np.float32)
        eta = oracles.sidco(x, ratio, counted=True, stride=stride, run=run, **KINDS[kind])
        above = np.abs(np.float64(x)) > eta
        edge = np.abs(np.abs(np.float64(x)) - eta) < 3e-4 * eta
        _, x_hat = compressed(compressor, x, key)
        np.testing.assert_array_equal((x_hat != 0)[~edge], above[~edge], err_msg=name)


GRID = (np.arange(1, 4097) - 0.5) / 4096
SIGNS = np.where(np.arange(4096) % 2, -1, 1)
GOLDEN = [
    ("laplace", "E", [(1, 4.6047805, 41), (2, 4.6043411, 41), (3, 4.6011683, 41)]),
    ("laplace", "P", [(1, 4.6011938, 41), (2, 4.6002611, 41), (3, 4.6028156, 41)]),
    ("laplace", "GP", [(1, 4.6253442, 40), (2, 4.600309, 41), (3, 4.602651, 41)]),
    ("gamma", "E", [(1, 2.3022147, 131), (2, 3.2334751, 45), (3, 3.3614901, 39)]),
    ("gamma", "P", [(1, 3.2404991, 45), (2, 3.2279065, 45), (3, 3.2507583, 44)]),
    ("gamma", "GP", [(1, 3.3420455, 40), (2, 3.2793223, 43), (3, 3.300029, 42)]),
    ("gamma", "GP-approximate", [(1, 4.0745116, 18), (2, 3.4732609, 34), (3, 3.48996, 34)]),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_golden_thresholds_and_counts(kind, key):
    """Specification, section 10: n = 4096 quantiles, delta = 0.01; [stages, threshold, entries above]."""
    for data, of_kind, rows in GOLDEN:
        x = SIGNS * (-np.log1p(-GRID) if data == "laplace" else oracles.special.gammaincinv(0.5, GRID))
        for stages, eta, count in rows if of_kind == kind else []:
            assert oracles.sidco(x, 0.01, stages=stages, **KINDS[kind]) == pytest.approx(eta, rel=1e-7)
            compressor = sidco(0.01, stages=stages, adapt=None, capacity=5, **KINDS[kind])
            _, x_hat = compressed(compressor, x.astype(np.float32), key)
            assert np.count_nonzero(x_hat) == count


HEAVY = {
    "laplace": lambda rng, d: rng.laplace(size=d),
    "gamma 0.2": lambda rng, d: rng.gamma(0.2, size=d),
    "pareto 0.4": lambda rng, d: (rng.random(d) ** -0.4 - 1) / 0.4,
    "half-normal": lambda rng, d: np.abs(rng.standard_normal(d)),
    "student": lambda rng, d: rng.standard_t(3, d),
    "mixture": lambda rng, d: rng.standard_normal(d) * np.exp(1.5 * rng.standard_normal(d)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("law", ["exponential", "pareto", "gamma"])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_the_default_hits_the_target_whatever_the_law(law, ratio, key, seed):
    """Sent over k, before the capacity cuts: the tolerance of the count correction, 10 %, is kept."""
    rng = np.random.default_rng(seed)
    for name, draw in HEAVY.items():
        for _ in range(3):
            _, x_hat = compressed(sidco(ratio, law=law, capacity=4), draw(rng, 100_000).astype(np.float32), key)
            assert abs(np.count_nonzero(x_hat) / (ratio * 100_000) - 1) <= 0.1, name


NO_TAILS = {
    "uniform": lambda rng, d: rng.uniform(-1, 1, d),
    "clipped": lambda rng, d: np.clip(rng.standard_normal(d), -1, 1),
    "clipped beyond k": lambda rng, d: np.clip(rng.standard_normal(d), -3.2, 3.2),
    "discrete": lambda rng, d: np.round(rng.standard_normal(d)),
    "plateau": lambda rng, d: np.where(rng.random(d) < 0.02, 1.0, 1e-3 * rng.standard_normal(d)),
    "steps": lambda rng, d: 2.0 ** -rng.integers(0, 4, d),
}


@pytest.mark.sampled
@pytest.mark.parametrize("law", ["exponential", "pareto", "gamma"])
@pytest.mark.parametrize("ratio", [0.01, 1e-3])
def test_the_default_is_near_its_target_where_tails_are_none(law, ratio, key, seed):
    rng, k = np.random.default_rng(seed), int(ratio * 2**17)
    for name, draw in NO_TAILS.items():
        x = draw(rng, 2**17).astype(np.float32)
        payload, x_hat = compressed(sidco(ratio, law=law, capacity=8, sample=1 << 12), x, key)
        sent = np.count_nonzero(x_hat)
        assert 0.8 * k <= sent <= np.ceil(1.25 * k), name
        assert np.abs(x[x_hat != 0]).min() >= np.abs(x[x_hat == 0]).max(), name
        assert payload.indices.size == 8 * k


@pytest.mark.parametrize("wrapped", [lambda c: c, jc.per_leaf, lambda c: jc.compose(c, jc.cast("bfloat16"))])
def test_searches_are_counted(wrapped, seed):
    """Info says where no estimate served: on clipped entries at one of two workers, never on a law with a tail."""
    rng = np.random.default_rng(seed)
    tail = rng.laplace(size=4096).astype(np.float32)
    tx = jc.compressed_mean(jc.error_feedback(wrapped(jc.sidco(0.01, capacity=4))), "data")
    state, step = vmap_step(tx, {"a": tail}, 2, "data")
    for second, searches in ((tail, 0), (np.clip(tail, -1, 1), 1)):
        _, after = step(state, {"a": jnp.stack([tail, second])})
        found = jc.info(after)
        assert int(found.searches) == searches
        assert 0.8 <= float(found.achieved_ratio) / 0.01 <= 1.25
        assert jc.metrics(after)["searches"] == searches


@pytest.mark.sampled
@pytest.mark.parametrize("law", ["exponential", "gamma"])
def test_a_sample_serves_as_well(law, key, seed):
    """What the sample gets wrong, the count of all entries mends; NaN in the sample spoils nothing."""
    rng = np.random.default_rng(seed)
    compressor = sidco(0.01, law=law, sample=5000, capacity=4)
    for name, draw in HEAVY.items():
        x = draw(rng, 100_000).astype(np.float32)
        x[::1000] = np.nan
        _, x_hat = compressed(compressor, x, key)
        assert abs(np.count_nonzero(x_hat) / 1000 - 1) <= 0.1, name
    x[:] = 0
    x[1:4] = 5.0  # nothing in the sample at all
    _, x_hat = compressed(compressor, x, key)
    np.testing.assert_array_equal(x_hat, x)


CORNERS = {
    "zeros": (np.zeros(1000), 0),
    "constant": (np.full(1000, -3.0), 10),  # all equal: the first k
    "single": (np.eye(1, 1000, 500)[0], 1),
    "outlier": (np.r_[np.ones(999), 1e6], None),
    "two": (np.r_[np.zeros(998), 1.0, -2.0], 2),
    "garbage": (np.r_[np.full(990, np.nan), np.arange(1.0, 9), np.inf, -np.inf], 8),
}
EVERY = {
    **{f"{kind}-{adapt}": jc.sidco(0.01, adapt=adapt, **KINDS[kind]) for kind in KINDS for adapt in ("count", None)},
    "E-paper": jc.sidco(0.01, adapt="paper"),
    "P-climb": jc.sidco(0.01, law="pareto", adapt="climb"),
    "dgc": jc.contrib.dgc(0.01),
    "redsync": jc.contrib.redsync(0.01),
    "redsync-trimmed": jc.contrib.redsync(0.01, method="trimmed"),
    "gaussian_k": jc.contrib.gaussian_k(0.01),
    "hard_threshold": jc.contrib.hard_threshold(2.5, room=0.01),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", EVERY)
def test_corners(name, key):
    """Section 8 of the specification: nothing raises, at least one is sent, and always the largest."""
    for case, (x, sent) in CORNERS.items():
        _, x_hat = compressed(EVERY[name], x.astype(np.float32), key)
        count = np.count_nonzero(x_hat)
        a = np.nan_to_num(np.abs(x), nan=0, posinf=0)
        assert np.all(np.isfinite(x_hat)), case
        assert (count >= 1) == (a.max() > 0), case
        if count:
            assert a[x_hat != 0].min() >= a[x_hat == 0].max(), case
        if name == "E-count" and sent is not None:
            assert count == sent, case


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", variants([name for name in EVERY if name != "hard_threshold"], {"E-count", "P-count", "GP-None", "dgc"})
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_free(name, dtype, key, seed):
    send = jax.jit(lambda x: jc.roundtrip(EVERY[name], x, key=key)[0])
    x = np.random.default_rng(seed).laplace(size=SIZE)
    x = jnp.asarray(x / np.abs(x).max(), dtype)
    one = np.asarray(send(x)) != 0
    for exponent in (-100, 100):  # powers of two, so that rounding to bf16 commutes with them
        other = np.asarray(send(x * jnp.asarray(2.0**exponent, dtype))) != 0
        assert np.sum(one != other) <= 0.01 * one.sum() + 1, exponent


def test_overflow_raises_the_threshold_and_is_counted(key):
    """More entries than fit: the largest are sent, the rest counted, even when the giant comes last."""
    x = np.ones(1000, np.float32) + np.linspace(0, 1, 1000, dtype=np.float32)
    x[:500] = 0.001
    x[-1] = 100
    compressor = jc.sidco(0.3, stages=1, adapt=None, capacity=1)
    payload, local = jax.jit(compressor.compress)(key, jnp.asarray(x), compressor.init(key, x))
    wanted = int((x > oracles.sidco(x, 0.3, stages=1)).sum())
    assert wanted > 300
    assert int(local.overflow) == wanted - 300
    indices = np.asarray(payload.indices)
    assert 999 in indices
    kept = x[indices[indices < 1000]]
    assert kept.min() >= np.delete(x, indices[indices < 1000]).max()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make", [jc.sidco, jc.contrib.dgc, jc.contrib.gaussian_k, jc.contrib.redsync], ids=lambda make: make.__name__
)
def test_a_schedule_changes_the_ratio_without_recompiling(make, key, seed):
    x = np.random.default_rng(seed).laplace(size=SIZE)
    rounds = run(make(jc.warm_up([0.25, 0.05, 0.01], 2)), [x] * 6, key)
    sent = [int(np.sum(np.asarray(payload.indices) < SIZE)) for payload, _ in rounds]
    for round_, count in enumerate(sent):
        ratio = [0.25, 0.05, 0.01][round_ // 2]
        low, high = {jc.sidco: (0.9, 1.1), jc.contrib.dgc: (0.7, 1)}.get(make, (0, 10))
        assert low * ratio * SIZE <= count <= high * ratio * SIZE
    assert sent[4] > 0
    if make in (jc.sidco, jc.contrib.dgc):  # the others may miss by any factor
        assert sent[0] > sent[2] > sent[4]
    assert len({payload.indices.shape for payload, _ in rounds}) == 1


def test_peak_of_a_schedule_that_rises(key):
    schedule = lambda count: jnp.where(count < 1, 0.01, 0.1)
    x = np.random.default_rng(0).laplace(size=SIZE)
    (_, (payload, _)) = run(jc.sidco(schedule, peak=0.1), [x] * 2, key)
    assert 0.09 * SIZE < np.sum(np.asarray(payload.indices) < SIZE) < 0.11 * SIZE
    (_, (payload, state)) = run(jc.sidco(schedule), [x] * 2, key)  # no peak: cut to the first value
    assert payload.indices.size == 250
    assert int(state.local.overflow) == 0


LANES = [(values, indices) for values in (None, "bfloat16", "float16") for indices in (None, "uint16")]


@pytest.mark.parametrize("lanes", variants(LANES, [("bfloat16", "uint16")]), ids=str)
def test_narrow_lanes(lanes, key, seed):
    """Four bytes an entry; the rounding errors, and nothing else, stay in the residual."""
    d, (values, indices) = 200_000, lanes
    x = np.random.default_rng(seed).laplace(size=d).astype(np.float32)
    wide_payload, wide = compressed(jc.sidco(0.001), x, key)
    payload, x_hat = compressed(jc.narrow(jc.sidco(0.001), values=values, indices=indices), x, key)
    capacity = wide_payload.indices.size
    expected = capacity * ((4 if values is None else 2) + (4 if indices is None else 2))
    expected += (4 if values == "float16" else 0) + (0 if indices is None else 4 * 4)
    assert jc.lane_bytes(payload) == expected
    np.testing.assert_array_equal(x_hat != 0, wide != 0)
    np.testing.assert_allclose(x_hat, wide, rtol={None: 0, "bfloat16": 2**-8, "float16": 2**-10}[values])
    decoded = jc.wire.decode(jc.wire.encode(payload))
    assert jax.tree.all(jax.tree.map(np.array_equal, decoded, jax.tree.map(np.asarray, payload)))

    compressor = jc.narrow(jc.sidco(0.001), values=values, indices=indices)
    mean = jc.compressed_mean(jc.error_feedback(compressor), None)
    sent, state = jax.jit(mean.update)(jnp.asarray(x), mean.init(jnp.asarray(x)))
    (memory,) = state.local.algorithm.memory
    np.testing.assert_array_equal(np.asarray(sent) + np.asarray(memory).reshape(-1), x)


BAD = [
    (lambda: jc.sidco(0.01, law="cauchy"), "law must be one of"),
    (lambda: jc.sidco(2), r"ratio must be in \(0, 1\]"),
    (lambda: jc.sidco(0.01, stages=0), "stages must be"),
    (lambda: jc.sidco(0.01, adapt="yes"), "adapt must be one of 'count', 'paper', 'climb', None; got 'yes'"),
    (lambda: jc.sidco(0.01, quantile="table"), "quantile must be one of"),
    (lambda: jc.sidco(0.01, capacity=0.5), "capacity must be at least 1; got 0.5"),
    (lambda: jc.sidco(0.01, sample=0), "sample must be an integer of at least 1, or None; got 0"),
    (lambda: jc.sidco(0.01, peak=0.1), "peak is for a ratio that follows a schedule"),
    (lambda: jc.sidco(lambda count: 0.0), r"ratio must be in \(0, 1\]; got 0"),
    (lambda: jc.warm_up([], 3), "ratios must be in"),
    (lambda: jc.warm_up([0.1, 0.2], 3), "ratios must be in"),
    (lambda: jc.warm_up([0.2, 0.1], 0), "rounds must be"),
    (lambda: jc.narrow(jc.top_k(0.1), indices="uint8"), "indices must be 'uint16' or None; got 'uint8'"),
    (lambda: jc.narrow(jc.per_leaf(jc.top_k(0.1)), indices="uint16"), "acts on trees"),
    (
        lambda: jc.roundtrip(jc.narrow(jc.natural(), indices="uint16"), jnp.ones(3), key=jax.random.key(0)),
        "sends no 32-bit indices",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
