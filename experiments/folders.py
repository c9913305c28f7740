"""The folder of a run: where it is, who writes to it, the options it was started with, and what it logged."""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from experiments.cli import Parser, UserError, choose_new, named_folder

__all__ = ["Journal", "choose_folder", "claimed", "given_in", "how_to_find", "jsonable", "resumed", "write_json"]

RUNNING = "running.json"  # who writes to the folder: there, and locked, as long as somebody does


def given_in(parser: Parser, arguments: Sequence[str]) -> dict[str, Any]:
    """Only the options that stand on the command line, without defaults. Changes the parser."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(arguments))


def choose_folder(runs: Path, name: str | None, resume: bool, kind: str) -> Path:
    """The folder of a new run (runs/NAME, or the next free runs/KIND-N), or of one to resume."""
    if name is None:
        if resume:
            raise UserError("--resume needs --name, the run to continue")
        return choose_new(runs, None, kind)
    folder = named_folder(runs, name)
    if resume and not (folder / "config.json").is_file():
        raise UserError(f"there is no run {folder} to resume")
    if not resume and folder.exists() and not (folder.is_dir() and is_unused(folder)):
        raise UserError(f"{folder} exists; continue it with --resume or choose another --name")
    return folder


def is_unused(folder: Path) -> bool:
    """Whether no run has written to it."""
    return all(path.name == RUNNING for path in folder.iterdir())


@contextlib.contextmanager
def claimed(runs: Path, name: str | None, resume: bool, kind: str) -> Iterator[Path]:
    """The folder that `choose_folder` chooses, made if it is new, and for this process alone while the context lasts.

    A new folder that is left unused is removed again. The lock goes with the process, however that ends.

    Raises:
        UserError: as `choose_folder`; or another process has the folder, and the message says which.
    """
    while True:
        folder = choose_folder(runs, name, resume, kind)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not resume and (name is None or not folder.exists()):
                folder.mkdir()
            lock = locked(folder)
        except (FileExistsError, FileNotFoundError):  # somebody else has just made it, or removed it
            continue
        break
    try:
        if not resume and not is_unused(folder):  # another run was here between our look and our lock
            raise UserError(f"{folder} exists; continue it with --resume or choose another --name")
        yield folder
    finally:
        (folder / RUNNING).unlink(missing_ok=True)
        lock.close()
        if not resume:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def locked(folder: Path) -> IO[str]:
    """The file that says who writes to a folder, open and locked by this process.

    Raises:
        UserError: another process has locked it.
    """
    path = folder / RUNNING
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            text = file.read()
            file.close()
            who = "process {process} on {host}".format(**json.loads(text)) if text else "another process"
            raise UserError(f"{folder} is in use by {who}; wait for it, or choose another --name") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its owner has removed it since we opened it
    file.truncate(0)
    file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}))
    file.flush()
    return file


def how_to_find(runs: Path, folder: Path) -> str:
    """The options that name a run."""
    where = "" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}"
    return f"{where} --name {shlex.quote(str(folder.relative_to(runs)))}"


def resumed(folder: Path, options: dict[str, Any], given: dict[str, Any], free: Collection[str] = ()) -> dict[str, Any]:
    """The options of the run; what is given again must agree with them, but for those that are free to change."""
    try:
        kept = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is damaged: {error}") from None
    for key in kept.keys() & given.keys():
        if key in free:
            kept[key] = given[key]
        elif jsonable(given[key]) != kept[key]:
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{folder} was started with {flag} {kept[key]}, not {given[key]}; leave it out")
    kept["data_dir"] = Path(kept["data_dir"]) if kept["data_dir"] else None
    return options | kept


def jsonable(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else value


def write_json(path: Path, content: Any) -> None:
    """All or nothing: a killed process leaves the old file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(draft, path)


class Journal:
    """metrics.jsonl of a run: a line for each logged step. One process writes it, the others do nothing."""

    def __init__(self, folder: Path, writes: bool = True):
        self.path, self.writes = folder / "metrics.jsonl", writes

    def lines(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        if lines and not lines[-1].endswith("}"):
            lines.pop()  # a killed process may have left half a line
        return [json.loads(line) for line in lines]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the lines that are not wanted."""
        if self.writes:
            draft = self.path.with_suffix(".tmp")
            draft.write_text("".join(json.dumps(line) + "\n" for line in self.lines() if wanted(line)))
            os.replace(draft, self.path)

    def add(self, line: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
