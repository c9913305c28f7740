"""Exchanges of unequal messages between processes: bytes on the wire, and time on a link.

Starts one process for each worker on this machine, joined by gloo. Each exchanges top-k messages whose lengths follow
DAGC's ratios. Bytes are those that the kernel counted, headers included. With --mbit each process gets a network
namespace of its own, joined by a bridge, and every link is limited to that rate (Linux and root only); without it they
exchange over the loopback device.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.timing import bench_parser
from experiments.dagc.data import skewed_volumes
from experiments.lib.cli import UserError, at_least, common, one_or_more, positive
from experiments.lib.launch import free_port
from experiments.lib.netlab import laboratory, missing
from experiments.lib.pool import Pool, serve
from experiments.lib.report import new_console, show

__all__ = ["main"]

WAYS = ("gather", "concat", "ring", "auto")


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench exchange", __doc__)
    common(p, "worker", "address", workers={"type": at_least(2)}, ratio=(0.01, "mean ratio"))
    p.add_argument("--skew", type=one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--size", type=at_least(1), default=1_000_000, help="entries of the gradient")
    p.add_argument("--rounds", type=at_least(1), default=10, help="timed exchanges of each kind; the median counts")
    p.add_argument("--mbit", type=positive, default=None, help="limit of every link, Mbit/s (needs root)")
    p.add_argument("--latency", type=positive, default=1e-3, help="seconds that the model takes for a message")
    o = p.parse_args(arguments)
    if o.worker is not None:
        serve(o.address, o.workers, o.worker, lambda: measured(o))
        return 0
    with hosts(o) as (prefixes, address):
        again = [sys.executable, "-m", "experiments", "bench", "exchange", *arguments, "--address", address, "--worker"]
        commands = [[*prefix, *again, str(i)] for i, prefix in enumerate(prefixes)]
        with Pool(commands, {"JAX_PLATFORMS": "cpu"}) as pool:
            pool.hear()
            rows = [joined(ways, shared=o.mbit is None) for ways in zip(*pool.ask(), strict=True)]
    quickest = min(row["seconds"] for row in rows)
    columns = {
        "exchange": lambda row: row["via"] if row["via"] == row["chosen"] else f"{row['via']} ({row['chosen']})",
        "kB sent by a worker": lambda row: f"{row['bytes'] / 1e3:,.1f}",
        "/ real sizes": lambda row: f"{row['bytes'] / row['real']:.3f}",
        "by the program": lambda row: f"{row['model_bytes'] / row['real']:.3f}",
        "ms": lambda row: f"{1e3 * row['seconds']:.1f}",
        "by the model": lambda row: f"{1e3 * row['model_seconds']:.1f}",
        "/ best": lambda row: f"{row['seconds'] / quickest:.2f}",
    }
    link = "the loopback device" if o.mbit is None else f"links of {o.mbit:g} Mbit/s"
    title = f"{o.workers} processes, skew {o.skew:g}, {o.size:,} entries, mean ratio {o.ratio:g}, {link}"
    notes = "real sizes: the sum over all workers of their values and indices. ms: median of an exchange."
    show(new_console(), title, columns, rows, notes, o.markdown)
    return 0


@contextlib.contextmanager
def hosts(o: Any) -> Iterator[tuple[list[list[str]], str]]:
    """The words before each worker's command, and the address of worker 0: on the loopback device, or in namespaces."""
    port = free_port()
    if o.mbit is None:
        yield [[]] * o.workers, f"127.0.0.1:{port}"
    elif reason := missing():
        raise UserError(f"--mbit needs {reason}")
    else:
        with laboratory(o.workers, 1e6 * o.mbit) as lab:
            yield lab.prefixes, f"{lab.addresses[0]}:{port}"


def joined(ways: Sequence[dict[str, Any]], shared: bool) -> dict[str, Any]:
    """What all workers found for one way. shared: they read the counter of one device."""
    assert len({way["sum"] for way in ways}) == 1
    sent = (ways[0]["bytes"] if shared else sum(way["bytes"] for way in ways)) / len(ways)
    return {**ways[0], "bytes": sent, "seconds": float(np.median(ways[0]["seconds"]))}


# ------------------------------------------------------------------------------------------------
# One worker


def sent_so_far(device: str) -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise UserError(f"no network device {device}")


def measured(o: Any) -> list[dict[str, Any]]:
    """A row for each way."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, PartitionSpec

    import jaxcomp as jc
    from jaxcomp.base import Lengths
    from jaxcomp.exchange.routes import Call, costs
    from jaxcomp.exchange.routes.auto import GATHERING, fastest
    from jaxcomp.exchange.routes.route import gathered_by
    from jaxcomp.exchange.routes.unequal import message_of
    from jaxcomp.payloads import Sparse

    n, d = o.workers, o.size
    counts = jc.allocate.counts(jc.allocate.ratios(skewed_volumes(n, o.skew), o.ratio), d)
    lengths = Lengths(tuple(int(k) for k in counts), d)
    capacity, mine = max(lengths.counts), int(counts[o.worker])
    indices = np.full((1, capacity), d, np.int32)
    indices[0, :mine] = np.arange(mine) * (d // mine)
    values = np.where(indices < d, o.worker + 1, 0).astype(np.float32)
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    payload = jax.tree.map(lambda x: jax.make_array_from_process_local_data(spread, x), Sparse(values, indices))
    link = jc.Link(o.latency, (o.mbit or 100) * 1e6 / 8)
    device = "lo" if o.mbit is None else "eth0"
    message = message_of(jax.tree.map(lambda a: a[0], Sparse(values, indices)), lengths, n)
    rows = []
    for via in WAYS:
        name = fastest(message.lengths, message.capacity, link) if via == "auto" else via

        def exchange(payload, gather=GATHERING[name].gather):
            mine = jax.tree.map(lambda a: a[0], payload)
            rows, _ = gathered_by(gather, mine, lengths, Call("data", link=link))
            return jnp.sum(rows.values) + jnp.sum(rows.indices % 7)

        step = jax.shard_map(exchange, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        step = jax.jit(step).lower(payload).compile()
        total = float(jax.block_until_ready(step(payload)))
        multihost_utils.sync_global_devices(f"before {via}")
        time.sleep(0.2)
        before, seconds = sent_so_far(device), []
        for _ in range(o.rounds):
            start = time.perf_counter()
            jax.block_until_ready(step(payload))
            seconds.append(time.perf_counter() - start)
        time.sleep(0.2)
        sent = (sent_so_far(device) - before) / o.rounds
        multihost_utils.sync_global_devices(f"after {via}")
        cost = costs(message.lengths, message.capacity, link)[name]
        row = {"via": via, "chosen": name, "bytes": sent, "seconds": seconds, "sum": total}
        row |= {"model_bytes": cost.sent_bytes, "model_seconds": cost.seconds, "real": 4 * sum(message.lengths)}
        rows.append(row)
    return rows
