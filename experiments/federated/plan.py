"""Who is there in each round, who dies, leaves or joins; and what hostile clients send."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from jaxcomp.payloads import Dense, Sparse

__all__ = ["HOSTILE", "Plan", "asked_of", "plan_for", "plan_of", "tampered"]

HOSTILE = ("noise", "cut", "flipped", "nan", "huge", "shape", "replay", "many")


class Plan(NamedTuple):
    """present[t]: clients that are there in round t + 1.

    events[t]: client -> "dies early" (before it has answered), "dies late" (with its answer on disk, not sent),
    "leaves" or "joins".
    """

    present: list[list[int]]
    events: list[dict[int, str]]


def plan_of(clients: int, hostile: int, rounds: int, changes: int, seed: int) -> Plan:
    """Draws `changes` deaths, leaves and joins of honest clients over the rounds after the first.

    With changes, a third of the honest clients joins later. Hostile clients are the last ones, and always there.
    """
    rng = np.random.default_rng([seed, 24])
    honest = clients - hostile
    here = set(range(honest - honest // 3 if changes else honest))
    when = np.sort(rng.integers(1, max(rounds - 1, 2), changes))
    present, events = [], []
    for t in range(rounds):
        now: dict[int, str] = {}
        for _ in range(int(np.count_nonzero(when == t))):
            free = sorted(here - now.keys())
            absent = sorted(set(range(honest)) - here - now.keys())
            gone = sum(event != "joins" for event in now.values())
            if absent and (len(free) < 2 or len(here) - gone < 3 or rng.random() < 0.5):
                client = int(rng.choice(absent))
                now[client] = "joins"
                here.add(client)
            elif len(free) > 1:
                now[int(rng.choice(free))] = str(rng.choice(["dies early", "dies late", "leaves"]))
        present.append(sorted(here | set(range(honest, clients))))
        events.append(now)
        here -= {client for client, event in now.items() if event != "joins"}
    return Plan(present, events)


def plan_for(config: dict[str, Any]) -> Plan:
    return plan_of(*(config[key] for key in ("clients", "hostile", "rounds", "changes", "seed")))


def asked_of(there: Iterable[int], events: dict[int, str], share: float, key: list[int]) -> list[int]:
    """A share of the clients that are there, drawn anew in each round; those who die or leave in it are among them."""
    there = set(there)
    first = {i for i in there if events.get(i, "joins") != "joins"}
    rest = sorted(there - first)
    number = max(int(np.ceil(share * len(there) - 1e-9)) - len(first), 0)
    return sorted(first | {int(i) for i in np.random.default_rng(key).permutation(rest)[:number]})


def tampered(record: dict[str, Any], size: int, kind: str) -> dict[str, Any]:
    """What a hostile client sends instead of its answer."""
    data, rng = record["data"], np.random.default_rng([record["round"], 23])
    few = np.arange(1, dtype=np.int32)
    bad = {
        "noise": lambda: rng.bytes(len(data)),
        "cut": lambda: data[: len(data) // 2],
        "flipped": lambda: bytes([*data[:20], data[20] ^ 0x5A, *data[21:]]),
        "nan": lambda: jc.wire.encode(Sparse(np.full(1, np.nan, np.float32), few)),
        "huge": lambda: jc.wire.encode(Sparse(np.full(1, 5e29, np.float32), few)),
        "shape": lambda: jc.wire.encode(Dense(np.ones(size + 1, np.float32))),
        "many": lambda: jc.wire.encode(Dense(np.ones(size, np.float32))),
    }
    if kind == "replay":
        return record | {"round": record["round"] - 1}
    return record | {"data": bad[kind](), "share": 1.0}
