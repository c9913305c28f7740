"""Workers on the host with exchanges in a thread: bitwise the program that waits for each of them."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_worlds import PARAMS, Board, random_gradients, vmap_steps
from variants import variants
from worlds import assert_same, at

import jaxcomp as jc
from jaxcomp.exchange.agreement import GREETING

pytestmark = pytest.mark.usefixtures("standard_promotion")
INNER, OUTER = optax.sgd(1 / 64), optax.sgd(0.5, momentum=0.5, nesterov=True)  # whose products are exact
ALGORITHMS = {
    "top_k": jc.error_feedback(jc.flat(jc.top_k(k=5))),
    "diana": jc.diana(jc.flat(jc.dithering(7))),
    "int4": jc.error_feedback(jc.block_scaled("int4")),
    "sparse_loco": jc.sparse_loco(k=2, chunk=8),
    "power_sgd": jc.power_sgd(2),
    "ef21": jc.ef21(jc.flat(jc.top_k(k=5))),
}


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"top_k"}))
def test_an_exchange_beside_the_steps_is_the_one_that_waits(name, seed):
    size, times = 3, {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.5}
    grads = at(random_gradients(seed, 11), np.s_[:, :size])
    algorithm = ALGORITHMS[name]
    tx = jc.local_updates(INNER, OUTER, algorithm, "data", via="gather", **times)
    want, state = vmap_steps(tx, PARAMS, grads)
    board = Board(size)
    make = lambda board, i: jc.local_process(INNER, OUTER, algorithm, board.gather(i), i, size, **times)
    workers = [make(board, i) for i in range(size)]
    points = [worker.start(PARAMS) for worker in workers]
    # One thread takes the steps of all workers in turn: that no step waits for an exchange which another worker has not
    # begun shows that exchanges run beside them.
    for t in range(11):
        for i, worker in enumerate(workers):
            points[i] = worker.step(at(grads, (t, i)), points[i])
        if t == 4:  # while a difference is on its way: others go on from what these remember
            kept, board = [worker.state() for worker in workers], Board(size)
            workers = [make(board, i) for i in range(size)]
            for worker, state_then in zip(workers, kept, strict=True):
                worker.start(PARAMS)
                worker.restore(state_then)
            assert any(part[2] is not None for part in kept[0]["parts"])
        for key in PARAMS:
            np.testing.assert_array_equal(np.stack([p[key] for p in points]), want[t][key])
    for worker in workers:
        worker.close()
        assert_same(worker.point, state.point)
        assert worker.sent_bytes > 0


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"sparse_loco"}))
def test_exchanges_are_compiled_once(name, seed, caplog):
    grads = at(random_gradients(seed, 1), (0, 0))
    made = jc.local_process(INNER, OUTER, ALGORITHMS[name], lambda m: [m] * 2, 0, 2, every=2, fragments=2, delay=1)
    with made as worker:
        own = worker.start(PARAMS)
        for step in range(9):
            if step == 5:
                jax.config.update("jax_log_compiles", True)
            try:
                own = jax.block_until_ready(worker.step(grads, own))
            finally:
                if step == 8:
                    jax.config.update("jax_log_compiles", False)
    assert "Compiling" not in caplog.text


BAD = [
    ({"every": 0}, "local_process: every must be"),
    ({"index": 2, "size": 2}, "index must be in 0"),
    ({"index": 0.5}, r"index must be an integer of at least 0; got 0\.5"),
    ({"code": "nope"}, "code must be one of fixed, elias, best; got 'nope'"),
    ({"algorithm": "dagc", "size": 2}, "size must be 3, as many as the compressor has weights; got 2"),
]


@pytest.mark.parametrize(("wrong", "said"), BAD, ids=[said for _, said in BAD])
def test_errors_name_what_is_wrong(wrong, said):
    given = {"algorithm": "top_k", "gather": list, "index": 0, "size": 1, "every": 2, **wrong}
    algorithm = (ALGORITHMS | WEIGHTED)[given.pop("algorithm")]
    with pytest.raises(ValueError, match=said):
        jc.local_process(INNER, OUTER, algorithm, **given)


def test_a_step_comes_after_the_start():
    with pytest.raises(ValueError, match=r"call start\(params\) before the first step"):
        jc.local_process(INNER, OUTER, ALGORITHMS["top_k"], list, 0, 1, every=2).step(PARAMS, PARAMS)


def after_steps(algorithm, params, grads, inner=INNER, outer=OUTER, **times):
    """Points and parameters of all workers after the gradients [t, n, ...], each worker in a thread of its own."""
    steps, size = jax.tree.leaves(grads)[0].shape[:2]
    board = Board(size)

    def run(i):
        with jc.local_process(inner, outer, algorithm, board.gather(i), i, size, **times) as worker:
            own = worker.start(params)
            for t in range(steps):
                own = worker.step(at(grads, (t, i)), own)
            return worker.point, own

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        points, own = zip(*pool.map(run, range(size)), strict=True)
    return jax.tree.map(lambda *rows: np.stack(rows), *points), jax.tree.map(lambda *rows: np.stack(rows), *own)


WEIGHTED = {
    "dagc": jc.error_feedback(jc.flat(jc.dagc([5, 4, 2], 0.5))),
    "dagc:leaves": jc.error_feedback(jc.dagc([5, 4, 2], 0.5)),
    "dagc:ef21": jc.ef21(jc.flat(jc.dagc([5, 4, 2], 0.5))),  # the first step is a sum
    "dagc:power_sgd": jc.by_path({"a": jc.power_sgd(1), "": jc.error_feedback(jc.dagc([5, 4, 2], 0.5))}),
}


@pytest.mark.parametrize("name", variants(WEIGHTED, {"dagc"}))
def test_weights_that_a_compressor_brings_are_those_of_the_mean(name, seed):
    grads = at(random_gradients(seed, 4), np.s_[:, :3])
    tx = jc.local_updates(INNER, OUTER, WEIGHTED[name], "data", via="concat", every=2)
    want, state = vmap_steps(tx, PARAMS, grads)
    points, own = after_steps(WEIGHTED[name], PARAMS, grads, every=2)
    for key in PARAMS:
        np.testing.assert_allclose(own[key], want[-1][key], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(points[key][0], np.asarray(state.point[key]), rtol=1e-5, atol=1e-7)


def test_parameters_of_16_bits_follow_small_steps():
    """As in `local_updates`: with an exchange after every step the difference is the inner update, not rounded."""
    inner, outer, ones = optax.sgd(1e-4), optax.sgd(1.0), jnp.ones(4, jnp.bfloat16)
    algorithm = jc.direct(jc.identity())
    tx = jc.local_updates(inner, outer, algorithm, None, every=1)
    own, state, grads = ones, tx.init(ones), np.ones((50, 1, 4), jnp.bfloat16)

    @jax.jit
    def step(g, state, own):
        updates, state = tx.update(g, state, own)
        return optax.apply_updates(own, updates), state

    for g in grads:
        own, state = step(g[0], state, own)
    points, found = after_steps(algorithm, ones, grads, inner, outer, every=1)
    np.testing.assert_array_equal(points[0], np.asarray(state.point))
    np.testing.assert_allclose(points[0], 1 - 50e-4, rtol=1e-4)
    np.testing.assert_array_equal(found[0].astype(np.float32), np.asarray(own, np.float32))


@pytest.mark.parametrize("size", [2, 3])
def test_means_of_huge_differences_are_finite(size):
    huge = jnp.full((1, size, 8), 3e38)
    for algorithm in (jc.direct(jc.identity()), jc.diana(jc.flat(jc.dithering(7)))):
        points, _ = after_steps(algorithm, jnp.zeros(8), huge, optax.sgd(1.0), optax.sgd(1.0), every=1)
        assert np.all(np.isfinite(points))
    points, _ = after_steps(jc.direct(jc.identity()), jnp.zeros(8), huge, optax.sgd(1.0), optax.sgd(1.0), every=1)
    np.testing.assert_allclose(points, -3e38, rtol=1e-6)


def message_of(algorithm, length):
    """The bytes of a worker with so many parameters, the last of which has the largest gradient."""
    sent = []
    with jc.local_process(INNER, OUTER, algorithm, lambda m: sent.append(m) or [m], 0, 1, every=1) as worker:
        worker.step(jnp.arange(1.0, length + 1), worker.start(jnp.zeros(length)))
    return sent[-1]


def greeted(gather):
    """The same, after a greeting that is as it should be."""
    return lambda m: [m, m] if m.startswith(GREETING) else gather(m)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (jc.direct(jc.identity()), r"that of worker 1 is .*float32\[3000\].*, that of this worker 0 .*float32\[2000\]"),
        (jc.direct(jc.flat(jc.dithering(7))), "that of worker 1 is Quantized of"),
        (jc.error_feedback(jc.top_k(k=2)), "that of worker 1 has index 2999, and the vector here 2000 entries"),
        (
            jc.error_feedback(jc.flat(jc.top_k(k=2))),
            "that of worker 1 has index 2999, and the vector here 2000 entries",
        ),
    ],
)
def test_messages_of_other_shapes_are_refused(algorithm, said):
    other = message_of(algorithm, 3000)
    said = f"local_process: gather must return messages of one exchange.*{said}"
    made = jc.local_process(INNER, OUTER, algorithm, greeted(lambda m: [m, other]), 0, 2, every=1)
    with made as worker, pytest.raises(ValueError, match=said):
        worker.step(jnp.arange(1.0, 2001.0), worker.start(jnp.zeros(2000)))


@pytest.mark.parametrize(
    ("gather", "error", "said"),
    [
        (lambda m: None, TypeError, "must return a list with the bytes of all 2 workers; got a NoneType"),
        (lambda m: m, TypeError, "must return a list with the bytes of all 2 workers; got a bytes"),
        (lambda m: [m], ValueError, "must return the bytes of all 2 workers; got 1"),
        (lambda m: [m[:-1], m], ValueError, "in the order of the workers; place 0 does not hold the message of this"),
        (lambda m: [m, m[:-1]], ValueError, "the first message of worker 1 does not say its options"),
        (greeted(lambda m: [m, m[:-1]]), jc.wire.WireError, "wire: body length of the message of worker 1 must be"),
        (
            greeted(lambda m: [m, None]),
            jc.wire.WireError,
            "wire: message of the message of worker 1 must be bytes; got NoneType",
        ),
    ],
)
def test_what_gather_may_not_return(gather, error, said):
    made = jc.local_process(INNER, OUTER, jc.direct(jc.identity()), gather, 0, 2, every=1)
    with made as worker, pytest.raises(error, match=said):
        worker.step(PARAMS, worker.start(PARAMS))


DIRECT, FEW = jc.direct(jc.dithering(7)), {"w": jnp.zeros(4000)}
OTHERS = {
    "algorithm.compressor.levels is 5 on worker 1, and 7 on worker 0": {"algorithm": jc.direct(jc.dithering(5))},
    "outer is an optimizer with the first steps .* on worker 1": {"outer": optax.sgd(0.7, momentum=0.5)},
    "every is 3 on worker 1, and 2 on worker 0": {"every": 3},
    "mixing is 0.5 on worker 1, and 0 on worker 0": {"mixing": 0.5},
    "message code is best on worker 1, and fixed on worker 0": {"code": "best"},
    r"seed is \[0, 1\] on worker 1, and \[0, 0\] on worker 0": {"seed": 1},
    r"parameters is float32\[3000\] .* on worker 1, and float32\[4000\]": {"params": {"w": jnp.zeros(3000)}},
}


@pytest.mark.parametrize("said", OTHERS)
def test_workers_with_other_options_are_refused_at_the_first_step(said):
    board, refused = Board(2), []
    options = {"outer": OUTER, "algorithm": DIRECT, "every": 2, "mixing": 0.0, "code": "fixed", "seed": 0}

    def run(i):
        mine = {**options, "params": FEW} | (OTHERS[said] if i else {})
        outer, algorithm, params = (mine.pop(name) for name in ("outer", "algorithm", "params"))
        with jc.local_process(INNER, outer, algorithm, board.gather(i), i, 2, **mine) as worker:
            own = worker.start(params)
            with pytest.raises(ValueError, match=f"local_process: {said}"):
                functools.reduce(lambda own, _: worker.step(own, own), range(3), own)
            refused.append(i)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert sorted(refused) == [0, 1]


def test_the_header_of_a_message_names_levels_and_blocks():
    """Two workers whose options were not compared: their messages have equal shapes, and are not read as one's own."""
    seven, five = (jc.direct(jc.dithering(levels, block_size=64)) for levels in (7, 5))
    other = message_of(five, 2000)
    made = jc.local_process(INNER, OUTER, seven, greeted(lambda m: [m, other]), 0, 2, every=1)
    said = r"compressor of the message of worker 1 must be .*levels=7, block_size=64.*; got .*levels=5, block_size=64"
    with made as worker, pytest.raises(jc.WireError, match=said):
        worker.step(jnp.arange(1.0, 2001.0), worker.start(jnp.zeros(2000)))
