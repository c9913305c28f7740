"""Bytes over gRPC, for sites that share no coordinator: the server has an address, and members dial it.

The hub is a gRPC service of two methods over `Mailboxes`; HTTP/2, flow control, TLS, keepalive and limits of length are
gRPC's. Only the hub needs an open port: sites behind firewalls dial out, and wait for messages in calls that the hub
answers late. With `keys`, a call is of the site that it says it is of.

    Post    packed({source, key, to, tag}, [message])  -> nothing
    Take    packed({source, key, tag, seconds})        -> packed({sources}, messages)

grpcio is imported when it is called, not before (`pip install "jaxcomp[sites]"`).
"""

import functools
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxcomp.checks import is_integer, is_number
from jaxcomp.transports.base import check_name, check_positive
from jaxcomp.transports.mailboxes import Mailboxes
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

__all__ = ["Hub", "Site", "hub", "site"]

SERVICE = "jaxcomp.Mailboxes"
LONGEST_WAIT = 20.0  # seconds that one call waits at the hub; then the site calls again
MOST_BYTES = 2**30
WORKERS = 64  # threads of the hub: each site that waits holds one


class Hub(Mailboxes):
    """The service, in the process of the server; made by `hub`. address: with the port that it listens at. The server
    has transports by `link`."""

    def __init__(self, server: Any):
        super().__init__()
        self._server, self.address = server, ""

    def close(self) -> None:
        """Ends the service; calls that wait end empty."""
        super().close()
        self._server.stop(1.0).wait()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def hub(
    address: str,
    *,
    keys: Mapping[str, str] | None = None,
    credentials: Any = None,
    most_bytes: int = MOST_BYTES,
) -> Hub:
    """Opens the mailboxes of this process to sites that dial `address`.

    Args:
        address: "HOST:PORT"; port 0: any that is free.
        keys: name of each site -> its secret. A call with another one is refused. None: whoever reaches the address may
            send in any name, which is for one machine, and for networks that are closed.
        credentials: `grpc.ssl_server_credentials(...)`; None: without TLS.
        most_bytes: of a message; longer ones are refused by gRPC.

    Returns:
        `Hub`, a context that is closed in the end.

    Raises:
        ValueError: an argument out of range, or the address cannot be listened at.
        ImportError: grpcio is not installed.
    """
    grpc = _grpc()
    options = _options(most_bytes)
    for name in keys or ():
        check_name("name in keys", name)
    server = grpc.server(ThreadPoolExecutor(WORKERS, thread_name_prefix="jaxcomp-hub"), options=options)
    boxes = Hub(server)
    methods = {"Post": _posted, "Take": functools.partial(_taken, most_bytes=most_bytes)}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_answering(grpc, boxes, keys, method))
        for name, method in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        listen = server.add_insecure_port if credentials is None else server.add_secure_port
        port = listen(address, *([] if credentials is None else [credentials]))
    except RuntimeError as error:
        raise ValueError(f"transports: address {address!r} cannot be listened at: {error}") from None
    boxes.address = f"{address.rsplit(':', 1)[0]}:{port}"
    server.start()
    return boxes


