"""`jaxcomp plan ...`: a recommendation for a link, or the plan in a file that was measured, on the command line."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.exchange.links import Link
from jaxcomp.plan import facts as files
from jaxcomp.plan.advise import choose, table, verdict
from jaxcomp.plan.candidates import Limits, default_candidates, hierarchies, traced
from jaxcomp.plan.predict import rows_of, shared_work
from jaxcomp.plan.recommend import recommend

__all__ = ["add_parser", "run"]

RATES = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8, "bit": 1 / 8}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
COUNTS = {"k": 1e3, "m": 1e6, "g": 1e9, "": 1.0}


def quantity(units: Mapping[str, float], words: str, *, least: float = 0.0, most: float = math.inf) -> Callable:
    """Reads a number with one of the units, in [least, most), as argparse wants it. words: what it must be.

    >>> quantity(TIMES, "a time")("1ms"), quantity(COUNTS, "a number")("1.5G"), quantity(RATES, "a rate")("8kbit")
    (0.001, 1500000000.0, 1000.0)
    """

    def read(text: str) -> float:
        lower = text.lower()
        unit = next((unit for unit in units if lower.endswith(unit)), None)
        try:
            value = math.nan if unit is None else float(lower.removesuffix(unit)) * units[unit]
        except ValueError:
            value = math.nan
        if not least <= value < most:
            raise argparse.ArgumentTypeError(f"must be {words}; got {text!r}")
        return value

    return read


class OfALink(argparse.Action):
    """Stores the value, and that it was given: of a link or a model, for which --facts has its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = [*namespace.given, self.option_strings[0]]


def add_parser(commands: Any) -> None:
    """Adds the command."""
    p = commands.add_parser(
        "plan",
        help="which exchange makes the fastest step on a link",
        description="Prints bytes, expected error and time of each way to exchange gradients, and which is fastest; it "
        "may be a dense one. Without --facts nothing is measured; jc.plan measures, and writes such a file. With "
        "--facts steps are predicted from what it says of links, workers, leaves and encoding, which may be edited.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = lambda *args, **options: p.add_argument(*args, action=OfALink, **options)
    time = quantity(TIMES, "a time such as 1ms, 20us or 0.5s")
    count = quantity(COUNTS, "a number of entries in [1, 2^40) such as 1e7 or 10M", least=1, most=2**40)
    rate = quantity(RATES, "a rate such as 100mbit or 10gbit", least=1 / 8)
    share = quantity({"": 1.0}, "a number >= 0")
    add("--parameters", type=count, default="10M", help="entries of the gradient, in vectors")
    add("--workers", type=int, default=4, help="how many exchange gradients")
    add("--rate", type=rate, default="100mbit", help="bits per second of a worker's link")
    add("--latency", type=time, default="1ms", help="time of a message besides its bytes")
    add("--gradient", type=time, default="0s", help="time of the forward and backward pass of a step")
    p.add_argument("--max-error", type=share, default=None, help="largest share of |x|^2 that a message may lose")
    p.add_argument("--max-every", type=int, default=1, help="most steps of a worker from one exchange to the next")
    p.add_argument(
        "--facts",
        type=Path,
        default=None,
        help="file that jc.plan(..., cache=FILE) has written, in place of the link and the model above",
    )
    p.set_defaults(given=[])


def run(o: argparse.Namespace) -> str:
    """The text to print.

    Raises:
        ValueError, OSError: options out of range, or a file that is none of a plan.
    """
    if o.facts is not None:
        if o.given:
            o.parser.error(f"argument {o.given[0]}: not allowed with argument --facts; edit that file instead")
        return _of_file(o)
    if o.workers < 2:
        raise ValueError(f"--workers must be at least 2; got {o.workers}")
    # One vector: low rank goes by the shapes of matrices, which a number of entries does not say.
    known = [each for each in default_candidates(o.max_every) if not each.name.startswith("power_sgd")]
    found = recommend(
        jax.ShapeDtypeStruct((int(o.parameters),), jnp.float32),
        workers=o.workers,
        link=Link(o.latency, o.rate),
        gradient=o.gradient,
        candidates=known,
        max_error=o.max_error,
        max_every=o.max_every,
    )
    return f"{found}\n\nLow rank is left out: it goes by the shapes of matrices, which jc.recommend(params) knows."


def _of_file(o: argparse.Namespace) -> str:
    """The table of a file that a plan has written, predicted from its parts, and which of its candidates it lacks."""
    text = files.read(o.facts)
    if text is None:
        raise ValueError(f"--facts must be a file that jc.plan(..., cache=FILE) has written; there is no {o.facts}")
    facts = files.from_text(text, str(o.facts))
    like = files.leaves_of(facts, str(o.facts))
    names = tuple(max(facts.fits, key=lambda names: names.count(","), default="data").split(","))  # along all of these
    candidates = [*default_candidates(o.max_every), *hierarchies(names)]
    held = [*facts.about.get("candidates", ()), *shared_work(facts.work, candidates)]
    known = [each for each in candidates if each.name in held]
    left = _left_out(held, [each.name for each in candidates], o.max_every)
    if all(each.dense for each in known):
        raise ValueError(
            f"--facts must hold a compressed candidate that this command knows by name; {o.facts} has none"
            f"{''.join(f'. {line}' for line in left)}. Call jc.plan with its candidates and cache={str(o.facts)!r}"
        )
    axis = names[0] if len(names) == 1 else names
    sent = traced(known, like, axis, facts.sizes, joined=facts.about.get("device") != "cpu")
    rows = rows_of(known, facts, like, axis, sent, Limits(max_error=o.max_error))
    chosen = choose(rows)
    return "\n\n".join([table(rows, chosen), *left, verdict(rows, chosen)])


def _left_out(held: list[str], known: list[str], max_every: int) -> list[str]:
    """Says in words which names in a file are unknown.

    >>> _left_out(["f32", "own", "f32, H=4"], ["f32"], 1)
    ['not known here, left out: own', 'more steps than --max-every 1, left out: f32, H=4']
    """
    unknown = [name for name in dict.fromkeys(held) if name not in known]
    steps = lambda name: int(match[1]) if (match := re.search(r", H=(\d{1,9})$", name)) else 0
    words = {
        "not known here": [name for name in unknown if steps(name) <= max_every],
        f"more steps than --max-every {max_every}": [name for name in unknown if steps(name) > max_every],
    }
    return [f"{why}, left out: {'; '.join(names)}" for why, names in words.items() if names]
