"""Members over slow links, one killed every minute, beside the same run without kills: goodput, the law, replay.

Two runs at the same time, with a server and members that are processes of their own, each in a network namespace behind
a link of its own rate (10 to 100 Mbit/s by default) and round-trip time (20 to 200 ms). Rates are held by the kernel;
for the round trips members wait, since few kernels have netem. A member trains between three quarters of the given
seconds and one and a half times as long. The last one joins after a sixth of the time; the one before it leaves at the
half and returns after two thirds. In the second run, every minute one member is killed with SIGKILL, whatever it is
doing, and started again 5 to 15 s later.

goodput: samples of the answers that the server used, a second. At the end: what each member made, entry by entry, is
what was used, remembered and handed over, in exact integers; and the log of what arrived, replayed, gives the same
point, bit by bit. Linux and root only, and grpcio. Writes to runs/NAME: config.json, results.json, table.md, churn.png.
"""

import json
import math
import os
import random
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import UserError, at_least, number
from experiments.lib.launch import end_all, start
from experiments.lib.netlab import Lab, laboratory, rate_name, rate_of
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main"]

PORT = 8431
STARTING = 300.0  # seconds that processes have to begin
AWAY = (5.0, 15.0)  # seconds until a killed member is started again
RUNS = ("without kills", "with kills")
COLUMNS: Columns = {
    "run": "{run}",
    "kills": "{kills}",
    "rounds": "{rounds}",
    "answers used": "{used:,}",
    "of them late": "{late}",
    "not waited for": "{missing}",
    "samples a second": "{goodput:,.0f}",
    "of the run without": "{share:.1%}",
    "accuracy": "{accuracy:.1%}",
    "MB up, down": "{up:.0f}, {down:.0f}",
    "entries apart": "{apart}",
    "replay": "{replay}",
}


