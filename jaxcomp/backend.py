"""Finds out for which devices a program is made: the one place that asks."""

import jax
from jax.sharding import AbstractMesh, Mesh

__all__ = ["platform"]


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """ "cpu", "gpu" or "tpu": of the devices that the program being traced will run on.

    These are the devices of `mesh`; without one, those of the mesh that is bound (inside `jax.shard_map`, `jax.pmap` or
    `jax.set_mesh`, also where a program is compiled ahead of time for devices that are not there); elsewhere (under
    `vmap`, on one device) those of `jax.default_device`, or of the default backend. A mesh of shapes alone
    (`AbstractMesh` without a device) says nothing.

    >>> platform()
    'cpu'
    """
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
    else:
        device = getattr(mesh or jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = device or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = device if isinstance(device, str) else getattr(device, "platform", None)
    name = name or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
