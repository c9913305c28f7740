"""Slow float64 NumPy transcriptions of the definitions. The tests hold the library against these.

None of this imports jaxcomp.
"""

import itertools
import math

import numpy as np
from scipy import special

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
    """Tiles of 32 groups, one after the other (one of all where 32 does not divide their number, or `width` not 32).

    Code i of group t of tile T is code 32 g T + i g + t, at bits [i*width, (i+1)*width) of the group, which is one big
    integer.
    """
    groups = -(-len(codes) // 32)
    tile = groups if groups % 32 or 32 % width else 32
    if not groups:
        return np.zeros((width, 0), np.uint32)
    words = []
    for first in range(0, groups, tile):
        streams = [0] * tile
        for i in range(32):
            for t in range(tile):
                j = 32 * first + i * tile + t
                if j < len(codes):
                    streams[t] |= int(codes[j]) << (i * width)
        words += [stream >> (32 * m) & 0xFFFFFFFF for m in range(width) for stream in streams]
    return np.asarray(words, np.uint32).reshape(width, groups)


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


def excess_quantile(law, e, ratio, quantile="newton"):
    """(1 - ratio) quantile of the law fitted to the excesses e >= 0."""
    mean, log_ratio = e.mean(), math.log(1 / ratio)
    if law == "gamma":
        s = math.log(mean) - np.log(e).mean()
        alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        if quantile == "approximate":
            return mean / alpha * (log_ratio - math.lgamma(alpha))
        return mean / alpha * special.gammainccinv(alpha, ratio)
    if law == "pareto" and e.size >= 8 and e.var(ddof=1) > 0:
        q = mean**2 / e.var(ddof=1)
        xi, sigma = (1 - q) / 2, mean * (1 + q) / 2
        if abs(xi) > 1e-8:
            return sigma / xi * math.expm1(xi * log_ratio)
    return mean * log_ratio


def sidco(x, ratio, law="exponential", stages=3, counted=False, quantile="newton", first_ratio=0.25, stride=1, run=1):
    """Threshold eta of SIDCo: multi-stage peaks over threshold, location at the last threshold.

    Zeros are left out of the fit and the target is raised to ratio d / (number of nonzeros).
    counted: stage ratios from the measured counts, then up to three corrections by the counts.
    stride: of the sample that laws are fitted to; its count moves the threshold before that of all entries does.
    run: entries of the sample that follow one another, run * stride apart; all from 0 to d where it is 1.
    """
    d = len(x)
    every = np.abs(np.asarray(x, np.float64))
    rows = d // (run * stride)
    a = every[::stride] if run == 1 else every[: rows * run * stride].reshape(rows, -1)[:, :run].reshape(-1)
    d_sample = a.size
    a = a[a > 0]
    if a.size == 0:
        return 0.0
    k = max(1, int(ratio * d)) / stride
    target = min(ratio * d_sample / a.size, 1.0)
    single = stages == 1 or target >= first_ratio
    eta = max(0.0, excess_quantile(law, a, target if single else first_ratio, quantile))
    tail = "exponential" if law == "exponential" else "pareto"
    before = (0.0, a.size)
    for m in range(2, stages + 1):
        e = a[a > eta] - eta
        if counted:
            each = (k / max(e.size, 1)) ** (1 / (stages - m + 1))
        else:
            each = 1.0 if single else (target / first_ratio) ** (1 / (stages - 1))
        before = (eta, e.size)
        if e.size >= 2:
            eta = max(0.0, eta + excess_quantile(tail, e, each))
    if counted and stride > 1:
        chance = max(0.02, k**-0.5)
        eta = _moved(a, before, eta, k, chance)
    if counted:
        eta = _moved(every, (before[0], before[1] * stride), eta, k * stride, 0.1)
    return eta


def _moved(a, before, eta, k, tolerance):
    """eta, moved along a line through the logarithms of the last two counts while it misses k, thrice at most."""
    for _ in range(3):
        above = int(np.sum(a > eta))
        if abs(above - k) <= tolerance * k or above == before[1]:
            break
        low, high = math.log(max(before[1], 0.5)), math.log(max(above, 0.5))
        here = (eta, above)
        eta = max(0.0, eta + (eta - before[0]) * (high - math.log(k)) / (low - high))
        before = here
    return eta


def local_indices(indices, d):
    """Position within blocks of 65536 entries, padded with zeros, and the number in each block."""
    real = [j for j in indices if j < d]
    counts = [sum(j // 65536 == b for j in real) for b in range(-(-d // 65536))]
    return [j % 65536 for j in real] + [0] * (len(indices) - len(real)), counts


def gaussian_k(x, ratio):
    """Threshold of Gaussian-k: a normal quantile, at most two corrections."""
    x = np.asarray(x, np.float64)
    k = max(1, int(ratio * len(x)))
    eta = x.mean() + special.ndtri(1 - ratio / 2) * x.std()
    for _ in range(2):
        count = np.sum(np.abs(x) > eta)
        if 3 * count < 2 * k:
            eta *= 0.5
        elif 3 * count > 4 * k:
            eta *= 1.5
        else:
            break
    return eta


def redsync(x, ratio, step=0.2):
    """Threshold of RedSync's binary search."""
    a = np.abs(np.asarray(x, np.float64))
    k = max(1, int(ratio * len(x)))
    low, high = 0.0, 1.0
    while True:
        t = (low + high) / 2
        eta = a.mean() + t * (a.max() - a.mean())
        count = np.sum(a > eta)
        low, high = (t if count > 2 * k else low), (t if count < k else high)
        if k <= count <= 2 * k or high - low <= step:
            return eta


def momentum_correction(grads, compress, momentum, nesterov=False, masking=True):
    """Directions of DGC over gradients [rounds, workers, d]."""
    rounds, workers, d = grads.shape
    u, v = np.zeros((workers, d)), np.zeros((workers, d))
    directions = []
    for t in range(rounds):
        sent = np.zeros((workers, d))
        for i in range(workers):
            g = grads[t, i]
            if nesterov:
                u[i] = momentum * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = momentum * u[i] + g
                v[i] = v[i] + u[i]
            sent[i] = compress(v[i])
            mask = sent[i] != 0
            v[i] = v[i] - sent[i]
            if masking:
                u[i][mask] = 0
        directions.append(sent.mean(0))
    return np.array(directions)


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
