"""Federated learning on Flower: members come and go, and messages are as long as their ratio.

Each round the clients that are there train on their own data, add what they could not send before, and
send the largest entries of the change that their ratio allows. Ratios follow the data volumes of the
clients of the round (DAGC), so every round has the same budget for each client. The server sends
compressed differences of the model down. Clients die, leave and join on the way (--changes); hostile
ones send nonsense (--hostile).
By default in Flower's simulation; with --processes a SuperLink and a SuperNode for each client, over TLS,
with a key for each node. Needs the extra "federated" (Flower), in an environment of its own: it pins
older versions of what other extras need.
Writes to runs/NAME: config.json, metrics.jsonl (a line for each round), clients.json, clients.md, memories.md (what
became of each memory at each change, as exact fractions), table.md, federated.png. A run that was interrupted goes on
with --resume from the last round that was closed.
"""

import importlib.util
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.lib import cli
from experiments.lib.cli import UserError, at_least, common, fraction, positive
from experiments.lib.folders import Journal, resumable, run_options
from experiments.lib.report import new_console, show_rows
from experiments.lib.run import draw_panels, parser_of

__all__ = ["main"]


def parser() -> cli.Parser:
    from experiments.lib.data import DATASETS
    from experiments.lib.models import MODELS

    p = parser_of("federated", __doc__)
    p.add_argument("--data", choices=DATASETS, default="digits", help="digits come with scikit-learn")
    common(p, "data-dir", ratio=(0.01, "mean ratio of the clients"), batch=(32, "examples of a step"))
    p.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    p.add_argument("--clients", type=at_least(2), default=6, help="clients, hostile ones among them")
    p.add_argument("--skew", type=cli.one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--alpha", type=positive, default=1.0, help="Dirichlet parameter of the label mixes")
    p.add_argument("--rule", type=cli.rule_of, default="sqrt", help="sqrt, phi, released, uniform, or an exponent")
    p.add_argument("--down", type=fraction, default=0.05, help="share of the entries that an update of the model has")
    p.add_argument("--rounds", type=at_least(1), default=40, help="rounds")
    p.add_argument("--local-steps", type=at_least(1), default=10, help="SGD steps of a client in a round")
    common(p, "seed", lr=(0.1, "learning rate of the local steps"))
    p.add_argument("--participation", type=fraction, default=1.0, help="share of the clients there asked in a round")
    p.add_argument("--changes", type=at_least(0), default=0, help="random deaths, leaves and joins in the run")
    p.add_argument("--hostile", type=at_least(0), default=0, help="clients that send nonsense, the last ones")
    p.add_argument("--late", choices=("use", "drop"), default="use", help="what becomes of answers after the deadline")
    p.add_argument("--deadline", type=positive, default=30.0, help="seconds until a round goes on without the rest")
    p.add_argument("--processes", action="store_true", help="SuperLink and SuperNodes as processes, not simulated")
    run_options(p, "federated")
    common(p, "resume")
    return p


def main(arguments: Sequence[str]) -> int:
    cli.one_thread()
    with resumable(parser, arguments, "federated", checked) as (options, _, folder):
        folder = folder.absolute()
        (folder / "clients").mkdir(exist_ok=True)
        start = time.perf_counter()
        restarts = 0 if (folder / "clients.json").is_file() else run(options, folder)
        report(options, folder, restarts, time.perf_counter() - start)
    return 0


def checked(options: dict[str, Any]) -> dict[str, Any]:
    if options["clients"] - options["hostile"] < 2:
        left = f"leaves fewer than 2 of {options['clients']} clients to learn from"
        raise UserError(f"--hostile {options['hostile']} {left}")
    needed = ("flwr",) if options["processes"] else ("flwr", "ray")
    missing = ", ".join(module for module in needed if importlib.util.find_spec(module) is None)
    if missing:
        raise UserError(f'{missing} not installed; in an environment of its own: pip install "jaxcomp[federated]"')
    return options


def run(config: dict[str, Any], folder: Path) -> int:
    """Returns how often processes were started again."""
    from experiments.federated.deploy import Federation, environment

    os.environ |= environment(folder)
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    journal = Journal(folder)
    seen = len(journal.lines())

    def look() -> None:
        nonlocal seen
        for line in journal.lines()[seen:]:
            seen += 1
            who = f"{line['used']} of {line['asked']} used, {line['missing']} missing"
            print(f"round {line['number']}: accuracy {line['accuracy']:.3f}, {who}", flush=True)

    if config["processes"]:
        with Federation(folder, config["clients"]) as federation:
            federation.run(look, 120 + config["rounds"] * (config["deadline"] + 30))
            return federation.restarts
    import logging

    from flwr.simulation import run_simulation  # pyright: ignore[reportMissingImports]

    from experiments.federated.app import client, server

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    print(f"{config['clients']} clients in Flower's simulation; writing to {folder}", flush=True)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, config["clients"], backend_config=resources)
    look()
    if not (folder / "clients.json").is_file():
        raise UserError(f"the simulation ended before its last round; see {folder}")
    return 0


