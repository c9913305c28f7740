"""Sites without a coordinator: `python members.py server ADDRESS`, and at each site `python members.py NAME ADDRESS`.

The server has an address, HOST:PORT; sites dial it. Each may be killed and started again at any moment, and so may the
server.
"""

import os
import sys
from pathlib import Path

import numpy as np

import jaxcomp as jc
from jaxcomp import federated

KEYS = {"ann": "a secret", "bob": "another one"}  # of each site; from a file that others cannot read
ROUNDS, SIZE = 20, 1000


def serve(address):
    server = federated.Server(np.zeros(SIZE), dict.fromkeys(KEYS, 10_000), 0.1, weights="tokens", patience=2)
    if Path("server.npz").is_file():
        federated.load("server.npz", server)
    journal = federated.Journal(server, "server.log")
    with jc.transports.hub(address, keys=KEYS) as hub:  # credentials=grpc.ssl_server_credentials(...) for TLS
        rounds = federated.Rounds(journal, hub.link("server"), quorum=1, grace=2.0, deadline=60.0)
        closed = server.number
        while closed < ROUNDS:
            result = rounds.step(1.0)
            if result is not None:
                closed = result.number
                federated.save("server.npz", server)
                print(f"round {result.number}: {result.used} used, {result.late} late", flush=True)
    journal.finish()


def member(name, address):
    goal = np.linspace(0, 1, SIZE) * (1.0 if name == "ann" else 1.1)

    def train(point, task):
        for _ in range(10):
            point = point - np.float32(0.01) * (point - goal).astype(np.float32)
        return point, 320  # tokens

    with jc.transports.site(address, name, key=KEYS[name], seconds=5.0) as site:
        part = federated.Participant(federated.Member(f"{name}.npz"), site, idle=2.0)
        part.serve(train, patience=10.0)  # or days


if __name__ == "__main__":
    name, address = sys.argv[1:3]
    try:
        serve(address) if name == "server" else member(name, address)
    except ConnectionError as error:  # the server has ended
        print(error, flush=True)
        os._exit(0)
