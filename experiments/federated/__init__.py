"""Federated learning on Flower: members come and go, and messages are as long as their ratio.

Each round the clients that are there train on their own digits, add what they could not send before, and
send the largest entries of the change that their ratio allows. Ratios follow the data volumes of the
clients of the round (DAGC), so every round has the same budget for each client. The server sends
compressed differences of the model down. Clients die, leave and join on the way (--changes); hostile
ones send nonsense (--hostile).
By default in Flower's simulation; with --processes a SuperLink and a SuperNode for each client, over TLS,
with a key for each node. Needs the extra "federated" (Flower), in an environment of its own: it pins
older versions of what other extras need.
Writes to runs/NAME: config.json, metrics.jsonl (a line for each round), clients.json (what became of the answers of
each client), clients.md (that, and its bytes beside its ratio), memories.md (what became of each memory at each change,
as exact fractions), table.md, federated.png. A run that was interrupted goes on with --resume from the last round that
was closed.
"""

import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.federated.deploy import Federation, environment
from experiments.federated.plan import plan_for
from experiments.lib import cli
from experiments.lib.cli import UserError, at_least, common, fraction, positive
from experiments.lib.errors import check_row, read_json, reading
from experiments.lib.folders import ANEW, Journal, resumable, run_options
from experiments.lib.report import new_console, show, show_rows
from experiments.lib.run import draw_panels, parser_of

__all__ = ["LINE", "main", "parser"]

# What is read again of a line of metrics.jsonl.
WAYS = ("up_bytes", "used_bytes", "down_bytes")
LINE: dict[str, type] = dict.fromkeys(("number", "asked", "used", "late", "missing", "entries", *WAYS), int)
LINE |= {"loss": float, "accuracy": float, "refused": list, "clipped": list, "sent": list, "sums": dict}

MEMORY_NOTES = """\
Sums over all entries of what training added to a memory, of what was used, of what the client remembers, and of what it
handed over. In {apart} of {checked} accounts, one for each client and round, an entry is not the sum of the others as
exact fractions."""

CLIENT_NOTES = """\
ratio and bytes: the mean of its messages that were decoded, apart from whole memories of who leaves; a ratio is of all
entries, an entry a value and an index. Largest: of all that it sent."""
MEANS = ("ratio", "entries", "bytes", "bytes an entry")  # columns of what was decoded


def parser() -> cli.Parser:
    p = parser_of("federated", __doc__)
    p.add_argument("--clients", type=at_least(2), default=6, help="clients, hostile ones among them")
    p.add_argument("--skew", type=cli.one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--rounds", type=at_least(1), default=40, help="rounds")
    common(p, "seed", ratio=(0.01, "mean ratio of the clients"))
    asked = "share of the clients there that a round asks; who dies or leaves in it is among them"
    p.add_argument("--participation", type=fraction, default=1.0, help=asked)
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
        if not (folder / "clients.json").is_file():
            run(options, folder)
        report(options, folder)
    return 0


def checked(options: dict[str, Any]) -> dict[str, Any]:
    if options["clients"] - options["hostile"] < 2:
        left = f"leaves fewer than 2 of {options['clients']} clients to learn from"
        raise UserError(f"--hostile {options['hostile']} {left}")
    needed = ("flwr",) if options["processes"] else ("flwr", "ray")
    missing = ", ".join(module for module in needed if importlib.util.find_spec(module) is None)
    if missing:
        raise UserError(f'{missing} not installed; in an environment of its own: pip install ".[federated]"')
    return options


def run(config: dict[str, Any], folder: Path) -> None:
    os.environ |= environment(folder)
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    journal = Journal(folder, needs=LINE)
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
        look()
        return
    from flwr.simulation import run_simulation  # pyright: ignore[reportMissingImports]

    from experiments.federated.app import client, server

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, config["clients"], backend_config=resources)
    look()
    if not (folder / "clients.json").is_file():
        raise UserError(f"the simulation ended before its last round; see {folder}")


