"""Tasks and answers as bytes, for transports that carry nothing else."""

import math
from collections.abc import Mapping
from typing import Any

from jaxcomp.checks import is_within
from jaxcomp.federated.messages import Answer, Task
from jaxcomp.transports.packets import packed
from jaxcomp.wire import WireError

__all__ = ["answer_of", "packed_answer", "packed_task", "task_of"]


def packed_answer(answer: Answer) -> bytes:
    """An answer as bytes; `transports.packets.unpacked`, and then `answer_of`, give it back."""
    fields = answer._asdict()
    data = fields.pop("data")
    return packed({"kind": "answer", **fields}, [data])


def answer_of(fields: Mapping[str, Any], blobs: list[bytes]) -> Answer:
    """The answer with these fields. What they may be a server checks.

    Raises:
        WireError: fields are missing, or there is more or less than one message.
    """
    if fields.get("kind") != "answer" or len(blobs) != 1:
        raise WireError("kind of a message", fields.get("kind"), "'answer' with one payload")
    names = [name for name in Answer._fields if name != "data"]
    missing = [name for name in names if name not in fields]
    if missing:
        raise WireError("fields of an answer", sorted(fields), f"{', '.join(names)}")
    return Answer(data=blobs[0], **{name: fields[name] for name in names})


def packed_task(task: Task) -> bytes:
    """A task as bytes; `transports.packets.unpacked`, and then `task_of`, give it back."""
    fields = task._asdict()
    updates = fields.pop("updates")
    return packed({"kind": "task", **fields}, updates)


def task_of(fields: Mapping[str, Any], blobs: list[bytes]) -> Task:
    """The task with these fields.

    Raises:
        WireError: a field is missing, or of another type or range.
    """

    def whole(name: str, low: int) -> int:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise WireError(f"{name} of a task", value, f"an integer of at least {low}")
        return value

    if fields.get("kind") != "task":
        raise WireError("kind of a message", fields.get("kind"), "'task'")
    norm: Any = fields.get("norm")
    rounds, shares, options = (fields.get(name) for name in ("rounds", "shares", "options"))
    if not is_within(norm, 0) and norm != math.inf:
        raise WireError("norm of a task", norm, "a number of at least 0")
    if not isinstance(rounds, list) or not isinstance(shares, list) or len(rounds) != len(shares):
        raise WireError("rounds of a task", rounds, "as many as shares")
    for number, share in zip(rounds, shares, strict=True):
        if isinstance(number, bool) or not isinstance(number, int):
            raise WireError("rounds of a task", number, "integers")
        if not is_within(share, 0, 1):
            raise WireError("shares of a task", share, "in [0, 1]")
    if not isinstance(options, str):
        raise WireError("options of a task", options, "a string")
    since = whole("since", -1)
    if since < 0 and not blobs:
        raise WireError("updates of a task", 0, "at least 1, the whole point")
    numbers = {"round": whole("round", 1), "entries": whole("entries", 0), "norm": float(norm), "since": since}
    numbers |= {"version": whole("version", 0), "check": whole("check", 0)}
    return Task(**numbers, updates=list(blobs), rounds=rounds, shares=[float(x) for x in shares], options=options)
