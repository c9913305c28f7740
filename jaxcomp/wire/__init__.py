"""Payloads as bytes between hosts: `encode`, `decode`, `WireError`. NumPy only, never inside jit."""

from jaxcomp.wire.codec import decode, encode
from jaxcomp.wire.errors import WireError

__all__ = ["WireError", "decode", "encode"]
