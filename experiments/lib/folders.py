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

from experiments.lib.cli import Parser, UserError, choose_new, named_folder
from experiments.lib.errors import line_of, read_json, shortened

__all__ = [
    "Journal",
    "choose_folder",
    "claimed",
    "given_in",
    "goes_on",
    "how_to_find",
    "jsonable",
    "read_results",
    "resumed",
    "run_options",
    "start_run",
    "write_config",
    "write_json",
]

RUNNING = "running.json"  # who writes to the folder: there, and locked, as long as somebody does


def run_options(parser: Any, kind: str) -> None:
    """Adds --name and --runs, the folder of a run, to a parser or to a group of one."""
    parser.add_argument("--name", default=None, help=f"folder under --runs; without it the next free {kind}-N")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")


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
    try:
        file.truncate(0)
        file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}))
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # what it could not write it tries to write again
            file.close()
        raise OSError(error.errno, error.strerror, str(path)) from None
    return file


def how_to_find(runs: Path, folder: Path) -> str:
    """The options that name a run."""
    where = "" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}"
    return f"{where} --name {shlex.quote(str(folder.relative_to(runs)))}"


@contextlib.contextmanager
def goes_on(runs: Path, folder: Path) -> Iterator[None]:
    """Errors that a user can mend say how the run goes on then."""
    try:
        yield
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        begun = (folder / "config.json").is_file() and "--resume" not in line
        raise UserError(line + (f", then go on with --resume{how_to_find(runs, folder)}" if begun else "")) from None


def resumed(
    folder: Path, options: dict[str, Any], given: dict[str, Any], parser: Parser, free: Collection[str] = ()
) -> dict[str, Any]:
    """The options of the run; what is given again must agree with them, but for those that are free to change.

    Raises:
        UserError: config.json is damaged, or they do not agree.
    """
    kept = read_json(folder / "config.json", lambda content: _wrong_options(content, options, parser), ANEW)
    for key in kept.keys() & given.keys():
        if key in free:
            kept[key] = given[key]
        elif jsonable(given[key]) != kept[key]:
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{folder} was started with {flag} {kept[key]}, not {given[key]}; leave it out")
    paths = [action.dest for action in parser._actions if action.type is Path]
    kept |= {key: Path(kept[key]) for key in paths if kept.get(key)}
    return options | kept


ANEW = "start a new run with another --name"


def _wrong_options(kept: Any, options: dict[str, Any], parser: Parser) -> str | None:
    """What no command line could have put there."""
    if not isinstance(kept, dict) or not kept:
        return "it must hold the options of the run by name"
    by_name = {action.dest: action for action in parser._actions}
    for key, value in kept.items():
        if key not in options:
            return f"{key} is no option"
        action = by_name[key]
        each = value if action.nargs == "+" else [value]
        if value is None or (action.nargs == 0 and isinstance(value, bool)):
            continue
        if not isinstance(each, list) or any(isinstance(one, bool | list | dict | None) for one in each):
            return f"{key} is {value!r}"
        for one in each:
            try:
                parsed = action.type(str(one)) if callable(action.type) else one
            except (argparse.ArgumentTypeError, ValueError) as error:
                return f"{key} {error}"
            if action.choices is not None and parsed not in action.choices:
                return f"{key} must be one of {', '.join(map(str, action.choices))}; got {one!r}"
    return None


# What a row of results has at least.
RESULT = {
    "method": str,
    "seed": int,
    "loss": float,
    "accuracy": float,
    "seconds": float,
    "sent_bytes": float,
    "lane_bytes": float,
    "code_bits": float,
    "parameters": int,
    "sha256": str,
    "sha256_optimizer": str,
}


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a results.json.

    Raises:
        UserError: it is damaged.
    """

    def wrong(rows: Any) -> str | None:
        if not isinstance(rows, list) or not rows:
            return "it must hold a list of results"
        for row in rows:
            for key, kind in RESULT.items():
                value = row.get(key) if isinstance(row, dict) else None
                if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
                    return f"{key} of a result is {value!r}"
        return None

    return read_json(path, wrong, "remove it, and the last step is done again")


def jsonable(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else value


def write_config(folder: Path, options: dict[str, Any]) -> None:
    """config.json: the options that a run was started with."""
    write_json(folder / "config.json", {key: jsonable(value) for key, value in options.items()})


def start_run(folder: Path, options: dict[str, Any]) -> None:
    """Makes the new folder of a run, with its config.json."""
    folder.mkdir(parents=True)
    write_config(folder, options)


def write_json(path: Path, content: Any) -> None:
    """All or nothing: a killed process leaves the old file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(draft, path)


class Journal:
    """metrics.jsonl of a run: a line for each logged step. One process writes it, the others do nothing.

    Args:
        folder: of the run.
        writes: whether this process does.
    """

    def __init__(self, folder: Path, writes: bool = True):
        self.path, self.writes = folder / "metrics.jsonl", writes

    def lines(self) -> list[dict[str, Any]]:
        """All lines, but for half a one at the end, which a killed process or a full disk may have left.

        Raises:
            UserError: another one is damaged.
        """
        try:
            lines = self.path.read_text().splitlines() if self.path.is_file() else []
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is damaged: {shortened(error)}; {ANEW}") from None
        if lines and not lines[-1].endswith("}"):
            lines.pop()
        return [self._parsed(number, line) for number, line in enumerate(lines, 1)]

    def _parsed(self, number: int, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{self.path}, line {number} is damaged: {shortened(error)}; {ANEW}") from None
        whole = isinstance(line, dict) and all(isinstance(line.get(key), int) for key in ("step", "seed"))
        if not whole or not isinstance(line.get("method"), str) or not isinstance(line.get("loss"), int | float):
            raise UserError(f"{self.path}, line {number} is damaged: it must have method, seed, step and loss; {ANEW}")
        return line

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the lines that are not wanted."""
        if self.writes:
            draft = self.path.with_suffix(".tmp")
            draft.write_text("".join(json.dumps(line) + "\n" for line in self.lines() if wanted(line)))
            os.replace(draft, self.path)

    def add(self, *lines: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
