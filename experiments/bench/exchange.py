"""Exchanges of unequal messages between processes: bytes on the wire, and time on links of one rate.

One process for each worker, each on a host of its own (see `experiments.lib.netlab`; Linux and root only), joined by
gloo. Each exchanges top-k messages whose lengths follow DAGC's ratios. Bytes are those that the kernel counted, headers
included.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.timing import bench_parser
from experiments.lib.cli import at_least, common, one_or_more, positive
from experiments.lib.data import skewed_volumes
from experiments.lib.netlab import laboratory
from experiments.lib.pool import Tasks, serve
from experiments.lib.report import new_console, show
from experiments.network import counted, pool_in, rounds_of, timed
from experiments.network.mesh import Workers
from experiments.network.worker import ends_of
from jaxcomp.base import Lengths
from jaxcomp.exchange.routes import Parcel, Way, costs
from jaxcomp.exchange.routes.route import ROUTES, Gather, fastest, gathered_by
from jaxcomp.payloads import Sparse
from jaxcomp.payloads.unequal import message_of

__all__ = ["main"]

LATENCY = 1e-3  # seconds that the model takes for a message
COLUMNS = {
    "exchange": lambda row: row["via"] if row["via"] == row["chosen"] else f"{row['via']} ({row['chosen']})",
    "kB sent by a worker": lambda row: f"{row['bytes'] / 1e3:,.1f}",
    "/ real sizes": lambda row: f"{row['bytes'] / row['real']:.3f}",
    "by the program": lambda row: f"{row['model_bytes'] / row['real']:.3f}",
    "ms": lambda row: f"{1e3 * row['seconds']:.1f}",
    "by the model": lambda row: f"{1e3 * row['model_seconds']:.1f}",
}


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench exchange", __doc__)
    common(p, "worker", "address", workers={"type": at_least(2)}, ratio=(0.01, "mean ratio"))
    p.add_argument("--skew", type=one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--size", type=at_least(1), default=1_000_000, help="entries of the gradient")
    p.add_argument("--rounds", type=at_least(1), default=10, help="timed exchanges of each kind; the median counts")
    p.add_argument("--mbit", type=positive, default=100.0, help="limit of every link, Mbit/s")
    o = p.parse_args(arguments)
    if o.worker is not None:
        serve(o.address, o.workers, o.worker, Tasks(exchange=Exchange))
        return 0
    rows, task = [], {"size": o.size, "ratio": o.ratio, "skew": o.skew, "mbit": o.mbit}
    with laboratory(o.workers, 1e6 * o.mbit) as lab, pool_in(lab, "bench exchange") as pool:
        pool.hear()
        for via in ("gather", "concat", "ring", "auto"):
            said = pool.ask(what="exchange", via=via, **task)
            if len({each["sum"] for each in said}) > 1:
                raise RuntimeError(f"{via}: the workers' sums differ")
            answers, _, sent = counted(lab, lambda: timed(pool, what="rounds", number=o.rounds))
            rows.append({**said[0], "via": via, "bytes": sent / o.rounds, "seconds": np.median(rounds_of(answers))})
    quickest = min(row["seconds"] for row in rows)
    columns = {**COLUMNS, "/ best": lambda row: f"{row['seconds'] / quickest:.2f}"}
    title = f"{o.workers} processes, skew {o.skew:g}, {o.size:,} entries, mean ratio {o.ratio:g}"
    notes = "real sizes: the sum over all workers of their values and indices. ms: median of an exchange."
    show(new_console(), f"{title}, links of {o.mbit:g} Mbit/s", columns, rows, notes, o.markdown)
    return 0


class Exchange:
    """Of top-k messages. described: its route, a sum that is equal everywhere, and what the model says."""

    def __init__(self, via: str, size: int, ratio: float, skew: float, mbit: float):
        workers, n, number = Workers(), jax.process_count(), jax.process_index()
        counts = jc.allocate.counts(jc.allocate.ratios(skewed_volumes(n, skew), ratio), size)
        lengths, mine = Lengths(tuple(int(k) for k in counts), size), int(counts[number])
        indices = np.full((1, max(lengths.counts)), size, np.int32)
        indices[0, :mine] = np.arange(mine) * (size // mine)
        values = np.where(indices < size, number + 1, 0).astype(np.float32)
        link = jc.Link(LATENCY, mbit * 1e6 / 8)
        message = message_of((Sparse(values[0], indices[0]),), (lengths,), n)
        compressor = jc.top_k(k=1)._replace(lengths=lambda like: lengths)
        chosen = (fastest(message.lengths, message.capacity, link) or "gather") if via == "auto" else via

        def exchange(payload):
            mine = jax.tree.map(lambda a: a[0], payload)
            parcel = Parcel(compressor, mine, (), jax.ShapeDtypeStruct((size,), jnp.float32))
            (rows,), _ = gathered_by(cast(Gather, ROUTES[chosen].gather), [parcel], Way("data", n, link=link))
            return jnp.sum(rows.values) + jnp.sum(rows.indices % 7)

        self.payload = jax.tree.map(workers.own, Sparse(values, indices))
        self.step = jax.jit(jax.shard_map(exchange, mesh=workers.mesh, in_specs=P("data"), out_specs=P()))
        cost = costs(message.lengths, message.capacity, link)[chosen]
        found = {"chosen": chosen, "sum": float(self.step(self.payload)), "real": 4 * sum(message.lengths)}
        self.described = found | {"model_bytes": cost.sent_bytes, "model_seconds": cost.seconds}

    def rounds(self, number: int, at: float) -> dict[str, Any]:
        """When each round ended (see `ends_of`)."""
        return {"ends": ends_of(lambda: self.step(self.payload), number, at)}
