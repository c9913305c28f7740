"""Block-scaled numbers in float64 NumPy, with the casts of ml_dtypes; none of this imports jaxcomp."""

import math

import ml_dtypes
import numpy as np

FLOATS = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
}


def blocks(x, size):
    return [x[i : i + size] for i in range(0, len(x), size)]


def power_up(peak, largest):
    """The least power of two s with peak <= largest s."""
    exponent = -126
    while peak > largest * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


def power_floor(peak, largest):
    """OCP Microscaling Formats, section 6.3."""
    if peak == 0:
        return 2.0**-126
    return 2.0 ** max(math.floor(math.log2(peak)) - math.floor(math.log2(largest)), -126)


def bfloat16_up(x):
    below = np.float64(np.float32(x).view(np.uint32) & np.uint32(0xFFFF0000))
    below = np.uint32(below).view(np.float32)
    return float(below) if below >= x else float((below.view(np.uint32) + np.uint32(0x10000)).view(np.float32))


def e4m3_up(ratio):
    grid = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float(grid[np.searchsorted(grid, ratio)])


def floats(x, kind, size, rule):
    """x_hat of nearest rounding, ties to even; rule: (peak of the block, largest element) -> scale."""
    largest = float(ml_dtypes.finfo(kind).max)
    out = []
    for block in blocks(np.float64(x), size):
        scale = rule(np.abs(block).max(), largest)
        scaled = np.clip(block / scale, -largest, largest) if scale else np.zeros_like(block)
        out.append(scaled.astype(np.float32).astype(kind).astype(np.float64) * scale)
    return np.concatenate(out)


def integers(x, bits, size):
    """Values 1 - L .. L, the larger side on L; errors of at most half a step."""
    last = 2 ** (bits - 1)
    out = []
    for block in blocks(np.float64(x), size):
        most, least = max(block.max(), 0), max(-block.min(), 0)
        sign = -1 if least > most else 1
        step = sign * bfloat16_up(max(max(most, least) / (last + 0.5), min(most, least) / (last - 0.5)))
        out.append(np.clip(np.round(block / step), 1 - last, last) * step)
    return np.concatenate(out)


def qgz(x, size):
    """DeepSpeed ZeRO++: one scale for each group, q = clip(round(8 x / max), -8, 7)."""
    out = []
    for block in blocks(np.float64(x), size):
        step = np.abs(block).max() / 8
        out.append(np.clip(np.round(block / step), -8, 7) * step)
    return np.concatenate(out)
