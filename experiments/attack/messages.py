"""Valid messages of all payloads in all codes, changed at random, under correct checksums.

`jc.wire.decode` refuses them with `WireError`, or returns a valid payload: encoded again, as fixed and as best, it
comes back as it is. Decoding takes no more than 50 ms and 1 ms a kB, and the memory that `jaxcomp.wire.limits` allows.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxcomp as jc
from experiments.attack.draw import bits_of
from experiments.bench.wire import Case, cases_of, judge, mutated, shares_of
from jaxcomp.payloads import registry

__all__ = ["check_valid", "drawn", "worst"]

SIZES = 3, 40, 900, 20_000
MEASURED = 1 / 8  # share of messages whose memory is counted: that takes long
WORST: dict[str, tuple[float, str]] = {}  # share of what is allowed, in words


def drawn(rng: np.random.Generator) -> tuple[str, Callable[[], str | None]]:
    cases, shares = known()
    one, other = (cases[rng.choice(len(cases), p=shares)] for _ in range(2))
    name, body = one.name, mutated(rng, one.body)
    if rng.random() < 0.1:  # the front of one and the end of another
        front, back = int(rng.integers(len(one.body) + 1)), int(rng.integers(len(other.body) + 1))
        name, body = f"{one.name} + {other.name}", one.body[:front] + other.body[back:]
    measure = bool(rng.random() < MEASURED)

    def attempt() -> str | None:
        tried = judge(body, measure)
        note("time", tried.time, f"{1e3 * tried.seconds:.1f} ms", name)
        note("memory", tried.memory, f"{tried.peak / 1e6:.2f} MB", name)
        assert tried.fell is None, tried.fell
        if tried.payload is None:
            return "refused"
        check_valid(tried.payload)
        return None

    return f"{name}, {len(body)} bytes", attempt


@functools.cache
def known() -> tuple[list[Case], np.ndarray]:
    """Valid messages, and how often each is taken."""
    cases = [
        Case(f"{name}, {code}", body)
        for _, name, code, body in cases_of(np.random.default_rng(0), SIZES, registry.CODES)
    ]
    for case in cases:
        judge(case.body, measure=False)  # tables are made once
    return cases, shares_of(cases)


def check_valid(payload: Any) -> None:
    """It encodes, and comes back with the same bits."""
    for code in ("fixed", "best"):
        try:
            back = jc.wire.decode(jc.wire.encode(payload, code=code))
        except Exception as error:  # of the library, too: what it has decoded it must encode
            raise AssertionError(f"encoded as {code}: {type(error).__name__}: {error}") from error
        assert bits_of(back) == bits_of(payload), f"encoded as {code} it comes back as something else"


def note(what: str, share: float, measured: str, name: str) -> None:
    WORST[what] = max(WORST.get(what, (0.0, "")), (share, f"{measured}, {100 * share:.0f} % of the bound ({name})"))


def worst() -> str:
    """What came nearest to the bounds."""
    return "Worst message: " + "; ".join(words for _, words in WORST.values()) + "."
