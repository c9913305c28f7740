"""`python -m experiments NAME ...`: one name for each experiment."""

import importlib
import sys

from experiments.lib.cli import fail, usage
from experiments.lib.errors import line_of

# name -> (module, what it shows). Modules are imported only when asked for: each sets up JAX itself.
EXPERIMENTS = {
    "compare": ("experiments.train.compare", "train one model with several compression methods and compare them"),
    "train": ("experiments.train", "train one model with one method: in one process, in several, or on a cluster"),
    "kills": ("experiments.train.kills", "kill processes of a training at random; what was trained must not show it"),
    "soak": (
        "experiments.train.soak",
        "a training with kills, a full disk, a NaN and a corrupted checkpoint: same bits",
    ),
    "attack": (
        "experiments.attack",
        "messages fuzzed, combinations and statistics of all parts: what holds, what falls",
    ),
    "sidco": ("experiments.sidco", "SIDCo and its rivals: quality of the threshold, and training"),
    "skcompress": ("experiments.skcompress", "SKCompress and its rivals: sizes and errors of messages, and training"),
    "quantizers": ("experiments.quantizers", "error of a mean against bits: block scales, rotations, releases"),
    "dagc": ("experiments.dagc", "rules for a ratio per worker, against each other and against uniform"),
    "network": ("experiments.network", "dense against compressed exchanges over slow links, in network namespaces"),
    "scoreboard": (
        "experiments.network.scoreboard",
        "does it pay: time to a loss of methods, against the best dense one",
    ),
    "federated": ("experiments.federated", "members who come and go, on Flower; messages as long as their ratio"),
    "smoothness": ("experiments.smoothness", "smoothness-aware compression against plain, in rounds, bits and seconds"),
    "sharded": ("experiments.sharded", "sharded models: each device compresses its shard, and what crosses which axis"),
    "overlap": ("experiments.sharded.overlap", "buckets: exchanges that may start while the backward pass still runs"),
    "layouts": ("experiments.layouts", "which vectors a tree should become: one, each leaf, or equal chunks"),
    "local": ("experiments.local", "many steps at each worker, then one compressed exchange of their differences"),
    "plan": ("experiments.plan", "the planner in the network laboratory: its advice, and its regret"),
    "scale": ("experiments.scale", "routes among up to 16,384 workers, by formula: bytes, memory, seconds"),
    "links": ("experiments.scale.links", "collectives fitted among 2 to 4 processes, checked among 6 and 8"),
    "workers": (
        "experiments.scale.workers",
        "1,024 simulated workers: error feedback, DIANA, EF21, DAGC, local updates",
    ),
    "figures": ("experiments.figures", "tables and pictures of docs/results: which are stale, and to make them anew"),
    "bench": ("experiments.bench", "benchmarks of the hot paths"),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage("python -m experiments", {name: what for name, (_, what) in EXPERIMENTS.items()}))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in EXPERIMENTS:
        fail(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    try:
        return importlib.import_module(EXPERIMENTS[name][0]).main(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        fail(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
