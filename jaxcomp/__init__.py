"""Gradient compression for JAX.

Compressors are pure functions, joined with an algorithm and chained into any optax optimizer::

    tx = optax.chain(
        jc.compressed_mean(jc.error_feedback(jc.sidco(0.001)), axis_name="data"),
        optax.adamw(1e-3),
    )

What is listed here is public. Everything else may change without notice. What is rarer stands in groups:

    jc.methods       methods that keep their own iterate: rounds, descend, adiana, isega, marina
    jc.contrib       historical rivals: dgc, gaussian_k, redsync, hard_threshold, momentum_correction
    jc.collectives   drop-in pmean and psum_scatter with a format on the wire
    jc.replicas      are all workers still the same: fingerprints, skip_nonfinite
    jc.state         states on meshes and of other workers: state_axes, refresh, set_amounts, ...
    jc.transports    bytes from process to process: coordination, hub, site; imported when it is first used
    jc.testing       the laws, for a compressor or an algorithm of your own: check, check_algorithm

`jaxcomp.federated`, rounds on the host among members who come and go, is imported by name and is no part of `jc`.
"""

import difflib
import importlib
from typing import Any

from jaxcomp import (
    allocate,
    collectives,
    contrib,
    methods,
    payloads,
    prox,
    replicas,
    smoothness,
    state,
    testing,
    theory,
    wire,
)
from jaxcomp.algorithms import (
    by_path,
    diana,
    direct,
    ef21,
    error_feedback,
    fetch_sgd,
    loco,
    majority_vote,
    power_sgd,
    sparse_loco,
)
from jaxcomp.base import Algorithm, Compressor, Sent, Spec, State
from jaxcomp.buckets import buckets
from jaxcomp.compressors import (
    bernoulli,
    binned,
    block_scaled,
    cast,
    chunked,
    compose,
    contract,
    count_sketch,
    dagc,
    dct,
    dithering,
    drive,
    eden,
    flat,
    identity,
    narrow,
    natural,
    per_leaf,
    precondition,
    rand_k,
    rotate,
    roundtrip,
    sidco,
    sign,
    skcompress,
    terngrad,
    top_k,
    warm_up,
)
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.measure import Info, info
from jaxcomp.expect import expect
from jaxcomp.factories import from_config
from jaxcomp.groups import Layout
from jaxcomp.ledger import Ledger, ledger
from jaxcomp.metrics import metrics
from jaxcomp.payloads import code_bits, lane_bytes
from jaxcomp.plan.candidates import Candidate
from jaxcomp.plan.machine import Machine
from jaxcomp.plan.planning import plan
from jaxcomp.plan.recommend import recommend
from jaxcomp.replicas import check_replicas
from jaxcomp.state.specs import init_state, per_worker, state_specs
from jaxcomp.state.workers import redistribute
from jaxcomp.transforms import (
    DynamicScale,
    WorkerGradients,
    check_loss,
    compressed_mean,
    demo,
    local_process,
    local_steps,
    local_updates,
    mean_over,
    onebit_adam,
    value_and_grad,
    worker_value_and_grad,
    zero_one_adam,
)
from jaxcomp.wire import WireError

__version__ = "0.2.0"

__all__ = [
    "Algorithm",
    "Candidate",
    "Compressor",
    "DynamicScale",
    "Info",
    "Layout",
    "Ledger",
    "Link",
    "Machine",
    "Sent",
    "Spec",
    "State",
    "WireError",
    "WorkerGradients",
    "allocate",
    "bernoulli",
    "binned",
    "block_scaled",
    "buckets",
    "by_path",
    "cast",
    "check_loss",
    "check_replicas",
    "chunked",
    "code_bits",
    "collectives",
    "compose",
    "compressed_mean",
    "contract",
    "contrib",
    "count_sketch",
    "dagc",
    "dct",
    "demo",
    "diana",
    "direct",
    "dithering",
    "drive",
    "eden",
    "ef21",
    "error_feedback",
    "expect",
    "fetch_sgd",
    "flat",
    "from_config",
    "identity",
    "info",
    "init_state",
    "lane_bytes",
    "ledger",
    "local_process",
    "local_steps",
    "local_updates",
    "loco",
    "majority_vote",
    "mean_over",
    "methods",
    "metrics",
    "narrow",
    "natural",
    "onebit_adam",
    "payloads",
    "per_leaf",
    "per_worker",
    "plan",
    "power_sgd",
    "precondition",
    "prox",
    "rand_k",
    "recommend",
    "redistribute",
    "replicas",
    "rotate",
    "roundtrip",
    "sidco",
    "sign",
    "skcompress",
    "smoothness",
    "sparse_loco",
    "state",
    "state_specs",
    "terngrad",
    "testing",
    "theory",
    "top_k",
    "value_and_grad",
    "warm_up",
    "wire",
    "worker_value_and_grad",
    "zero_one_adam",
]

_GROUPS = (methods, contrib, collectives, replicas, state)
# What else may be looked for here: names in papers, and a package that is imported by name.
_KNOWN_AS = {
    "qsgd": "jc.dithering(levels, blocks=1)",
    "signsgd": "jc.majority_vote(momentum=0.0)",
    "efsignsgd": "jc.error_feedback(jc.sign())",
    "randomk": "jc.rand_k",
    "diloco": "jc.local_updates",
    "onebitsgd": "jc.error_feedback(jc.sign())",
    "federated": "from jaxcomp import federated",
    "members": "from jaxcomp import federated",
    "flower": "from jaxcomp.federated import flower",
    "coordination": "jc.transports.coordination",
}


def __getattr__(name: str) -> Any:
    """`jc.transports`, imported when it is first used; for other names AttributeError with the one that was meant."""
    if name == "transports":
        return importlib.import_module("jaxcomp.transports")
    places = {each: f"{group.__name__.replace('jaxcomp', 'jc')}.{each}" for group in _GROUPS for each in group.__all__}
    known = {each.replace("_", "").lower(): f"jc.{each}" for each in __all__} | _KNOWN_AS
    known |= {each.replace("_", "").lower(): place for each, place in places.items()}
    near = difflib.get_close_matches(name.replace("_", "").lower(), known, 1)
    meant = places.get(name, known[near[0]] if near else None)
    hint = f"; did you mean {meant}?" if meant and not name.startswith("_") else ""
    raise AttributeError(f"module 'jaxcomp' has no attribute {name!r}{hint}")
