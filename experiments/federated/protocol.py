"""What server and clients say to each other: a small header and the bytes of a payload, over gRPC.

gRPC because it is the transport that federated engines themselves stand on (Flower among them), is
kept by its community, does deadlines, limits and reconnection, and with generic handlers needs no
generated code. Messages of the model and of the clients are `jc.wire` frames, whose length is what is
really sent: nothing is padded to another client's size.

    Join   client -> {client, samples}                       server -> {room}, {wait} or {done}
    Pull   client -> {client, after}                         server -> {round, k} + model, {wait} or {done}
    Push   client -> {client, round} + message               server -> {accepted, why}
"""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import grpc

__all__ = ["METHODS", "OPTIONS", "SERVICE", "BadCall", "call_of", "handler_of", "pack", "unpack", "whole"]

SERVICE = "jaxcomp.Federated"
METHODS = ("Join", "Pull", "Push")
MAX_HEADER = 4096
MAX_MESSAGE = 1 << 28
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
]


class BadCall(ValueError):
    """A call that is not of this protocol."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Length of the header u32 | header as JSON | body."""
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + body


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse.

    Raises:
        BadCall: the bytes are not a header and a body.
    """
    if len(data) < 4:
        raise BadCall(f"a call of {len(data)} bytes has no header")
    (size,) = struct.unpack_from("<I", data)
    if size > min(MAX_HEADER, len(data) - 4):
        raise BadCall(f"a header of {size} bytes in a call of {len(data)}")
    try:
        header = json.loads(data[4 : 4 + size])
    except (ValueError, RecursionError):
        raise BadCall("the header is not JSON") from None
    if not isinstance(header, dict):
        raise BadCall("the header is not an object")
    return header, data[4 + size :]


def whole(header: dict[str, Any], name: str, low: int, high: float = math.inf) -> int:
    """A field of a header that is an integer in [low, high).

    Raises:
        BadCall: it is not.
    """
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise BadCall(f"{name} must be an integer in [{low}, {high}); got {str(value)[:20]}")
    return value


def handler_of(methods: dict[str, Callable[..., bytes]], refused: Callable[[str], None]) -> grpc.GenericRpcHandler:
    """A gRPC service of bytes.

    Args:
        methods: name -> function of (header, body, waits); waits() is False once the caller has gone.
        refused: gets the reason why a call was refused; a bad call is not fatal.
    """

    def serve(function):
        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return function(*unpack(data), context.is_active)
            except BadCall as error:
                refused(str(error))
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    return grpc.method_handlers_generic_handler(SERVICE, {name: serve(f) for name, f in methods.items()})


def call_of(channel: grpc.Channel, method: str) -> Callable[..., tuple[dict[str, Any], bytes]]:
    """(header, body, timeout) -> (header, body) of a remote method."""
    stub = channel.unary_unary(f"/{SERVICE}/{method}")

    def call(header: dict[str, Any], body: bytes = b"", *, timeout: float = 60.0) -> tuple[dict[str, Any], bytes]:
        return unpack(stub(pack(header, body), timeout=timeout))

    return call
