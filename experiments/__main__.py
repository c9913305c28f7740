"""`python -m experiments NAME ...`: one name for each experiment."""

import contextlib
import difflib
import importlib
import os
import sys
from typing import NoReturn

from experiments.lib.cli import fail
from experiments.lib.errors import line_of

# Name, of one or two words -> (module, what it shows). Modules are imported when asked for: each sets up JAX itself.
EXPERIMENTS = {
    "compare": ("train.compare", "train one model with several compression methods and compare them"),
    "train": ("train", "train one model with one method: in one process, in several, or on a cluster"),
    "churn": ("churn", "members over slow links, one killed every minute: goodput, nothing lost, same bits on replay"),
    "soak": ("train.soak", "trainings with kills, a full disk, NaN, a corrupted checkpoint: same bits"),
    "attack": ("attack", "messages fuzzed, combinations and statistics of all parts: what holds, what falls"),
    "sidco quality": ("sidco.quality", "share of entries that SIDCo and rivals send, on known laws and on gradients"),
    "sidco training": ("sidco.training", "loss and accuracy of threshold methods, at equal steps and at equal bytes"),
    "skcompress sizes": ("skcompress.sizes", "bytes per nonzero and error of messages; what each part is worth"),
    "skcompress training": ("skcompress.training", "loss of linear models and a network, at equal steps and bytes"),
    "quantizers": ("quantizers", "error of a mean against bits: block scales, rotations, releases"),
    "dagc": ("dagc", "rules for a ratio per worker, against each other and against uniform"),
    "network": ("network", "dense against compressed exchanges over slow links, in network namespaces"),
    "scoreboard": ("network.scoreboard", "does it pay: time to a loss of methods, against the best dense one"),
    "federated": ("federated", "members who come and go, on Flower; messages as long as their ratio"),
    "smoothness": ("smoothness", "smoothness-aware compression against plain, in rounds and bits"),
    "sharded": ("sharded", "sharded models: each device compresses its shard, and what crosses which axis"),
    "ways": ("ways", "per-worker and unreduced gradients of Flax, Equinox, a GPT: what each needs and costs"),
    "overlap": ("sharded.overlap", "buckets: exchanges that may start while the backward pass still runs"),
    "layouts": ("layouts", "which vectors a tree should become: one, each leaf, or equal chunks"),
    "local": ("local", "many steps at each worker, then one compressed exchange of their differences"),
    "plan": ("plan", "the planner in the network laboratory: its advice, and its regret"),
    "scale": ("scale", "routes among up to 16,384 workers, by formula: bytes, memory, seconds"),
    "links": ("scale.links", "collectives fitted among 2 to 4 processes, checked among 6 and 8"),
    "setups": ("scale.setups", "five set-ups that people have: what to exchange, with times checked by simulation"),
    "workers": ("scale.workers", "1,024 simulated workers: error feedback, DIANA, EF21, DAGC, local updates"),
    "compiled": ("compiled", "what the compilers of H100s and TPUs make of each method, on a machine without either"),
    "pods": ("pods", "what crosses between slices of TPUs and hosts of GPUs for a GPT, compiled without any of them"),
    "trainers": (
        "trainers",
        "MaxText's DiLoCo, DrJAX and Tunix with the exchange compressed, in their released packages",
    ),
    "accelerator": ("accelerator", "on a GPU or a TPU: parity with the CPU, laws, and times; under five minutes"),
    "figures": ("figures", "tables and pictures of docs/results: which are stale, and to make them anew"),
    # Benchmarks: every figure is a ratio within one run.
    "bench exchange": ("bench.exchange", "exchanges of unequal messages between processes: bytes on the wire, time"),
    "bench codes": ("bench.codes", "keys and levels in jit and on the host, against a sort, zlib and zstd"),
    "bench compressors": ("bench.compressors", "compress and decompress of each, against passes over memory"),
    "bench layers": ("bench.layers", "parameters cut over devices: bytes and memory, gathered whole or by layers"),
    "bench machines": (
        "bench.machines",
        "what codecs cost on an H100 or a TPU, by its compiler: a file for jaxcomp plan",
    ),
    "bench memory": (
        "bench.memory",
        "bytes a parameter of each method and route: state and peak, compiled for H100 and v5e",
    ),
    "bench plan": ("bench.plan", "seconds of jc.plan for 10 M parameters, and how much of its table it measures"),
    "bench rotations": ("bench.rotations", "rotations, EDEN and block-scaled numbers, against a copy"),
    "bench select": ("bench.select", "thresholds and compaction against sorts, over sizes"),
    "bench skcompress": ("bench.skcompress", "sketches and quantile buckets in jit and as bytes, against one sort"),
    "bench step": ("bench.step", "one update of a GPT's tree: time and memory beside a plain pmean"),
    "bench text": ("bench.text", "what codecs and steps move on an H100, counted in the text made by its compiler"),
    "bench trees": ("bench.trees", "a GPT's whole tree: compile time and memory, beside a plain psum"),
    "bench smoothness": ("bench.smoothness", "the parts of a DIANA+ round, against the gradients"),
    "bench wire": ("bench.wire", "the worst time and memory of decoding mutated messages"),
}


def main(arguments: list[str]) -> int:
    first, second = [*arguments, "", ""][:2]
    parts = [name for name in EXPERIMENTS if name.startswith(f"{first} ")]
    name, last = (f"{first} {second}", second) if parts else (first, first)
    if last in ("", "-h", "--help"):
        print("usage: python -m experiments NAME [options]\n")
        print("\n".join(f"  {each:<20}{EXPERIMENTS[each][1]}" for each in parts or EXPERIMENTS))
        print("\npython -m experiments NAME --help lists the options.")
        return 0 if last else 2
    if name not in EXPERIMENTS:
        where = f"name {second!r} after {first}" if parts else f"experiment {first!r}"
        known = [each.removeprefix(f"{first} ") for each in parts or EXPERIMENTS]
        near = difflib.get_close_matches(last, known, 1, 0.75)
        fail(f"unknown {where}; {f'did you mean {near[0]!r}? C' if near else 'c'}hoose from {', '.join(known)}")
    try:
        module = importlib.import_module(f"experiments.{EXPERIMENTS[name][0]}")
        return module.main(arguments[len(name.split()) :])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        fail(line)


def leave(status: int) -> NoReturn:
    """Ends the program; an interrupted one at once, unless other processes wait for its farewell.

    Where a compilation was cut short, JAX (0.10) often crashes while Python takes it down.
    """
    jax = sys.modules.get("jax")
    if status == 130 and not (jax and jax.distributed.is_initialized()):
        with contextlib.suppress(OSError):  # nobody may be left to read it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
