"""What people see: the console, the progress bar, and a table that is printed and kept as markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Columns", "cells", "markdown", "new_console", "progress_bar", "show", "show_rows", "spread"]

# What stands above a column -> the format of a cell, which names fields of a row, or a function of the whole row.
Columns = Mapping[str, str | Callable[[Any], str]]
WIDTH = 170  # of what is printed to no terminal: the widest table


def new_console(quiet: bool = False) -> Any:
    """The console of an experiment: as wide as the terminal, or as the widest table where there is none.

    It prints texts as they are: names may have brackets or colons in them.
    """
    from rich.console import Console

    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    return Console(width=None if Console().is_terminal else WIDTH, quiet=quiet, **plain)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, of a single one the value alone."""
    return f"{np.mean(values):.4f}" + (f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else "")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table in markdown; every column after the first is aligned to the right if it holds figures."""
    figures = [all(row[i][:1] in "-+0123456789." for row in rows) for i in range(len(head))]
    rule = ["---:" if i and figures[i] else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def cells(columns: Columns, rows: Iterable[Any]) -> list[list[str]]:
    """The texts of a table. rows: dictionaries or NamedTuples."""

    def text(column: str | Callable[[Any], str], row: Any) -> str:
        if callable(column):
            return column(row)
        return column.format(**(row if isinstance(row, dict) else row._asdict()))

    return [[text(column, row) for column in columns.values()] for row in rows]


def show(console: Any, title: str, columns: Columns, rows: Iterable[Any], notes: str, path: Path | None = None) -> None:
    """Prints a table of `cells` with notes below it, and keeps it as markdown if a path is given."""
    from rich.table import Table

    head, texts = list(columns), cells(columns, rows)
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        least = None if i else max(map(len, (name, *(row[0] for row in texts))))  # what a row is about is never cut
        table.add_column(name, justify="right" if i else "left", min_width=least)
    for row in texts:
        table.add_row(*row)
    console.print(table)
    paragraphs = [" ".join(part.split()) for part in notes.split("\n\n")]  # broken anew, as wide as the terminal is
    console.print("\n\n".join(paragraphs))
    if path is not None:
        path.write_text(f"{title}\n\n{markdown(head, texts)}\n\n{notes}\n")


def show_rows(console: Any, title: str, rows: list[dict[str, str]], notes: str, path: Path | None = None) -> None:
    """The same of rows whose cells stand under the names of their columns; columns of nothing but "-" are left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] != "-" for row in rows)]
    show(console, title, {name: lambda row, name=name: row[name] for name in names}, rows, notes, path)


def progress_bar(console: Any, unit: str = "steps") -> Any:
    """A bar for `unit`, hidden where nobody watches. Each task has a field `now` of a few words."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    words = ("{task.description}", f"{{task.completed}}/{{task.total}} {unit}", "{task.fields[now]}")
    what, done, now = (TextColumn(each, markup=False) for each in words)
    columns = (what, BarColumn(bar_width=24), done, TimeRemainingColumn(), now)
    return Progress(*columns, console=console, disable=not console.is_terminal)
