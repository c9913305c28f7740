"""Splits a budget of entries over workers, layers and rounds. Host-side, float64 NumPy.

`ratios`, `thresholds` and `counts` split one budget over workers by their data volume (DAGC and its
sound relatives), once, before training. `by_layer`, `by_regime` and `by_bandwidth` split along the
other axes while training runs. All of them make numbers that the compressed step takes as
arguments (`jc.dagc`, `jc.state.set_amounts`), so nothing recompiles when they change.
"""

from jaxcomp.allocate.adaptive import by_bandwidth, by_layer, by_regime, layer_errors
from jaxcomp.allocate.workers import bound, calibrate, counts, coupled_bound, ratios, thresholds

__all__ = [
    "bound",
    "by_bandwidth",
    "by_layer",
    "by_regime",
    "calibrate",
    "counts",
    "coupled_bound",
    "layer_errors",
    "ratios",
    "thresholds",
]
