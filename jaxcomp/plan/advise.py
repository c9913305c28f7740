"""The advice: which candidate to take, the table of all, and the reason in words. Nothing is measured here."""

import math
from collections.abc import Callable, Sequence

from jaxcomp.ledger import aligned
from jaxcomp.plan.facts import Facts
from jaxcomp.plan.links import at_bandwidth, seconds_of
from jaxcomp.plan.predict import Advice

__all__ = ["best_of", "break_even", "choose", "columns_of", "duration", "rate", "reason", "table", "verdict"]

LEAST = 1e-9  # seconds that are told apart
MARGIN = 0.05  # by which compressing must be faster than dense to be advised
SLOWEST, FASTEST = 1e3 / 8, 1e14 / 8  # bytes per second between which a link may be
MORE_STEPS = '; steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'


def choose(rows: Sequence[Advice], name: str = "plan") -> Advice:
    """The candidate that is advised: the fastest; a dense one where compressing saves less than the margin.

    name: of the function that the user called, for errors.

    Raises:
        ValueError: there is none, or none is eligible.
    """
    tried = _comparable(rows)
    if not tried:
        raise ValueError(f"{name}: candidates must hold at least one that is eligible; all are refused")
    best = min(tried, key=lambda row: row.seconds)
    dense = min((row for row in tried if row.candidate.dense), key=lambda row: row.seconds, default=None)
    return dense if dense is not None and dense.seconds <= (1 + MARGIN) * best.seconds else best


def _comparable(rows: Sequence[Advice]) -> list[Advice]:
    """The eligible rows: the ones that were run, else those whose work is known, else all."""
    eligible = [row for row in rows if row.refused is None]
    known = [row for row in eligible if row.known] or eligible
    return [row for row in known if row.measured is not None] or known


def best_of(rows: Sequence[Advice], dense: bool) -> Advice | None:
    """The fastest of either kind; of dense ones that exchange at every step, if there are any."""
    kind = [row for row in rows if row.candidate.dense == dense]
    kind = _comparable([row for row in kind if dense and row.candidate.every == 1] or kind)
    return min(kind, key=lambda row: row.seconds, default=None)


def _work(row: Advice, dense: Advice | None) -> float:
    """Seconds per step to encode and decode, beyond what the best dense candidate takes."""
    own, other = row.per_step, None if dense is None else dense.per_step
    return max(own.encode + own.decode - (0.0 if other is None else other.encode + other.decode), 0.0)


