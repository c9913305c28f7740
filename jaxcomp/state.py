"""States of optimizers on meshes, under vmap, with other plans, and with other workers."""

from jaxcomp.compressors import refresh, set_amounts
from jaxcomp.exchange.redistribute import redistribute
from jaxcomp.exchange.specs import init_state, per_worker, state_axes, state_specs
from jaxcomp.exchange.state import by_leaf

__all__ = ["by_leaf", "init_state", "per_worker", "redistribute", "refresh", "set_amounts", "state_axes", "state_specs"]
