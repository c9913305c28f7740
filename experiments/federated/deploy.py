"""Flower as processes on this machine: a SuperLink, a SuperNode for each client, TLS, a key for each node."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.lib.cli import UserError
from experiments.lib.launch import end_all, free_port, start

__all__ = ["Federation", "environment"]

PROJECT = """[project]
name = "jaxcomp-federated"
version = "1.0.0"
description = "Compressed rounds"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "jaxcomp"

[tool.flwr.app.components]
serverapp = "apps.run:server"
clientapp = "apps.run:client"
"""

# Flower looks for the names in the text of the file.
APPS = """from experiments.federated import app

server = app.server
client = app.client
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of all processes of a run: nothing is sent or looked up outside."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # every task is a new process
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAXCOMP_FEDERATED": str(folder),
        "PYTHONPATH": path,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


class Federation:
    """Context of the processes. Every node has a key of its own, and only registered keys may come in.

    Each process is the head of a group with all that it starts, and ends with this one, however that goes.
    """

    def __init__(self, folder: Path, clients: int):
        self.folder, self.clients, self.port = folder, clients, free_port()
        self.home = folder / "flower"
        self.env = os.environ | environment(folder)
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Federation":
        shutil.rmtree(self.home, ignore_errors=True)  # of a run that is resumed
        (self.home / "app" / "apps").mkdir(parents=True)
        self.home.chmod(0o700)  # there are private keys
        (self.home / "app" / "pyproject.toml").write_text(PROJECT)
        (self.home / "app" / "apps" / "__init__.py").touch()
        (self.home / "app" / "apps" / "run.py").write_text(APPS)
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.home / "ca.pem"}"\n'
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}')
        certificates(self.home)
        keys = {node_key(self.home / f"node-{i}"): i for i in range(self.clients)}
        (self.folder / "keys.json").write_text(json.dumps(keys))
        link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"]
        link += ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.pem"]
        self.start("superlink", [*link, "--disable-runtime-dependency-installation"])
        return self

    def start(self, name: str, words: list[str]) -> None:
        with (self.folder / "clients" / f"{name}.log").open("a") as log:
            self.processes[name] = start(words, cwd=self.home, env=self.env, stdout=log, stderr=log)

    def start_node(self, i: int) -> None:
        node = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.pem"]
        node += ["--auth-supernode-private-key", f"node-{i}", "--port", str(free_port())]
        self.start(f"client-{i}", [*node, "--node-config", f"partition-id={i}"])
        with (self.folder / "clients" / "starts").open("a") as starts:
            print(i, file=starts)
        (self.folder / "clients" / f"client-{i}.pid").write_text(str(self.processes[f"client-{i}"].pid))

    def flwr(self, *words: str, tries: int = 1) -> None:
        for left in reversed(range(tries)):
            result = subprocess.run(["flwr", *words], cwd=self.home, env=self.env, capture_output=True, text=True)
            if result.returncode == 0:
                return
            if not left:
                raise UserError(f"flwr {' '.join(words)}: {(result.stderr or result.stdout).strip()[-400:]}")
            time.sleep(1)

    def run(self, look: Callable[[], Any], seconds: float) -> None:
        """Registers the nodes, starts the run, and starts nodes again that died, until clients.json is there."""
        for i in range(self.clients):
            self.flwr("supernode", "register", f"node-{i}.pub", "here", tries=60 if i == 0 else 3)
            self.start_node(i)
        self.flwr("run", "app", "here")
        end = time.monotonic() + seconds
        while not (self.folder / "clients.json").is_file():
            if time.monotonic() > end or self.processes["superlink"].poll() is not None:
                raise UserError(f"the run did not end within {seconds:.0f} s; see {self.folder / 'clients'}")
            for i in range(self.clients):
                if self.processes[f"client-{i}"].poll() is not None:
                    self.start_node(i)
            look()
            time.sleep(0.5)

    def __exit__(self, *error: Any) -> None:
        end_all(self.processes.values(), patience=10)


def node_key(path: Path) -> str:
    """Writes a key pair as Flower reads it; returns the public key as Flower names the node by it."""
    from cryptography.hazmat.primitives import serialization as s  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric import ec  # pyright: ignore[reportMissingImports]

    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    public = key.public_key()
    path.with_name(path.name + ".pub").write_bytes(public.public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH))
    return public.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo).decode()


def certificates(folder: Path) -> None:
    """A certificate authority of this run, and the server's certificate for 127.0.0.1."""
    import trustme  # pyright: ignore[reportMissingImports]

    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    own.cert_chain_pems[0].write_to_path(folder / "server.pem")
    own.private_key_pem.write_to_path(folder / "server.key")
