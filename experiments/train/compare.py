"""The main job: one model, several compression methods, what each costs and what it loses.

Runs `train` for every method and every seed, in one process or in several, and compares the results. Writes to
runs/NAME what `train` does, in the same files (results.json has a row for each finished method and seed), and
table.md and compare.png.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import train
from experiments.lib.job import WINDOW, Job
from experiments.lib.report import show_rows, spread
from experiments.lib.run import draw_panels

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    return train.main(arguments, Comparison)


class Comparison(train.Run):
    """Trainings of all methods with all seeds in one folder."""

    kind = "compare"
    parser = staticmethod(lambda: train.parser("compare", __doc__))

    def jobs(self) -> list[Job]:
        return [Job(method, seed) for method in self.options["methods"] for seed in self.options["seeds"]]

    def report(self) -> None:
        if self.number:
            return
        if self.results:
            title = f"{self.folder.name}: {self.results[0]['parameters']:,} parameters"
            show_rows(self.console, title, self.rows(), NOTES, self.folder / "table.md")
        if any(line["step"] > 1 for line in self.journal.lines()):
            self.say(f"plot: {self.plot()}")

    def rows(self) -> list[dict[str, str]]:
        """A row of the table for each method that has a result."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.results:
            groups.setdefault(row["method"], []).append(row)

        def against(dense: str, sent: float) -> str:
            return f"{groups[dense][0]['sent_bytes'] / sent:.1f} x" if dense in groups and sent else "-"

        return [
            {
                "method": method,
                "final loss": spread([row["loss"] for row in rows]),
                "test accuracy": spread([row["accuracy"] for row in rows]),
                "lane B": f"{rows[0]['lane_bytes']:,.0f}",
                "code B": f"{np.mean([row['code_bits'] for row in rows]) / 8:,.0f}",
                "sent B": f"{rows[0]['sent_bytes']:,.0f}",
                "vs f32": against("dense-f32", rows[0]["sent_bytes"]),
                "vs bf16": against("dense-bf16", rows[0]["sent_bytes"]),
                "ms/step": f"{1e3 * np.median([row['seconds'] for row in rows]):.1f}",
            }
            for method, rows in groups.items()
        ]

    def plot(self) -> Path:
        from experiments.lib.plots import by_seed, running_mean

        o, lines = self.options, self.journal.lines()
        by_step, by_bytes = {}, {}
        for method in dict.fromkeys(line["method"] for line in lines):
            mine = by_seed([line for line in lines if line["method"] == method], "step", "sent_bytes", "loss")
            # Steps and bytes are averaged like the losses, so that no curve lags behind.
            steps, sent, losses = (running_mean(values, WINDOW) for values in mine)
            by_step[method], by_bytes[method] = (steps[0], losses), (sent[0] / 1e6, losses)
        panels = {"loss by step": by_step}
        if any(line["sent_bytes"] > 0 for line in lines):  # one worker sends nothing
            panels["loss by bytes sent"] = by_bytes
        title = (
            f"{o['data']}, {o['model']}, {o['workers']} workers, {o['optimizer']} {o['lr']:g}, ratio {o['ratio']:g}; "
            f"{self.labels}; {len(o['seeds'])} seed(s), band: min to max"
        )
        each = {"loss by bytes sent": {"xlabel": "MB sent by each worker", "xscale": "log"}}
        path, loss = self.folder / "compare.png", f"training loss (mean of {WINDOW} logged steps)"
        draw_panels(path, panels, title, each, xlabel="step", ylabel=loss, yscale="log")
        return path


NOTES = """\
Per worker and step. lane B: bytes it contributes to the collective. code B: the best code we have for that message.
sent B: what the compiled program sends from one device (ring model, read by jaxcomp.ledger, with the loss of
each worker, 4 bytes).
vs f32, vs bf16: sent B of the dense exchange divided by this one's. ms/step: median; all devices share this machine.
final loss: training loss, mean of the last 5 logged steps. ±: standard deviation over seeds."""
