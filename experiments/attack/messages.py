"""Messages that are changed at random under correct checksums, over all payloads, records and codes."""

from typing import Any

import jax
import numpy as np

import jaxcomp as jc
from experiments.attack import HELD, REFUSED, Attack
from experiments.bench.wire import Case, Judged, cases_of, mutated, shares_of
from experiments.bench.wire import judge as judged
from jaxcomp.payloads import registry

__all__ = ["cases", "judge", "missing_kinds", "ready"]

SIZES = (3, 40, 900, 20_000)
MEASURED = 8  # one message in so many has its memory measured, and what it decodes to encoded again


def cases(rng: np.random.Generator) -> list[Case]:
    """Valid messages, each distinct one once."""
    found: dict[bytes, Case] = {}
    for size, name, code, body in cases_of(rng, SIZES, registry.CODES):
        found.setdefault(body, Case(f"{name} of {size} as {code}", body))
    return list(found.values())


def missing_kinds(tried: list[Case]) -> set[int]:
    """Kinds of records that no message begins with; parts of other payloads aside."""
    return set(registry._readers) - {case.body[0] for case in tried}


def ready(seed: int) -> Attack:
    known = cases(np.random.default_rng([seed, 1]))
    for case in known:
        judge(case.body, measure=False)  # tables are made once
    shares = shares_of(known)
    worst = {"time": (0.0, 0.0, ""), "memory": (0.0, 0.0, "")}

    def attempt(number: int) -> str:
        rng = np.random.default_rng([seed, 2, number])
        name, body = changed(rng, known, shares)
        tried = judge(body, measure=number % MEASURED == 0)
        worst["time"] = max(worst["time"], (tried.time, tried.seconds, name))
        worst["memory"] = max(worst["memory"], (tried.memory, float(tried.peak), name))
        if tried.fell:
            return f"({name}, {len(body)} bytes): {tried.fell}"
        return REFUSED if tried.payload is None else HELD

    def in_words() -> str:
        (slow, seconds, slowest), (large, peak, largest) = worst.values()
        said = f"{1e3 * seconds:.1f} ms, {100 * slow:.0f} % of the bound ({slowest}); "
        said += f"{peak / 1e6:.2f} MB, {100 * large:.0f} % ({largest})"
        untried = missing_kinds(known)
        return said + (f"; no message of kinds {sorted(untried)}" if untried else "")

    return Attack(attempt, in_words)


def changed(rng: np.random.Generator, known: list[Case], shares: np.ndarray) -> tuple[str, bytes]:
    """A case with one to three changes, or the front of one and the end of another."""
    case = known[rng.choice(len(known), p=shares)]
    if rng.random() < 0.1:
        other = known[rng.choice(len(known), p=shares)]
        front, back = int(rng.integers(len(case.body) + 1)), int(rng.integers(len(other.body) + 1))
        return f"{case.name} + {other.name}", case.body[:front] + other.body[back:]
    return case.name, mutated(rng, case.body)


def judge(body: bytes, measure: bool) -> Judged:
    """Decodes a body against the clock; and, if asked to, with its memory measured and what comes out encoded again."""
    found = judged(body, measure=measure)
    if measure and found.fell is None and found.payload is not None:
        found = found._replace(fell=again(found.payload))
    return found


def again(payload: Any) -> str | None:
    """What is wrong with a payload that was decoded: it must encode, and come back as it is."""
    try:
        for code in ("fixed", "best"):
            back = jc.wire.decode(jc.wire.encode(payload, code=code))
            same = jax.tree.structure(back) == jax.tree.structure(payload) and all(
                a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
                for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(payload), strict=True)
            )
            if not same:
                return f"encoded as {code} it comes back as something else"
    except Exception as error:
        return f"what was decoded does not encode: {type(error).__name__}: {error}"
    return None
