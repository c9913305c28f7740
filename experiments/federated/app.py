"""The two apps that Flower runs, as `flwr run` finds them: `server` and `client`.

The folder of the run stands in JAXCOMP_FEDERATED; its config.json holds the options. From these every process makes the
same plan, data, parts of the clients and model.
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

from experiments.federated import LINE
from experiments.federated.account import Counted, begin, sums_of
from experiments.federated.plan import HOSTILE, asked_of, plan_for, tampered
from experiments.lib.data import imbalanced_split, load
from experiments.lib.flat import flat_model, local_batches, local_steps
from experiments.lib.folders import Journal, write_json
from jaxcomp.federated import load as load_server
from jaxcomp.federated import save as save_server
from jaxcomp.federated.flower import RECORD, FlowerRounds, members_mod

__all__ = ["client", "server"]

ALPHA = 1.0  # Dirichlet parameter of the label mixes
STEPS, BATCH, RATE = 10, 32, 0.1  # of SGD at a client in a round
DOWN = 0.05  # share of the entries that an update of the model has

FOLDER = Path(os.environ["JAXCOMP_FEDERATED"])
CLIENTS = FOLDER / "clients"
CONFIG = json.loads((FOLDER / "config.json").read_text())
HONEST = range(CONFIG["clients"] - CONFIG["hostile"])
PLAN, DATA = plan_for(CONFIG), load("digits")
PARTS = imbalanced_split(DATA.train_y, CONFIG["clients"], CONFIG["skew"], ALPHA, CONFIG["seed"])
MODEL = flat_model(DATA, CONFIG["seed"])
change = jax.jit(functools.partial(local_steps, MODEL))


# What clients run


def number_of(context: Any) -> int:
    return int(context.node_config["partition-id"])


def event_of(message: Any, context: Any) -> str:
    return PLAN.events[message.content[RECORD]["round"] - 1].get(number_of(context), "")


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
    number = number_of(context)
    if number in HONEST:
        begin(CLIENTS, number, message.content[RECORD])
    reply = call_next(message, context)
    if reply.has_error() or "data" not in (record := reply.content[RECORD]):
        return reply
    if number not in HONEST:
        kind = HOSTILE[(record["round"] + number) % len(HOSTILE)]
        reply.content[RECORD] = ConfigRecord(tampered(dict(record), MODEL.start.size, kind))
    elif event_of(message, context) == "dies late":
        die(context)
    return reply


client = ClientApp(mods=[around, members_mod(CLIENTS)])


@client.query()
def who(message: Any, context: Any) -> Any:
    return Message(RecordDict({"who": ConfigRecord({"client": number_of(context)})}), reply_to=message)


@client.train()
def train(message: Any, context: Any) -> Any:
    """As for any strategy of Flower: parameters in, trained parameters out."""
    event, number = event_of(message, context), number_of(context)
    if event == "dies early":
        die(context)
    if event == "leaves":
        return Message(RecordDict({RECORD: ConfigRecord({"leaves": True})}), reply_to=message)
    point, round_ = message.content["arrays"]["point"].numpy(), message.content[RECORD]["round"]
    chosen = local_batches(PARTS[number], STEPS, BATCH, CONFIG["seed"], round_, number)
    after = point + np.asarray(change(jnp.asarray(point), DATA.train_x[chosen], DATA.train_y[chosen], RATE))
    return Message(RecordDict({"arrays": ArrayRecord({"point": Array(after)})}), reply_to=message)


# What the server runs


def connected(grid: Any, known: dict[int, int]) -> Mapping[int, int]:
    """Node -> client: by the key of the node where nodes have one, in simulation by what the node says."""
    keys = FOLDER / "keys.json"
    if keys.is_file():
        number_of_key = json.loads(keys.read_text())
        named = {node.node_id: number_of_key.get(node.public_key.decode()) for node in grid.get_nodes()}
        return {node: i for node, i in named.items() if i is not None}
    nodes = list(grid.get_node_ids())
    if set(nodes) - known.keys():
        ask = [Message(RecordDict({"who": ConfigRecord({})}), node, "query") for node in nodes]
        for reply in grid.send_and_receive(ask, timeout=120):
            known[reply.metadata.src_node_id] = int(reply.content["who"]["client"])
    return known


server = ServerApp()


@server.main()
def main(grid: Any, context: Any) -> None:
    """Writes a line for each round to metrics.jsonl, and what became of everybody's answers to clients.json."""
    test, start = jax.jit(MODEL.test), np.asarray(MODEL.start)
    options: dict[str, Any] = {"late": CONFIG["late"], "down": DOWN, "max_norm": 10 * float(np.linalg.norm(start))}
    volumes = {i: len(part) for i, part in enumerate(PARTS)}
    core = Counted(start, volumes, CONFIG["ratio"], folder=FOLDER / "used", **options)
    state, journal = FOLDER / "server.npz", Journal(FOLDER, needs=LINE)
    if state.is_file():
        load_server(state, core)
        core.take_up()
    journal.keep(lambda line: line["number"] <= core.number)
    known: dict[int, int] = {}

    def here(grid: Any) -> dict[int, int]:
        return {node: i for node, i in connected(grid, known).items() if i in PLAN.present[core.number]}

    def choose(there: set[int]) -> list[int]:
        key = [CONFIG["seed"], 22, core.number]
        return asked_of(there, PLAN.events[core.number], CONFIG["participation"], key)

    rounds = FlowerRounds(core, here, deadline=CONFIG["deadline"], choose=choose, least=2)
    for now in rounds.start(grid, CONFIG["rounds"] - core.number):
        loss, accuracy = (float(x) for x in test(core.point, DATA.test_x, DATA.test_y))
        found = {i: sums for i in HONEST if (sums := sums_of(core, CLIENTS, i)) is not None}
        sums = {i: [*map(str, each[:-1]), each.apart] for i, each in found.items()}
        line = {"entries": start.size, "loss": loss, "accuracy": accuracy, "sums": sums, "sent": sorted(core.sent)}
        journal.add(now._asdict() | line)
        core.sent = []
        save_server(state, core)
    core.open(())  # whose answer has not come is lost
    write_json(FOLDER / "clients.json", {i: {"samples": volumes[i], "counts": core.counts[i]} for i in volumes})
