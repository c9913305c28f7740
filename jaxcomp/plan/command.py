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
from jaxcomp.plan.candidates import Limits, candidates_of, traced
from jaxcomp.plan.machine import Machine, platform_of
from jaxcomp.plan.predict import rows_of, shared_work
from jaxcomp.plan.recommend import recommend

__all__ = ["add_parser", "run"]

RATES = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8, "bit": 1 / 8}
SIDE = 4096  # most rows of a matrix
NOTE = f"Parameters: square matrices of at most {SIDE} rows and a vector of the rest, which low rank goes by."
FORM = "NAME=RATE,LATENCY[,WIDTH], say dcn=10Gbit/s,50us or ici=400Gbit/s,1us,8"
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
COUNTS = {"k": 1e3, "m": 1e6, "g": 1e9, "": 1.0}


def quantity(units: Mapping[str, float], words: str, *, least: float = 0.0, most: float = math.inf) -> Callable:
    """Reads a number with one of the units, in [least, most), as argparse wants it. words: what it must be.

    >>> quantity(TIMES, "a time")("1ms"), quantity(COUNTS, "a number")("1.5G"), quantity(RATES, "a rate")("8kbit")
    (0.001, 1500000000.0, 1000.0)
    """

    def read(text: str) -> float:
        lower = text.lower().removesuffix("/s")
        unit = next((unit for unit in units if lower.endswith(unit)), None)
        try:
            value = math.nan if unit is None else float(lower.removesuffix(unit)) * units[unit]
        except ValueError:
            value = math.nan
        if not least <= value < most:
            raise argparse.ArgumentTypeError(f"must be {words}; got {text!r}")
        return value

    return read


def link_of(text: str) -> tuple[str, Link]:
    """Reads a level of links, as argparse wants it.

    >>> link_of("ici=400Gbit/s,1us,8")
    ('ici', Link(latency=1e-06, bandwidth=50000000000.0, width=8))
    """
    name, _, rest = text.partition("=")
    parts = rest.split(",")
    if not name or not 2 <= len(parts) <= 3 or (len(parts) == 3 and not parts[2].isdigit()):
        raise argparse.ArgumentTypeError(f"must be {FORM}; got {text!r}")
    rate = quantity(RATES, f"a link with a rate such as 10Gbit/s, {FORM}", least=1)(parts[0])
    latency = quantity(TIMES, f"a link with a latency such as 50us, {FORM}", most=60)(parts[1])
    return name, Link(latency, rate, int(parts[2]) if len(parts) == 3 else None)


class OfALink(argparse.Action):
    """Stores the value, and that it was given: of a link or a model, for which --facts has its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        several = [*(namespace.link or []), values] if self.dest == "link" else values
        setattr(namespace, self.dest, several)
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
    share = quantity({"": 1.0}, "a number >= 0")
    add("--parameters", type=count, default="10M", help="entries of the gradient, in vectors")
    add("--workers", type=int, default=None, help="how many exchange gradients; 4 where no --link has a width")
    what = "rate, latency and width of a level of links, innermost first; several levels have one option each"
    add("--link", type=link_of, default=None, metavar="LINK", help=f"{FORM}: {what}; without it --rate and --latency")
    add(
        "--rate",
        type=quantity(RATES, "a rate such as 100mbit or 10gbit", least=1 / 8),
        default="100mbit",
        help="of one link",
    )
    add("--latency", type=time, default="1ms", help="of one link: time of a message besides its bytes")
    add("--machine", default=None, help=f"{', '.join(Machine.names())}, or a file; without it the device that is there")
    add("--gradient", type=time, default="0s", help="time of the forward and backward pass of a step")
    p.add_argument("--max-error", type=share, default=None, help="largest share of |x|^2 that a message may lose")
    p.add_argument("--max-every", type=int, default=1, help="most steps of a worker from one exchange to the next")
    what = "file that jc.plan(..., cache=FILE) has written, in place of the links and the machine above"
    p.add_argument("--facts", type=Path, default=None, help=what)
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
    links: dict[str, Link] = dict(o.link or [("data", Link(o.latency, o.rate))])
    if len(links) < len(o.link or links):
        raise ValueError("--link must have different names")
    if o.link and {"--rate", "--latency"} & set(o.given):
        raise ValueError("--link has the rate and the latency; leave --rate and --latency out")
    if o.workers is not None and o.workers < 2:
        raise ValueError(f"--workers must be at least 2; got {o.workers}")
    some_open = any(each.width is None for each in links.values())
    workers = o.workers or (4 * math.prod(each.width or 1 for each in links.values()) if some_open else None)
    found = recommend(
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in _matrices(int(o.parameters))],
        workers=workers,
        link=links,
        machine=o.machine,
        gradient=o.gradient,
        max_error=o.max_error,
        max_every=o.max_every,
    )
    return f"{found}\n\n{NOTE}"


def _matrices(parameters: int) -> list[tuple[int, ...]]:
    """Shapes of so many entries: square matrices with at most 4096 rows, and a vector of the rest.

    >>> _matrices(10_000_000)
    [(3162, 3162), (1756,)]
    """
    side = min(math.isqrt(parameters), SIDE)
    many = parameters // side**2
    rest = parameters - many * side**2
    return [(many, side, side) if many > 1 else (side, side), *([(rest,)] if rest else [])]


def _of_file(o: argparse.Namespace) -> str:
    """The table of a file that a plan has written, predicted from its parts, and which of its candidates it lacks."""
    text = files.read_file(o.facts)
    if text is None:
        raise ValueError(f"--facts must be a file that jc.plan(..., cache=FILE) has written; there is no {o.facts}")
    facts = files.from_text(text, str(o.facts))
    like = files.leaves_of(facts, str(o.facts))
    names = tuple(max(facts.fits, key=lambda names: names.count(","), default="data").split(","))  # along all of these
    candidates = candidates_of("plan", None, names, o.max_every)
    held = [*facts.about.get("candidates", ()), *shared_work(facts.work, candidates)]
    known = [each for each in candidates if each.name in held]
    left = _left_out(held, [each.name for each in candidates], o.max_every)
    if all(each.dense for each in known):
        raise ValueError(
            f"--facts must hold a compressed candidate that this command knows by name; {o.facts} has none"
            f"{''.join(f'. {line}' for line in left)}. Call jc.plan with its candidates and cache={str(o.facts)!r}"
        )
    axis = names[0] if len(names) == 1 else names
    platform = platform_of(str(facts.about.get("device", "cpu")))
    sent = traced(known, like, axis, facts.sizes, joined=platform != "cpu", platform=platform)
    rows = rows_of(known, facts, like, axis, sent, Limits(max_error=o.max_error))
    chosen = choose(rows)
    return "\n\n".join([table(rows, chosen, facts), *left, verdict(rows, chosen)])


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
