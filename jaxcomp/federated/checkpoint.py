"""A server on disk: everything that its next round depends on, in one file.

Members forget what they are told that the server has used. So the file must be as new as what they are told: `save`
after each `Server.close`, before the next `Server.open`. A server that is killed at any moment then goes on from the
last round that it closed, and opens the next one again; members answer it with the bytes that they answered before.

A NumPy .npz with the arrays and a JSON text, like files of `jc.smoothness.save`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcomp.federated.roster import Entry
from jaxcomp.federated.server import Server
from jaxcomp.files import read_arrays, refusing, write_arrays

__all__ = ["load", "save"]

VERSION = 1
FIELDS = ("volume", "version", "round", "last", "offered", "limit", "told", "seen", "here", "used", "norm", "tokens")


def save(file: Path | str, server: Server, **about: Any) -> None:
    """Writes a server whose round is closed, whole or not at all.

    Args:
        file: used as it is.
        server: whose members are named by strings or integers.
        about: what else goes on with the run, anything that JSON can hold: `load` returns it.

    Raises:
        ValueError: a round is open, or a member has another name.
    """
    if server._open:
        raise ValueError(f"federated: round {server.number} is open; close it, then save")
    for name in server._entries:
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ValueError(f"federated: names must be strings or integers to be saved; got {name!r}")
    entries = [
        [name, {field: getattr(entry, field) for field in FIELDS}, list(entry.fates.items())]
        for name, entry in server._entries.items()
    ]
    content = {
        "version": VERSION,
        "options": _options(server),
        "shown": server.version,
        "number": server.number,
        "counts": [[name, dict(counter)] for name, counter in server.counts.items()],
        "entries": entries,
        "held": [name for name, _ in server._held],
        "about": about,
    }
    arrays = {"header": np.array(json.dumps(content)), "point": server.point, "shown": server.shown}
    arrays["digests"] = np.frombuffer(b"".join(server._digests), np.uint8).reshape(-1, 32)
    arrays |= {f"update_{i}": np.frombuffer(data, np.uint8) for i, data in enumerate(server._updates)}
    arrays |= {f"held_{i}": vector for i, (_, vector) in enumerate(server._held)}
    arrays |= {f"outer_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(server._outer_state))}
    write_arrays(file, arrays)


def load(file: Path | str, server: Server) -> dict[str, Any]:
    """Puts a server that has not begun where the one was that `save` wrote. Returns what was saved about the run.

    Answers that were awaited count as lost: the next task reports them as not used, and their members keep them.

    Args:
        file: of `save`.
        server: made with the same options as the one that was saved. Members on its roster alone join it.

    Raises:
        ValueError: not such a file, other options, another volume of a member, or the server has begun.

    >>> import tempfile
    >>> start = lambda: Server(np.zeros(4), {"a": 1}, 0.5)
    >>> server = start()
    >>> tasks, result = server.open({"a"}), server.close()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/server.npz", server, accuracy=[0.5])
    ...     again = start()
    ...     print(load(f"{folder}/server.npz", again), again.number)
    {'accuracy': [0.5]} 1
    """
    if server.number:
        raise ValueError(f"federated: load into a server that has not begun; this one is at round {server.number}")
    if not Path(file).is_file():
        raise ValueError(f"federated: no file {file}")
    with refusing(f"federated: {file} is not a file of federated.save"):
        arrays = read_arrays(file)
        content = json.loads(str(arrays["header"]))
        version = content["version"]
    if version != VERSION:
        raise ValueError(f"federated: {file} has format version {version}; this library reads {VERSION}")
    options = _options(server)
    with refusing(f"federated: {file} is damaged"):
        saved = content["options"].items()
        volumes = [(name, fields["volume"]) for name, fields, _ in content["entries"]]
        outer = _checked(server, content, arrays)
    for name, value in saved:
        if options.get(name) != value:
            raise ValueError(
                f"federated: {file} was saved with {name} {value!r}; this server has {options.get(name)!r}"
            )
    for name, volume in volumes:
        here = server._entries.get(name)
        if here is not None and here.volume != volume:
            raise ValueError(f"federated: the volume of {name!r} is {volume} in {file} and {here.volume} here")
    with refusing(f"federated: {file} is damaged"):
        _restore(server, content, arrays, outer)
    for name in server.missing():
        server.lost(name)
    return content["about"]


def _checked(server: Server, content: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The arrays of the outer optimizer. Raises ValueError where a vector has another length, or is not finite."""
    outer = [f"outer_{i}" for i in range(len(jax.tree.leaves(server._outer_state)))]
    vectors = ["point", "shown", *(f"held_{i}" for i in range(len(content["held"])))]
    lengths = {arrays[name].shape for name in vectors}
    if lengths != {tuple(arrays["point"].shape)} or arrays["point"].ndim != 1:
        raise ValueError(f"vectors in it have the shapes {sorted(lengths)}")
    for name in (*vectors, *outer):
        if np.issubdtype(arrays[name].dtype, np.floating) and not np.all(np.isfinite(arrays[name])):
            raise ValueError(f"{name} is not finite")
    return [arrays[name] for name in outer]


def _restore(server: Server, content: dict[str, Any], arrays: dict[str, np.ndarray], outer: list[np.ndarray]) -> None:
    server._outer_state = jax.tree.unflatten(jax.tree.structure(server._outer_state), outer)
    server.point, server.shown = arrays["point"], arrays["shown"]
    server.version, server.number = content["shown"], content["number"]
    for name, fields, fates in content["entries"]:
        entry = server._entries[name] = Entry(fields["volume"])
        for field in FIELDS:
            setattr(entry, field, fields.get(field, 0) if field == "tokens" else fields[field])  # new in 0.2
        entry.fates = dict(fates)
    server.counts |= {name: Counter(counter) for name, counter in content["counts"]}
    count = sum(name.startswith("update_") for name in arrays)
    server._updates.extend(arrays[f"update_{i}"].tobytes() for i in range(count))
    server._digests = {row.tobytes(): None for row in arrays["digests"]}
    server._held = [(name, arrays[f"held_{i}"]) for i, name in enumerate(content["held"])]


def _options(server: Server) -> dict[str, Any]:
    """Options that must be the same when a run goes on."""
    names = ("mean_ratio", "rule", "down", "late", "bound", "max_norm", "weights", "patience")
    leaves = [[list(np.shape(leaf)), str(np.asarray(leaf).dtype)] for leaf in jax.tree.leaves(server._outer_state)]
    options = {name: getattr(server, name) for name in names}
    return options | {"size": server.point.size, "history": server._updates.maxlen, "outer": leaves}
