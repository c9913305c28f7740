"""Slow float64 NumPy transcriptions of SketchML's and SKCompress's definitions, one key at a time.

Keys are Python integers, sketches are dictionaries. None of this imports jaxcomp.
"""

import math

import numpy as np
from oracles import fmix32

EMPTY = 2**31 - 1
FLOOR = 8  # cells in a row of a small group, in "recentred"


def column(key: int, seed: int, columns: int) -> int:
    """Multiply-high of a mixed key."""
    return fmix32(key ^ seed) * columns >> 32


def columns_of(count: int, per_mille: int) -> int:
    """ceil(rho g) with rho a multiple of 1/1000, without rounding."""
    return -(-count * per_mille // 1000)


# ------------------------------------------------------------------------------------------------
# MinMaxSketch (specification 1.4)


def minmax(pairs, seeds, columns, distance):
    """What each key reads after all (key, bucket) were inserted, and the tables: a dictionary for each row."""
    tables = [{} for _ in seeds]
    for key, bucket in pairs:
        for table, seed in zip(tables, seeds, strict=True):
            j = column(key, seed, columns)
            if j not in table or distance(bucket) < distance(table[j]):
                table[j] = bucket
    read = {}
    for key, _ in pairs:
        found = [table[column(key, seed, columns)] for table, seed in zip(tables, seeds, strict=True)]
        read[key] = max(found, key=distance)
    return read, tables


def chance_correct(others: int, columns: int, rows: int) -> float:
    """Section 2: no row lost the key to one of the `others` keys that are nearer to zero."""
    return 1 - (1 - (1 - 1 / columns) ** others) ** rows


def mean_decay(nearer: list[int], columns: int, rows: int) -> float:
    """Section 2: expected loss in buckets of a key whose distance is len(nearer).

    nearer: N_i, the number of other keys at distance <= i, for each i below the key's distance.
    """
    return len(nearer) - sum(chance_correct(others, columns, rows) for others in nearer)


# ------------------------------------------------------------------------------------------------
# As released (specification 1.2 and 1.3)


def released(keys, values, buckets, groups, seeds, per_mille):
    """Decoded value, true and decoded bucket of each key; bucket of zero, number of buckets, group edges."""
    n = len(values)
    ordered = sorted(values)
    ranks = [min(n * i // buckets, n - 1) for i in range(1, buckets)]
    splits = sorted({ordered[rank] for rank in ranks})
    total = len(splits) + 1
    bucket = [sum(split <= v for split in splits) for v in values]
    ends = [ordered[0], *splits, ordered[-1]]
    level = [(ends[b] + ends[b + 1]) / 2 for b in range(total)]
    if ordered[0] > 0:
        zero = 0
    elif ordered[-1] < 0:
        zero = total - 1
    else:
        zero = sum(split < 0 for split in splits)
    edges = released_groups(zero, total, groups)
    group = [next(i for i, edge in enumerate(edges) if b < edge) for b in bucket]
    decoded = {}
    for g in range(len(edges)):
        pairs = [(key, b) for key, b, i in zip(keys, bucket, group, strict=True) if i == g]
        if pairs:
            # In a group of both signs the first of those at equal distance stays, whatever the order: positive ones
            # go in first here.
            pairs.sort(key=lambda pair: pair[1] < zero)
            read, _ = minmax(pairs, seeds, columns_of(len(pairs), per_mille), lambda b: abs(b - zero))
            decoded |= read
    return {
        "values": np.array([level[decoded[key]] for key in keys]),
        "bucket": np.array(bucket),
        "decoded": np.array([decoded[key] for key in keys]),
        "zero": zero,
        "total": total,
        "edges": edges,
        "group": np.array(group),
        "level": np.array(level),
    }


def released_groups(zero, total, groups):
    groups = min(groups, total)  # the released code divides by zero instead
    if groups == 1:
        return [total]
    if groups == 2:
        return [zero, total]
    width = total // groups
    if zero < width:
        first = zero
    elif zero % width < width // 2:
        first = width + zero % width
    else:
        first = zero % width
    return [first + i * width for i in range(groups - 1)] + [total]


# ------------------------------------------------------------------------------------------------
# With zero as an exact split, groups of one sign, and means


def of_one_sign(values, groups):
    """Number of groups for the negative values: those whose middle value is negative, but some for each sign."""
    n, negative = len(values), sum(v < 0 for v in values)
    ordered = sorted(values)
    number = sum(ordered[n * (2 * g + 1) // (2 * groups)] < 0 for g in range(groups))
    return min(max(number, 1 if negative else 0), groups - 1 if negative < n else groups)


def signed_buckets(values, buckets, groups):
    """Bucket of each value: quantiles of the negative values, zero, quantiles of the others."""
    negative = sorted(v for v in values if v < 0)
    rest = sorted(v for v in values if v >= 0)
    below = of_one_sign(values, groups) * (buckets // groups)
    above = buckets - below
    splits = [negative[len(negative) * j // below] for j in range(1, below)]
    splits += [0.0] if below and above else []
    splits += [rest[len(rest) * j // above] for j in range(1, above)]
    return np.array([sum(split <= v for split in splits) for v in values]), below


def means_of(values, decoded):
    values, decoded = np.asarray(values, np.float64), np.asarray(decoded)
    return np.array([math.fsum(values[decoded == b]) / np.sum(decoded == b) for b in decoded])


def quantile(values, buckets):
    bucket, _ = signed_buckets(values, buckets, buckets)
    return {"values": means_of(values, bucket), "bucket": bucket}


def weighted(values, buckets, power):
    """Buckets of equal weight |v|^power on each side of zero; a value goes where the middle of its weight lies."""
    weight = np.abs(values) ** power
    left, total = weight[values < 0].sum(), weight.sum()
    negative, rest = sorted(v for v in values if v < 0), sorted(v for v in values if v >= 0)
    below = sum(total * (2 * g + 1) / (2 * buckets) < left for g in range(buckets))
    below = min(max(below, 1 if negative else 0), buckets - 1 if rest else buckets)

    def splits_of(side, number):
        middles = np.cumsum(np.abs(side) ** power) - np.abs(side) ** power / 2
        goals = [sum(np.abs(side) ** power) * j / number for j in range(1, number)]
        return [
            next((v for v, middle in zip(side, middles, strict=True) if middle >= goal), math.inf) for goal in goals
        ]

    splits = [min(split, 0.0) for split in splits_of(negative, below)]
    splits += [0.0] if 0 < below < buckets else []
    splits += splits_of(rest, buckets - below)
    return {"bucket": np.array([sum(split <= v for split in splits) for v in values]), "below": below}


def recentred(keys, values, buckets, groups, seeds, per_mille):
    width = buckets // groups
    bucket, below = signed_buckets(values, buckets, groups)
    distance = lambda b: b - below if b >= below else below - 1 - b
    decoded = {}
    for g in range(groups):
        pairs = [(key, int(b)) for key, b in zip(keys, bucket, strict=True) if b // width == g]
        if pairs:
            columns = max(columns_of(len(pairs), per_mille), min(len(pairs), FLOOR))
            decoded |= minmax(pairs, seeds, columns, distance)[0]
    decoded = np.array([decoded[key] for key in keys])
    return {
        "values": means_of(values, decoded),
        "bucket": bucket,
        "decoded": decoded,
        "distance": np.array([distance(b) for b in bucket]),
        "decoded_distance": np.array([distance(b) for b in decoded]),
    }