def report(config: dict[str, Any], folder: Path) -> None:
    console, lines = new_console(), Journal(folder, needs=LINE).lines()
    memories(console, lines, plan_for(config).events, folder / "memories.md")
    sizes = by_client(console, config, lines, folder)
    total = lambda key: sum(line[key] for line in lines)
    refused = Counter(why.split(":")[0] for line in lines for _, why in line["refused"])
    change = lambda key: f"{lines[0][key]:.3f} -> {lines[-1][key]:.3f}"
    row = {"test accuracy": change("accuracy"), "loss": change("loss")}
    row |= {f"MB {way}": f"{total(f'{way}_bytes') / 1e6:.3f}" for way in ("up", "used", "down")}
    row |= {key: str(total(key)) for key in ("asked", "used", "late", "missing")}
    row |= {"refused": str(refused.total()), "clipped": str(sum(len(line["clipped"]) for line in lines))}
    dense = 4 * lines[0]["entries"]
    up, down = dense * total("used") / max(total("used_bytes"), 1), dense * total("asked") / max(total("down_bytes"), 1)
    notes = f"{up:.0f} times fewer bytes used and {down:.1f} times fewer down than dense f32, "
    notes += "with whole memories of who leaves and whole points of who joins."
    notes += f"\n\nrefused: {', '.join(f'{kind} {count}' for kind, count in sorted(refused.items()))}." * bool(refused)
    show_rows(console, "Federated", [row], notes, folder / "table.md")
    rounds = [line["number"] for line in lines]
    panels = {
        "test accuracy": {"accuracy": (rounds, [line["accuracy"] for line in lines])},
        "clients": {key: (rounds, [line[key] for line in lines]) for key in ("asked", "used")},
        "kB of values and indices a round": sizes,
    }
    title = "{clients} clients, mean ratio {ratio:g}, skew {skew:g}".format(**config)
    each = {"kB of values and indices a round": {"xlabel": "client, and its samples"}}
    draw_panels(folder / "federated.png", panels, title, each, xlabel="round")
    console.print(f"plot: {folder / 'federated.png'}", soft_wrap=True)


def by_client(console: Any, config: dict[str, Any], lines: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A row for each client. Returns the curves of what its messages that were decoded might take, and took."""
    clients, started = read_json(folder / "clients.json", dict, ANEW), folder / "clients" / "starts"
    for name, client in clients.items():
        with reading(f"{folder / 'clients.json'}, {name}", ANEW):
            check_row(client, {"samples": int, "counts": dict})
    starts = Counter(started.read_text().split() if started.is_file() else ())
    counted = lambda counts: ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "-"
    events, rows = plan_for(config).events[: len(lines)], []
    names, might, took = [], [], []  # for the figure; kB
    for i, (name, client) in enumerate(clients.items()):
        sent = [each[1:] for line in lines for each in line["sent"] if each[0] == i]
        let_in = [(entries, size) for entries, size, what in sent if what == "in"]
        entries, size = (sum(each) / max(len(let_in), 1) for each in zip((0, 0), *let_in, strict=True))
        why = Counter(why.split(":")[0] for line in lines for who, why in line["refused"] if who == i)
        hostile = " (hostile)" * (i >= config["clients"] - config["hostile"])
        row = {"client": f"{name}{hostile}", "samples": f"{client['samples']:,}"}
        row |= {"ratio": f"{entries / lines[0]['entries']:.5f}", "entries": f"{entries:,.0f}", "bytes": f"{size:,.0f}"}
        row |= {"bytes an entry": f"{size / entries:.2f}"} if let_in else dict.fromkeys(MEANS, "-")
        row |= {"largest": f"{max((size for _, size, _ in sent), default=0):,}"}
        row |= {"changes": counted(Counter(now[i] for now in events if i in now)), "starts": str(starts[name] or "-")}
        answers = {kind: count for kind, count in client["counts"].items() if kind not in why}
        rows.append(row | {"its answers": counted(answers), "refused": counted(why)})
        names.append(f"{name}: {client['samples']:,}")
        might.append(8 * entries / 1e3)
        took.append(size / 1e3)
    show_rows(console, "Clients", rows, CLIENT_NOTES, folder / "clients.md")
    return {"8 bytes an entry": (names, might), "message": (names, took)}


def memories(console: Any, lines: list[dict[str, Any]], events: list[dict[int, str]], path: Path) -> None:
    """A row for each change: the sums of its client, over all entries, when its round was closed."""
    rows = []
    for line, now in zip(lines, events, strict=False):
        for client, event in sorted(now.items()):
            sums = list(map(Fraction, line["sums"].get(str(client), [0] * 5)[:4]))
            row = {"round": line["number"], "client": client, "change": event, "difference": sums[0] - sum(sums[1:])}
            rows.append(row | dict(zip(("made", "used", "remembered", "held"), map(float, sums), strict=True)))
    columns = {"round": "{round}", "client": "{client}", "change": "{change}", "made": "{made:+.6f}"}
    columns |= {"used": "{used:+.6f}", "remembered": "{remembered:+.6f}", "held by the server": "{held:+.6f}"}
    accounts = [each for line in lines for each in line["sums"].values()]
    notes = MEMORY_NOTES.format(apart=sum(each[-1] != 0 for each in accounts), checked=len(accounts))
    show(console, "Memories", columns | {"difference": "{difference!s}"}, rows, notes, path)
