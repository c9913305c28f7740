"""One client process: trains on its own data, sends as many entries as the server allows, keeps the rest on disk."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.dagc_data import imbalanced_split
from experiments.data import load
from experiments.federated.model import flat_model, local_batches, local_steps
from experiments.federated.protocol import OPTIONS, call_of
from jaxcomp.base import State, bounded, finite, for_worker, residual
from jaxcomp.payloads import Sparse

__all__ = ["DROPPED", "main"]

DROPPED = 75  # exit status of a client that dropped out on purpose


class Client:
    """Its program is compiled for its own room: no other client's size is in it."""

    def __init__(self, number: int, options: dict[str, Any], folder: Path):
        self.number, self.options = number, options
        self.data = load(options["data"], Path(options["data_dir"]) if options["data_dir"] else None)
        parts = imbalanced_split(
            self.data.train_y, options["clients"], options["skew"], options["alpha"], options["seed"]
        )
        self.part = parts[number]
        self.file = folder / f"client-{number}.npz"
        self.model = flat_model(options["model"], self.data, options["seed"])
        self.after, self.memory = 0, jnp.zeros_like(self.model.start)
        if self.file.is_file():  # it was here before
            kept = np.load(self.file)
            self.after, self.memory = int(kept["round"]), jnp.asarray(kept["memory"])

    def compile(self, room: int) -> None:
        """For messages of at most `room` entries; how many of them is an argument of each round."""
        model, rate, size = self.model, self.options["lr"], self.model.start.size
        compressor = jc.dagc([1], room / size)
        start = compressor.init(jax.random.key(self.number), model.start)

        def round_(vector, memory, ratio, x, y):
            message = bounded(memory + finite(local_steps(model, vector, x, y, rate)))
            state = jc.set_amounts(start, ratio)
            mine = for_worker(compressor, state.shared, 0, 1)
            payload, _ = compressor.compress(jax.random.key(0), message, State(state.local, mine))
            return payload, residual(compressor, message, payload, mine), message

        steps, batch = self.options["local_steps"], self.options["batch"]
        x = jax.ShapeDtypeStruct((steps, batch, *self.data.train_x.shape[1:]), jnp.float32)
        y = jax.ShapeDtypeStruct((steps, batch), jnp.int32)
        ratio = jax.ShapeDtypeStruct((1,), jnp.float32)
        self.round = jax.jit(round_).lower(model.start, model.start, ratio, x, y).compile()

    def train(self, round_: int, vector: np.ndarray, k: int) -> tuple[bytes, Any, Any]:
        """The message of k entries, the memory if it is accepted, and the memory if it is not."""
        o = self.options
        chosen = local_batches(self.part, o["local_steps"], o["batch"], o["seed"], round_, self.number)
        ratio = np.full(1, k / vector.size, np.float32)
        batches = self.data.train_x[chosen], self.data.train_y[chosen]
        (values, indices), rest, whole = self.round(vector, self.memory, ratio, *batches)
        real = np.asarray(indices) < vector.size  # the padding of the room stays here
        return jc.wire.encode(Sparse(np.asarray(values)[real], np.asarray(indices)[real])), rest, whole

    def keep(self, round_: int, memory: Any) -> None:
        """All or nothing: a killed process leaves the old file."""
        self.after, self.memory = round_, memory
        draft = self.file.with_suffix(".tmp")
        with draft.open("wb") as file:
            np.savez(file, round=round_, memory=np.asarray(memory))
        os.replace(draft, self.file)


def garbage(message: bytes, round_: int) -> bytes:
    """Four kinds of nonsense in turn: noise, a message cut short, one flipped byte, a message of NaN."""
    rng = np.random.default_rng([round_, 23])
    if round_ % 4 == 0:
        return rng.bytes(len(message))
    if round_ % 4 == 1:
        return message[: len(message) // 2]
    if round_ % 4 == 2:
        return bytes([*message[:20], message[20] ^ 0x5A, *message[21:]])
    nan = np.full(1, np.nan, np.float32)
    return jc.wire.encode(Sparse(nan, np.zeros(1, np.int32)))


def main(arguments: Sequence[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--number", type=int, required=True)
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--config", type=Path, required=True)
    p.add_argument("--start", type=int, default=0)
    given = p.parse_args(arguments)
    options = json.loads(given.config.read_text())
    client = Client(given.number, options, given.config.parent / "clients")
    chance = np.random.default_rng([options["seed"], 24, given.number, given.start])
    bad = given.number >= options["clients"] - options["garbage"]
    me: dict[str, Any] = {"client": given.number}
    with grpc.insecure_channel(f"127.0.0.1:{given.port}", options=OPTIONS) as channel:
        join, pull, push = (call_of(channel, name) for name in ("Join", "Pull", "Push"))
        try:
            welcome: dict[str, Any] = {"wait": True}
            while "wait" in welcome:
                welcome, _ = join({**me, "samples": len(client.part)})
            if "done" in welcome:
                return 0
            client.compile(welcome["room"])
            while True:
                task, body = pull({**me, "after": client.after})
                if "done" in task:
                    return 0
                if "wait" in task:
                    continue
                number = task["round"]
                if chance.random() < options["dropout"]:
                    return DROPPED
                message, rest, whole = client.train(number, jc.wire.decode(body).values, task["k"])
                sent = garbage(message, number) if bad else message
                answer, _ = push({**me, "round": number}, sent)
                client.keep(number, rest if answer["accepted"] else whole)
        except grpc.RpcError as error:
            print(f"client {given.number}: {error.code().name}", file=sys.stderr)  # pyright: ignore
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
