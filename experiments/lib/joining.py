"""How a process finds the others that it trains with, and what it says while it waits for them."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from experiments.lib.cli import UserError
from experiments.lib.processes import leave

__all__ = ["join"]

SILENT = 5.0  # seconds that a process waits without a word


def join(
    coordinator: str | None, number: int | None, process: int | None, patience: float = 300.0, logs: Path | None = None
) -> None:
    """Joins the others: at a coordinator, or wherever JAX finds one in the environment of the cluster.

    Says so while it waits. After `patience` seconds it ends this process with one line, as JAX itself would abort.

    Raises:
        UserError: they cannot be found.
    """
    import jax

    # Gloo's greetings go to the standard error; what the program itself prints stays where it was.
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(out, "w", buffering=1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"at {coordinator}" if coordinator else "in the environment of this cluster"
    try:
        with waiting(process, number, where, patience, logs):
            seconds = int(patience) + 60
            if coordinator is None:
                jax.distributed.initialize(initialization_timeout=seconds)
            else:
                check_address(coordinator, process)
                jax.distributed.initialize(
                    coordinator,
                    number,
                    process,
                    cluster_detection_method="deactivate",
                    initialization_timeout=seconds,
                )
    except (ValueError, RuntimeError) as error:
        hint = "" if coordinator else "; name it: --coordinator HOST:PORT --num-processes N --process-id I"
        raise UserError(f"found no other processes {where}: {str(error).splitlines()[0].rstrip('.')}{hint}") from None


@contextlib.contextmanager
def waiting(process: int | None, number: int | None, where: str, patience: float, logs: Path | None) -> Iterator[None]:
    """Says whom this process waits for as long as the context lasts; ends the process when it has waited too long."""
    over = threading.Event()
    others = "process 0" if process else "process 1" if number == 2 else "the other processes"

    def watch() -> None:
        if over.wait(min(SILENT, patience)):
            return
        more = patience - SILENT
        if more > 0:
            print(f"waiting for {others} {where}, for at most {patience:g} s (--patience)", file=sys.stderr, flush=True)
            if over.wait(more):
                return
        leave(logs, process or 0, UserError(f"waited {patience:g} s for {others} {where} (--patience)"))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def check_address(coordinator: str, process: int | None) -> None:
    """That the host of a coordinator has an address, and that process 0 can listen at its port; JAX would abort.

    Raises:
        UserError: it has none, or cannot.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise UserError(f"--coordinator {coordinator}: {host} has no address: {error.strerror}") from None
    if process == 0:
        try:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            socket.create_server(("", int(port)), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
        except OSError as error:
            raise UserError(
                f"--coordinator {coordinator}: cannot listen at port {port}: {os.strerror(error.errno or 0)}"
            ) from None
