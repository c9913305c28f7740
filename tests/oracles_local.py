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


class Adam:
    """optax.adamw: moments mu and nu, corrected by their counts; the decay of weights is beside them."""

    def __init__(self, rate, decay=0.0, b1=0.9, b2=0.999, eps=1e-8):
        self.rate, self.decay, self.betas, self.eps, self.count = rate, decay, (b1, b2), eps, 0
        self.moments = {"mu": 0.0, "nu": 0.0}

    def __call__(self, gradient, x):
        self.count += 1
        (b1, b2), m = self.betas, self.moments
        m["mu"] = b1 * m["mu"] + (1 - b1) * gradient
        m["nu"] = b2 * m["nu"] + (1 - b2) * gradient**2
        mu, nu = m["mu"] / (1 - b1**self.count), m["nu"] / (1 - b2**self.count)
        return -self.rate * (mu / (np.sqrt(nu) + self.eps) + self.decay * x)


class Momentum:
    """optax.sgd(rate, momentum): trace <- momentum trace + g; step -rate trace."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.moments = rate, momentum, {"trace": 0.0}

    def __call__(self, gradient, x):
        self.moments["trace"] = gradient + self.momentum * self.moments["trace"]
        return -self.rate * self.moments["trace"]


class Muon:
    """optax.contrib.muon of one matrix: five steps of Newton and Schulz on the momentum, with Nesterov's look ahead."""

    def __init__(self, rate, shape, beta=0.95, eps=1e-8):
        self.rate, self.shape, self.beta, self.eps, self.count = rate, shape, beta, eps, 0
        self.moments = {"mu": 0.0}

    def __call__(self, gradient, x):
        self.count += 1
        b, (rows, columns) = self.beta, self.shape
        mu = self.moments["mu"] = b * self.moments["mu"] + (1 - b) * gradient
        ahead = b * mu / (1 - b ** (self.count + 1)) + (1 - b) * gradient / (1 - b**self.count)
        y = ahead.reshape(self.shape)
        y = y.T if rows > columns else y
        y = y / (np.linalg.norm(y) + self.eps)
        for _ in range(5):
            square = y @ y.T
            y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
        y = y.T if rows > columns else y
        return -self.rate * np.sqrt(max(1, columns / rows)) * y.reshape(-1)


def des_loc(start, gradient, optimizers, *, every, periods, steps):
    """DES-LOC: points of all workers after each step, f64[steps, n, d].

    Every `every` steps x_i <- mean x_i, and every periods[name] steps, for each moment, u_i <- mean u_i.
    """
    mine, points = [np.array(start, np.float64) for _ in optimizers], []
    for t in range(1, steps + 1):
        mine = [x + step(gradient(i, t, x), x) for i, (x, step) in enumerate(zip(mine, optimizers, strict=True))]
        if t % every == 0:
            mine = [np.mean(mine, 0)] * len(mine)
        for name, period in periods.items():
            if t % period == 0:
                shared = np.mean([each.moments[name] for each in optimizers], 0)
                for each in optimizers:
                    each.moments[name] = shared
        points.append(np.stack(mine))
    return np.stack(points)
