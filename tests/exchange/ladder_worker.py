"""Three processes that exchange payloads over the loopback device and read its counter; started by test_ladder.py.

Without arguments: starts the others and prints one line of JSON for each exchange.
"""

import fcntl
import json
import socket
import struct
import sys
import time
from pathlib import Path

from experiments.lib import launch

WORKERS, CAPACITY, SIZE, ROUNDS = 3, 400_000, 10**8, 10


def raise_loopback():
    """`ip link set lo up`: a new network namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(s, 0x8913, request))[1]
        if not flags & 1:
            fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))


def sent_so_far():
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def start():
    raise_loopback()
    address = f"127.0.0.1:{launch.free_port()}"
    each = [launch.start([sys.executable, __file__, address, str(i)]) for i in range(WORKERS)]
    try:
        return max(process.wait(timeout=240) for process in each)
    finally:
        launch.end_all(each)


def work(address, number):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxcomp as jc
    from jaxcomp.exchange.routes import Parcel, Way, gather, ladder
    from jaxcomp.payloads import Sparse

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, WORKERS, number)
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(number)

    def payload(count):
        indices = np.full((1, CAPACITY), SIZE, np.int32)
        indices[0, :count] = np.cumsum(rng.integers(1, SIZE // CAPACITY, count))
        values = np.where(indices < SIZE, rng.standard_normal((1, CAPACITY)), 0).astype(np.float32)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(spread, x), Sparse(values, indices))

    def program(via):
        def exchange(payload):
            carried = {"gather": gather.gather_padded, "ladder": ladder.gather_coded}[via]
            own, like = jax.tree.map(lambda a: a[0], payload), jax.ShapeDtypeStruct((SIZE,), np.float32)
            (rows,), sent_bytes = carried([Parcel(jc.top_k(k=1), own, (), like)], Way("data", WORKERS))
            return jax.numpy.sum(rows.values, axis=0), jax.numpy.float32(sent_bytes)

        step = jax.shard_map(exchange, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        return jax.jit(step).lower(payload(CAPACITY)).compile()

    steps = {via: program(via) for via in ("gather", "ladder")}
    for via, count in (
        ("gather", CAPACITY),
        ("ladder", CAPACITY),
        ("ladder", CAPACITY // 2),
        ("ladder", CAPACITY // 9),
    ):
        mine = payload(count)
        total, accounted = jax.block_until_ready(steps[via](mine))
        same, _ = steps["gather"](mine)
        assert np.asarray(total).tobytes() == np.asarray(same).tobytes()
        multihost_utils.sync_global_devices("before")
        time.sleep(0.2)
        before = sent_so_far()
        for _ in range(ROUNDS):
            jax.block_until_ready(steps[via](mine))
        time.sleep(0.2)
        sent = (sent_so_far() - before) / ROUNDS / WORKERS
        multihost_utils.sync_global_devices("after")
        if number == 0:
            print(json.dumps({"via": via, "bytes": sent, "accounted": float(accounted)}), flush=True)


if __name__ == "__main__":
    sys.exit(start() if len(sys.argv) == 1 else work(sys.argv[1], int(sys.argv[2])))
