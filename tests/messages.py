"""Payloads for each kind of record that `wire.encode(code="best")` writes."""

import functools

import jax.numpy as jnp
import numpy as np

from jaxcomp.packing import width_for
from jaxcomp.payloads import (
    Chunks,
    Dense,
    Leaves,
    Quantized,
    Scaled,
    Several,
    Sparse,
    chunks,
    local_indices,
    registry,
    several,
)
from jaxcomp.payloads import quantized as quantized_
from jaxcomp.payloads import sparse_records as records
from jaxcomp.wire.bitstream import pack_words


def sparse(rng, size, count, capacity, dtype=np.float32):
    indices = np.sort(rng.choice(size, count, replace=False)).astype(np.int32)
    values = rng.standard_normal(count).astype(dtype)
    spare = capacity - count
    return Sparse(np.pad(values, (0, spare)), np.pad(indices, (0, spare), constant_values=size))


def quantized(rng, size, density, most, width=None):
    levels = np.where(rng.random(size) < density, rng.integers(1, most + 1, size), 0)
    where = np.flatnonzero(levels)
    width = width_for(most + 1) if width is None else width
    return Quantized(np.ones(2, np.float32), pack_words(where, levels[where], width, -(-size // 32)))


def chunks_of(rng, rows, each, width, most=None):
    gaps = rng.integers(0, (1 << width) // each if most is None else most, rows * each)
    places = np.flatnonzero(gaps)
    words = pack_words(places, gaps[places].astype(np.uint32), width, -(-gaps.size // 32))
    return Chunks(rng.standard_normal(gaps.size).astype(np.float32), words)


@functools.cache
def examples():
    """One payload for each kind of message that code="best" writes, and that kind."""
    rng = np.random.default_rng(3)
    entries = sparse(rng, 5000, 300, 310)
    local = sparse(rng, 200_000, 90, 100)
    skewed = Quantized(
        np.ones(1, np.float32), pack_words(np.arange(960), np.minimum(rng.geometric(0.4, 960), 31), 5, 30)
    )
    unsorted = Sparse(np.ones(4, np.float32), np.array([5, 1, 2, 8], np.int32))
    return {
        "dense": (Dense(np.arange(9, dtype=np.float32)), registry.DENSE),
        "scaled": (Scaled(np.ones(9, jnp.bfloat16), np.float32(2)), registry.SCALED),
        "sparse": (entries, records.CODED_SPARSE),
        "sparse-bf16": (sparse(rng, 10**6, 300, 300, jnp.bfloat16), records.CODED_SPARSE),
        "sparse-full": (Sparse(np.ones(99, np.float32), np.arange(99, dtype=np.int32)), records.CODED_SPARSE),
        "sparse-empty": (Sparse(np.zeros(0, np.float32), np.zeros(0, np.int32)), records.SPARSE),
        "sparse-one": (Sparse(np.ones(1, np.float32), np.zeros(1, np.int32)), records.SPARSE),
        "sparse-unsorted": (unsorted, records.SPARSE),
        "sparse-nothing": (Sparse(np.zeros(7, np.float32), np.full(7, 1000, np.int32)), records.CODED_SPARSE),
        "sparse-far": (
            Sparse(np.ones(9, np.float32), np.arange(2**31 - 9, 2**31).astype(np.int32)),
            records.CODED_SPARSE,
        ),
        "local": (local._replace(indices=local_indices(jnp.asarray(local.indices), 200_000)), records.CODED_LOCAL),
        "local-none": (Sparse(np.zeros(3, np.float32), local_indices(jnp.full(3, 9), 9)), records.CODED_LOCAL),
        "levels": (skewed, quantized_.CODED_LEVELS),
        "levels-uniform": (quantized(rng, 640, 1.0, 255), quantized_.QUANTIZED),
        "levels-few": (quantized(rng, 64, 0.02, 1), quantized_.ELIAS_QUANTIZED),
        "levels-sparse": (quantized(rng, 40_000, 0.02, 7), quantized_.CODED_NONZEROS),
        "levels-wide": (quantized(rng, 4000, 0.02, 2**14), quantized_.ELIAS_QUANTIZED),
        "levels-none": (Quantized(np.ones(1, np.float32), np.zeros((3, 0), np.uint32)), quantized_.QUANTIZED),
        "levels-zero": (Quantized(np.ones(1, np.float32), np.zeros((3, 9), np.uint32)), quantized_.ELIAS_QUANTIZED),
        "chunks": (chunks_of(rng, 40, 64, 12), chunks.CODED_CHUNKS),
        "chunks-even": (chunks_of(rng, 2, 16, 3, 8), chunks.CHUNKS),
        "chunks-none": (Chunks(np.zeros(0, np.float32), np.zeros((5, 0), np.uint32)), chunks.CHUNKS),
        "chunks-zero": (Chunks(np.zeros(40, np.float32), np.zeros((7, 2), np.uint32)), chunks.CODED_CHUNKS),
        "chunks-nested": (Chunks(quantized(rng, 640, 0.9, 3), chunks_of(rng, 20, 32, 9).words), chunks.CODED_CHUNKS),
        "nested": (Sparse(quantized(rng, 300, 0.9, 3), entries.indices[:300]), records.CODED_SPARSE),
        "several": (Several((Dense(np.ones(1, np.float32)), skewed)), several.SEVERAL),
        "scales-e8m0": (skewed._replace(norms=np.ones(4, jnp.float8_e8m0fnu)), quantized_.CODED_LEVELS),
        "leaves": (Leaves(Dense(np.ones(3, np.float32)), (entries, skewed)), several.LEAVES),
    }
