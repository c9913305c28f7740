"""Messages that are changed at random under correct checksums, over all payloads, records and codes."""

import time
import tracemalloc
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.attack import Clock, Outcome
from experiments.bench.wire import SECONDS, mutated, payloads_of_size
from jaxcomp.payloads import registry
from jaxcomp.wire.frame import seal, unseal
from jaxcomp.wire.limits import PAD_BYTES, WORKSPACE

__all__ = ["attack", "cases"]

SIZES = (3, 40, 900, 20_000)
MEASURED = 8  # one message in so many has its memory measured, and what it decodes to encoded again


class Case(NamedTuple):
    """name: payload, size and code.  body: of a valid message."""

    name: str
    body: bytes


class Tried(NamedTuple):
    """What became of a message: seconds of one core and bytes, each with its share of what is allowed."""

    decoded: bool
    seconds: float
    time: float
    peak: int
    memory: float
    fell: str | None


def cases(rng: np.random.Generator) -> list[Case]:
    """Valid messages, each distinct one once."""
    found: dict[bytes, Case] = {}
    for size in SIZES:
        for name, payload in payloads_of_size(rng, size).items():
            for code in registry.CODES:
                body = bytes(unseal(jc.wire.encode(payload, code=code)))
                found.setdefault(body, Case(f"{name} of {size} as {code}", body))
    return list(found.values())


def missing_kinds(tried: list[Case]) -> set[int]:
    """Kinds of records that no message begins with; parts of other payloads aside."""
    return set(registry._readers) - {case.body[0] for case in tried}


def attack(seed: int, first: int, clock: Clock) -> Outcome:
    """Tries one message after another as long as there is time."""
    known = cases(np.random.default_rng([seed, 1]))
    _ = [judge(case.body, False) for case in known]  # tables are made once
    shares = 1 / np.array([2000 + len(case.body) for case in known])
    shares /= shares.sum()
    held = refused = 0
    worst_time = worst_memory = (0.0, 0.0, "")
    fell: list[str] = []
    number = first
    while clock.goes_on(f"{held + refused:,} messages, {len(fell)} fell"):
        rng = np.random.default_rng([seed, 2, number])
        name, body = changed(rng, known, shares)
        tried = judge(body, number % MEASURED == 0)
        if tried.fell:
            fell.append(f"case {number} ({name}, {len(body)} bytes): {tried.fell}")
        else:
            held, refused = held + tried.decoded, refused + (not tried.decoded)
        worst_time = max(worst_time, (tried.time, tried.seconds, name))
        worst_memory = max(worst_memory, (tried.memory, float(tried.peak), name))
        number += 1
    untried = missing_kinds(known)
    worst = (
        f"{1e3 * worst_time[1]:.1f} ms, {100 * worst_time[0]:.0f} % of the bound ({worst_time[2]}); "
        f"{worst_memory[1] / 1e6:.2f} MB, {100 * worst_memory[0]:.0f} % ({worst_memory[2]})"
        + (f"; no message of kinds {sorted(untried)}" if untried else "")
    )
    return Outcome(held, refused, tuple(fell), worst)


def changed(rng: np.random.Generator, known: list[Case], shares: np.ndarray) -> tuple[str, bytes]:
    """A case with one to three changes, or the front of one and the end of another."""
    case = known[rng.choice(len(known), p=shares)]
    if rng.random() < 0.1:
        other = known[rng.choice(len(known), p=shares)]
        front, back = int(rng.integers(len(case.body) + 1)), int(rng.integers(len(other.body) + 1))
        return f"{case.name} + {other.name}", case.body[:front] + other.body[back:]
    return case.name, mutated(rng, case.body)


def judge(body: bytes, measure: bool) -> Tried:
    """Decodes a body against the clock; and, if asked to, with its memory measured and what comes out encoded again."""
    message = seal(body)
    payload, fell, seconds = timed(message)
    allowed = SECONDS[0] + SECONDS[1] * len(message)
    if seconds / allowed > 0.5:  # what else the machine does is not what is measured
        seconds = min(seconds, timed(message)[2], timed(message)[2])
    if fell is None and seconds > allowed:
        fell = f"{1e3 * seconds:.0f} ms of {1e3 * allowed:.0f}"
    peak, share = 0, 0.0
    if measure and fell is None:
        tracemalloc.start()
        decoded(message)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        room = PAD_BYTES * len(message) + WORKSPACE
        share = peak / room
        if peak > room:
            fell = f"{peak / 1e6:.1f} MB of {room / 1e6:.1f}"
        elif payload is not None:
            fell = again(payload)
    return Tried(payload is not None, seconds, seconds / allowed, peak, share, fell)


def timed(message: bytes) -> tuple[Any, str | None, float]:
    """What `decoded` says, and the seconds of one core that it took."""
    start = time.process_time()
    payload, fell = decoded(message)
    return payload, fell, time.process_time() - start


def decoded(message: bytes) -> tuple[Any, str | None]:
    """The payload, or None where it is refused; and what fell."""
    try:
        return jc.wire.decode(message), None
    except jc.WireError:
        return None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def again(payload: Any) -> str | None:
    """What is wrong with a payload that was decoded: it must encode, and come back as it is."""
    import jax

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
