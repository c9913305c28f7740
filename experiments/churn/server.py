"""The server as a process: `python -m experiments.churn.server FOLDER`. Ends after the time that config.json says."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from experiments.churn.model import initial, losses, touch
from experiments.federated.account import Counted
from jaxcomp.federated import Journal, RoundResult, Rounds, save
from jaxcomp.transports import hub


class Weighed(Counted):
    """tokens: of the answers that the last round used."""

    def close(self) -> RoundResult:
        self.tokens = 0
        return super().close()

    def _moved(self, parts: Any) -> Any:
        self.tokens = sum(self._said.values())
        return super()._moved(parts)


def made(config: dict[str, Any], folder: Path) -> Weighed:
    """The server of a run, not begun."""
    volumes = dict.fromkeys(range(config["members"]), config["most_tokens"])
    options = {"weights": "tokens", "patience": 2}
    return Weighed(initial(config["seed"]), volumes, config["ratio"], folder=folder / "used", **options)


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    core = made(config, folder)
    journal = Journal(core, folder / "log")
    with hub(config["address"], keys=config["keys"]) as boxes, (folder / "rounds.jsonl").open("w") as lines:
        touch(folder / "listening")
        members = {str(i): i for i in range(config["members"])}
        settings = {name: config[name] for name in ("quorum", "grace", "deadline")}
        rounds = Rounds(journal, boxes.link("server"), members, least=config["first"], **settings)
        start = None
        while start is None or time.time() - start < config["seconds"]:
            result = rounds.step(0.5)
            if start is None and core.number:
                start, rounds.least = time.time(), 2
                touch(folder / "begun")
            if result is None:
                continue
            save(folder / "server.npz", core)
            loss, accuracy = losses(core.point)
            tokens = 0 if result.skipped else core.tokens
            fields = (
                "number",
                "asked",
                "used",
                "late",
                "missing",
                "joined",
                "returned",
                "left",
                "up_bytes",
                "down_bytes",
            )
            line = {name: getattr(result, name) for name in fields} | {"refused": len(result.refused)}
            times = {"time": time.time(), "tokens": tokens, "loss": loss, "accuracy": accuracy}
            lines.write(json.dumps(line | times) + "\n")
            lines.flush()
    journal.finish()
    touch(folder / "ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
