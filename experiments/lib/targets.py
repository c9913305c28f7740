"""Devices that are described and not there: their own compilers make programs for them, ahead of time, on any machine.

These compilers are `jaxcomp[accelerators]`: XLA for GPUs without any other part of CUDA, and libtpu. What they make can
be read (text, memory, collectives) and not run.
"""

import os
import re
import time
from typing import Any, NamedTuple

# Before JAX is imported: a plugin for GPUs without a GPU prints a traceback, and libtpu asks a cloud where it is.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for name, value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(name, value)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.errors import shortened

__all__ = ["H100", "Program", "compiled", "described", "donating", "lacks", "mesh_on", "shapes_on", "state_on"]

# Properties of an H100 SXM5 (NVIDIA's data sheet and CUDA's device query), in the form in which XLA takes a target.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
WHOLE = P()
PACKAGES = {"h100": "jax_plugins.xla_cuda13"}


def lacks(name: str) -> str | None:
    """The package without which nothing can be compiled for this target, where it is missing; else None."""
    from importlib.util import find_spec

    number = r"[1-9]\d*"
    flat, cubes = f"v(5e|6e):{number}x{number}", f"v(4|5p):{number}x{number}x{number}"
    if not re.fullmatch(f"h100(:{number}x{number})?|{flat}|{cubes}", name):
        raise UserError(
            "a target must be h100, h100:HOSTSxDEVICES, v5e:AxB, v6e:AxB, v4:AxBxC or v5p:AxBxC, for instance v5e:2x2; "
            f"got {name!r}"
        )
    package = PACKAGES.get(name.partition(":")[0], "libtpu")
    try:
        return None if find_spec(package) else package
    except ModuleNotFoundError:
        return package


def described(name: str, slices: int = 1) -> list[Any]:
    """The devices of a target.

    Args:
        name: "h100" (four of one host), "h100:4x8" (4 hosts of 8), or "v5e:2x2" (a slice of 4 chips).
        slices: of TPUs, joined by the network of a data centre.

    Raises:
        UserError: an unknown name, or the compiler is not installed.
    """
    if package := lacks(name):
        raise UserError(f"compiling for {name} needs the package {package}; in a clone: pip install '.[accelerators]'")
    kind, _, shape = name.partition(":")
    if kind == "h100":
        import jax_plugins.xla_cuda13  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers the compiler

        topology = f"1x{shape or '1x4'}"
        return list(topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=topology).devices)
    more = {"num_slices": slices} if slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, "tpu", **more).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"there is no slice {name} of TPUs: {shortened(error)}") from error


def mesh_on(devices: list[Any], axes: dict[str, int]) -> Mesh:
    """The first devices as a mesh with these axes."""
    sizes = tuple(axes.values())
    return Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))


def shapes_on(mesh: Mesh, tree: Any, specs: Any = WHOLE) -> Any:
    """Shapes of arrays that lie so on a mesh. specs: one, or a tree of them."""
    each = jax.tree.map(lambda x: specs, tree) if isinstance(specs, P) else specs
    place = lambda x, spec: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, each)


class Program(NamedTuple):
    """lines: of StableHLO; seconds: to trace and compile; memory: temporary, in bytes; aliased: bytes of arguments that
    results take the place of; peak: bytes of arguments, results and temporary arrays together."""

    stable: str
    text: str
    lines: int
    seconds: float
    memory: int
    aliased: int
    peak: int
    ledger: jc.Ledger


def compiled(function: Any, *args: Any) -> Program:
    """What the compiler of the devices of the arguments makes of a function (jitted, or not yet)."""
    begun = time.perf_counter()
    lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*args)
    stable = lowered.as_text()
    program = lowered.compile()
    seconds = time.perf_counter() - begun
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(
        stable,
        program.as_text() or "",
        stable.count("\n"),
        seconds,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        held + memory.temp_size_in_bytes,
        jc.ledger(program),
    )


def state_on(mesh: Mesh, tx: Any, params: Any, axis: str = "data") -> tuple[Any, Any]:
    """Shapes of the state of a transformation on a mesh, and its specs: `jc.init_state` without arrays."""
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    state = jax.eval_shape(lambda: jc.init_state(tx, zeros(), mesh, axis)[0])
    specs = jc.state_specs(state, axis)
    return shapes_on(mesh, state, specs), specs


def donating(step: Any, mesh: Mesh, specs: Any, donated: int) -> Any:
    """A jitted step in the place of one of its arguments. specs: of its results.

    Where jit knows their shardings it pairs what is donated with results of its shape; else XLA does by size alone, in
    their order, and a direction that comes first takes the place of a memory, which then is copied.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    return jax.jit(step, donate_argnums=donated, out_shardings=shardings)


def update_on(mesh: Mesh, tx: Any, params: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted update in the place of its state, and shapes of its arguments."""
    state, specs = state_on(mesh, tx, params)
    step = lambda grads, state, params: tx.update(jc.per_worker(grads, "data"), state, params)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, specs, WHOLE), out_specs=(WHOLE, specs))
    like = shapes_on(mesh, params)
    return donating(mapped, mesh, (WHOLE, specs), 1), (like, state, like)
