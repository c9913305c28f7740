"""`jaxcomp plan ...`: a recommendation for a link, or the plan in a file that was measured, on the command line."""

import argparse
import re
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate(text: str) -> float:
    """10mbit, 1gbit, ... in bytes per second."""
    lower = text.lower()
    for unit in sorted(UNITS, key=len, reverse=True):
        number = lower.removesuffix(unit)
        if number != lower:
            try:
                value = float(number)
            except ValueError:
                break
            if value > 0:
                return value * UNITS[unit] / 8
    raise argparse.ArgumentTypeError(f"must be a rate such as 100mbit or 10gbit; got {text!r}")


def seconds(text: str) -> float:
    """20us, 1ms, 0.5s or a plain number of seconds.

    >>> seconds("1ms"), seconds("0.02")
    (0.001, 0.02)
    """
    scales = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in scales if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * scales.get(unit, 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time such as 1ms, 20us or 0.5s; got {text!r}")
    return value


def share(text: str) -> float:
    """A number >= 0; NaN is none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0; got {text!r}")
    return value


def count(text: str) -> float:
    """A number of entries, which may end in K, M or G.

    >>> count("1e7"), count("114K"), count("1.5G")
    (10000000.0, 114000.0, 1500000000.0)
    """
    scale = {"K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:].upper(), 1.0)
    try:
        return float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number such as 1e7 or 10M; got {text!r}") from None


class OfALink(argparse.Action):
    """Stores the value, and that it was given: of a link or a model, for which --facts has its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = [*getattr(namespace, "given", ()), self.option_strings[0]]


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
    add("--parameters", type=count, default="10M", help="entries of the gradient, in vectors")
    add("--workers", type=int, default=4, help="how many exchange gradients")
    add("--rate", type=rate, default="100mbit", help="bits per second of a worker's link")
    add("--latency", type=seconds, default="1ms", help="time of a message besides its bytes")
    add("--gradient", type=seconds, default="0s", help="time of the forward and backward pass of a step")
    p.add_argument("--max-error", type=share, default=None, help="largest share of |x|^2 that a message may lose")
    p.add_argument("--max-every", type=int, default=1, help="most steps of a worker from one exchange to the next")
    p.add_argument(
        "--facts",
        type=Path,
        default=None,
        help="file that jc.plan(..., cache=FILE) has written, in place of the link and the model above",
    )
    p.set_defaults(given=())


def run(o: argparse.Namespace) -> str:
    """Runs the command; returns the text to print.

    Raises:
        ValueError, OSError: options out of range, or a file that is none of a plan.
    """
    import jax
    import jax.numpy as jnp

    from jaxcomp.exchange.links import Link
    from jaxcomp.plan.candidates import default_candidates
    from jaxcomp.plan.recommend import recommend

    if o.facts is not None:
        if o.given:
            o.parser.error(f"argument {o.given[0]}: not allowed with argument --facts; edit that file instead")
        return _of_file(o)
    if not 1 <= o.parameters < 2**40:
        raise ValueError(f"--parameters must be in [1, 2^40); got {o.parameters:g}")
    if o.workers < 2:
        raise ValueError(f"--workers must be at least 2; got {o.workers}")
    like = jax.ShapeDtypeStruct((int(o.parameters),), jnp.float32)
    link = Link(o.latency, o.rate)
    # One vector: low rank goes by the shapes of matrices, which a number of entries does not say.
    known = [each for each in default_candidates(o.max_every) if not _by_shape(each)]
    options = {"candidates": known, "max_error": o.max_error, "max_every": o.max_every}
    found = recommend(like, workers=o.workers, link=link, gradient=o.gradient, **options)
    return f"{found}\n\nLow rank is left out: it goes by the shapes of matrices, which jc.recommend(params) knows."


def _of_file(o: argparse.Namespace) -> str:
    """The table of a file that a plan has written, predicted from its parts, and which of its candidates it lacks."""
    from jaxcomp.plan import facts as files
    from jaxcomp.plan.advise import choose, predicted, shared_work, table, verdict, without_twins
    from jaxcomp.plan.candidates import default_candidates, hierarchies

    text = files.read(o.facts)
    if text is None:
        raise ValueError(f"--facts must be a file that jc.plan(..., cache=FILE) has written; there is no {o.facts}")
    facts = files.from_text(text, str(o.facts))
    like = files.leaves_of(facts, str(o.facts))
    axis = max(facts.fits, key=lambda names: names.count(","), default="data")  # of several the workers are along all
    names = tuple(axis.split(","))
    candidates = [*default_candidates(o.max_every), *hierarchies(names)]
    facts = facts._replace(work=shared_work(facts.work, candidates))
    held = [*facts.about.get("candidates", ()), *facts.work]
    known = [each for each in candidates if each.name in held]
    left = _left_out(held, [each.name for each in candidates], o.max_every)
    if all(each.dense for each in known):
        raise ValueError(
            f"--facts must hold a compressed candidate that this command knows by name; {o.facts} has none"
            f"{''.join(f'. {line}' for line in left)}. Call jc.plan with its candidates and cache={str(o.facts)!r}"
        )
    axis = names[0] if len(names) == 1 else names
    rows = [predicted(each, facts, like, axis, max_error=o.max_error) for each in known]
    rows = without_twins(rows, like, axis, facts.sizes)
    chosen = choose(rows)
    return "\n\n".join([table(rows, chosen), *left, verdict(rows, chosen)])


def _left_out(held: list[str], known: list[str], max_every: int) -> list[str]:
    """Says in words which names in a file are unknown.

    >>> _left_out(["f32", "own", "f32, H=4"], ["f32"], 1)
    ['not known here, left out: own', 'more steps than --max-every 1, left out: f32, H=4']
    """
    unknown = [name for name in dict.fromkeys(held) if name not in known]
    steps = {name: int(match[1]) for name in unknown if (match := re.search(r", H=(\d{1,9})$", name))}
    longer = [name for name in unknown if steps.get(name, 0) > max_every]
    other = [name for name in unknown if name not in longer]
    words = {"not known here": other, f"more steps than --max-every {max_every}": longer}
    return [f"{why}, left out: {'; '.join(names)}" for why, names in words.items() if names]


def _by_shape(candidate: Any) -> bool:
    layout = getattr(candidate.algorithm, "layout", None)
    return layout is not None and layout.unit == "shape"
