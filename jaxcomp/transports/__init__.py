"""Transports: bytes from process to process, for `jc.local_process` and for `jaxcomp.federated`.

    coordination    over the coordination service of jax.distributed, where that runs
    hub, site       over gRPC, where sites share no coordinator: members dial the one address of the server
    mailboxes       among threads of one process, for tests and simulations

All of them are a `Transport`: `send`, `receive` and `close`, and whoever has these three brings a transport of his own.
`Gathering` makes of any of them the `gather` of `jc.local_process`.

The package is imported when `jc.transports` is first used. Nothing of it runs inside jit, or where gradients are
exchanged.
"""

from jaxcomp.transports.base import Gathering, Missing, Transport
from jaxcomp.transports.coordination import Coordination, coordination
from jaxcomp.transports.mailboxes import Mailboxes, mailboxes
from jaxcomp.transports.over_grpc import Hub, Site, hub, site

__all__ = [
    "Coordination",
    "Gathering",
    "Hub",
    "Mailboxes",
    "Missing",
    "Site",
    "Transport",
    "coordination",
    "hub",
    "mailboxes",
    "site",
]
