"""Trainers that people have, with the exchange compressed: DrJAX, MaxText, Tunix. Each in its released package.

`pip install '.[trainers]'` in an environment of its own, on Python 3.12. What is not installed is left out by name.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.lib.cli import existing_folder
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from experiments.lib.text import bytes_of

__all__ = ["PACKAGES", "main"]

PACKAGES = {"drjax": "drjax", "maxtext": "maxtext", "tunix": "tunix"}  # name of the command -> module


def over(row: dict[str, Any], axis: str) -> float:
    return sum(sent for names, sent in row["axes"].items() if axis in names.split("+"))


def main(arguments: Sequence[str]) -> int:
    p = parser_of("trainers", __doc__)
    p.add_argument("trainer", choices=list(PACKAGES), help="whose package")
    p.add_argument("--steps", type=int, default=0, help="steps of each training; 0: as on the page")
    p.add_argument("--data", type=Path, default=None, metavar="DIR", help="tinyshakespeare, for MaxText")
    run = Run(p, arguments, "trainers")
    name = run.options.trainer
    if find_spec(PACKAGES[name]) is None:
        run.say(f"{name}: left out, its package is not installed (pip install '.[trainers]', on Python 3.12)")
        return 0
    return {"drjax": drjax, "maxtext": maxtext, "tunix": tunix}[name](run)


def with_ratios(rows: list[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    """The rows with bytes over the axis, and how many times fewer they are than those of the dense row above."""
    dense, found = 0.0, []
    for row in rows:
        sent = over(row, axis)
        dense = sent if row.get("dense") else dense
        others = sum(row["axes"].values()) - sent
        found.append(row | {"sent": sent, "fewer": dense / sent if sent else float("nan"), "others": others})
    return found


def maxtext(run: Run) -> int:
    from experiments.trainers.pretrain import CASES, RESTORED, MaxText, made_lines

    steps, data = run.options.steps or 200, run.options.data
    if data is None:
        run.say(
            "DiLoCo on text is left out, and MaxText's own step trains on made lines: --data DIR has tinyshakespeare"
        )
    text = made_lines() if data is None else bytes_of(existing_folder(data)).decode()
    cases = [case for case in CASES if data is not None or case.form != "DiLoCo, text"]
    with MaxText(run.path("config.json").parent, text) as trainer:
        measure = lambda case: trainer.trained(case, steps if case.axis == "diloco" else steps // 4)
        rows = run.rows_of(cases, lambda case: f"{case.form}, {case.method}", measure)
        found = []
        for case, row in zip(cases, rows, strict=False):
            dense = not case.algorithm
            own = row if dense else next(each for each in found if each["form"] == case.form)
            away = max(abs(loss - own["losses"][step]) for step, loss in row["losses"].items() if step < 50)
            both = with_ratios([own | {"dense": True}, row | {"dense": dense}], case.axis)
            found.append(both[-1] | {"away": away})
        run.keep(found)
        restored = {case.form: trainer.restored(case, 16, 8) for case in RESTORED}
    run.keep([*found, {"restored": restored}])
    at = lambda step: lambda row: f"{row['losses'][step]:.3f}" if step in row["losses"] else ""
    columns: Columns = {
        "MaxText 0.2.5": "{form}",
        "mean": "{method}",
        'bytes over "diloco" or "data" in a step': "{sent:,.0f}",
        "times fewer": "{fewer:.1f}",
        "on other axes": "{others:,.0f}",
        **{f"loss at step {step}": at(step) for step in (steps // 4 - 1, steps // 2 - 1, steps - 1)},
        "furthest from its own in 50 steps": lambda row: "" if row["dense"] else f"{row['away']:.0e}",
    }
    notes = (
        "Two layers of width 64; DiLoCo: 2 replicas of fsdp 2, an exchange every 5 steps (streaming: 3 fragments, 6 "
        "steps). Bytes: jc.ledger of MaxText's compiled step, with an exchange, of the largest fragment. Restored from "
        f"MaxText's checkpoint after 8 of 16 steps, losses are the same: {restored}."
    )
    run.table("MaxText, compressed", columns, found, notes)
    panels = {
        form: {
            row["method"]: (list(row["losses"]), list(row["losses"].values())) for row in found if row["form"] == form
        }
        for form in dict.fromkeys(row["form"] for row in found)
        if form not in ("step, data 4, text", "the same, 2 micro-batches")  # like the one between them
    }
    run.plot("maxtext.png", panels, xlabel="step", ylabel="loss", yscale="log")
    return run.status


def drjax(run: Run) -> int:
    on_four_devices()
    from experiments.trainers.rounds import AXIS, FORMS, METHODS, trained

    rounds = run.options.steps or 20
    cases = [(form, method) for form in FORMS for method in METHODS]
    measure = lambda case: {
        "form": case[0],
        "method": case[1],
        "dense": METHODS[case[1]] is None,
        **trained(FORMS[case[0]], METHODS[case[1]], rounds),
    }
    rows = with_ratios(run.rows_of(cases, ", ".join, measure), AXIS)
    for row in rows:
        del row["params"]
    run.keep(rows)
    columns: Columns = {
        "DrJAX 0.2.1": "{form}",
        "mean": "{method}",
        f'bytes over "{AXIS}" in a round': "{sent:,.0f}",
        "times fewer": "{fewer:.1f}",
        "on other axes": "{others:,.0f}",
        f"loss after {rounds // 2} rounds": lambda row: f"{row['losses'][rounds // 2 - 1]:.4f}",
        f"after {rounds}": lambda row: f"{row['losses'][-1]:.4f}",
    }
    notes = (
        "A linear model of 16,640 parameters, 4 clients (2 where their parameters are cut), 5 local steps in a round."
    )
    run.table("Rounds in DrJAX", columns, rows, notes)
    panels = {
        form: {row["method"]: (list(range(1, rounds + 1)), row["losses"]) for row in rows if row["form"] == form}
        for form in FORMS
    }
    run.plot("drjax.png", panels, xlabel="round", ylabel="loss", yscale="log")
    return run.status


def tunix(run: Run) -> int:
    on_four_devices()
    from experiments.trainers.peft import METHODS, restored, trained

    steps, forms = run.options.steps or 50, {"step": None, "step of 2 micro-batches": 2}
    cases = [(form, name) for form in forms for name in METHODS]
    measure = lambda case: {
        "form": case[0],
        **trained(case[1], steps, forms[case[0]]),
        "dense": METHODS[case[1]] is None,
    }
    rows = with_ratios(run.rows_of(cases, ", ".join, measure), "fsdp")
    for row in rows:
        own = next(each for each in rows if each["form"] == row["form"])
        row["away"] = max(abs(a - b) for a, b in zip(row["losses"], own["losses"], strict=True))
    same = [restored("int4 + error feedback", run.path(f"checkpoints-{micro}"), micro) for micro in forms.values()]
    run.keep([*rows, {"restored": same}])
    of = lambda row: row["losses"][:: forms[row["form"]] or 1]
    at = lambda step: lambda row: f"{of(row)[step]:.4f}"
    columns: Columns = {
        "Tunix 0.1.7, PeftTrainer": "{form}",
        "mean": "{method}",
        'bytes over "fsdp" in a step': "{sent:,.0f}",
        "times fewer": "{fewer:.1f}",
        **{f"loss at step {step + 1}": at(step) for step in (steps // 5 - 1, steps // 2 - 1, steps - 1)},
        "furthest from its own": "{away:.1e}",
    }
    notes = (
        "Qwen3 with two layers of width 64, batches of very unequal lengths, clipping, a cosine schedule. Of two "
        "micro-batches Tunix's own exchanges the gradients of each, and the others their mean. "
        f"A new trainer finds the exchange's state in Tunix's checkpoint: {same}."
    )
    run.table("Tunix's trainer, compressed", columns, rows, notes)
    panels = {
        form: {row["method"]: (list(range(1, steps + 1)), of(row)) for row in rows if row["form"] == form}
        for form in forms
    }
    run.plot("tunix.png", panels, xlabel="step", ylabel="loss")
    return run.status


def on_four_devices() -> None:
    """Before anything else touches JAX."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
