"""What tests call in one program: outside of jit each operation of it is compiled by itself."""

import functools

import jax

import jaxcomp as jc


@functools.partial(jax.jit, static_argnums=0)
def roundtrip(compressor, x, key, worker=0):
    """`jc.roundtrip`, compiled once for each compressor and shape."""
    return jc.roundtrip(compressor, x, key=key, worker=worker)


__all__ = ["roundtrip"]
