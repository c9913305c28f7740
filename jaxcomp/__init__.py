"""Gradient compression for JAX.

Compressors are pure functions, joined with an algorithm and chained into any optax optimizer::

    tx = optax.chain(
        jc.compressed_mean(jc.error_feedback(jc.sidco(0.001)), axis_name="data"),
        optax.adamw(1e-3),
    )

What is listed here is public. Everything else may change without notice. What is rarer stands in groups:

    jc.methods       methods that keep their own iterate: rounds, descend, adiana, isega, marina; theory, prox
    jc.contrib       historical rivals: dgc, gaussian_k, redsync, hard_threshold, momentum_correction
    jc.collectives   drop-in pmean and psum_scatter with a format on the wire
    jc.replicas      are all workers still the same: fingerprints, check_replicas, skip_nonfinite
    jc.state         states on meshes and of other workers: state_axes, refresh, set_amounts, ...

`jaxcomp.federated`, rounds on the host among members who come and go, is imported by name and is no part of `jc`.
"""

import difflib
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
from jaxcomp.base import Algorithm, Compressor, Exchange, Sent, Spec, State
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
from jaxcomp.exchange.info import Info, info
from jaxcomp.exchange.links import Link
from jaxcomp.layout import Layout
from jaxcomp.ledger import Ledger, ledger
from jaxcomp.payloads import code_bits, lane_bytes
from jaxcomp.plan.candidates import Candidate
from jaxcomp.plan.planning import plan
from jaxcomp.plan.recommend import recommend
from jaxcomp.replicas import check_replicas
from jaxcomp.state.specs import init_state, per_worker, state_specs
from jaxcomp.state.workers import redistribute
from jaxcomp.transforms import (
    DynamicScale,
    compressed_mean,
    demo,
    local_process,
    local_steps,
    local_updates,
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
    "Exchange",
    "Info",
    "Layout",
    "Ledger",
    "Link",
    "Sent",
    "Spec",
    "State",
    "WireError",
    "allocate",
    "bernoulli",
    "binned",
    "block_scaled",
    "by_path",
    "cast",
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
    "fetch_sgd",
    "flat",
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
    "methods",
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
    "theory",
    "top_k",
    "value_and_grad",
    "warm_up",
    "wire",
    "worker_value_and_grad",
    "zero_one_adam",
]

# Other names under which methods are known.
_IN_PAPERS = {
    "qsgd": "dithering(levels, blocks=1)",
    "signsgd": "majority_vote(momentum=0.0)",
    "efsignsgd": "error_feedback(jc.sign())",
    "randomk": "rand_k",
    "diloco": "local_updates",
    "onebitsgd": "error_feedback(jc.sign())",
}
_GROUPS = (methods, contrib, collectives, replicas, state)


def __getattr__(name: str) -> Any:
    """What is in a group is found without it, too: `jc.rounds` is `jc.methods.rounds`."""
    if name in ("federated", "flower", "members"):
        raise AttributeError(f"jaxcomp imports no {name}; import jaxcomp.federated: from jaxcomp import federated")
    for group in _GROUPS:
        if name in group.__all__:
            return getattr(group, name)
    names = {each.replace("_", ""): each for group in _GROUPS for each in group.__all__}
    names |= {each.replace("_", ""): each for each in __all__}
    bare = name.replace("_", "").lower()
    near = [_IN_PAPERS[bare]] if bare in _IN_PAPERS else [names[e] for e in difflib.get_close_matches(bare, names, 1)]
    hint = f"; did you mean jc.{near[0]}?" if near and not name.startswith("_") else ""
    raise AttributeError(f"module 'jaxcomp' has no attribute {name!r}{hint}")
