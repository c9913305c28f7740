"""Float64 transcriptions of what low-rank and EF21-like methods are defined by. None of this imports jaxcomp."""

import numpy as np


def gram_schmidt(matrix, epsilon=1e-8):
    """`_orthogonalize` of torch's hook: modified Gram-Schmidt, norms with epsilon added, in place."""
    for i in range(matrix.shape[1]):
        column = matrix[:, i : i + 1]
        column /= np.linalg.norm(column) + epsilon
        rest = matrix[:, i + 1 :]
        rest -= np.sum(column * rest, axis=0) * column


class PowerSGDHook:
    """`powerSGD_hook` of torch for one bucket: iteration counter, dense start, Q warm, error of the whole bucket.

    first: name -> Q [columns, rank] of the first compressed round, before it is made orthonormal.
    again: iteration -> the same for that round, where there is no warm start.
    feedback: whether errors are remembered.
    """

    def __init__(self, first, rank=1, start=10, min_ratio=2.0, again=None, feedback=True):
        self.again, self.feedback = again, feedback
        self.q = {name: np.array(q, np.float64) for name, q in first.items()}
        self.rank, self.start, self.min_ratio, self.iter, self.error = rank, start, min_ratio, 0, None

    def __call__(self, workers):
        """workers: for each, name -> gradient. Returns name -> direction."""
        n, names = len(workers), list(workers[0])
        mean = lambda arrays: sum(arrays) / n
        self.iter += 1
        if self.iter <= self.start:
            return {name: mean([np.float64(g[name]) for g in workers]) for name in names}
        if self.again is not None:
            self.q = {name: np.array(q, np.float64) for name, q in self.again(self.iter - 1).items()}
        if self.error is None or not self.feedback:
            self.error = [{name: np.zeros(np.shape(g[name])) for name in names} for g in workers]
        inputs = [{name: g[name] + e[name] for name in names} for g, e in zip(workers, self.error, strict=True)]
        out = {}
        for name in names:
            views = [x[name].reshape(x[name].shape[0], -1) if x[name].ndim else x[name].reshape(1, 1) for x in inputs]
            rows, columns = views[0].shape
            rank = min(rows, columns, self.rank)
            if not rank * (rows + columns) * self.min_ratio < rows * columns:
                out[name] = mean([x[name] for x in inputs])
                continue
            q = self.q[name][:, :rank].copy()
            gram_schmidt(q)
            p = sum(m @ q for m in views)
            gram_schmidt(p)
            self.q[name] = mean([m.T @ p for m in views])
            out[name] = (p @ self.q[name].T).reshape(np.shape(inputs[0][name]))
        # Of leaves that are not compressed, too: there the errors of all workers add up to zero.
        self.error = [{name: x[name] - out[name] for name in names} for x in inputs]
        return out


class BatchedPowerSGDHook:
    """`batched_powerSGD_hook` of torch for one bucket: the whole of it as one square matrix.

    first: Q [side, rank] of the first compressed round, before it is made orthonormal. again: iteration -> the same for
    that round, where there is no warm start. feedback: whether errors are remembered, those of what is filled up, too.
    """

    def __init__(self, first, rank=1, start=10, again=None, feedback=True):
        self.q, self.again, self.feedback = None if first is None else np.array(first, np.float64), again, feedback
        self.rank, self.start, self.iter, self.error = rank, start, 0, None

    def __call__(self, workers):
        """workers: for each, name -> gradient; the bucket has them in this order. Returns name -> direction."""
        n, shapes = len(workers), {name: np.shape(g) for name, g in workers[0].items()}
        bucket = [np.concatenate([np.float64(g).reshape(-1) for g in each.values()]) for each in workers]
        length = bucket[0].size
        side = int(np.ceil(np.sqrt(length)))
        self.iter += 1
        if self.iter <= self.start:
            out = sum(bucket) / n
        else:
            inputs = [np.pad(x, (0, side**2 - length)) for x in bucket]
            if self.error is None or not self.feedback:
                self.error = [np.zeros(side**2) for _ in workers]
            inputs = [x + e for x, e in zip(inputs, self.error, strict=True)]
            if self.again is not None:
                self.q = np.array(self.again(self.iter - 1), np.float64)
            gram_schmidt(self.q)
            p = sum(x.reshape(side, side) @ self.q for x in inputs)
            gram_schmidt(p)
            self.q = sum(x.reshape(side, side).T @ p for x in inputs) / n
            out = (p @ self.q.T).reshape(-1)
            self.error = [x - out for x in inputs]
            out = out[:length]
        cuts = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
        return {name: x.reshape(shapes[name]) for name, x in zip(shapes, np.split(out, cuts), strict=True)}


def ef21(workers, compress, momentum=0.0, plus=False, whole_start=True):
    """Richtarik, Sokolov, Fatkhullin 2021, algorithms 2 and 3 (with one choice for all); Fatkhullin et al. 2023.

    workers: f64[rounds, n, d]. Returns directions [rounds, d] and the shifts [n, d].
    """
    directions, shifts, averages = [], None, None
    for t, g in enumerate(np.float64(workers)):
        averages = g.copy() if t == 0 else momentum * averages + (1 - momentum) * g
        shifts = np.zeros_like(g) if t == 0 else shifts
        if t == 0 and whole_start:
            shifts = g.copy()
        else:
            shifted = shifts + np.stack([compress(v - h) for v, h in zip(averages, shifts, strict=True)])
            anew = np.stack([compress(v) for v in averages])
            better = plus and np.sum((anew - averages) ** 2) < np.sum((shifted - averages) ** 2)
            shifts = anew if better else shifted
        directions.append(shifts.mean(0))
    return np.stack(directions), shifts


def ef_bv(workers, compress, shift_step, mean_step):
    """Condat, Li, Richtarik 2022, algorithm 1."""
    shifts, directions = np.zeros(np.shape(workers)[1:]), []
    for g in np.float64(workers):
        sent = np.stack([compress(each) for each in g - shifts])
        directions.append(shifts.mean(0) + mean_step * sent.mean(0))
        shifts = shifts + shift_step * sent
    return np.stack(directions), shifts
