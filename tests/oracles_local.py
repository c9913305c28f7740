"""Local updates in float64 NumPy, step by step as `jaxcomp.transforms.local_updates` defines them."""

import numpy as np


class Sgd:
    """optax.sgd(rate, momentum, nesterov): m <- momentum m + g; step -rate (g + momentum m) or -rate m."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov, self.trace = rate, momentum, nesterov, 0.0

    def __call__(self, gradient):
        self.trace = gradient + self.momentum * self.trace
        return -self.rate * (gradient + self.momentum * self.trace if self.nesterov else self.trace)


class Mean:
    """The mean of all differences."""

    def __call__(self, messages):
        return np.mean(messages, 0)


class TopK:
    """Error feedback with the k largest entries of decay e + message."""

    def __init__(self, k, decay=1.0):
        self.k, self.decay, self.memory = k, decay, 0.0

    def __call__(self, messages):
        total = self.decay * self.memory + np.asarray(messages)
        sent = np.zeros_like(total)
        for row, out in zip(total, sent, strict=True):
            top = np.argsort(-np.abs(row), kind="stable")[: self.k]
            out[top] = row[top]
        self.memory = total - sent
        return sent.mean(0)


def local_updates(start, gradient, inner, outer, exchange, *, every, parts, delay, mixing, steps):
    """Points of all workers after each step, f64[steps, n, d], and the shared point after each, f64[steps, d].

    Args:
        start: f64[d].
        gradient: (worker, step counted from one, its point) -> f64[d].
        inner: an optimizer of each worker. outer, exchange: of each fragment; an exchange maps f64[n, m] to f64[m].
        parts: a slice of the d entries for each fragment.
    """
    shared, mine, taken = np.array(start, np.float64), [np.array(start, np.float64) for _ in inner], {}
    points, centre = [], []
    for t in range(1, steps + 1):
        mine = [x + step(gradient(i, t, x)) for i, (x, step) in enumerate(zip(mine, inner, strict=True))]
        for p, part in enumerate(parts):
            place = (p + 1) * every // len(parts) % every
            if (t + delay) % every == place:
                taken[p] = np.stack([shared[part] - x[part] for x in mine])
            if t % every == place and p in taken and t > delay:
                shared[part] += outer[p](exchange[p](taken.pop(p)))
                for x in mine:
                    x[part] = (1 - mixing) * shared[part] + mixing * x[part]
        points.append(np.stack(mine))
        centre.append(shared.copy())
    return np.stack(points), np.stack(centre)


def sparse_loco(x, *, chunk=4096, k=64, bits=2, refine=4, released=False):
    """What the others decode of a message x: the k largest of each chunk, each the mean of its bin.

    released: bins are found by rounding to the nearest multiple of their width, so that the middle one lies on the
    mean, and are not refined; otherwise by rounding down, and `refine` times each value goes to the nearest mean.
    """
    x = np.asarray(x, np.float64)
    rows = np.pad(x, (0, -len(x) % chunk)).reshape(-1, chunk)
    places = np.argsort(-np.abs(rows), axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(rows, places, 1)
    count = 2**bits
    centred = values - values.mean()
    width = 6 * np.sqrt(np.mean(centred**2)) / count
    scaled = centred / width + count // 2
    codes = np.clip(np.round(scaled) if released else np.floor(scaled), 0, count - 1).astype(int)
    means = lambda: np.array([values[codes == i].mean() if np.any(codes == i) else np.inf for i in range(count)])
    for _ in range(0 if released else refine):
        codes = np.argmin(np.abs(values[..., None] - means()), axis=-1)
    out = np.zeros_like(rows)
    np.put_along_axis(out, places, means()[codes], 1)
    return out.reshape(-1)[: len(x)]
