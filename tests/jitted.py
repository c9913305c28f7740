"""What tests call in one program: outside of jit each operation of it is compiled by itself."""

import functools

import jax

import jaxcomp as jc


@functools.partial(jax.jit, static_argnums=0)
def roundtrip(compressor, x, key, worker=0):
    """`jc.roundtrip`, compiled once for each compressor and shape."""
    return jc.roundtrip(compressor, x, key=key, worker=worker)


def traced_for(platform):
    """A context in which programs are traced as for CPUs, GPUs or TPUs."""
    device = jax.sharding.AbstractDevice(device_kind="", num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def made_for(platform, function, *args):
    """What the program that is made for GPUs or TPUs computes, run here."""
    with traced_for(platform):
        lowered = jax.jit(lambda *args: function(*args)).lower(*args)
    return lowered.compile()(*args)


__all__ = ["made_for", "roundtrip", "traced_for"]