def options() -> Any:
    parser = parser_of("churn", __doc__)
    positive = number(lambda x: 0 < x < math.inf, "a number above 0")
    parser.add_argument("--minutes", type=positive, default=30.0, help="of the runs, after all have begun")
    parser.add_argument("--members", type=at_least(3), default=8, help="of each run")
    parser.add_argument("--every", type=positive, default=60.0, metavar="SECONDS", help="between two kills")
    parser.add_argument(
        "--rates", type=rate_of, nargs=2, default=[1e7, 1e8], metavar="RATE", help="of links, from and to"
    )
    parser.add_argument(
        "--trips", type=positive, nargs=2, default=[20.0, 200.0], metavar="MS", help="round trips, from and to"
    )
    parser.add_argument("--seconds", type=positive, default=4.0, help="that members train in a round")
    parser.add_argument("--grace", type=positive, default=1.0, help="seconds after the quorum")
    parser.add_argument(
        "--quorum", type=number(lambda x: 0 < x <= 1, "in (0, 1]"), default=0.75, help="share of those asked"
    )
    parser.add_argument("--ratio", type=number(lambda x: 0 < x <= 1, "in (0, 1]"), default=0.2, help="of entries sent")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class World:
    """One run: its processes, and what happens to them."""

    def __init__(self, lab: Lab, first: int, folder: Path, o: Any, trips: Sequence[float], kills: bool):
        self.folder, self.o, self.kills, self.lab, self.first = folder, o, kills, lab, first
        self.processes: dict[int, Any] = {}
        self.killed: list[tuple[float, int]] = []
        self.back: dict[int, float] = {}
        self.rng = random.Random(o.seed)
        folder.mkdir(parents=True)
        paces = np.linspace(250, 400, o.members)
        config = {"address": f"{lab.addresses[first]}:{PORT}", "members": o.members, "seed": o.seed}
        config |= {"round_trips": list(trips), "paces": paces.tolist()}
        config |= {"keys": {str(i): secrets.token_hex(16) for i in range(o.members)}, "ratio": o.ratio}
        config |= {"train_seconds": o.seconds, "most_tokens": round(8 * paces[-1] * o.seconds), "first": o.members - 1}
        config |= {"quorum": o.quorum, "grace": o.grace, "deadline": 60.0, "seconds": 60 * o.minutes}
        self.config = config
        (folder / "config.json").write_text(json.dumps(config))
        self.log = (folder / "output.txt").open("w")
        self.server = self._start(0, ["experiments.churn.server", folder])

    def _start(self, host: int, words: Sequence[Any]) -> Any:
        prefix = self.lab.prefixes[self.first + host]
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        words = [*prefix, sys.executable, "-m", *words]
        return start(words, stdout=self.log, stderr=self.log, env={**os.environ, **alone, "JAX_PLATFORMS": "cpu"})

    def member(self, i: int) -> None:
        """Starts member i, for the first time or again."""
        self.processes[i] = self._start(i + 1, ["experiments.churn.member", self.folder, i])

    def wait_for(self, name: str) -> float:
        """The time at which this happened."""
        end = time.monotonic() + STARTING
        while not (self.folder / name).is_file():
            self.check()
            if time.monotonic() > end:
                raise UserError(f"churn: no member began within {STARTING:g} s; see {self.folder}/output.txt")
            time.sleep(0.1)
        return time.time()

    def check(self) -> None:
        if self.server.poll() not in (None, 0):
            raise UserError(
                f"churn: the server ended with status {self.server.returncode}; see {self.folder}/output.txt"
            )

    def tick(self, since: float) -> None:
        """What is due so many seconds after the beginning."""
        o, last, leaver = self.o, self.o.members - 1, self.o.members - 2
        whole, now = 60 * o.minutes, time.monotonic()
        if since >= whole / 6 and last not in self.processes:
            self.member(last)
        goodbye = self.folder / f"goodbye-{leaver}"
        if whole / 2 <= since < whole * 2 / 3 and not goodbye.exists():
            goodbye.touch()
        if since >= whole * 2 / 3 and goodbye.exists() and self.processes[leaver].poll() is not None:
            goodbye.unlink()
            self.back.pop(leaver, None)
            self.member(leaver)
        for i in [i for i, at in self.back.items() if now >= at]:
            del self.back[i]
            self.member(i)
        if self.kills and since >= (len(self.killed) + 1) * o.every and since < whole - o.every / 2:
            alive = [i for i, process in self.processes.items() if process.poll() is None]
            chosen = self.rng.choice(alive)
            end_all([self.processes[chosen]])  # SIGKILL
            self.killed.append((since, chosen))
            self.back[chosen] = now + self.rng.uniform(*AWAY)

    def end(self) -> None:
        """Ends what still runs."""
        end_all([*self.processes.values(), self.server])
        self.log.close()


def outcome(world: World, name: str, begun: float) -> dict[str, Any]:
    """The row of a run: its goodput, the law, and the replay."""
    from experiments.churn.account import apart
    from experiments.churn.server import made
    from jaxcomp.federated import Server, load, replay

    folder, config = world.folder, world.config
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    core = made(config, folder)
    load(folder / "server.npz", core)
    core.take_up()
    found = [apart(core, folder, i) for i in range(config["members"])]
    fresh = made(config, folder)
    again = Server(
        fresh.point, {i: fresh._entries[i].volume for i in fresh.counts}, config["ratio"], weights="tokens", patience=2
    )
    rounds = sum(1 for _ in replay(folder / "log", again))
    same = again.point.tobytes() == core.point.tobytes() and again.shown.tobytes() == core.shown.tobytes()
    row = {"run": name, "kills": len(world.killed), "killed": world.killed, "rounds": len(lines)}
    row |= {key: sum(line[key] for line in lines) for key in ("used", "late", "missing", "refused", "tokens")}
    row |= {"goodput": row["tokens"] / config["seconds"], "accuracy": lines[-1]["accuracy"] if lines else 0.0}
    row |= {
        "up": sum(line["up_bytes"] for line in lines) / 1e6,
        "down": sum(line["down_bytes"] for line in lines) / 1e6,
    }
    row |= {"apart": sum(count for count, _ in found), "made_norms": [norm for _, norm in found]}
    row |= {"replay": "same bits" if same and rounds == len(lines) == core.number else "differs"}
    row |= {"joined": sum(len(line["joined"]) for line in lines), "left": sum(len(line["left"]) for line in lines)}
    row |= {"returned": sum(len(line["returned"]) for line in lines)}
    return row | {"curve": [(line["time"] - begun, line["tokens"], line["loss"]) for line in lines]}


