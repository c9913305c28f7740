"""Federated learning between processes: a server, and clients whose messages are as long as their ratio.

Starts a gRPC server and one process for each client on this machine. Each round the server sends its
model to the chosen clients; each trains on its own data, adds what it could not send before, and
sends the largest entries of the change that its ratio allows. Ratios follow the data volumes of the
clients of the round (DAGC), so every round has the same budget.
Writes to runs/NAME: config.json, metrics.jsonl (a line for each round), table.md, federated.png.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli import (
    Parser,
    UserError,
    at_least,
    choose_new,
    fraction,
    one_or_more,
    one_thread,
    positive,
    rule_of,
    share,
)

__all__ = ["main"]

RESTARTS = 3  # of a client that dies again and again before it is ready


def parser() -> Parser:
    from experiments.data import DATASETS
    from experiments.models import MODELS

    p = Parser(prog="python -m experiments federated", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--data", choices=DATASETS, default="digits", help="digits come with scikit-learn")
    p.add_argument("--data-dir", type=Path, default=None, help="folder with the files of --data mnist")
    p.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    p.add_argument("--clients", type=at_least(1), default=4, help="client processes")
    p.add_argument("--skew", type=one_or_more, default=100.0, help="largest data volume over the smallest")
    p.add_argument("--alpha", type=positive, default=1.0, help="Dirichlet parameter of the label mixes")
    p.add_argument("--rule", type=rule_of, default="sqrt", help="sqrt, phi, released, uniform, or an exponent")
    p.add_argument("--ratio", type=fraction, default=0.01, help="mean ratio of the clients")
    p.add_argument("--rounds", type=at_least(1), default=40, help="rounds")
    p.add_argument("--local-steps", type=at_least(1), default=10, help="SGD steps of a client in a round")
    p.add_argument("--batch", type=at_least(1), default=32, help="examples of a step")
    p.add_argument("--lr", type=positive, default=0.1, help="learning rate of the local steps")
    p.add_argument("--participation", type=fraction, default=1.0, help="share of the clients asked in a round")
    p.add_argument("--dropout", type=share, default=0.0, help="chance that a client's process dies in a round")
    p.add_argument("--garbage", type=at_least(0), default=0, help="clients that send nonsense, the last ones")
    p.add_argument("--deadline", type=positive, default=30.0, help="seconds until a round goes on without the rest")
    p.add_argument("--seed", type=at_least(0), default=0, help="of data, model and choices")
    p.add_argument("--name", default=None, help="folder under --runs; without it the next free federated-N")
    p.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    options = vars(parser().parse_args(arguments))
    name, runs = options.pop("name"), options.pop("runs")
    if options["garbage"] >= options["clients"]:
        raise UserError(f"--garbage {options['garbage']} leaves none of {options['clients']} clients to learn from")
    folder = choose_new(runs, name, "federated")

    from experiments.data import load

    data = load(options["data"], options["data_dir"])
    (folder / "clients").mkdir(parents=True)
    config = options | {"data_dir": str(options["data_dir"].absolute()) if options["data_dir"] else None}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    run(options, data, folder)
    return 0


class Clients:
    """The client processes; one that dropped out is started again."""

    def __init__(self, number: int, port: int, folder: Path):
        self.port, self.folder = port, folder
        self.starts, self.failures = [-1] * number, [0] * number
        self.processes: list[subprocess.Popen] = []
        self.processes = [self.start(i) for i in range(number)]

    def start(self, number: int) -> subprocess.Popen:
        self.starts[number] += 1
        words = [sys.executable, "-m", "experiments.federated.client", "--number", str(number)]
        words += ["--port", str(self.port), "--config", str(self.folder / "config.json")]
        words += ["--start", str(self.starts[number])]
        with self.log(number).open("a") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)

    def log(self, number: int) -> Path:
        return self.folder / "clients" / f"client-{number}.log"

    @property
    def restarts(self) -> int:
        return sum(self.starts)

    def look_after(self, ready: set[int]) -> None:
        """Starts those again that are gone, and takes them out of `ready`.

        Raises:
            UserError: one has died RESTARTS + 1 times in a row before it was ready.
        """
        gone = [i for i, process in enumerate(self.processes) if process.poll() not in (None, 0)]
        for i in gone:
            self.failures[i] = 0 if i in ready else self.failures[i] + 1
            if self.failures[i] > RESTARTS:
                last = self.log(i).read_text(errors="replace").strip().splitlines()[-1:]
                why = f"its log ends: {last[0]}" if last else f"exit status {self.processes[i].poll()}"
                raise UserError(f"client {i} died {self.failures[i]} times before it was ready; {why}")
            ready.discard(i)
            self.processes[i] = self.start(i)

    def stop(self, ready: set[int], seconds: float = 20.0) -> None:
        """Ends those that are not ready, as they will not hear of it; waits for the others."""
        end = time.monotonic() + seconds
        for i, process in enumerate(self.processes):
            if i not in ready:
                process.kill()
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(options: dict[str, Any], data: Any, folder: Path) -> None:
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from experiments.federated.model import flat_model
    from experiments.federated.server import Server

    console = Console(width=None if sys.stdout.isatty() else 150)
    model = flat_model(options["model"], data, options["seed"])
    test = jax.jit(model.test)
    o = options
    server = Server(model.start, o["clients"], o["ratio"], o["rule"], o["seed"], o["participation"])
    clients = Clients(options["clients"], server.port, folder)
    server.look_after = lambda: clients.look_after(server.ready)
    lines = []
    console.print(f"{options['clients']} clients on port {server.port}; writing to {folder}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    try:
        server.wait_for_clients(180.0)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("rounds", total=options["rounds"], now="")
            with (folder / "metrics.jsonl").open("w") as metrics:
                for now in server.rounds(options["rounds"], options["deadline"]):
                    loss, accuracy = (float(x) for x in test(now.vector, data.test_x, data.test_y))
                    line = {key: value for key, value in now._asdict().items() if key != "vector"}
                    line |= {"loss": loss, "accuracy": accuracy, "restarts": clients.restarts}
                    lines.append(line)
                    metrics.write(json.dumps(line) + "\n")
                    metrics.flush()
                    bar.update(task, completed=now.number, now=f"accuracy {accuracy:.3f}, {now.up_bytes:,} B up")
    except TimeoutError as error:
        raise UserError(f"{error}; see {folder / 'clients'}") from None
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        server.stop()
        clients.stop(server.ready)
    if lines:
        report(console, options, server, lines, folder)


def report(console: Any, options: dict[str, Any], server: Any, lines: list[dict[str, Any]], folder: Path) -> None:
    import numpy as np

    from experiments.plots import LINES, new_figure, save
    from experiments.report import show

    volumes = np.array([server.samples[i] for i in range(options["clients"])])
    counts = np.array(list(server.shared_among(range(options["clients"])).values()))
    rows = [
        [str(i), f"{n:,}", f"{k / server.vector.size:.5f}", f"{k:,}"]
        for i, (n, k) in enumerate(zip(volumes, counts, strict=True))
    ]
    note = "" if server.asked == options["clients"] else "If all take part; the clients of a round share its budget."
    show(console, "Clients", ["client", "samples", "ratio", "entries a round"], rows, note)
    total = lambda key: sum(line[key] for line in lines)
    row = [
        str(options["rule"]),
        str(len(lines)),
        f"{lines[-1]['accuracy']:.4f}",
        f"{total('up_bytes') / 1e6:.3f}",
        f"{total('down_bytes') / 1e6:.2f}",
        str(total("accepted")),
        str(total("rejected")),
        str(total("missing")),
        str(total("refused")),
        str(total("skipped")),
        str(lines[-1]["restarts"]),
    ]
    head = ["rule", "rounds", "test accuracy", "MB up", "MB down", "accepted", "rejected", "missing"]
    head += ["bad calls", "rounds skipped", "restarts"]
    dense = 4 * server.vector.size * total("accepted")
    notes = f"{dense / max(total('up_bytes'), 1):.0f} times fewer bytes up than dense f32; the model goes down whole."
    if server.reasons:
        notes += f"\nlast message refused: {server.reasons[-1]}"
    show(console, f"Federated on {options['data']}", head, [row], notes, folder / "table.md")
    figure, (left, right) = new_figure(2)
    left.plot([line["number"] for line in lines], [line["accuracy"] for line in lines], **LINES[1], markersize=3)
    left.set(xlabel="round", ylabel="test accuracy")
    right.bar(range(len(volumes)), 8 * counts / 1e3, color=LINES[1]["color"])
    right.set(
        xlabel=f"client, {volumes.max():,} to {volumes.min():,} samples", ylabel="kB of values and indices a round"
    )
    figure.suptitle(
        f"{options['clients']} clients, rule {options['rule']}, mean ratio {options['ratio']:g}, "
        f"skew {options['skew']:g}"
    )
    save(figure, folder / "federated.png")
    console.print(f"plot: {folder / 'federated.png'}")
