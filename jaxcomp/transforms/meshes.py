"""The mesh on which a loss runs and how its parameters lie there, found from the arrays."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp.exchange.axes import axis_names

__all__ = ["find_devices", "find_mesh", "find_specs", "is_cut", "laid_out", "on_mesh", "without"]

Meshes = Mesh | AbstractMesh


def find_mesh(name: str, given: Meshes | None, axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """The mesh that was given, else that of `jax.set_mesh`, else that on which arrays lie; None without any.

    Raises:
        ValueError: it does not have the axes.
    """
    found = given if given is not None else _ambient() or _of_arrays(trees)
    unknown = [] if found is None else [axis for axis in axes if axis not in found.shape]
    if unknown:
        raise ValueError(f"{name}: axis_name must be of the mesh, which has {tuple(found.shape)}; got {unknown[0]!r}")  # pyright: ignore
    return found


def find_devices(name: str, given: Meshes | None, axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """`find_mesh` outside of any program: with its devices, where arrays and no shapes are given."""
    found = find_mesh(name, given, axes, *trees)
    shapes = any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trees))
    if given is not None or shapes or not isinstance(found, AbstractMesh):
        return found
    mesh = jax.sharding.get_mesh()
    return found if mesh.empty else mesh


def on_mesh(axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """The mesh in force, or that on which arrays lie, if it has these axes and none of them is manual already."""
    found = _ambient() or _of_arrays(trees)
    if found is None or any(axis not in found.shape for axis in axes):
        return None
    return None if set(axes) & set(getattr(found, "manual_axes", ())) else found


def _ambient() -> Meshes | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _of_arrays(trees: Any) -> Meshes | None:
    """Mesh of the first array that lies on one."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            if isinstance(leaf.sharding, NamedSharding):
                return leaf.sharding.mesh
        elif isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
            mesh = getattr(getattr(_type(leaf), "sharding", None), "mesh", None)
            if mesh is not None and not mesh.empty:
                return mesh
    return None


def _type(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def find_specs(name: str, params: Any, mesh: Meshes, workers: tuple[str, ...], given: Any) -> tuple[PartitionSpec, ...]:
    """How each leaf of the parameters is cut: as given (a prefix tree of specs), else as the arrays lie.

    Raises:
        ValueError: that cannot be known: inside jit, over axes that are left to the compiler, or before the parameters
            were placed on the mesh.
    """
    if given is not None:
        is_spec = lambda node: node is None or isinstance(node, PartitionSpec)
        if not all(is_spec(spec) for spec in jax.tree.leaves(given, is_leaf=is_spec)):
            raise TypeError(f"{name}: param_specs must be a PartitionSpec, None, or a tree of them; got {given!r}")

        def fill(spec, tree):
            spec = PartitionSpec() if spec is None else spec
            axes, rank = [axis for entry in spec for axis in axis_names(entry)], len(spec)
            for leaf in jax.tree.leaves(tree):
                if rank > np.ndim(leaf) or not set(axes) <= set(mesh.axis_names):
                    shape = tuple(np.shape(leaf))
                    raise ValueError(
                        f"{name}: param_specs must be over the axes {tuple(mesh.axis_names)} of the mesh, with at most "
                        f"an entry for each dimension; got {spec} for an array of shape {shape}"
                    )
            return jax.tree.map(lambda _: spec, tree)

        return tuple(jax.tree.leaves(jax.tree.map(fill, given, params, is_leaf=is_spec), is_leaf=is_spec))
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis in mesh.axis_names if axis not in workers and mesh.shape[axis] > 1]
    automatic = [axis for axis in others if kinds[axis] == AxisType.Auto]

    def one(leaf):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer):
            if isinstance(leaf.sharding, NamedSharding):
                return leaf.sharding.spec
            if others:
                raise ValueError(
                    f"{name}: the parameters do not lie on the mesh yet, so how they are cut over {others[0]!r} is not "
                    "known. Place them first (jax.device_put with NamedShardings), or give param_specs."
                )
        elif isinstance(leaf, Tracer):
            if automatic:
                raise ValueError(
                    f"{name}: inside jit, and under jax.eval_shape, how parameters are cut over the automatic axis "
                    f"{automatic[0]!r} is not known: JAX does not hand on the sharding of what it is given. Call init "
                    "outside, on parameters that are placed on the mesh, or give param_specs."
                )
            if not jax.typeof(leaf).sharding.mesh.empty:
                return jax.typeof(leaf).sharding.spec
        elif others and not isinstance(leaf, Tracer):
            raise ValueError(
                f"{name}: parameters must be JAX arrays on the mesh, or param_specs be given; got {type(leaf)}"
            )
        return PartitionSpec()

    return tuple(map(one, jax.tree.leaves(params)))


def is_cut(spec: PartitionSpec, mesh: Meshes) -> bool:
    """Whether it cuts an array into more than one piece."""
    return any(mesh.shape[axis] > 1 for entry in spec for axis in axis_names(entry))


def without(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with these mesh axes left out."""
    left = [tuple(axis for axis in axis_names(entry) if axis not in axes) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in left))


def laid_out(x: Any, spec: PartitionSpec, mesh: Meshes) -> Any:
    """The array as the spec says, over those axes that are explicit; others are the compiler's."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = tuple(axis for axis in mesh.axis_names if kinds[axis] != AxisType.Explicit)
    if len(automatic) == len(mesh.axis_names):
        return x
    target = without(spec, automatic)
    have = getattr(jax.typeof(x), "sharding", None) if not isinstance(x, np.ndarray) else None
    if have is not None and _padded(have.spec, x.ndim) == _padded(target, x.ndim):
        return x
    return jax.reshard(x, NamedSharding(mesh, target))


def _padded(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    entries = [axis_names(entry) for entry in spec]
    return (*entries, *[()] * (ndim - len(entries)))
