"""Dense against compressed exchanges over slow links, in a laboratory of network namespaces.

One process for each worker, each on a host of its own (see `experiments.lib.netlab`). Measured for every method and
every rate: seconds of a whole `compressed_mean.update` (compress, exchange, decode, remember), bytes that
passed the links by the kernel's counters, and the time to a target loss when a model is trained so. Written
to runs/NAME: config.json, results.json, exchange.md, training.md, network.png.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, common, one_thread, positive
from experiments.lib.launch import free_port
from experiments.lib.netlab import Lab, add_rates, delay_of, laboratory, rate_name
from experiments.lib.pool import Pool, serve
from experiments.lib.run import Run, parser_of
from experiments.lib.training import OPTIMIZERS
from experiments.network import methods
from experiments.network.results import report
from experiments.network.training import ARCHITECTURES, DATA, OF_TEXT, data_of
from experiments.network.worker import tasks_of

__all__ = ["SETTINGS", "counted", "main", "pool_in", "rounds_of", "timed"]

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
DEMO_RATE = 1e-3  # learning rate of demo, whose updates are signs
TRAINED = ["psum-f32", "dense-bf16:two_shot", "dithering:two_shot", "sidco"]

Rows = Iterator[tuple[dict[str, Any], str]]  # each with what is said of it


def parser() -> Parser:
    p = parser_of("network", __doc__)
    add_rates(p, "10mbit 100mbit 1gbit none")
    p.add_argument("--delay", type=delay_of, default="0ms", help="of a link, each way; needs netem")
    common(p, workers={"type": at_least(2), "help": "processes, each on a host of its own"})
    p.add_argument("--size", type=at_least(1), default=4_200_000, help="entries that are exchanged")
    names: dict[str, Any] = {"nargs": "+", "metavar": "METHOD"}
    what = f"what is measured: {methods.KNOWN}"
    p.add_argument("--methods", type=methods.method_name, **names, default=methods.DEFAULT, help=what)
    common(p, "levels", ratio=0.001)
    p.add_argument("--rounds", type=at_least(1), default=15, help="timed exchanges; the median counts")
    p.add_argument("--seconds", type=positive, default=15.0, help="fewer rounds, at least two, if they take longer")
    p.add_argument("--only", choices=("exchange", "training"), default=None, help="one of the two parts")
    what = f"of the same, {methods.KNOWN_TRAINED}"
    p.add_argument("--train-methods", type=methods.trained_name, **names, default=TRAINED, help=what)
    p.add_argument("--data", choices=DATA, default="digits", help="digits come with scikit-learn")
    what = "files of --data mnist; a text (plain or .xz) for --data text, the source of this package if not given"
    common(p, "batch", "lr", data_dir={"help": what}, steps={"default": 1000, "help": "after which it ends anyhow"})
    what = f"architecture; {' or '.join(OF_TEXT)} for --data text"
    p.add_argument("--model", choices=ARCHITECTURES, default="cnn", help=what)
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what follows the mean")
    p.add_argument("--target", type=positive, default=0.2, help="training loss, mean of 10 steps, at which it ends")
    p.add_argument("--train-seeds", type=at_least(0), nargs="+", default=[0], help="of the start and the batches")
    common(p, "worker", "address")
    return p


def main(arguments: Sequence[str]) -> int:
    run = Run(parser(), arguments, "network")
    o = run.options
    if o.worker is not None:
        serve(o.address, o.workers, o.worker, tasks_of(o.address))
        return 0

    if o.only != "exchange":
        if (o.data == "text") != (o.model in OF_TEXT):
            texts = " or ".join(OF_TEXT)
            raise UserError(f"--data text goes with --model {texts}; got --data {o.data} --model {o.model}")
        data_of(o.data, o.data_dir)  # a wrong folder is noticed before anything is measured
    one_thread()
    found: dict[str, list[dict[str, Any]]] = {"exchange": [], "training": []}
    parts = {"exchange": exchanges, "training": trainings}
    try:
        with laboratory(o.workers) as lab, run.console.status("") as status:
            for part in [o.only] if o.only else parts:
                for rate in dict.fromkeys(o.rates):
                    # TCP remembers what a link was like: connections made without a limit go on to hand over more than
                    # a slow link takes, and what gloo says on others waits behind it (two shots of 4 bits at
                    # 100 Mbit/s: 16 % longer). So each rate has workers that found each other at it.
                    lab.shape(rate, o.delay)
                    with pool_in(lab) as pool:
                        pool.show = status.update
                        status.update(f"{rate_name(rate)}: starting the workers")
                        pool.hear()
                        for row, said in parts[part](o, lab, pool):
                            found[part].append({**row, "rate": rate})
                            run.keep(found)
                            run.say(f"{part}, {rate_name(rate)}: {said}")
    finally:  # whatever was measured until Ctrl-C, too
        report(run, found["exchange"], found["training"])
    return 0


def pool_in(lab: Lab, experiment: str = "network") -> Pool:
    """A worker of an experiment on each host."""
    address = f"{lab.addresses[0]}:{free_port()}"
    more = [*experiment.split(), "--workers", str(len(lab.prefixes)), "--address", address, "--worker"]
    words = [[*prefix, sys.executable, "-m", "experiments", *more, str(i)] for i, prefix in enumerate(lab.prefixes)]
    return Pool(words, {"JAX_PLATFORMS": "cpu", **SETTINGS})


def counted(lab: Lab, ask: Callable[[], list[Any]], delay: float = 0.0) -> tuple[list[Any], float, float]:
    """Answers, and what a host sent meanwhile: bytes without headers, and with them; means over the hosts."""
    settled = SETTLE_SECONDS + 4 * delay
    time.sleep(settled)
    before = lab.counters()
    answers = ask()
    time.sleep(settled)
    links = [new.since(old) for new, old in zip(lab.counters(), before, strict=True)]
    return answers, float(np.mean([x.sent_payload for x in links])), float(np.mean([x.sent_bytes for x in links]))


def rounds_of(answers: Sequence[dict[str, Any]]) -> np.ndarray:
    """Seconds of each round: from when the last worker had ended the round before until the last had ended this one.

    Not what the slowest worker waited: one that begins a round early waits for the others, and by no worker's clock
    would the rounds add up to the time that all of them took.
    """
    return np.diff(np.max([answer["ends"] for answer in answers], axis=0), prepend=0.0)


def timed(pool: Pool, **request: Any) -> list[Any]:
    """Answers of the workers, who begin together once all have heard the request."""
    return pool.ask(**request, at=time.perf_counter() + HEARD_SECONDS)


def exchanges(o: Any, lab: Lab, pool: Pool) -> Rows:
    """Of every method."""
    for method in dict.fromkeys(o.methods):
        pool.show(method)
        program = pool.ask(what="exchange", method=method, size=o.size, ratio=o.ratio, levels=o.levels)[0]
        alone = without_network(pool, o.rounds)
        (first,) = rounds_of(timed(pool, what="rounds", number=1))
        if first < 1:  # the first rounds still find the queues and windows of the method before
            *_, first = rounds_of(timed(pool, what="rounds", number=3))
        rounds = min(o.rounds, max(2, int(o.seconds / first)))
        answers, payload, whole = counted(lab, lambda n=rounds: timed(pool, what="rounds", number=n), o.delay)
        seconds = rounds_of(answers)
        row = {"method": method, "compute": alone, **program, "all_seconds": seconds.tolist()}
        row |= {"seconds": float(np.median(seconds)), "sent_bytes": answers[0]["sent_bytes"]}
        row |= {"payload_bytes": payload / rounds, "link_bytes": whole / rounds}
        row["equal"] = len({answer["sum"] for answer in answers}) == 1
        yield row, f"{method}: {1e3 * row['seconds']:.1f} ms, {row['link_bytes'] / 1e6:.3f} MB with headers"


def without_network(pool: Pool, rounds: int) -> float | None:
    """Seconds of the work alone, median of the rounds; None if it cannot be measured apart."""
    slowest = []
    for _ in range(rounds + 2):  # the first two compile and settle
        answers = timed(pool, what="compute")
        if answers[0]["seconds"] is None:
            return None
        slowest.append(max(answer["seconds"] for answer in answers))  # the others would wait for it
    return float(np.median(slowest[2:]))


def trainings(o: Any, lab: Lab, pool: Pool) -> Rows:
    """Of every method with every seed."""
    task = {key: getattr(o, key) for key in ("ratio", "levels", "data", "model", "batch", "optimizer")}
    task |= {"data_dir": str(o.data_dir) if o.data_dir else None, "outer": (None, None)}
    for method in dict.fromkeys(o.train_methods):
        pool.show(method)
        rate = DEMO_RATE if method == "demo" else o.lr
        program = pool.ask(what="training", method=method, rate=rate, **task)[0]
        for seed in dict.fromkeys(o.train_seeds):
            request = {"what": "train", "steps": o.steps, "target": o.target, "seed": seed}
            answers, payload, whole = counted(lab, lambda request=request: pool.ask(**request), o.delay)
            steps = len(answers[0]["losses"])
            row = {**answers[0], **program, "method": method, "seed": seed}
            row |= {"payload_bytes": payload / steps, "link_bytes": whole / steps}
            row["total"] = max(answer["seconds"][-1] for answer in answers)
            ended = f"{row['total']:.1f} s, {steps} steps, loss {np.mean(row['losses'][-10:]):.3f}"
            yield row, f"{method}, seed {seed}: {ended}"
