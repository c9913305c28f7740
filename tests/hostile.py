"""Checks of messages: equal to the last bit, and decoded within bounds whatever they say."""

import time
import tracemalloc

import jax
import numpy as np
from hypothesis import strategies as st

import jaxcomp as jc
from jaxcomp.wire.elias import Records
from jaxcomp.wire.frame import seal, unseal
from jaxcomp.wire.limits import PAD_BYTES, WORKSPACE

FRAME = 13 + 4

list(Records(memoryview(bytes(9)), 1, 9, levels=True))  # makes their table, with which no single message is charged


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()
    return True


def survives(payload, data, code="fixed"):
    """A sender that lies: with some bits of it flipped, a payload that survives another round trip, or WireError."""
    body = bytearray(unseal(jc.wire.encode(payload, code=code)))
    for _ in range(data.draw(st.integers(1, 3))):
        last = 8 * len(body) - 1
        bit = data.draw(st.one_of(st.integers(0, last), st.integers(0, min(last, 400))))
        body[bit // 8] ^= 1 << bit % 8
    decoded = decode_guarded(seal(bytes(body)))
    return decoded is None or same(jc.wire.decode(jc.wire.encode(decoded, code=code)), decoded)


def decode_guarded(data, limit_seconds=0.1):
    """Decodes or raises WireError, within the time limit and in bounded memory; returns the payload or None."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        return jc.wire.decode(data)
    except jc.WireError as error:
        assert error.field  # noqa: PT017
        return None
    finally:
        seconds = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= PAD_BYTES * len(data) + WORKSPACE
        # tracemalloc slows everything down; the bound is still far below what a hang would take.
        assert seconds < 10 * limit_seconds
