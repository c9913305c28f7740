"""The folder of a run: where it is, who writes to it, the options it was started with, and what it logged."""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.cli import Parser, UserError, choose_new, named_folder
from experiments.lib.errors import check_row, line_of, read_json, reading, shortened

__all__ = ["Journal", "choose_folder", "claimed", "goes_on"]
__all__ += ["how_to_find", "read_results", "resumable", "resumed", "run_options", "write_config", "write_json"]

LOCK = "lock"  # a file of the folder, locked as long as somebody writes there; it says who
ANEW = "start a new run with another --name"


def run_options(parser: Any, kind: str) -> None:
    """Adds --name and --runs, the folder of a run, to a parser or to a group of one."""
    parser.add_argument("--name", default=None, help=f"folder under --runs; without it the next free {kind}-N")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")


# ------------------------------------------------------------------------------------------------
# Runs that can be resumed


def choose_folder(runs: Path, name: str | None, resume: bool, kind: str) -> Path:
    """The folder of a new run (runs/NAME, or the next free runs/KIND-N), or of one to resume."""
    if name is None:
        if resume:
            raise UserError("--resume needs --name, the run to continue")
        return choose_new(runs, None, kind)
    folder = named_folder(runs, name)
    if resume and not (folder / "config.json").is_file():
        raise UserError(f"there is no run {folder} to resume")
    if not resume and folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        raise UserError(f"{folder} exists; continue it with --resume or choose another --name")
    return folder


@contextlib.contextmanager
def claimed(runs: Path, name: str | None, resume: bool, kind: str) -> Iterator[Path]:
    """The folder that `choose_folder` chooses, made if it is new, and for this process alone while the context lasts.

    A new folder that is left unused is removed again. The lock goes with the process, however that ends.
    """
    while True:
        folder = choose_folder(runs, name, resume, kind)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # somebody else has just made it
            folder.mkdir(exist_ok=name is not None)
            break
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read() or "another process"
            raise UserError(f"{folder} is in use by {who}; wait for it, or choose another --name") from None
        if name is not None:
            choose_folder(runs, name, resume, kind)  # another run may have been here between our look and our lock
        try:
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            yield folder
        finally:
            with contextlib.suppress(FileNotFoundError):
                if all(each == path for each in folder.iterdir()):
                    shutil.rmtree(folder)


def how_to_find(runs: Path, folder: Path) -> str:
    """The options that name a run."""
    where = "" if runs == Path("runs") else f" --runs {shlex.quote(str(runs))}"
    return f"{where} --name {shlex.quote(str(folder.relative_to(runs)))}"


@contextlib.contextmanager
def resumable(
    parser: Callable[[], Parser], arguments: Sequence[str], kind: str, prepare: Callable[[dict[str, Any]], Any]
) -> Iterator[tuple[Any, Path, Path]]:
    """A run that --resume continues: what `prepare` makes of its options, --runs, and the folder, for us alone.

    parser: makes that of the experiment, with --name, --runs and --resume. prepare: refuses options by a UserError,
    before anything is written.
    """
    p = parser()
    options = vars(p.parse_args(arguments))
    resume, name, runs = options.pop("resume"), options.pop("name"), options.pop("runs")
    folder = choose_folder(runs, name, resume, kind)
    if resume:
        options = resumed(folder, p, arguments, options)
    prepared = prepare(options)
    with claimed(runs, name, resume, kind) as folder, goes_on(runs, folder):
        write_config(folder, options)  # of a run to resume with defaults of options that it did not have
        yield prepared, runs, folder


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
    folder: Path, parser: Parser, arguments: Sequence[str], wanted: Collection[str], free: Collection[str] = ()
) -> dict[str, Any]:
    """The wanted options of the run; what is given again must agree with them, but for those that are free."""
    path = folder / "config.json"
    kept = read_json(path, dict, ANEW)
    with reading(str(path), ANEW):
        check_options(kept, parser, wanted)
    parser.set_defaults(**kept)
    options = vars(parser.parse_args(arguments))
    for key, value in kept.items():
        if key not in free and jsonable(options[key]) != value:
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{folder} was started with {flag} {value}, not {options[key]}; leave it out")
    return {key: options[key] for key in wanted}


def check_options(kept: dict[str, Any], parser: Parser, wanted: Collection[str]) -> None:
    """Raises an error for a value that no command line could have left there."""
    actions = {action.dest: action for action in parser._actions}
    for key, value in kept.items():
        if key not in wanted:
            raise ValueError(f"{key} is no option")
        action = actions[key]
        if value is None and action.default is None:
            continue
        if action.nargs == 0:
            check_row(kept, {key: bool})
            continue
        if action.nargs:
            check_row(kept, {key: list})
        for each in list(value or ()) if action.nargs else [value]:
            parsed = parser._get_value(action, each if isinstance(each, str) else json.dumps(each))
            parser._check_value(action, parsed)
            if jsonable(parsed) != each:
                raise ValueError(f"{key} must be as the option {action.option_strings[0]}; got {each!r}")


# ------------------------------------------------------------------------------------------------
# What is written


def read_results(path: Path, needs: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """The rows of a results.json, each with what it needs; none where there is no such file yet."""
    cure = "remove it, and the last step is done again"
    rows = read_json(path, list, cure) if path.is_file() else []
    for number, row in enumerate(rows, 1):
        with reading(f"{path}, row {number},", cure):
            check_row(row, needs or {})
    return rows


def jsonable(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else value


def write_config(folder: Path, options: dict[str, Any]) -> None:
    """config.json: the options that a run was started with."""
    write_json(folder / "config.json", {key: jsonable(value) for key, value in options.items()})


def write_json(path: Path, content: Any) -> None:
    """All or nothing: a killed process leaves the old file."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    os.replace(draft, path)


class Journal:
    """metrics.jsonl of a run: a line for each logged step. One process writes it, the others do nothing.

    needs: what each line has at least, and of which kind.
    """

    def __init__(self, folder: Path, writes: bool = True, needs: Mapping[str, type] | None = None):
        self.path, self.writes, self.needs = folder / "metrics.jsonl", writes, needs or {}

    def lines(self) -> list[dict[str, Any]]:
        """All lines, but for half a one at the end, which a killed process or a full disk may have left."""
        lines = self.path.read_text(errors="replace").splitlines(keepends=True) if self.path.is_file() else []
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(check_row(json.loads(line), self.needs))
            except ValueError as error:
                raise UserError(f"{self.path}, line {number} is damaged: {shortened(error)}; {ANEW}") from None
        return found

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the lines that are not wanted."""
        if self.writes:
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines() if wanted(line)))

    def add(self, *lines: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
