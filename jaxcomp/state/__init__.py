"""States of optimizers on meshes, under vmap, with other plans, and with other workers.

specs.py      where the parts of a state lie: `jc.init_state`, `jc.state_specs`, `jc.per_worker`, `state_axes`
workers.py    the state for another number of workers: `jc.redistribute`
moments.py    moments that workers of `local_updates` share
by_leaf.py    vectors of a state as trees
register.py   states for `flax.serialization`

`refresh` and `set_amounts` are those of the compressors whose plans they change: `precondition` and `dagc`.
"""

from jaxcomp.compressors import refresh, set_amounts
from jaxcomp.state.by_leaf import by_leaf
from jaxcomp.state.register import register_flax
from jaxcomp.state.specs import state_axes

__all__ = ["by_leaf", "refresh", "register_flax", "set_amounts", "state_axes"]
