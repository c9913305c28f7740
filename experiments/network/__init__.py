"""Dense against compressed exchanges over slow links, in a laboratory of network namespaces.

One process for each worker, each on a host of its own (see `experiments.lib.netlab`). Measured for every method and
every rate: seconds of a whole `compressed_mean.update` (compress, exchange, decode, remember), bytes that
passed the links by the kernel's counters, and the time to a target loss when a model is trained so. Written
to runs/NAME: config.json, results.json, exchange.md, training.md, network.png.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, common, fraction, one_thread, positive
from experiments.lib.launch import free_port
from experiments.lib.netlab import Lab, add_rates, delay_of, laboratory, rate_name
from experiments.lib.pool import Pool, serve
from experiments.lib.report import status
from experiments.lib.run import Run, parser_of
from experiments.network import results
from experiments.network.methods import DEFAULT, PEERS, known, method_name, trained_name

__all__ = ["main", "pool_in"]

# Of every worker, whatever its method. One thread: several workers share a core, and more threads look for work in
# the time of the others. And the C library gives large arrays back at once, while fresh ones cost more than most
# passes over them.
SETTINGS = {
    "NPROC": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}
SETTLE_SECONDS = 0.1  # for the last acknowledgements, before the counters are read
HEARD_SECONDS = 0.02  # within which every worker has heard what it is asked
TRAINED = ["psum-f32", "dense-bf16:two_shot", "dithering:two_shot", "sidco"]


def parser() -> Parser:
    from experiments.lib.training import OPTIMIZERS
    from experiments.local.methods import CODES
    from experiments.network.training import ARCHITECTURES, DATA, OF_TEXT

    p = parser_of("network", __doc__)
    add_rates(p, "10mbit 100mbit 1gbit none")
    p.add_argument("--delay", type=delay_of, default="0ms", help="of a link, each way; needs netem")
    common(p, workers={"type": at_least(2), "help": "processes, each on a host of its own"})
    p.add_argument("--sizes", type=at_least(1), nargs="+", default=[4_200_000], metavar="SIZE", help="entries")
    names: dict[str, Any] = {"nargs": "+", "metavar": "METHOD"}
    p.add_argument("--methods", type=method_name, **names, default=DEFAULT, help=f"what is measured: {known()}")
    common(p, "levels", ratio=0.001)
    p.add_argument("--rounds", type=at_least(1), default=15, help="timed exchanges; the median counts")
    p.add_argument("--seconds", type=positive, default=15.0, help="fewer rounds, at least two, if they take longer")
    p.add_argument("--only", choices=("exchange", "training"), default=None, help="one of the two parts")
    add_rates(p, "100mbit", "train-rates", "at which a model is trained")
    what = "of the same, demo (the optimizer), local-CODE@H and stream-CODE@H (local updates, CODE one of "
    what += f"{', '.join(CODES)}), or, where PyTorch is installed, {', '.join(PEERS)}"
    p.add_argument("--train-methods", type=trained_name, **names, default=TRAINED, help=what)
    p.add_argument("--train-ratio", type=fraction, default=None, help="of sparse methods in training; else --ratio")
    p.add_argument("--data", choices=DATA, default="digits", help="digits come with scikit-learn")
    what = "files of --data mnist; a text (plain or .xz) for --data text, the source of this package if not given"
    common(p, "batch", "lr", data_dir={"help": what}, steps={"default": 1000, "help": "after which it ends anyhow"})
    what = f"architecture; {' or '.join(OF_TEXT)} for --data text"
    p.add_argument("--model", choices=ARCHITECTURES, default="cnn", help=what)
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what follows the mean")
    p.add_argument("--demo-lr", type=positive, default=1e-3, help="learning rate of demo, whose updates are signs")
    p.add_argument("--target", type=positive, default=0.2, help="training loss, mean of 10 steps, at which it ends")
    p.add_argument("--train-seeds", type=at_least(0), nargs="+", default=[0], help="of the start and the batches")
    common(p, "worker", "address")
    return p


def check(o: Any) -> None:
    """Options that need each other."""
    from experiments.network.training import OF_TEXT

    o.train_ratio = o.train_ratio or o.ratio
    if o.only != "exchange" and (o.data == "text") != (o.model in OF_TEXT):
        texts = " or ".join(OF_TEXT)
        raise UserError(f"--data text goes with --model {texts}; got --data {o.data} --model {o.model}")


def main(arguments: Sequence[str]) -> int:
    run = Run(parser(), arguments, "network")
    o = run.options
    check(o)
    if o.worker is not None:
        from experiments.network.worker import Worker

        serve(o.address, o.workers, o.worker, Worker(o.address, o.workers, o.worker))
        return 0

    from experiments.network.training import data_of

    if o.only != "exchange":
        data_of(o.data, o.data_dir)  # a wrong folder is noticed before anything is measured
    one_thread()
    rows: dict[str, list[dict[str, Any]]] = {"exchange": [], "training": []}
    interrupted = False
    try:
        with laboratory(o.workers) as lab, status(run.console) as show:
            runs = Runs(run, lab, rows, show)
            for rate in dict.fromkeys(o.rates if o.only != "training" else ()):
                with runs.connected(rate):
                    runs.exchanges(rate)
            for rate in dict.fromkeys(o.train_rates if o.only != "exchange" else ()):
                with runs.connected(rate):
                    runs.trainings(rate)
    except KeyboardInterrupt:
        interrupted = True
    if any(rows.values()):
        rows["exchange"].sort(key=lambda row: (o.sizes.index(row["size"]), o.methods.index(row["method"])))
        rows["training"].sort(key=lambda row: o.train_methods.index(row["method"]))
        results.report(run, rows["exchange"], rows["training"])
    if interrupted:
        run.say(f"interrupted; {run.folder} has what was measured" if any(rows.values()) else "interrupted")
    return 130 if interrupted else 0


def pool_in(lab: Lab, experiment: str = "network") -> Pool:
    """A worker of an experiment on each host."""
    address = f"{lab.addresses[0]}:{free_port()}"
    more = [experiment, "--workers", str(len(lab.prefixes)), "--address", address, "--worker"]
    words = [[*prefix, sys.executable, "-m", "experiments", *more, str(i)] for i, prefix in enumerate(lab.prefixes)]
    return Pool(words, {"JAX_PLATFORMS": "cpu", **SETTINGS})


def rounds_of(answers: Sequence[dict[str, Any]]) -> np.ndarray:
    """Seconds of each round: from when the last worker had ended the round before until the last had ended this one.

    Not what the slowest worker waited: one that begins a round early waits for the others, and by no worker's clock
    would the rounds add up to the time that all of them took.
    """
    return np.diff(np.max([answer["ends"] for answer in answers], axis=0), prepend=0.0)


class Runs:
    """All measurements of one folder."""

    def __init__(self, run: Run, lab: Lab, rows: dict[str, list[dict[str, Any]]], show: Callable[[str], None]):
        self.run, self.options, self.lab, self.rows, self.show = run, run.options, lab, rows, show
        self.pool: Any = None
        self.alone: dict[Any, float | None] = {}

    @contextlib.contextmanager
    def connected(self, rate: float | None) -> Iterator[None]:
        """Workers that found each other on links of this rate.

        TCP remembers what a link was like: connections made without a limit go on to hand over more than a slow link
        takes, and what gloo says on others waits behind it (two shots of 4 bits at 100 Mbit/s: 16 % longer).
        """
        self.lab.shape(rate, self.options.delay)
        with pool_in(self.lab) as pool:
            pool.show = self.show
            self.show(f"{rate_name(rate)}: starting the workers")
            pool.hear()
            self.pool = pool
            yield

    def keep(self, part: str, row: dict[str, Any], said: str) -> None:
        self.rows[part].append(row)
        self.run.keep({"machine": {"cores": len(os.sched_getaffinity(0))}, **self.rows})
        self.run.say(said)

    def timed(self, **request: Any) -> list[Any]:
        """Answers of the workers, who begin together once all have heard the request."""
        return self.pool.ask(**request, at=time.perf_counter() + HEARD_SECONDS)

    def counted(self, ask: Callable[..., list[Any]], **request: Any) -> tuple[list[Any], float, float]:
        """Answers, and what a host sent meanwhile: bytes without headers, and with them; means over the hosts."""
        settled = SETTLE_SECONDS + 4 * self.options.delay
        time.sleep(settled)
        before = self.lab.counters()
        answers = ask(**request)
        time.sleep(settled)
        links = [new.since(old) for new, old in zip(self.lab.counters(), before, strict=True)]
        return answers, float(np.mean([x.sent_payload for x in links])), float(np.mean([x.sent_bytes for x in links]))

    def exchanges(self, rate: float | None) -> None:
        o = self.options
        for size, method in itertools.product(dict.fromkeys(o.sizes), dict.fromkeys(o.methods)):
            where = f"{method}, {size:,} entries, {rate_name(rate)}"
            self.show(f"{where}: compiling")
            program = self.pool.ask(what="exchange", method=method, size=size, ratio=o.ratio, levels=o.levels)[0]
            if (method, size) not in self.alone:
                self.show(f"{where}: without the network")
                self.alone[method, size] = self.without_network()
            self.show(where)
            (first,) = rounds_of(self.timed(what="rounds", number=1))
            if first < 1:  # the first rounds still find the queues and windows of the method before
                *_, first = rounds_of(self.timed(what="rounds", number=3))
            rounds = min(o.rounds, max(2, int(o.seconds / first)))
            answers, payload, whole = self.counted(self.timed, what="rounds", number=rounds)
            seconds = rounds_of(answers)
            row = {"method": method, "size": size, "rate": rate, "compute": self.alone[method, size], **program}
            row |= {"seconds": float(np.median(seconds)), "all_seconds": seconds.tolist()}
            row |= {"payload_bytes": payload / rounds, "link_bytes": whole / rounds}
            row |= {key: answers[0].get(key) for key in ("lane_bytes", "sent_bytes")}
            row["equal"] = len({answer["sum"] for answer in answers}) == 1
            took, sent = 1e3 * row["seconds"], row["link_bytes"] / 1e6
            self.keep("exchange", row, f"{where}: {took:.1f} ms, {sent:.3f} MB with headers")

    def without_network(self) -> float | None:
        """Seconds of the work alone, median of the rounds; None if it cannot be measured apart."""
        slowest = []
        for _ in range(self.options.rounds + 2):  # the first two compile and settle
            answers = self.timed(what="compute")
            if answers[0]["seconds"] is None:
                return None
            slowest.append(max(answer["seconds"] for answer in answers))  # the others would wait for it
        return float(np.median(slowest[2:]))

    def trainings(self, rate: float | None) -> None:
        o = self.options
        for method in dict.fromkeys(o.train_methods):
            self.show(f"training with {method}, {rate_name(rate)}: compiling")
            described = {key: getattr(o, key) for key in ("levels", "data", "model", "batch", "optimizer")}
            described |= {"ratio": o.train_ratio, "data_dir": str(o.data_dir) if o.data_dir else None, "rate": o.lr}
            if method == "demo":
                described["rate"] = o.demo_lr
            program = self.pool.ask(what="training", method=method, **described)[0]
            for seed in dict.fromkeys(o.train_seeds):
                where = f"training with {method}, {rate_name(rate)}, seed {seed}"
                self.pool.show = lambda text, where=where: self.show(f"{where}: {text}")
                answers, payload, whole = self.counted(
                    self.pool.ask, what="train", steps=o.steps, target=o.target, seed=seed
                )
                self.pool.show = self.show
                steps = len(answers[0]["losses"])
                row = {**answers[0], **program, "method": method, "rate": rate, "seed": seed}
                row |= {"payload_bytes": payload / steps, "link_bytes": whole / steps}
                row["total"] = max(answer["seconds"][-1] for answer in answers)
                ended = f"{row['total']:.1f} s, {steps} steps, loss {np.mean(row['losses'][-10:]):.3f}"
                self.keep("training", row, f"{where}: {ended}")