def _answering(grpc: Any, boxes: Mailboxes, keys: Mapping[str, str] | None, method: Callable) -> Callable:
    """A handler of gRPC: bytes and context -> bytes. Says why it refuses a call."""

    def handle(data: bytes, context: Any) -> bytes:
        try:
            fields, blobs = unpacked(data)
            source = check_name("source", fields.get("source"))
            if keys is not None:
                key = str(fields.get("key", ""))
                if not hmac.compare_digest(keys.get(source, "").encode(), key.encode()) or source not in keys:
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{source} has another key here, or none")
            return method(boxes, source, fields, blobs)
        except (WireError, ValueError, TypeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    return handle


def _posted(boxes: Mailboxes, source: str, fields: Mapping[str, Any], blobs: Sequence[bytes]) -> bytes:
    to = fields.get("to")
    if not isinstance(to, list) or len(blobs) != 1:
        raise WireError("receivers", to, "a list of names, with one message")
    boxes.post(source, [check_name("receiver", name) for name in to], check_name("tag", fields.get("tag")), blobs[0])
    return b""


def _taken(boxes: Mailboxes, source: str, fields: Mapping[str, Any], blobs: Sequence[bytes], most_bytes: int) -> bytes:
    seconds: Any = fields.get("seconds")
    if not is_number(seconds) or not 0 <= seconds <= LONGEST_WAIT:
        raise WireError("seconds", seconds, f"in [0, {LONGEST_WAIT:g}]")
    found = boxes.take(source, check_name("tag", fields.get("tag")), seconds, most_bytes)
    return packed({"sources": [name for name, _ in found]}, [data for _, data in found])


class Site:
    """A `Transport` that dials a hub; made by `site`."""

    def __init__(self, channel: Any, name: str, key: str, seconds: float):
        self.name, self._key, self._channel, self._seconds = name, key, channel, seconds
        self._calls = {method: channel.unary_unary(f"/{SERVICE}/{method}") for method in ("Post", "Take")}

    def _call(self, method: str, fields: Mapping[str, Any], blobs: Sequence[bytes], seconds: float) -> bytes:
        grpc = _grpc()
        message = packed({"source": self.name, "key": self._key, **fields}, blobs)
        try:
            return self._calls[method](message, timeout=seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            code, said = error.code(), error.details()
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
                raise PermissionError(f"transports: the hub refuses {self.name}: {said}") from None
            if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ValueError(f"transports: the message is longer than the hub takes: {said}") from None
            raise ConnectionError(f"transports: the hub does not answer {self.name}: {code.name}, {said}") from None
        except ValueError as error:  # of a channel that was closed meanwhile
            raise ConnectionError(f"transports: {self.name} is closed: {error}") from None

    def send(self, to: Sequence[str], tag: str, data: bytes) -> None:
        to = [check_name("receiver", name) for name in to]
        self._call("Post", {"to": to, "tag": check_name("tag", tag)}, [bytes(data)], self._seconds)

    def receive(self, tag: str, seconds: float) -> list[tuple[str, bytes]]:
        check_name("tag", tag)
        end = time.monotonic() + seconds
        while True:
            wait = min(max(end - time.monotonic(), 0.0), LONGEST_WAIT)
            answer = self._call("Take", {"tag": tag, "seconds": wait}, [], wait + self._seconds)
            fields, blobs = unpacked(answer)
            sources = fields.get("sources")
            if not isinstance(sources, list) or len(sources) != len(blobs):
                raise WireError("sources of messages", sources, f"a list of {len(blobs)} names")
            if blobs or time.monotonic() >= end:
                return list(zip(map(str, sources), blobs, strict=True))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def site(
    address: str,
    name: str,
    *,
    key: str = "",
    credentials: Any = None,
    seconds: float = 60.0,
    most_bytes: int = MOST_BYTES,
) -> Site:
    """A transport to the hub at an address. The hub need not be there yet, and may go and come again.

    Args:
        address: of the hub, "HOST:PORT".
        name: of this site.
        key: its secret, if the hub has keys.
        credentials: `grpc.ssl_channel_credentials(...)`; None: without TLS.
        seconds: that a call may take, besides what the receiver asks to wait; then ConnectionError.
        most_bytes: of a message.

    Returns:
        `Site`, a context that is closed in the end.

    Raises:
        ValueError: an argument out of range.
        ImportError: grpcio is not installed.
    """
    grpc = _grpc()
    check_name("name", name)
    seconds, options = check_positive("seconds", seconds), _options(most_bytes)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    return Site(channel, name, key, seconds)


def _options(most_bytes: int) -> list[tuple[str, int]]:
    if not is_integer(most_bytes) or most_bytes >= 2**31 - 2**16:
        raise ValueError(f"transports: most_bytes must be an integer in [1, {2**31 - 2**16}); got {most_bytes!r}")
    room = most_bytes + 2**16  # for the fields beside the message
    return [
        ("grpc.max_send_message_length", min(room, 2**31 - 1)),
        ("grpc.max_receive_message_length", min(room, 2**31 - 1)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.so_reuseport", 0),  # a second hub at one address is an error
    ]


def _grpc() -> Any:
    try:
        import grpc  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError('transports: hub and site need grpcio; pip install "jaxcomp[sites]"') from None
    return grpc
