"""Exchanges of unequal messages between processes: bytes on the wire, and time on a link.

Starts one process for each worker on this machine, joined by gloo. Each exchanges top-k messages
whose lengths follow DAGC's ratios. Bytes are those that the kernel counted, headers included. With
--mbit each process gets a network namespace of its own, joined by a bridge, and every link is
limited to that rate (Linux and root only); without it they exchange over the loopback device.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dagc.data import skewed_volumes
from experiments.lib.cli import Parser, UserError, at_least, fraction, one_or_more, positive
from experiments.lib.launch import free_port
from experiments.lib.netlab import laboratory, missing
from experiments.lib.pool import Pool, or_die
from experiments.lib.report import new_console, show

__all__ = ["main"]

WAYS = ("gather", "concat", "ring", "auto")


def parser() -> Parser:
    p = Parser(prog="python -m experiments bench exchange", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--workers", type=at_least(2), default=4, help="processes")
    p.add_argument("--skew", type=one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--size", type=at_least(1), default=1_000_000, help="entries of the gradient")
    p.add_argument("--ratio", type=fraction, default=0.01, help="mean ratio")
    p.add_argument("--rounds", type=at_least(1), default=10, help="timed exchanges of each kind; the median counts")
    p.add_argument("--mbit", type=positive, default=None, help="limit of every link, Mbit/s (needs root)")
    p.add_argument("--latency", type=positive, default=1e-3, help="seconds that the model takes for a message")
    p.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    p.add_argument("--address", default=None, help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.worker is not None:
        with or_die():
            work(options)
        return 0
    with hosts(options) as (prefixes, address):
        rows = run(options, list(arguments), prefixes, address)
    report(options, rows)
    return 0


# ------------------------------------------------------------------------------------------------
# Hosts: the loopback device, or namespaces with shaped links


@contextlib.contextmanager
def hosts(options: Any) -> Iterator[tuple[list[list[str]], str]]:
    """The words before each worker's command, and the address of worker 0."""
    port = free_port()
    if options.mbit is None:
        yield [[]] * options.workers, f"127.0.0.1:{port}"
        return
    reason = missing()
    if reason:
        raise UserError(f"--mbit needs {reason}")
    with laboratory(options.workers, 1e6 * options.mbit) as lab:
        yield lab.prefixes, f"{lab.addresses[0]}:{port}"


def run(options: Any, arguments: list[str], prefixes: list[list[str]], address: str) -> list[dict]:
    commands = [
        [*prefix, sys.executable, "-m", "experiments", "bench", "exchange", *arguments]
        + ["--worker", str(i), "--address", address]
        for i, prefix in enumerate(prefixes)
    ]
    with Pool(commands, {"JAX_PLATFORMS": "cpu"}) as pool:
        lines = pool.wait()
    each = [[json.loads(line[len("row ") :]) for line in log if line.startswith("row ")] for log in lines]
    rows = []
    for ways in zip(*each, strict=True):
        shared = options.mbit is None  # all workers then read the counter of one device
        sent = ways[0]["bytes"] / len(ways) if shared else sum(way["bytes"] for way in ways) / len(ways)
        rows.append({**ways[0], "bytes": sent, "seconds": float(np.median(ways[0]["seconds"]))})
        assert len({way["sum"] for way in ways}) == 1
    return rows


# ------------------------------------------------------------------------------------------------
# One worker


def sent_so_far(device: str) -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise UserError(f"no network device {device}")


def work(options: Any) -> None:
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

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    n, d = options.workers, options.size
    jax.distributed.initialize(options.address, n, options.worker)
    counts = jc.allocate.counts(jc.allocate.ratios(skewed_volumes(n, options.skew), options.ratio), d)
    lengths = Lengths(tuple(int(k) for k in counts), d)
    capacity, mine = max(lengths.counts), int(counts[options.worker])
    indices = np.full((1, capacity), d, np.int32)
    indices[0, :mine] = np.arange(mine) * (d // mine)
    values = np.where(indices < d, options.worker + 1, 0).astype(np.float32)
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    payload = jax.tree.map(lambda x: jax.make_array_from_process_local_data(spread, x), Sparse(values, indices))
    link = jc.Link(options.latency, (options.mbit or 100) * 1e6 / 8)
    device = "lo" if options.mbit is None else "eth0"

    message = message_of(jax.tree.map(lambda a: a[0], Sparse(values, indices)), lengths, n)
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
        for _ in range(options.rounds):
            start = time.perf_counter()
            jax.block_until_ready(step(payload))
            seconds.append(time.perf_counter() - start)
        time.sleep(0.2)
        sent = (sent_so_far(device) - before) / options.rounds
        multihost_utils.sync_global_devices(f"after {via}")
        cost = costs(message.lengths, message.capacity, link)[name]
        row = {"via": via, "chosen": name, "bytes": sent, "seconds": seconds, "sum": total}
        row |= {"model_bytes": cost.sent_bytes, "model_seconds": cost.seconds, "real": 4 * sum(message.lengths)}
        print("row", json.dumps(row), flush=True)


# ------------------------------------------------------------------------------------------------


def report(options: Any, rows: list[dict]) -> None:
    console = new_console()
    quickest = min(row["seconds"] for row in rows)
    table = [
        [
            row["via"] if row["via"] == row["chosen"] else f"{row['via']} ({row['chosen']})",
            f"{row['bytes'] / 1e3:,.1f}",
            f"{row['bytes'] / row['real']:.3f}",
            f"{row['model_bytes'] / row['real']:.3f}",
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['model_seconds']:.1f}",
            f"{row['seconds'] / quickest:.2f}",
        ]
        for row in rows
    ]
    link = "the loopback device" if options.mbit is None else f"links of {options.mbit:g} Mbit/s"
    head = ["exchange", "kB sent by a worker", "/ real sizes", "by the program", "ms", "by the model", "/ best"]
    show(
        console,
        f"{options.workers} processes, skew {options.skew:g}, {options.size:,} entries, "
        f"mean ratio {options.ratio:g}, {link}",
        head,
        table,
        "real sizes: the sum over all workers of their values and indices. ms: median of an exchange.",
    )
