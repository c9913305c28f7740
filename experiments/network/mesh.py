"""The mesh of all processes, and how arrays come to lie on it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.network.methods import AXIS
from jaxcomp.exchange.state import means_in

__all__ = ["Workers"]


class Workers:
    """One worker for each process, in a row, or in so many groups: along axes "group" and AXIS."""

    def __init__(self, groups: int = 1):
        self.axis: Any = AXIS if groups == 1 else ("group", AXIS)
        shape = (jax.device_count(),) if groups == 1 else (groups, jax.device_count() // groups)
        names = (AXIS,) if groups == 1 else self.axis
        self.mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
        self.equal, self.split = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(self.axis))

    def replicate(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.equal, np.array(x)), tree)

    def own(self, x: np.ndarray) -> jax.Array:
        """This worker's rows of an array split among all."""
        return jax.make_array_from_process_local_data(self.split, x)

    def start(self, tx: Any, params: Any) -> tuple[Any, Any]:
        """The state of an optax transformation for replicated parameters, and its specs: P() where no mean is in it."""
        state = jax.eval_shape(tx.init, params)
        if means_in(state):
            return jc.init_state(tx, params, self.mesh, AXIS)
        return self.replicate(jax.device_get(tx.init(jax.tree.map(lambda x: x.addressable_data(0), params)))), P()
