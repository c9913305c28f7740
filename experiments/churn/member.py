"""One member as a process: `python -m experiments.churn.member FOLDER NUMBER`. It may be killed at any moment."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.churn.account import Made
from experiments.churn.model import Training
from jaxcomp.federated import Member, Participant
from jaxcomp.transports import site


class Delayed:
    """A transport whose messages take a while: half of a round trip in each direction."""

    def __init__(self, transport: Any, round_trip: float):
        self.transport, self.half, self.name = transport, round_trip / 2, transport.name

    def send(self, to: Sequence[str], tag: str, data: bytes) -> None:
        time.sleep(self.half)
        self.transport.send(to, tag, data)
        time.sleep(self.half)

    def receive(self, tag: str, seconds: float) -> list[tuple[str, bytes]]:
        found = self.transport.receive(tag, seconds)
        time.sleep(self.half)
        return found

    def close(self) -> None:
        self.transport.close()


def main(folder: Path, i: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    transport = site(config["address"], str(i), key=config["keys"][str(i)], seconds=30.0)
    member = Member(folder / f"client-{i}.npz")
    made = Made(folder / f"made-{i}.npz", member)
    part = Participant(member, Delayed(transport, config["round_trips"][i]), idle=4.0)
    train = Training(i, config["members"], config["seed"], config["paces"][i], config["train_seconds"])
    goodbye = folder / f"goodbye-{i}"  # asks this member to leave
    part.hello()
    while True:
        try:
            given = part.task(part.idle)
            if given is None:
                part.hello(part.idle)
                continue
            task, point = given
            if goodbye.is_file():
                made.begin(task)
                if part.leave(task):
                    return
                continue
            after, tokens = train(point, task)
            made.begin(task)
            part.answer(task, after, tokens)
            made.answered()
        except ConnectionError:  # the server will be there again
            time.sleep(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
