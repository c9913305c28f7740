"""What a transformation keeps for each worker alone: opened at a worker, and put away behind a leading axis."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.exchange.placement import Placement
from jaxcomp.exchange.runner import local_rows
from jaxcomp.exchange.state import OwnState, is_own
from jaxcomp.exchange.varying import is_bound, varying

__all__ = ["own_at_device", "own_off_device"]


def own_off_device(local: Any, placement: Placement, roles: tuple) -> OwnState:
    """What one worker keeps for itself, as it is kept: with a leading axis of workers."""
    axis = placement.workers
    rows = local_rows(axis)
    local = jax.tree.map(lambda x: jnp.tile(jnp.asarray(x)[None], (rows,) + (1,) * jnp.ndim(x)), local)
    return OwnState(varying(local, axis) if is_bound(axis) else local, placement.identity, roles)


def own_at_device(name: str, own: OwnState, placement: Placement) -> Any:
    """What this worker keeps for itself, without the leading axis.

    Raises:
        ValueError: it belongs to another transformation, or is not cut for one worker.
    """
    if not is_own(own) or own.placement != placement.identity:
        got = own.placement if is_own(own) else type(own).__name__
        raise ValueError(f"{name}: expected a state of {placement.identity}; got {got}")

    def one(path, x):
        if x.shape[:1] != (1,):
            raise ValueError(
                f"{name}: own{jax.tree_util.keystr(path)} has shape {x.shape}, expected a leading axis of 1 at one "
                "worker. Make the state, and its in_specs and out_specs, with jc.init_state."
            )
        return x[0]

    return jax.tree_util.tree_map_with_path(one, varying(own.local, placement.workers))
