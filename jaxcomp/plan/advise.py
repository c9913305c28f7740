"""The advice: which candidate to take, the table of all, and the reason in words. Nothing is measured here."""

import math
from collections.abc import Callable, Mapping, Sequence

from jaxcomp.plan.predict import Advice

__all__ = ["best_of", "choose", "table", "text_table", "verdict"]

LEAST = 1e-9  # seconds that are told apart
MARGIN = 0.05  # by which compressing must be faster than dense to be advised
MORE_STEPS = '. Steps to the same loss may grow, above all with Adam: see "Where it does not pay" in the documentation'


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


# ------------------------------------------------------------------------------------------------
# Words


def verdict(rows: Sequence[Advice], chosen: Advice) -> str:
    """Why, in a sentence or two."""
    dense, best = best_of(rows, dense=True), best_of(rows, dense=False)
    takes = f"{chosen.candidate.name} takes {_ms(chosen.seconds)} a step"
    if not chosen.candidate.dense:
        if dense is None:
            return f"compress: {takes}"
        own, other = chosen.per_step, dense.per_step
        return (
            f"compress: {takes}, {dense.candidate.name}, the fastest dense candidate{_at_every_step(dense, rows)}, "
            f"{_ms(dense.seconds)}. Of a step it is on the links for {_ms(own.network)} in place of "
            f"{_ms(other.network)} and works for {_ms(own.encode + own.decode)} to encode and decode. What it loses: "
            f"{chosen.loss.words}{'' if chosen.loss.is_useful else MORE_STEPS}"
        )
    if best is None:
        some = not all(row.candidate.dense for row in rows)
        why = "no compressed candidate is eligible" if some else "there is no compressed candidate"
        return f"do not compress: {chosen.candidate.name}; {why}"
    text = f"do not compress: {takes}. The fastest compressed candidate, {best.candidate.name},"
    if not best.known:
        return f"{text} was {_unmeasured(best, rows)}"
    more = (best.seconds - chosen.seconds) / max(chosen.seconds, LEAST)
    share = f"{abs(more):.0%}"
    text += " takes the same time" if share == "0%" else f" is {share} {'slower' if more > 0 else 'faster'}"
    text += "" if best.bound else _difference(best, chosen)
    left = sum(row.refused is None and not row.candidate.dense and _left_out(row, rows) for row in rows)
    many = f"{left} compressed candidate{'' if left == 1 else 's'}"
    return text + (f". {many} could not be measured: the budget was too short" if left else "")


def reason(row: Advice, dense: Advice | None, rows: Sequence[Advice]) -> str:
    """Says what sets a candidate apart from the best dense one; of one whose work was not measured, why it was not."""
    if row.refused:
        return row.refused
    if row is dense:
        return f"the best dense candidate{_at_every_step(row, rows)}"
    if not row.known:
        return _unmeasured(row, rows)
    if dense is None:
        return ""
    both = row.measured is not None and dense.measured is not None
    more = row.seconds - dense.seconds if both else row.parts.total - dense.parts.total
    words = f"{_ms(abs(more))} {'slower' if more > 0 else 'faster'} than {dense.candidate.name}"
    if abs(more) <= LEAST:
        words = f"takes the same time as {dense.candidate.name}"
    words += "" if row.bound else _difference(row, dense)
    return words + (f", an exchange every {row.candidate.every} steps" if row.candidate.every > 1 else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _at_every_step(dense: Advice, rows: Sequence[Advice]) -> str:
    """An addition to the name of the best dense candidate where other dense ones exchange less often."""
    fewer = any(row.candidate.dense and row.candidate.every > dense.candidate.every for row in rows)
    return " with an exchange at every step" if fewer and dense.candidate.every == 1 else ""


def _fastest(rows: Sequence[Advice]) -> Advice | None:
    """The row with the least predicted time of those whose work was measured."""
    known = [each for each in rows if each.refused is None and not each.bound]
    return min(known, key=lambda each: each.parts.total, default=None)


def _left_out(row: Advice, rows: Sequence[Advice]) -> bool:
    """Whether a candidate was not measured though it might be the fastest."""
    fastest = _fastest(rows)
    return not row.known and (fastest is None or row.parts.total < fastest.parts.total)


def _unmeasured(row: Advice, rows: Sequence[Advice]) -> str:
    """Why the work of a candidate was not measured. Its links alone decide, or there was no time for it."""
    fastest = _fastest(rows)
    if fastest is None or _left_out(row, rows):
        return "not measured: the budget was spent"
    more = _ms(row.parts.total - fastest.parts.total)
    return f"not measured: without encoding and decoding it is {more} slower than {fastest.candidate.name}"


def _difference(row: Advice, dense: Advice) -> str:
    """The end of a sentence: predicted seconds per step, on the links and at work, against those of a dense one.

    Where both were run it says that this is from the parts, since what was measured may differ.
    """
    own, other = row.per_step, dense.per_step
    saved = {
        "on the links": other.network - own.network,
        "of work": other.encode + other.decode - own.encode - own.decode,
    }
    sides = [f"{'saves' if x > 0 else 'costs'} {_ms(abs(x))} {where}" for where, x in saved.items() if abs(x) > LEAST]
    begin = ": it " if row.measured is None or dense.measured is None else "; by the parts it "
    return begin + (" and ".join(sides) or "takes as long on the links and to encode and decode")


# ------------------------------------------------------------------------------------------------
# Tables


def table(rows: Sequence[Advice], chosen: Advice) -> str:
    """The rows as text, the best first; what was not measured comes later. All columns are per step."""
    dense = best_of(rows, dense=True)
    ms = lambda seconds: "-" if seconds is None else f"{1e3 * seconds:.4g}"
    columns: dict[str, Callable[[Advice], str]] = {
        "candidate": lambda row: row.candidate.name,
        "ms/step": lambda row: f"{'>' if row.bound else ''}{ms(row.parts.total)}",
        "+-": lambda row: ms(row.parts.deviation),
        "gradient": lambda row: ms(row.parts.gradient),
        "encode": lambda row: ms(row.per_step.encode),
        "links": lambda row: ms(row.per_step.network),
        "decode": lambda row: ms(row.per_step.decode),
        "hidden": lambda row: ms(abs(row.per_step.hidden)),
        "measured": lambda row: ms(row.measured),
        "expected": lambda row: ms(row.expected),
        "MB sent": lambda row: f"{row.sent_bytes / 1e6:.4g}",
        "lost": lambda row: "-" if row.error is None else f"{row.error:.3g}",
        "bound": lambda row: "-" if row.loss.bound is None else f"{row.loss.bound:.4g}",
        "why": lambda row: reason(row, dense, rows),
    }
    return text_table(columns, rows, chosen, ("candidate", "why"))


def text_table(
    columns: Mapping[str, Callable[[Advice], str]], rows: Sequence[Advice], chosen: Advice, left: Sequence[str]
) -> str:
    """Columns of text, the fastest eligible candidate first; the one that is advised has an arrow.

    columns: head -> the text of a row; left: heads of the columns that are aligned to the left.
    """
    place = lambda row: (row.refused is not None, not row.known, math.isnan(row.seconds), row.seconds)
    ordered = sorted(rows, key=place)
    texts = [["  ", *("->" if row is chosen else "  " for row in ordered)]]
    for head, cell in columns.items():
        column = [head, *map(cell, ordered)]
        width = max(map(len, column))
        texts.append([text.ljust(width) if head in left else text.rjust(width) for text in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*texts, strict=True))
