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
    """

    def __init__(self, first, rank=1, start=10, min_ratio=2.0):
        self.q = {name: np.array(q, np.float64) for name, q in first.items()}
        self.rank, self.start, self.min_ratio, self.iter, self.error = rank, start, min_ratio, 0, None

    def __call__(self, workers):
        """workers: for each, name -> gradient. Returns name -> direction."""
        n, names = len(workers), list(workers[0])
        mean = lambda arrays: sum(arrays) / n
        self.iter += 1
        if self.iter <= self.start:
            return {name: mean([np.float64(g[name]) for g in workers]) for name in names}
        if self.error is None:
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
