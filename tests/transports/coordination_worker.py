"""A worker of test_coordination.py: `coordination_worker.py ADDRESS NUMBER FOLDER PART`."""

import json
import os
import sys
import time
from pathlib import Path

SIZE = 3


def say(**row):
    print(json.dumps(row), flush=True)


def wait_for(file):
    while not file.is_file():
        time.sleep(0.05)


def join(address, number):
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(address, SIZE, number, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5)


def trained(gather, index):
    """The point of a worker after a few rounds of 4 bits, as bytes."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcomp as jc

    goal, inner, outer = jnp.sin(jnp.arange(200.0) + index), optax.sgd(0.1), optax.sgd(0.9)
    with jc.local_process(inner, outer, jc.direct(jc.dithering(bits=4)), gather, index, SIZE, every=2) as worker:
        w = worker.start(jnp.zeros(200))
        for _ in range(4):
            w = worker.step(w - goal, w)
        return np.asarray(worker.point).tobytes().hex()


def first(number, folder):
    """Gathers, trains, loses worker 2, and goes on with it as the member of a federated server at worker 0."""
    import numpy as np

    import jaxcomp as jc

    link = jc.transports.coordination(seconds=20.0, chunk_bytes=100_000)
    mine = bytes([number]) * 250_000
    for _ in range(5):
        assert link.gather(mine) == [bytes([i]) * 250_000 for i in range(SIZE)]
    held = sum(len(value) for _, value in link._client.key_value_dir_get_bytes("jaxcomp/"))
    say(case="held", bytes=held)
    link.gather(b"")
    say(case="trained", point=trained(link.gather, link.index))
    if number == 2:
        os.kill(os.getpid(), 9)
    wait_for(folder / "killed")
    lonely = jc.transports.Gathering(link, "012", seconds=1.0, tag="after")
    try:
        lonely(b"")
    except jc.transports.Missing as error:
        say(case="missing", names=error.names, said=str(error))
    if number == 0:
        from jaxcomp import federated

        server = federated.Server(np.zeros(3, np.float32), {"2": 1}, 1.0)
        rounds = federated.Rounds(server, link)
        (folder / "open").touch()
        while (result := rounds.step(0.1)) is None:
            pass
        say(case="federated", used=result.used, point=server.point.tolist())
        (folder / "done").touch()
    wait_for(folder / "done")


def again(number, folder):
    """Worker 2, started anew under its number, as a federated member."""
    import numpy as np

    import jaxcomp as jc
    from jaxcomp import federated

    wait_for(folder / "open")
    part = federated.Participant(federated.Member(), jc.transports.coordination(), server="0", idle=1.0)
    part.serve(lambda point, task: (point - np.float32([1, 2, 3]), 0), until=(folder / "done").is_file)


if __name__ == "__main__":
    number, folder = int(sys.argv[2]), Path(sys.argv[3])
    join(sys.argv[1], number)
    (again if sys.argv[4] == "again" else first)(number, folder)
    if number == 0:  # the service ends with this process, and aborts who still talks to it
        wait_for(folder / "ended")
    os._exit(0)
