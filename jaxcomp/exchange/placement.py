"""Where on a mesh a mean is taken, and whether gradients are what they should be there."""

import dataclasses
import sys
from types import FrameType
from typing import Any

import jax
import optax

from jaxcomp.exchange.varying import Axis, axis_names, axis_size, is_bound, known_equal, types_tell, unknown_axes

__all__ = ["Placement", "check_gradients", "check_not_alone", "check_own", "is_missing"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes hold workers, shards and replicas.

    workers: axis (or axes) over which the mean is taken; None for a single worker.
    later: those of each later level of a hierarchy, at which groups of these workers exchange.
    shards: those along which parameters are cut into shards.
    replicas: those along which gradients are equal, so that the devices there share the work.
    partial: whether it is part of a larger mesh, so that shared state may differ over `outer`.
    """

    workers: Axis
    later: tuple[tuple[str, ...], ...] = ()
    shards: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    partial: bool = False

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value in values if value or name == "workers")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes of the workers."""
        return axis_names(self.workers)

    @property
    def outer(self) -> tuple[str, ...]:
        """Axes over which gradients differ and which it leaves alone, in the order of the leading axis of a state."""
        return (*(name for axes in self.later for name in axes), *self.shards)

    @property
    def every(self) -> Axis:
        """Axes over which gradients differ."""
        return (*self.outer, *self.names) or None

    @property
    def identity(self) -> "Placement":
        """What two placements have in common whose states can be handed on to one another."""
        return Placement(self.names, self.later, self.shards, (), self.partial)


def is_missing(placement: Placement) -> Axis:
    """The axes that must be bound here and are not; None if there are none."""
    if not is_bound(placement.workers):
        return placement.workers
    return None if is_bound(placement.outer or None) else placement.outer


def _some(leaves: list[str]) -> str:
    return f"gradients{', gradients'.join(leaves[:3])}{' ...' if leaves[3:] else ''}"


def check_gradients(grads: Any, placement: Placement) -> None:
    """Refuses gradients that are equal where they should differ, or differ where nobody said so."""
    check_own(grads, placement.workers)
    whole = [name for name in placement.outer if known_equal(grads, name)]
    if whole:
        leaves = known_equal(grads, whole[0])
        if whole[0] not in placement.shards:
            raise ValueError(
                f"compressed_mean: {_some(leaves)} are equal along {whole[0]!r}, over which a later level takes the "
                "mean: they were added up uncompressed. Differentiate with respect to jc.per_worker(params, levels), "
                "levels as given to compressed_mean."
            )
        raise ValueError(
            f"compressed_mean: {_some(leaves)} are equal along mesh axis {whole[0]!r}, and not shards. Give sharded= "
            "the tree of PartitionSpecs of the parameters."
        )
    differ, automatic = unknown_axes(grads, placement.workers, (*placement.names, *placement.outer))
    if differ:
        raise ValueError(
            f"compressed_mean: gradients differ over mesh axis {differ[0]!r}, too. If parameters are shards over it, "
            f"say sharded={differ[0]!r}; if it holds more workers, name it in axis_name; if they are parts of a sum, "
            "add them up before."
        )
    if automatic:
        raise ValueError(
            f"compressed_mean: mesh axis {automatic[0]!r} is not manual here, and gradients may be sharded over it: to "
            "compress them the compiler would gather the whole of each on every device. Make all axes of the mesh "
            f"manual (leave axis_names out of jax.shard_map) and say sharded={automatic[0]!r}: then each device "
            "compresses its own shard."
        )


def check_own(grads: Any, axis: Axis) -> None:
    """Refuses gradients that are equal on all workers."""
    equal = known_equal(grads, axis) if is_bound(axis) and axis_size(axis) > 1 else []
    if equal:
        raise ValueError(
            f"compressed_mean: {_some(equal)} are typed as equal on all workers of axis {axis!r}. Under jax.shard_map, "
            "jax.grad sums the gradient of a replicated parameter over the workers by itself: uncompressed, and n "
            "times the mean. Differentiate with respect to jc.per_worker(params, axis_name) instead; mark gradients "
            "that are meant to be equal the same way, jc.per_worker(grads, axis_name)."
        )


# ------------------------------------------------------------------------------------------------
# A decision that each worker takes alone must not stand around an exchange: the others would wait for ever. Types tell
# only inside `shard_map` with its default check_vma=True; elsewhere it is visible in the calls that are being traced.


def check_not_alone(name: str, axis: Axis) -> None:
    """Refuses to exchange where a caller is known to run this on some workers only.

    Args:
        name: of the outer form, for the error. axis: of the workers.

    Raises:
        ValueError: within `optax.apply_if_finite`, or an `optax.MultiSteps` with should_skip_update_fn;
            within wrappers that let what is each worker's own through beside the mean.
    """
    _check_wrapped(name, axis)
    frame = sys._getframe(1)
    while frame is not None:
        wrapper = _decides_alone(frame)
        if wrapper:
            raise ValueError(
                f"{name}: {wrapper} around an exchange lets each worker decide by its own gradient whether to take "
                "part, so that one NaN blocks the others or leaves them with other states. Use "
                "jc.replicas.skip_nonfinite(tx, axis_name), by which all workers skip a step together"
            )
        frame = frame.f_back


def _check_wrapped(name: str, axis: Axis) -> None:
    """Refuses wrappers of optax that let what is each worker's own through beside the mean.

    Raises:
        ValueError: within `optax.conditionally_transform`, whose other branch returns gradients as they are; or within
            an `optax.masked` that leaves gradients out which are typed as differing over the axis.
    """
    frame, left_out = sys._getframe(1), None
    while frame is not None:
        where = frame.f_code.co_qualname if frame.f_globals.get("__name__", "").startswith("optax.") else ""
        if where == "partition.<locals>.update_fn":  # multi_transform: others take what is left out here
            return
        if where == "conditionally_transform.<locals>.update_fn":
            raise ValueError(
                f"{name}: optax.conditionally_transform around an exchange returns each worker's own gradient where "
                "the condition is not met, and the workers go apart. Put the condition behind the mean: "
                "optax.chain(jc.compressed_mean(...), optax.conditionally_mask(optimizer, ...)); for an exchange every "
                "so many steps take optax.MultiSteps or jc.local_updates"
            )
        if where == "masked.<locals>.update_fn":
            left_out = (frame.f_locals.get("updates"), frame.f_locals.get("masked_updates"))
        frame = frame.f_back
    if left_out is not None:
        _check_left_out(name, *left_out, axis)


def _check_left_out(name: str, updates: Any, masked: Any, axis: Axis) -> None:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    if updates is None or masked is None or not types_tell(axis) or axis_size(axis) == 1:
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(masked, is_leaf=is_masked), strict=False)
    left = {jax.tree_util.keystr(path): x for (path, x), node in pairs if is_masked(node)}
    own = [path for path, x in left.items() if not known_equal(x, axis)]
    if own:
        raise ValueError(
            f"{name}: optax.masked leaves {_some(own)} out, which would stay each worker's own. Give them a mean, too: "
            'jc.by_path({"...": jc.direct(jc.identity()), ".*": ...}) in place of the mask, or optax.multi_transform'
        )


def _decides_alone(frame: FrameType) -> str | None:
    """What in optax, if this is a call of it."""
    code = frame.f_code
    if code.co_name != "update" or not frame.f_globals.get("__name__", "").startswith("optax."):
        return None
    if code.co_qualname == "apply_if_finite.<locals>.update":
        return "optax.apply_if_finite"
    steps = frame.f_locals.get("self")
    if isinstance(steps, optax.MultiSteps):
        skips = getattr(steps, "_should_skip_update_fn", None)
        if skips is not None and "MultiSteps.__init__" not in getattr(skips, "__qualname__", ""):
            return "optax.MultiSteps(should_skip_update_fn=...)"
    return None