def picture(rows: Sequence[dict[str, Any]], minutes: float) -> Any:
    """Goodput in half minutes and loss, with a mark for each kill."""
    from experiments.lib.plots import LINES, new_figure

    figure, (left, right) = new_figure(2)
    edges = np.arange(0, 60 * minutes + 1e-9, min(60.0, 10 * minutes))
    for style, row in zip(LINES, rows, strict=False):
        at, tokens, loss = (np.array(each) for each in zip(*row["curve"], strict=True))
        sums, _ = np.histogram(at, edges, weights=tokens)
        plain = {**style, "marker": ""}
        left.plot((edges[1:] + edges[:-1]) / 120, sums / np.diff(edges), label=row["run"], **plain)
        right.plot(at / 60, loss, label=row["run"], **plain)
        for when, _ in row["killed"]:
            left.axvline(when / 60, color="0.8", linewidth=0.8, zorder=0)
    left.set(xlabel="minutes (grey: a kill)", ylabel="samples used a second", ylim=(0, None))
    right.set(xlabel="minutes", ylabel="test loss", yscale="log")
    left.legend()
    right.legend()
    return figure


def main(arguments: Sequence[str]) -> int:
    run = Run(options(), arguments, "churn")
    o = run.options
    try:
        import grpc  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError('churn needs grpcio; install it with: pip install "jaxcomp[sites]"') from None
    rates = [float(x) for x in np.geomspace(float(o.rates[0]), float(o.rates[1]), o.members)]
    # The slowest link is the farthest.
    trips = [float(x) / 1000 for x in np.geomspace(o.trips[1], o.trips[0], o.members)]
    worlds: list[World] = []
    with laboratory(2 * (o.members + 1)) as lab:
        lab.shape([*[1e9, *rates] * 2])
        folder = run.path("config.json").parent
        try:
            for w, name in enumerate(RUNS):
                place = folder.absolute() / name.replace(" ", "-")
                worlds.append(World(lab, w * (o.members + 1), place, o, trips, kills=bool(w)))
            for world in worlds:
                world.wait_for("listening")
                for i in range(o.members - 1):
                    world.member(i)
            begun = [world.wait_for("begun") for world in worlds]
            run.say(f"both runs have begun; they take {o.minutes:g} minutes")
            while any(not (world.folder / "ended").is_file() for world in worlds):
                for world, since in zip(worlds, begun, strict=True):
                    world.check()
                    if not (world.folder / "ended").is_file():
                        world.tick(time.time() - since)
                time.sleep(0.1)
        finally:
            for world in worlds:
                world.end()
    rows = [outcome(world, name, since) for world, name, since in zip(worlds, RUNS, begun, strict=True)]
    for row in rows:
        row["share"] = row["goodput"] / rows[0]["goodput"] if rows[0]["goodput"] else math.nan
    links = f"{o.members} members, {rate_name(rates[0])} to {rate_name(rates[-1])}, {o.trips[0]:g} to {o.trips[1]:g} ms"
    notes = f"{links}; {o.minutes:g} minutes, a kill every {o.every:g} s. Rates by tc, round trips by waiting."
    run.table("Members that are killed", COLUMNS, rows, notes)
    run.keep({"rates": rates, "trips": trips, "rows": rows})
    run.picture(picture(rows, o.minutes), "churn.png")
    failed = [f"{row['run']}: {row['apart']} entries apart" for row in rows if row["apart"]]
    failed += [f"{row['run']}: the replay differs" for row in rows if row["replay"] != "same bits"]
    failed += (
        [f"goodput {rows[1]['share']:.1%} of the run without kills; at least 85 % is asked"]
        if rows[1]["share"] < 0.85
        else []
    )
    for line in failed:
        run.say(line)
    return 1 if failed else 0