def report(config: dict[str, Any], folder: Path, restarts: int, seconds: float) -> None:
    from experiments.federated.plan import plan_of
    from jaxcomp.members import Member

    console = new_console()
    lines, clients = Journal(folder).lines(), json.loads((folder / "clients.json").read_text())
    events = plan_of(*(config[key] for key in ("clients", "hostile", "rounds", "changes", "seed"))).events
    number = lambda x: "-" if x is None else f"{x:.2g}"
    counted = lambda counts: ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    rows = [
        {
            "client": i,
            "samples": f"{x['volume']:,}",
            "entries if all are there": f"{x['entries']:,}",
            "|differences|": number(x.get("made")),
            "|remembered|": number(x.get("remembered")),
            "its answers": counted(x["counts"]),
        }
        for i, x in clients.items()
    ]
    show_rows(console, "Clients", rows, "", folder / "clients.md")
    changes(console, lines, events, folder)
    total = lambda key: sum(line[key] for line in lines)
    happened = Counter(event for each in events for event in each.values())
    refused = Counter(why.split(":")[0] for line in lines for _, why in line["refused"])
    row = {"rounds": f"{len(lines)}", "test accuracy": f"{lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}"}
    row |= {f"MB {way}": f"{total(f'{way}_bytes') / 1e6:.3f}" for way in ("up", "used", "down")}
    row |= {key: str(total(key)) for key in ("asked", "used", "late", "missing")}
    row |= {"refused": str(refused.total()), "clipped": str(sum(len(line["clipped"]) for line in lines))}
    deaths = happened["dies early"] + happened["dies late"]
    row |= {"deaths / leaves / joins": f"{deaths} / {happened['leaves']} / {happened['joins']}"}
    points = (Member(folder / "clients" / f"client-{i}.npz").point for i in clients)
    size = 4 * next(point.size for point in points if point is not None)
    up = size * max(total("used"), 1) / max(total("used_bytes"), 1)
    down = size * total("asked") / max(total("down_bytes"), 1)
    notes = f"{up:.0f} times fewer bytes used and {down:.1f} times fewer down than dense f32, "
    notes += "with whole memories of who leaves and whole points of who joins."
    notes += f"\n\nrefused: {counted(refused)}." if refused else ""
    notes += f"\n\n{restarts} processes of clients were started again." if restarts else ""
    title = f"Federated on {config['data']}"
    show_rows(console, title, [row | {"seconds": f"{seconds:.0f}"}], notes, folder / "table.md")
    plot(config, lines, clients, events, folder)
    console.print(f"plot: {folder / 'federated.png'}")


def changes(console: Any, lines: list[dict[str, Any]], events: Any, folder: Path) -> None:
    """A row for each change: the sums of its client, over all entries, when its round was closed."""
    rows, apart = [], sum(each[-1] != 0 for line in lines for each in line["sums"].values())
    for line, now in zip(lines, events, strict=False):
        for client, event in sorted(now.items()):
            sums = list(map(Fraction, line["sums"].get(str(client), [0] * 5)[:4]))
            row = {"round": str(line["number"]), "client": str(client), "change": event}
            for name, x in zip(("made", "used", "remembered", "held by the server"), sums, strict=True):
                row[name] = f"{float(x):+.6f}"
            rows.append(row | {"difference": str(sums[0] - sum(sums[1:]))})
    checked = sum(len(line["sums"]) for line in lines)
    notes = (
        "Sums over all entries of what training added to a memory, of what was used, of what the client remembers, and "
        f"of what it handed over. In {apart} of {checked} accounts, one for each client and round, an entry is not the "
        "sum of the others as exact fractions."
    )
    show_rows(console, "Memories", rows or [{"change": "none"}], notes, folder / "memories.md")


def plot(
    config: dict[str, Any], lines: list[dict[str, Any]], clients: dict[str, Any], events: Any, folder: Path
) -> None:
    rounds = [line["number"] for line in lines]
    there = {key: (rounds, [line[key] for line in lines]) for key in ("asked", "used")}
    for start, label in {"dies": "deaths", "leav": "leaves", "join": "joins"}.items():
        counts = [sum(event.startswith(start) for event in now.values()) for now in events[: len(rounds)]]
        there[label] = (rounds, counts)
    volumes = [x["volume"] for x in clients.values()]
    by_client = f"client, {max(volumes):,} to {min(volumes):,} samples"
    panels: dict[str, dict[str, Any]] = {
        "test accuracy": {"accuracy": (rounds, [line["accuracy"] for line in lines])},
        "clients": there,
        "kB of values and indices a round": {
            "message": (list(clients), [8e-3 * x["entries"] for x in clients.values()])
        },
    }
    title = (
        f"{config['clients']} clients, rule {config['rule']}, mean ratio {config['ratio']:g}, skew {config['skew']:g}"
    )
    each = {"kB of values and indices a round": {"xlabel": by_client}}
    draw_panels(folder / "federated.png", panels, title, each, xlabel="round")
