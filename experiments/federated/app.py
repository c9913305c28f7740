"""The two apps that Flower runs, as `flwr run` finds them: `server` and `client`.

The folder of the run stands in JAXCOMP_FEDERATED; its config.json holds the options and the plan.
"""

import functools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import ServerApp  # pyright: ignore[reportMissingImports]

from experiments.dagc.data import imbalanced_split
from experiments.federated.account import Counted, begin, sums_of
from experiments.federated.model import flat_model, local_batches, local_steps
from experiments.federated.plan import HOSTILE, Plan, plan_for, tampered
from experiments.lib.data import load
from experiments.lib.folders import Journal, write_json
from jaxcomp.flower import RECORD, Rounds, members_mod
from jaxcomp.members import load as load_server
from jaxcomp.members import save as save_server

__all__ = ["client", "server"]

FOLDER = Path(os.environ.get("JAXCOMP_FEDERATED", "."))
CLIENTS = FOLDER / "clients"
ALPHA = 1.0  # Dirichlet parameter of the label mixes
STEPS, BATCH, RATE = 10, 32, 0.1  # of SGD at a client in a round
DOWN = 0.05  # share of the entries that an update of the model has


@functools.cache
def setting() -> tuple[dict[str, Any], Plan, Any, list[np.ndarray], Any]:
    """Options, plan, data, the part of each client, model: the same in every process."""
    config = json.loads((FOLDER / "config.json").read_text())
    data = load("digits")
    parts = imbalanced_split(data.train_y, config["clients"], config["skew"], ALPHA, config["seed"])
    return config, plan_for(config), data, parts, flat_model(data, config["seed"])


# What clients run


@functools.cache
def steps() -> Any:
    return jax.jit(functools.partial(local_steps, setting()[4]))


def number_of(context: Any) -> int:
    return int(context.node_config["partition-id"])


def event_of(message: Any, context: Any) -> str:
    return setting()[1].events[message.content[RECORD]["round"] - 1].get(number_of(context), "")


def die(context: Any) -> None:
    """Where nodes are processes, the node and all that it has started end at once, this process among them.

    In simulation all that is in memory goes.
    """
    node = CLIENTS / f"client-{number_of(context)}.pid"
    if node.is_file():
        os.killpg(int(node.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("killed")


def around(message: Any, context: Any, call_next: Any) -> Any:
    """Deaths after the answer is on disk; hostile clients; and what the account needs to know."""
    if RECORD not in message.content.config_records:
        return call_next(message, context)
    config, _, _, _, model = setting()
    number = number_of(context)
    hostile = number >= config["clients"] - config["hostile"]
    if not hostile and "updates" in message.content[RECORD]:
        begin(CLIENTS, number, message.content[RECORD])
    reply = call_next(message, context)
    if reply.has_error() or "data" not in (record := reply.content[RECORD]):
        return reply
    if hostile:
        kind = HOSTILE[(record["round"] + number) % len(HOSTILE)]
        reply.content[RECORD] = ConfigRecord(tampered(dict(record), model.start.size, kind))
    elif event_of(message, context) == "dies late":
        die(context)
    return reply


client = ClientApp(mods=[around, members_mod(CLIENTS)])


@client.query()
def who(message: Any, context: Any) -> Any:
    return Message(RecordDict({RECORD: ConfigRecord({"client": number_of(context)})}), reply_to=message)


@client.train()
def train(message: Any, context: Any) -> Any:
    """As for any strategy of Flower: parameters in, trained parameters out."""
    event, number = event_of(message, context), number_of(context)
    if event == "dies early":
        die(context)
    if event == "leaves":
        return Message(RecordDict({RECORD: ConfigRecord({"leaves": True})}), reply_to=message)
    config, _, data, parts, _ = setting()
    point = message.content["arrays"]["point"].numpy()
    round_ = message.content[RECORD]["round"]
    chosen = local_batches(parts[number], STEPS, BATCH, config["seed"], round_, number)
    change = steps()(jnp.asarray(point), data.train_x[chosen], data.train_y[chosen], RATE)
    after = point + np.asarray(change)
    return Message(RecordDict({"arrays": ArrayRecord({"point": Array(after)})}), reply_to=message)


# What the server runs


def connected(grid: Any, known: dict[int, int]) -> Mapping[int, int]:
    """Node -> client: by the key of the node where nodes have one, in simulation by what the node says."""
    keys = FOLDER / "keys.json"
    if keys.is_file():
        number_of_key = json.loads(keys.read_text())
        named = {node.node_id: number_of_key.get(_text(node.public_key)) for node in grid.get_nodes()}
        return {node: i for node, i in named.items() if i is not None}
    nodes = list(grid.get_node_ids())
    if set(nodes) - known.keys():
        ask = [Message(RecordDict({"ask": ConfigRecord({})}), node, "query") for node in nodes]
        for reply in grid.send_and_receive(ask, timeout=120):
            known[reply.metadata.src_node_id] = int(reply.content[RECORD]["client"])
    return known


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else key


server = ServerApp()


@server.main()
def main(grid: Any, context: Any) -> None:
    """Writes a line for each round to metrics.jsonl, and what became of everybody's answers to clients.json."""
    config, plan, data, parts, model = setting()
    test, start = jax.jit(model.test), np.asarray(model.start)
    volumes = {i: len(part) for i, part in enumerate(parts)}
    norm = 10 * float(np.linalg.norm(start))
    options: dict[str, Any] = {"rule": config["rule"], "down": DOWN, "max_norm": norm}
    core = Counted(start, volumes, config["ratio"], folder=FOLDER / "used", **options)
    known: dict[int, int] = {}
    rng = np.random.default_rng([config["seed"], 22])
    state, honest = FOLDER / "server.npz", range(config["clients"] - config["hostile"])
    if state.is_file():
        rng.bit_generator.state = load_server(state, core)["rng"]
        core.take_up()
    journal = Journal(FOLDER)
    journal.keep(lambda line: line["number"] <= core.number)

    def here(grid: Any) -> dict[int, int]:
        present = plan.present[core.number]
        return {node: i for node, i in connected(grid, known).items() if i in present}

    def chosen(members: set[int]) -> list[int]:
        asked = int(np.ceil(config["participation"] * len(members) - 1e-9))
        return sorted(int(i) for i in rng.choice(sorted(members), asked, replace=False)) if members else []

    rounds = Rounds(core, here, deadline=config["deadline"], choose=chosen, least=2)
    for now in rounds.start(grid, config["rounds"] - core.number):
        loss, accuracy = (float(x) for x in test(core.point, data.test_x, data.test_y))
        found = {i: sums for i in honest if (sums := sums_of(core, CLIENTS, i)) is not None}
        sums = {i: [*map(str, each[:-1]), each.apart] for i, each in found.items()}
        journal.add(now._asdict() | {"entries": start.size, "loss": loss, "accuracy": accuracy, "sums": sums})
        save_server(state, core, rng=rng.bit_generator.state)
    core.open(())  # whose answer has not come is lost
    write_json(FOLDER / "clients.json", core.counts)
