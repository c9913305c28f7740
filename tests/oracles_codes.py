"""Key coders, Huffman codes and streams of bits, slowly, from the specification (sections 1.6 to 1.8, 2)."""

import heapq
import math

import numpy as np

# Bits per key for geometric gaps, measured over 10^5 random keys (section 1.8): mean gap -> SketchML, released
# adaptive, adaptive at true cost without the dead unary bit, Huffman on n with the leading 1 implicit, Rice, entropy.
TABLE = {
    2: (10.00, 4.38, 3.38, 2.27, 2.00, 2.00),
    10: (10.00, 6.82, 5.82, 4.84, 4.76, 4.69),
    40: (10.01, 10.01, 8.43, 6.85, 6.80, 6.75),
    80: (10.32, 10.47, 9.34, 7.85, 7.81, 7.76),
    800: (15.82, 13.85, 13.57, 11.20, 11.11, 11.09),
    8000: (17.76, 17.00, 17.00, 14.49, 14.49, 14.41),
}
COLUMNS = ("sketchml", "released", "adaptive", "huffman", "rice", "entropy")


def geometric_entropy(mean):
    """Bits of a gap D >= 1 with P(D) = p (1 - p)^(D - 1), p = 1 / mean."""
    p = 1 / mean
    return (-(1 - p) * math.log2(1 - p) - p * math.log2(p)) / p


def random_keys(rng, mean, count):
    return (np.cumsum(rng.geometric(1 / mean, count)) - 1).astype(np.int64)


def deltas(lists):
    """D of each list: the first key, then the differences."""
    return [int(k) - (0 if i == 0 else int(keys[i - 1])) for keys in lists for i, k in enumerate(keys)]


def digits(number):
    """n: bits needed, 1 for 0."""
    return max(int(number).bit_length(), 1)


def sketchml_bits(lists):
    return sum(2 + 8 * (1 if d < 2**8 else 2 if d < 2**16 else 4) for d in deltas(lists))


def split_bits(lists, m, kind, dead=True):
    """Body b I bits; prefix I - 1 in log2 m bits (kind 0), or I ones and a zero (kind 1), or one bit less."""
    b, total = 32 // m, 0
    for d in deltas(lists):
        intervals = -(-digits(d) // b)
        total += b * intervals + ({0: int(math.log2(m)), 1: intervals + (1 if dead else 0)}[kind] if m > 1 else 0)
    return total


def released_choice(lists):
    """(m, kind) by the estimate with floor(n / b) + 1 intervals, replaced on strict improvement."""
    p = np.zeros(33)
    numbers = deltas(lists)
    for d in numbers:
        p[digits(d)] += 1 / len(numbers)
    best, choice = 32.0, (1, 0)
    for m in (2, 4, 8, 16):
        b = 32 // m
        intervals = sum(p[n] * (n // b + 1) for n in range(33))
        for kind, cost in ((0, b * intervals + math.log2(m)), (1, (b + 1) * intervals + 1)):
            if cost < best - 1e-9:
                best, choice = cost, (m, kind)
    return choice


def released_bits(lists):
    return split_bits(lists, *released_choice(lists))


def adaptive_bits(lists):
    return min(split_bits(lists, m, kind, dead=False) for m in (1, 2, 4, 8, 16) for kind in (0, 1))


def rice_bits(lists):
    """Gaps g = D - 1, but the key itself at the start of a list; the best parameter of all."""
    gaps = [int(k) - (0 if i == 0 else int(keys[i - 1]) + 1) for keys in lists for i, k in enumerate(keys)]
    return min(sum((g >> k) + 1 + k for g in gaps) for k in range(32))


def huffman_bits(lists):
    """Of n (0 for D = 0) and n - 1 bits, without any header; the code is not limited in length."""
    counts = {}
    for d in deltas(lists):
        counts[d.bit_length()] = counts.get(d.bit_length(), 0) + 1
    return huffman_cost(list(counts.values())) + sum(c * max(n - 1, 0) for n, c in counts.items())


def huffman_cost(counts):
    """Bits of all symbols in an optimal prefix code; 1 each if there is only one."""
    heap = [c for c in counts if c > 0]
    if len(heap) == 1:
        return heap[0]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        total += pair
        heapq.heappush(heap, pair)
    return total


def limited_cost(counts, limit):
    """The same with no code longer than the limit: least sum of c l over all lengths with Kraft's sum at most 1.

    Sorted descending, lengths ascend: dynamic programming over (symbols placed, leaves left at this depth).
    """
    counts = sorted((c for c in counts if c > 0), reverse=True)
    if len(counts) == 1:
        return counts[0]
    rest = np.concatenate([np.cumsum(counts[::-1])[::-1], [0]])
    states = {(0, 1): 0}
    for _ in range(limit):  # every symbol not yet placed goes one deeper
        deeper = {}
        for (placed, free), cost in states.items():
            cost, room = cost + rest[placed], 2 * free
            for more in range(min(room, len(counts) - placed) + 1):
                left = min(room - more, len(counts))
                key = (placed + more, left)
                if cost < deeper.get(key, math.inf):
                    deeper[key] = cost
        states = deeper
    return min(cost for (placed, _), cost in states.items() if placed == len(counts))


def stream(codes, lengths):
    """Words of codes laid end to end, lowest bits first."""
    pairs = zip(map(int, codes), map(int, lengths), strict=True)
    bits = "".join(f"{c % 2**n:0{n}b}"[::-1] for c, n in pairs if n)
    words = [bits[i : i + 32] for i in range(0, len(bits), 32)]
    return np.array([int(word[::-1], 2) for word in words], np.uint32), len(bits)
