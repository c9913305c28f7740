"""Workers on the host with exchanges in a thread: bitwise the program that waits for each of them."""

import threading

import jax
import numpy as np
import optax
import pytest
from local_worlds import PARAMS, random_gradients, vmap_steps
from variants import variants

import jaxcomp as jc

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


class Board:
    """Where the exchange threads of n workers leave their bytes."""

    def __init__(self, size):
        self.places, self.barrier = [None] * size, threading.Barrier(size, timeout=120)

    def gather(self, index):
        def run(message):
            self.places[index] = message
            self.barrier.wait()
            every = list(self.places)
            self.barrier.wait()
            return every

        return run


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"top_k"}))
def test_an_exchange_beside_the_steps_is_the_one_that_waits(name, seed):
    size, times = 3, {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.5}
    grads = jax.tree.map(lambda g: g[:, :size], random_gradients(seed, 11))
    algorithm = ALGORITHMS[name]
    tx = jc.local_updates(INNER, OUTER, algorithm, "data", via="gather", **times)
    want, state = vmap_steps(tx, PARAMS, grads)
    board, found = Board(size), {}
    make = lambda board, i: jc.local_process(INNER, OUTER, algorithm, board.gather(i), i, size, **times)
    workers = [make(board, i) for i in range(size)]
    points = [worker.start(PARAMS) for worker in workers]
    # One thread takes the steps of all workers in turn: that no step waits for an exchange which another worker has not
    # begun shows that exchanges run beside them.
    for t in range(11):
        for i, worker in enumerate(workers):
            points[i] = worker.step(jax.tree.map(lambda g: g[t, i], grads), points[i])  # noqa: B023
        if t == 4:  # while a difference is on its way: others go on from what these remember
            kept, board = [worker.state() for worker in workers], Board(size)
            workers = [
                jc.local_process(INNER, OUTER, algorithm, board.gather(i), i, size, **times) for i in range(size)
            ]
            for worker, state_then in zip(workers, kept, strict=True):
                worker.start(PARAMS)
                worker.restore(state_then)
            assert any(part[2] is not None for part in kept[0]["parts"])
        for key in PARAMS:
            np.testing.assert_array_equal(np.stack([p[key] for p in points]), want[t][key])
    for worker in workers:
        worker.close()
        jax.tree.map(np.testing.assert_array_equal, worker.point, jax.tree.map(np.asarray, state.point))
        found[worker.sent_bytes] = worker.waited
    assert all(sent > 0 for sent in found)


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"sparse_loco"}))
def test_exchanges_are_compiled_once(name, seed, caplog):
    grads = jax.tree.map(lambda g: g[0, 0], random_gradients(seed, 1))
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


def test_errors_name_what_is_wrong():
    make = lambda **more: jc.local_process(INNER, OUTER, ALGORITHMS["top_k"], list, 0, 1, **{"every": 2, **more})
    with pytest.raises(ValueError, match="local_process: every must be"):
        make(every=0)
    with pytest.raises(ValueError, match=r"call start\(params\) before the first step"):
        make().step(PARAMS, PARAMS)
    with pytest.raises(ValueError, match="index must be in 0"):
        jc.local_process(INNER, OUTER, ALGORITHMS["top_k"], list, 2, 2, every=2)
    with pytest.raises(ValueError, match="code must be one of fixed, elias, best; got 'nope'"):
        make(code="nope")
    with pytest.raises(ValueError, match=r"index must be an integer of at least 0; got 0\.5"):
        jc.local_process(INNER, OUTER, ALGORITHMS["top_k"], list, 0.5, 2, every=2)
    with make(every=1) as worker:
        worker.start(PARAMS)
        worker._link._gather = lambda message: []
        with pytest.raises(ValueError, match="gather must return the bytes of all 1 workers"):
            worker.step(PARAMS, PARAMS)