# ------------------------------------------------------------------------------------------------
# Words


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(22.712), duration(8.1e-4), duration(0.0)
    ('22.7 s', '0.81 ms', '0 ms')
    """
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def rate(bandwidth: float) -> str:
    """A bandwidth in bits per second.

    >>> rate(12.5e6), rate(1.25e9)
    ('100 Mbit/s', '10 Gbit/s')
    """
    units = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    unit = next((unit for unit, least in units.items() if 8 * bandwidth >= least), "k")
    return f"{8 * bandwidth / units[unit]:.3g} {unit}bit/s"


def verdict(rows: Sequence[Advice], chosen: Advice, on: str = "") -> str:
    """Why, in one sentence. on: what the times are of, in words."""
    dense, best = best_of(rows, dense=True), best_of(rows, dense=False)
    on = f" ({on})" if on else ""
    takes = f"{chosen.candidate.name} takes {duration(chosen.seconds)} a step"
    if not chosen.candidate.dense:
        if dense is None:
            return f"compress: {takes}{on}"
        share = dense.sent_bytes / max(chosen.sent_bytes, 1e-9)
        more = "" if chosen.bound else f" and works {duration(_work(chosen, dense))} more"
        every = " with an exchange at every step" if dense.candidate.every < chosen.candidate.every else ""
        effect = chosen.loss.words + ("" if chosen.loss.is_useful else MORE_STEPS)
        return (
            f"compress: {takes} where {dense.candidate.name}{every} takes {duration(dense.seconds)}{on}: it sends "
            f"{share:.3g} times fewer bytes{more}; effect on the loss: {effect} ({_known(chosen)})"
        )
    if best is None:
        some = not all(row.candidate.dense for row in rows)
        why = "no compressed candidate is eligible" if some else "there is no compressed candidate"
        return f"do not compress: {chosen.candidate.name}; {why}"
    text = f"do not compress: {takes}{on}; the fastest compressed candidate, {best.candidate.name},"
    if not best.known:
        return f"{text} was {_unmeasured(best, rows)}"
    share = f"{abs(best.seconds - chosen.seconds) / max(chosen.seconds, LEAST):.0%}"
    side = "slower" if best.seconds > chosen.seconds else "faster, less than what is worth it"
    text += " takes the same time" if share == "0%" else f" is {share} {side}"
    left = sum(row.refused is None and not row.candidate.dense and _left_out(row, rows) for row in rows)
    many = f"{left} compressed candidate{'' if left == 1 else 's'}"
    return text + (f"; {many} could not be measured: the budget was too short" if left else "")


def reason(row: Advice, rows: Sequence[Advice]) -> str:
    """Why a candidate is not compared; nothing of one that is."""
    return row.refused or ("" if row.known else _unmeasured(row, rows))


def _fastest(rows: Sequence[Advice]) -> Advice | None:
    """The row with the least predicted time of those whose work is known."""
    known = [each for each in rows if each.refused is None and not each.bound]
    return min(known, key=lambda each: each.parts.total, default=None)


def _left_out(row: Advice, rows: Sequence[Advice]) -> bool:
    """Whether the work of a candidate is not known though it might be the fastest."""
    fastest = _fastest(rows)
    return not row.known and (fastest is None or row.parts.total < fastest.parts.total)


def _unmeasured(row: Advice, rows: Sequence[Advice]) -> str:
    """Why the work of a candidate is not known. Its links alone decide, or it was not measured."""
    fastest = _fastest(rows)
    if fastest is None or _left_out(row, rows):
        return "not measured: what it takes to encode and decode is not known"
    more = duration(row.parts.total - fastest.parts.total)
    return f"not measured: without encoding and decoding it is {more} slower than {fastest.candidate.name}"


def _known(row: Advice) -> str:
    """How the effect on the loss is known."""
    if row.candidate.dense:
        return "exact" if _is_exact(row) else "rounding"
    return "unknown" if row.loss.bound is None else "theory"


def break_even(faster: Callable[[float], bool]) -> str:
    """The bandwidths at which a candidate is faster.

    faster: whether it is, on a link of so many bytes per second.

    >>> break_even(lambda bandwidth: bandwidth < 1.25e9)
    'below 10 Gbit/s'
    """
    low, high = SLOWEST, FASTEST
    first, last = faster(low), faster(high)
    if first == last:
        return "always" if first else "never"
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) == first else (low, middle)
    return f"{'below' if first else 'above'} {rate(low)}"


# ------------------------------------------------------------------------------------------------
# The table


def columns_of(rows: Sequence[Advice], chosen: Advice, facts: Facts) -> tuple[dict[str, list[str]], list[bool]]:
    """Cells of the rows by column, the fastest first, what is not known later; and which row is advised. Per step:

    MB sent: by a worker. A column for each link: seconds on it. work: to encode and
    decode, beyond what the best dense candidate takes. step: predicted, ">" is a lower bound; measured: where it was
    run. loses: share of |x|^2 of a message. effect on the loss, known from: theory, or unknown. pays: bandwidths, of
    the link on which the best dense candidate is longest, at which it is faster than that one.
    """
    dense = best_of(rows, dense=True)
    links = list(dict.fromkeys(name for row in rows for name in row.parts.links))
    level = max(dense.parts.links, key=lambda name: dense.parts.links[name], default=None) if dense else None
    columns: dict[str, Callable[[Advice], str]] = {
        "candidate": lambda row: row.candidate.name,
        "MB sent": lambda row: "-" if math.isnan(row.sent_bytes) else f"{row.sent_bytes / 1e6:.4g}",
        **{name: lambda row, name=name: duration(row.per_step.links.get(name, math.nan)) for name in links},
        "work": lambda row: "-" if row.bound or math.isnan(row.seconds) else duration(_work(row, dense)),
        "step": lambda row: f"{'>' if row.bound else ''}{duration(row.parts.total)}",
        "measured": lambda row: "-" if row.measured is None else duration(row.measured),
        "loses": _loses,
        "effect on the loss": lambda row: row.loss.words,
        "known from": _known,
        f"pays{'' if level is None else f' ({level})'}": lambda row: (
            reason(row, rows) or _pays(row, dense, facts, level)
        ),
    }
    if all(row.measured is None for row in rows):
        del columns["measured"]
    place = lambda row: (row.refused is not None, not row.known, math.isnan(row.seconds), row.seconds)
    ordered = sorted(rows, key=place)
    return {head: [cell(row) for row in ordered] for head, cell in columns.items()}, [row is chosen for row in ordered]


def table(rows: Sequence[Advice], chosen: Advice, facts: Facts) -> str:
    """The rows as text (`columns_of`); "->" marks the advice."""
    columns, marks = columns_of(rows, chosen, facts)
    words = ("candidate", "loses", "effect", "known", "pays")
    cells = [(head.startswith(words), [head, *column]) for head, column in columns.items()]
    return aligned([(True, ["  ", *("->" if mark else "  " for mark in marks)]), *cells])


def _loses(row: Advice) -> str:
    if row.error is not None:
        return f"{row.error:.3g} (measured here)"
    if row.loss.bound is None:
        return "unknown"
    if row.candidate.dense:
        return "0" if _is_exact(row) else "2^-16"
    return f"<= {row.loss.bound:.3g}"


def _is_exact(row: Advice) -> bool:
    compressor = getattr(row.candidate.algorithm, "compressor", None)
    return compressor is None or compressor.spec.name == "identity"


def _pays(row: Advice, dense: Advice | None, facts: Facts, level: str | None) -> str:
    if dense is None or level is None or row.candidate.dense:
        return ""

    def rest(row: Advice) -> float:
        return row.parts.total - row.per_step.network

    def at(row: Advice, bandwidth: float) -> float:
        fits = at_bandwidth(facts.fits, level, bandwidth)
        return rest(row) + seconds_of(row.collectives, fits, facts.sizes).mean / row.candidate.every

    return break_even(lambda bandwidth: at(row, bandwidth) < at(dense, bandwidth) - LEAST * at(dense, bandwidth))
