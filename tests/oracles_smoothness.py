"""Float64 NumPy transcriptions of smoothness-aware compression, written from the formulas alone."""

import itertools

import numpy as np


def glm_matrix(features, curvature, l2):
    """(curvature / m) A'A + l2 I."""
    m, d = features.shape
    matrix = np.zeros((d, d))
    for a in features:
        matrix += curvature * np.outer(a, a) / m
    return matrix + l2 * np.eye(d)


def roots(matrix):
    values, vectors = np.linalg.eigh(matrix)
    keep = values > values.max() * len(values) * np.finfo(float).eps
    root = sum(np.sqrt(v) * np.outer(q, q) for v, q, k in zip(values, vectors.T, keep, strict=True) if k)
    inverse = sum(np.outer(q, q) / np.sqrt(v) for v, q, k in zip(values, vectors.T, keep, strict=True) if k)
    return root, inverse


def logistic_gradient(features, labels, l2, x):
    """labels in {0, 1}; loss mean log(1 + exp(z)) - b z, plus (l2 / 2)|x|^2."""
    z = features @ x
    return features.T @ (1 / (1 + np.exp(-z)) - labels) / len(labels) + l2 * x


def enumerate_sparsification(p):
    """All masks with their probabilities."""
    for mask in itertools.product([0, 1], repeat=len(p)):
        chosen = np.array(mask, bool)
        yield chosen, np.prod(np.where(chosen, p, 1 - p))


def sparsification_error(x, p, matrix):
    """E|C(x) - x|^2_L by enumeration."""
    total = 0.0
    for mask, chance in enumerate_sparsification(p):
        e = np.where(mask, x / p, 0) - x
        total += chance * e @ matrix @ e
    return total


def dithering_error(x, h, diag, norm=2):
    """E|Q(x) - x|^2_L: coordinates are rounded independently, so only the diagonal counts."""
    size = np.linalg.norm(x, norm)
    y = np.abs(x) / (h * size)
    r = y - np.floor(y)
    return size**2 * np.sum(diag * h**2 * r * (1 - r))


def dither(x, h, u, norm=2):
    """Levels and value for given uniform draws."""
    size = np.linalg.norm(x, norm)
    levels = np.floor(np.abs(x) / (h * size) + u).astype(int)
    return np.sign(x) * levels, size * np.sign(x) * h * levels


def elias_omega_length(n):
    length = 1
    while n > 1:
        bits = n.bit_length()
        length += bits
        n = bits - 1
    return length


def elias_bits(levels, norms=1):
    """32 bits per norm; for each non-zero level its gap, its sign, its magnitude."""
    bits, last = 32 * norms, -1
    for j, level in enumerate(levels):
        if level:
            bits += elias_omega_length(j - last) + 1 + elias_omega_length(abs(int(level)))
            last = j
    return bits


def descent(gradients, operators, compress, x, gamma, alpha, rounds):
    """DIANA+ with explicit shifts: operators: list of (root, inverse); compress(i, t, u) -> c. Returns x, shifts."""
    n = len(gradients)
    shifts = [np.zeros_like(x) for _ in range(n)]
    for t in range(rounds):
        mean = np.mean(shifts, axis=0)
        decoded = []
        for i in range(n):
            root, inverse = operators[i]
            decoded.append(root @ compress(i, t, inverse @ (gradients[i](x) - shifts[i])))
        x = x - gamma * (mean + np.mean(decoded, axis=0))
        shifts = [s + alpha * d for s, d in zip(shifts, decoded, strict=True)]
    return x, shifts


def adiana(gradients, operators, compress, x, constants, coins, rounds):
    """ADIANA+ as specified; compress(i, t, which, u), which 0 for the point x and 1 for w; coins[t] refreshes w."""
    eta, theta_1, theta_2, gamma, beta, alpha = constants
    n = len(gradients)
    y = z = w = x
    shifts = [np.zeros_like(x) for _ in range(n)]
    for t in range(rounds):
        point = theta_1 * z + theta_2 * w + (1 - theta_1 - theta_2) * y
        mean = np.mean(shifts, axis=0)
        first, second = [], []
        for i in range(n):
            root, inverse = operators[i]
            first.append(root @ compress(i, t, 0, inverse @ (gradients[i](point) - shifts[i])))
            second.append(root @ compress(i, t, 1, inverse @ (gradients[i](w) - shifts[i])))
        g = mean + np.mean(first, axis=0)
        shifts = [s + alpha * c for s, c in zip(shifts, second, strict=True)]
        w = y if coins[t] else w
        y = point - eta * g
        z = beta * z + (1 - beta) * point + (gamma / eta) * (y - point)
    return y


def isega(gradients, operators, masks, probabilities, x, gamma):
    """ISEGA+: the sampled whitened coordinates of the shift are overwritten; masks[t][i]."""
    n = len(gradients)
    shifts = [np.zeros_like(x) for _ in range(n)]
    for mask in masks:
        mean = np.mean(shifts, axis=0)
        decoded, moves = [], []
        for i in range(n):
            root, inverse = operators[i]
            u = inverse @ (gradients[i](x) - shifts[i])
            decoded.append(root @ np.where(mask[i], u / probabilities[i], 0))
            moves.append(root @ np.where(mask[i], u, 0))
        x = x - gamma * (mean + np.mean(decoded, axis=0))
        shifts = [s + m for s, m in zip(shifts, moves, strict=True)]
    return x, shifts


def marina(gradients, operators, compress, x, gamma, coins):
    """MARINA+: coins[t] sends full gradients, else compressed differences."""
    n = len(gradients)
    g = np.mean([grad(x) for grad in gradients], axis=0)
    for t, coin in enumerate(coins):
        new = x - gamma * g
        if coin:
            g = np.mean([grad(new) for grad in gradients], axis=0)
        else:
            moves = []
            for i in range(n):
                root, inverse = operators[i]
                moves.append(root @ compress(i, t, inverse @ (gradients[i](new) - gradients[i](x))))
            g = g + np.mean(moves, axis=0)
        x = new
    return x
