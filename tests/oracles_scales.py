"""Block-scaled numbers in float64 NumPy, with the casts of ml_dtypes; none of this imports jaxcomp."""

import math
from fractions import Fraction

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


def grid_of(name):
    """The values of a format that are not negative, in the order of their codes."""
    if name == "mxint8":  # OCP MX v1.0, section 5.3.4: -128/64 may be left unused
        return [Fraction(k, 64) for k in range(128)]
    kind = FLOATS[name]
    codes = np.arange(2 ** (ml_dtypes.finfo(kind).bits - 1), dtype=np.uint8)
    return [Fraction(v) for v in codes.view(kind).astype(np.float64) if np.isfinite(v)]


def mx(x, name, floor=False, size=32):
    """OCP Microscaling Formats v1.0, section 6.3, in exact arithmetic.

    Entries that are not finite count as zero.  Returns bytes of the scales, signs, levels (places in the grid) and
    values, f64, exact, of which the largest are those of f32.
    """
    grid = grid_of(name)
    places = np.array([float(v) for v in grid])
    top = max(e for e in range(-9, 17) if Fraction(2) ** e <= grid[-1])
    scales, signs, levels, values = [], [], [], []
    for block in blocks(np.float64(x), size):
        entries = [Fraction(v) if math.isfinite(v) else Fraction(0) for v in block]
        peak = max(map(abs, entries))
        exponent = -127
        if floor:  # floor(log2 peak) - top
            while exponent < 127 and peak >= Fraction(2) ** (exponent + 1 + top):
                exponent += 1
        else:
            while exponent < 127 and peak > grid[-1] * Fraction(2) ** exponent:
                exponent += 1
        scales.append(exponent + 127)
        for entry, raw in zip(entries, block, strict=True):
            y = min(abs(entry) / Fraction(2) ** exponent, grid[-1])
            above = min(int(np.searchsorted(places, float(y))), len(grid) - 1)
            around = [k for k in range(above - 2, above + 2) if 0 <= k < len(grid)]
            level = min(around, key=lambda k: (abs(grid[k] - y), k % 2))
            signs.append(math.isfinite(raw) and bool(np.signbit(raw)) and not (name == "mxint8" and level == 0))
            levels.append(level)
            value = min(grid[level] * Fraction(2) ** exponent, Fraction(float(np.finfo(np.float32).max)))
            values.append(float(value) * (-1 if signs[-1] else 1))
    return np.uint8(scales), np.array(signs), np.array(levels), np.array(values)


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
