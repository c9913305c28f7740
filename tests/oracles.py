"""Slow float64 NumPy transcriptions of the definitions. The tests hold the library against these.

None of this imports jaxcomp.
"""

import itertools
import math

import numpy as np

# ------------------------------------------------------------------------------------------------
# Words and bits


def fmix32(h: int) -> int:
    """MurmurHash3's 32-bit finalizer on Python integers."""
    h &= 0xFFFFFFFF
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def pack(codes, width):
    """Code i*G + g at bits [i*width, (i+1)*width) of group g, as one big integer per group."""
    groups = -(-len(codes) // 32)
    words = np.zeros((width, groups), np.uint32)
    for g in range(groups):
        stream = 0
        for i in range(32):
            j = i * groups + g
            if j < len(codes):
                stream |= int(codes[j]) << (i * width)
        for m in range(width):
            words[m, g] = stream >> (32 * m) & 0xFFFFFFFF
    return words


def fixed_width_stream(values, width):
    """Integers of `width` bits, least significant bit first, as bytes."""
    stream = sum(int(v) << (i * width) for i, v in enumerate(values))
    return stream.to_bytes((len(values) * width + 7) // 8, "little")


# ------------------------------------------------------------------------------------------------
# Compressors: C(x) for given randomness


def top_k(x, k):
    """Largest magnitudes, ties to the lowest index, by a stable sort."""
    order = sorted(range(len(x)), key=lambda j: (-abs(x[j]), j))
    out = np.zeros(len(x))
    for j in order[:k]:
        out[j] = x[j]
    return out


def rand_k(x, chosen):
    out = np.zeros(len(x))
    for j in chosen:
        out[j] = x[j] * len(x) / len(chosen)
    return out


def bernoulli(x, probabilities, uniforms):
    return np.where(uniforms < probabilities, x / probabilities, 0.0)


def block_edges(d, blocks=None, block_size=None):
    """Start of each block, and d."""
    if block_size is not None:
        return [*range(0, d, block_size), d]
    blocks = max(1, min(blocks or 1, d))
    return [b * (d // blocks) for b in range(blocks)] + [d]


def dithering(x, steps, uniforms, order=2, blocks=None, block_size=None):
    """|x|_q sign(x) h floor(|x| / (h |x|_q) + u), block by block; steps one per entry."""
    x = np.asarray(x, np.float64)
    steps = np.broadcast_to(np.asarray(steps, np.float64), x.shape)
    out = np.zeros_like(x)
    edges = block_edges(len(x), blocks, block_size)
    for a, b in itertools.pairwise(edges):
        norm = np.linalg.norm(x[a:b], order)
        if norm > 0:
            level = np.floor(np.abs(x[a:b]) / (norm * steps[a:b]) + uniforms[a:b])
            out[a:b] = norm * np.sign(x[a:b]) * steps[a:b] * level
    return out


def dithering_variance(x, steps, order=2):
    """E|C(x) - x|^2 exactly: |x|_q^2 sum h^2 r (1 - r), r the fractional part of |x| / (h |x|_q)."""
    norm = np.linalg.norm(x, order)
    y = np.abs(x) / (norm * steps)
    r = y - np.floor(y)
    return norm**2 * np.sum(np.broadcast_to(steps, x.shape) ** 2 * r * (1 - r))


def natural_choices(x):
    """The two powers of two around |x| (with sign) and the probability of the upper one."""
    if x == 0:
        return 0.0, 0.0, 0.0
    low = 2.0 ** math.floor(math.log2(abs(x)))
    return math.copysign(low, x), math.copysign(2 * low, x), abs(x) / low - 1


def sidco_exponential(x, ratio, stages, first_ratio=0.25):
    """Threshold eta of SIDCo-E: multi-stage peaks over threshold, location at the last threshold.

    Zeros are left out of the fit and the target is raised to ratio d / (number of nonzeros).
    """
    a = np.abs(np.asarray(x, np.float64))
    a = a[a > 0]
    if a.size == 0:
        return 0.0
    target = min(ratio * len(x) / a.size, 1.0)
    if stages == 1 or target >= first_ratio:
        return a.mean() * math.log(1 / target)
    eta = a.mean() * math.log(1 / first_ratio)
    each = (target / first_ratio) ** (1 / (stages - 1))
    for _ in range(stages - 1):
        above = a[a > eta]
        if above.size:
            eta += (above - eta).mean() * math.log(1 / each)
    return eta


# ------------------------------------------------------------------------------------------------
# Algorithms: rounds over gradients [rounds, workers, d] with a deterministic compressor


def error_feedback(grads, compress, decay=1.0, weights=None):
    """Directions and the memories at the end."""
    rounds, workers, d = grads.shape
    weights = np.full(workers, 1 / workers) if weights is None else np.asarray(weights) / np.sum(weights)
    memory = np.zeros((workers, d))
    directions = []
    for t in range(rounds):
        sent = np.zeros((workers, d))
        for i in range(workers):
            message = decay * memory[i] + grads[t, i]
            sent[i] = compress(message)
            memory[i] = message - sent[i]
        directions.append(weights @ sent)
    return np.array(directions), memory


def diana(grads, compress, alpha):
    """Directions and the shifts at the end."""
    rounds, workers, d = grads.shape
    shifts, mean_shift = np.zeros((workers, d)), np.zeros(d)
    directions = []
    for t in range(rounds):
        deltas = np.array([compress(grads[t, i] - shifts[i]) for i in range(workers)])
        directions.append(mean_shift + deltas.mean(0))
        shifts += alpha * deltas
        mean_shift = mean_shift + alpha * deltas.mean(0)
    return np.array(directions), shifts
