"""A run of an experiment: its options, the folder that keeps it, and its rows as a table and a picture."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.lib.cli import Parser, UserError, choose_new
from experiments.lib.folders import Journal, run_options, write_config, write_json
from experiments.lib.report import Columns, cells, new_console, progress_bar, show

__all__ = ["Columns", "Panels", "Run", "cells", "draw_panels", "parser_of"]

# Title of a panel -> label of a curve -> x, y and perhaps the lengths of error bars. Of y [runs, len(x)] the mean is
# drawn, with a band from the least to the largest.
Panels = Mapping[str, Mapping[str, tuple[Any, ...]]]


def parser_of(name: str, about: str | None) -> Parser:
    """The parser of `python -m experiments NAME`; about: the docstring whose first paragraph describes it."""
    return Parser(prog=f"python -m experiments {name}", description=(about or "").split("\n\n")[0])


class Run:
    """The console of a run, and its folder, which is made when the first thing is written to it.

    Args:
        parser: of the options of the experiment; --name and --runs are added.
        arguments: of the command line.
        kind: what the folder is called if the user gives no name.
        resumable: adds --rows, a folder in which `rows_of` keeps each row as it is made.

    Raises:
        UserError: the folder exists.
    """

    def __init__(self, parser: Parser, arguments: Sequence[str], kind: str, resumable: bool = False):
        run_options(parser, kind)
        if resumable:
            about = "keep each row here as it is made, and make none again that is here: to go on after an end"
            parser.add_argument("--rows", type=Path, default=None, metavar="FOLDER", help=about)
        options = vars(parser.parse_args(arguments))
        if find_spec("matplotlib") is None:  # said before hours of work, not after
            raise UserError("the plot needs matplotlib; install it with: pip install 'jaxcomp[experiments]'")
        self.folder = choose_new(options.pop("runs"), options.pop("name"), kind)
        self.rows: Path | None = options.pop("rows", None)
        self.options: Any = SimpleNamespace(**options)
        self.made_with = json.dumps(options, sort_keys=True, default=str)
        self.console, self.begun, self.interrupted = new_console(), False, False

    @property
    def status(self) -> int:
        """What the program ends with."""
        return 130 if self.interrupted else 0

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def path(self, name: str) -> Path:
        """A file of the folder."""
        if not self.begun:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_config(self.folder, vars(self.options))
            self.begun = True
        return self.folder / name

    def add(self, *rows: dict[str, Any]) -> None:
        """To metrics.jsonl."""
        Journal(self.path(".")).add(*rows)

    def keep(self, content: Any) -> None:
        """As results.json."""
        write_json(self.path("results.json"), content)

    def rows_of(self, cases: Sequence[Any], name: Callable[[Any], str], measure: Callable[[Any], Any]) -> list[Any]:
        """What `measure` gives for each case, behind a progress bar with its name.

        With --rows those that stand there, of a run with the same options and by the names of their cases, are not made
        again, but for errors. After Ctrl-C these are the rows so far, of the first cases.

        Raises:
            KeyboardInterrupt: there are none so far, or Ctrl-C ended an earlier call.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        rows, kept, journal = [], {}, None
        if self.rows is not None:
            if self.rows.exists() and not self.rows.is_dir():
                raise UserError(f"--rows must be a folder; {self.rows} is a file")
            self.rows.mkdir(parents=True, exist_ok=True)
            journal = Journal(self.rows, needs={"case": str, "options": str, "row": dict})
            journal.keep(lambda line: "error" not in line["row"])  # nor half a line at the end
            kept = {line["case"]: line["row"] for line in journal.lines() if line["options"] == self.made_with}
        with progress_bar(self.console, "runs") as bar:
            task = bar.add_task("", total=len(cases), now="")
            try:
                for case in cases:
                    bar.update(task, description=name(case))
                    if bar.disable:
                        self.say(name(case))
                    if (row := kept.get(name(case))) is None:
                        row = measure(case)
                        if journal is not None:
                            journal.add({"case": name(case), "options": self.made_with, "row": row})
                    rows.append(row)
                    bar.advance(task)
            except KeyboardInterrupt:
                if not rows:
                    raise
                self.interrupted = True
                self.say("interrupted")
        return rows

    def table(self, title: str, columns: Columns, rows: Iterable[Any], notes: str = "", name: str = "table.md") -> None:
        show(self.console, title, columns, rows, notes, self.path(name))

    def plot(self, name: str, panels: Panels, title: str = "", **labels: Any) -> None:
        draw_panels(self.path(name), panels, title, **labels)
        self.say(f"plot: {self.folder / name}")

    def picture(self, figure: Any, name: str) -> None:
        """A figure of matplotlib's that is more than panels of curves."""
        from experiments.lib.plots import save

        save(figure, self.path(name))
        self.say(f"plot: {self.folder / name}")


def draw_panels(
    path: Path, panels: Panels, title: str = "", each: Any = None, ticks: Sequence[float] = (), **labels: Any
) -> None:
    """A panel for each title, and in it a line for each curve, which looks the same in all panels.

    each: a mapping of titles to labels of that panel alone. ticks: places along x in place of those that a scale has.
    labels: of `axis.set`, the same for all.
    """
    import numpy as np

    from experiments.lib.plots import LINES, new_figure, save

    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(columns, rows=rows, height=5 * rows)
    looks: dict[str, dict[str, Any]] = {}
    for axis, (name, curves) in zip(axes, panels.items(), strict=False):
        axis.set(title=name, **{**labels, **(each or {}).get(name, {})})
        axis.tick_params(which="both", labelsize=8)
        if ticks:
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.set_xticks([], minor=True)
        for label, (x, y, *error) in curves.items():
            look = looks.setdefault(label, {"label": label, "markersize": 4} | LINES[len(looks) % len(LINES)])
            if error:
                axis.errorbar(x, y, *error, capsize=2, elinewidth=1, **look)
            elif isinstance(x[0], str):  # names, between which there is nothing
                axis.plot(x, y, **look | {"linestyle": "none"})
                axis.tick_params(axis="x", rotation=90)
            else:
                runs = np.atleast_2d(y)
                axis.plot(x, runs.mean(0), markevery=max(1, len(x) // 8), **look)
                if len(runs) > 1:
                    axis.fill_between(x, runs.min(0), runs.max(0), color=look["color"], alpha=0.15, linewidth=0)
    known = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known, loc="outside lower center", ncols=min(5, 2 * columns), fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
