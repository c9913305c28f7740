"""Decoding of bytes that lie: the worst time and memory of mutated messages with correct checksums."""

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.bench.timing import bench_parser, report
from experiments.lib.cli import at_least
from experiments.lib.report import new_console
from jaxcomp.payloads import Chunks, Dense, Leaves, LocalIndices, Quantized, Scaled, Several, Sketch, Sparse
from jaxcomp.wire.bitstream import pack_words
from jaxcomp.wire.frame import FRAME_BYTES, seal, unseal, varint
from jaxcomp.wire.limits import PAD_BYTES, WORKSPACE

__all__ = ["Case", "Judged", "cases_of", "decoded", "judge", "main", "mutated", "shares_of"]

SECONDS = 0.05, 1e-6  # allowed for any message; for each of its bytes


class Case(NamedTuple):
    """name: of the payload.  body: of a valid message."""

    name: str
    body: bytes


class Judged(NamedTuple):
    """What became of a message.

    payload: None if it was refused. seconds of one core, peak bytes: each with its share of what is allowed.
    """

    payload: Any
    seconds: float
    time: float
    peak: int
    memory: float
    fell: str | None


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench wire", __doc__)
    p.add_argument("--messages", type=at_least(1), default=100_000, help="mutated messages")
    p.add_argument("--scale", type=at_least(1), default=1000, help="entries of the largest payloads, in thousands")
    p.add_argument("--seed", type=at_least(0), default=0, help="of payloads and mutations")
    o = p.parse_args(arguments)

    rng = np.random.default_rng(o.seed)
    sizes = (40, 1000 * o.scale // 50, 1000 * o.scale)
    cases = [Case(name, body) for _, name, _, body in cases_of(rng, sizes, ("fixed", "elias", "best"))]
    found: dict[str, list[tuple[float, ...]]] = {case.name: [] for case in cases}

    def attempt(name: str, body: bytes) -> None:
        tried = judge(body)
        if tried.fell and max(tried.time, tried.memory) <= 1:
            raise RuntimeError(f"{name}: {tried.fell}")
        found[name].append((len(body) + FRAME_BYTES, tried.payload is not None, *tried[1:5]))

    judge(cases[0].body)  # tables are made once
    for case in cases:
        attempt(*case)
    with new_console().status("decoding") as status:
        for i, number in enumerate(rng.choice(len(cases), o.messages, p=shares_of(cases))):
            attempt(cases[number].name, mutated(rng, cases[number].body))
            if i % 1000 == 0:
                status.update(f"{i:,} of {o.messages:,} messages")
    worst = {name: np.max(each, 0) for name, each in found.items()}  # size, decoded, seconds, time, peak, memory
    columns = {
        "message": str,
        "kB": lambda name: f"{worst[name][0] / 1e3:.1f}",
        "tried": lambda name: f"{len(found[name]):,}",
        "decoded": lambda name: f"{sum(each[1] for each in found[name]):,}",
        "worst ms": lambda name: f"{1e3 * worst[name][2]:.1f}",
        "of the time allowed": lambda name: f"{worst[name][3]:.2f}",
        "worst MB": lambda name: f"{worst[name][4] / 1e6:.2f}",
        "of the memory allowed": lambda name: f"{worst[name][5]:.2f}",
    }
    _, _, _, time_share, _, memory_share = np.max(list(worst.values()), 0)
    notes = (
        f"Worst of {o.messages:,} messages: {100 * time_share:.0f} % of the time allowed, 50 ms and 1 ms a kB on one "
        f"core; {100 * memory_share:.0f} % of the memory allowed, 64 bytes a byte and a fixed workspace.\n"
        "Bits, bytes and lengths of valid messages are changed, parts repeated or cut; checksums are made anew."
    )
    report(o, "decode", columns, found, notes)
    return int(max(time_share, memory_share) > 1)


# ------------------------------------------------------------------------------------------------
# Messages


def payloads_of_size(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Payloads of every family, of about n entries."""

    def levels(n, width, density):
        where = np.flatnonzero(rng.random(n) < density)
        codes = np.minimum(rng.geometric(0.5, where.size), (1 << width) - 1)
        return Quantized(np.ones(1, np.float32), pack_words(where, codes, width, -(-n // 32)))

    def sparse(n, gap):
        keys = np.cumsum(rng.geometric(1 / gap, n)) - 1
        return Sparse(rng.standard_normal(n).astype(np.float32), keys.astype(np.int32))

    def local(n):
        keys = np.cumsum(rng.geometric(0.1, n)) - 1
        counts = np.bincount(keys >> 16).astype(np.int32)
        return Sparse(np.ones(n, np.float32), LocalIndices((keys & 0xFFFF).astype(np.uint16), counts))

    def sketch(n):
        keys = np.concatenate([np.cumsum(rng.geometric(0.05, n)) for _ in range(3)]).astype(np.int32)
        cells = levels(2 * n + 32, 5, 0.8).words
        none = np.zeros(0, np.int32)
        return Sketch(np.linspace(-1, 1, 30, dtype=np.float32), np.full(3, n, np.int32), keys, cells, none)

    def chunks(rows):
        gaps = rng.integers(0, 64, 64 * rows)
        places = np.flatnonzero(gaps)
        words = pack_words(places, gaps[places].astype(np.uint32), 12, -(-gaps.size // 32))
        return Chunks(rng.standard_normal(gaps.size).astype(np.float32), words)

    nothing = Dense(np.zeros(0, np.float32))
    return {
        "Dense": Dense(np.ones(n // 4, np.float32)),
        "Scaled": Scaled(np.ones(n, np.float16), np.ones(-(-n // 32), np.float32)),
        "Sparse": sparse(n // 4, 100),
        "Sparse of nothing, dense": Sparse(nothing, np.arange(n, dtype=np.int32)),
        "Sparse of levels": Sparse(levels(n, 3, 0.9), sparse(n, 2).indices),
        "LocalIndices": local(n // 4),
        "Quantized": levels(n, 3, 0.5),
        "Quantized, all": levels(n, 5, 1.0),
        "Quantized, few": levels(n, 3, 0.01),
        "Quantized, 1 bit": levels(n, 1, 0.97),
        "Quantized, zero": levels(n, 8, 0),
        "Sketch": sketch(n // 4),
        "Chunks": chunks(n // 64 + 1),
        "Several": Several((Dense(np.ones(n // 8, np.float32)), levels(n, 3, 0.5))),
        "Leaves": Leaves(nothing, (sparse(30, 4), levels(64, 3, 0.5)) * min(n // 300 + 1, 1000)),
    }


def cases_of(
    rng: np.random.Generator, sizes: Sequence[int], codes: Sequence[str]
) -> Iterator[tuple[int, str, str, bytes]]:
    """Valid messages of every payload in these sizes and codes: size, name, code, body."""
    for size in sizes:
        for name, payload in payloads_of_size(rng, size).items():
            for code in codes:
                yield size, name, code, bytes(unseal(jc.wire.encode(payload, code=code)))


def shares_of(cases: Sequence[Case]) -> np.ndarray:
    """Chances by which short messages have as many bytes as long ones."""
    shares = 1 / np.array([2000 + len(case.body) for case in cases])
    return shares / shares.sum()


def mutated(rng: np.random.Generator, body: bytes) -> bytes:
    """A body with one to three changes, most of them at its front, where lengths stand."""
    changed = bytearray(body)
    for _ in range(rng.integers(1, 4)):
        size = len(changed)
        place = int(rng.integers(min(size, 60) if rng.random() < 0.7 else size)) if size else 0
        kind = rng.integers(6)
        if kind == 0 and size:
            changed[place] ^= 1 << int(rng.integers(8))
        elif kind == 1 and size:
            changed[place] = int(rng.integers(256))
        elif kind == 2:
            changed[place : place + 1] = varint(int(2 ** rng.uniform(0, 40)))
        elif kind == 3:
            del changed[place : place + int(rng.integers(1, 9))]
        elif kind == 4 and size < 200_000:
            start, length = int(rng.integers(size + 1)), int(rng.integers(1, 200))
            changed[place:place] = changed[start : start + length] * int(rng.integers(1, 50))
        elif kind == 5:
            changed[place : place + 200] = bytes([int(rng.choice([0, 255, 85]))]) * 200
    return bytes(changed)


# ------------------------------------------------------------------------------------------------
# What becomes of them


def decoded(message: bytes) -> tuple[Any, str | None]:
    """The payload, or None where it is refused; and what fell."""
    try:
        return jc.wire.decode(message), None
    except jc.WireError:
        return None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def judge(body: bytes, measure: bool = True) -> Judged:
    """Decodes a body against the clock, and with its memory counted if it is to be measured."""
    message = seal(body)

    def timed() -> tuple[Any, str | None, float]:
        start = time.process_time()
        payload, fell = decoded(message)
        return payload, fell, time.process_time() - start

    payload, fell, seconds = timed()
    allowed, room = SECONDS[0] + SECONDS[1] * len(message), PAD_BYTES * len(message) + WORKSPACE
    if seconds / allowed > 0.1:  # again, since the machine does other things, too
        seconds = min(seconds, timed()[2], timed()[2])
    if fell is None and seconds > allowed:
        fell = f"{1e3 * seconds:.0f} ms of {1e3 * allowed:.0f}"
    peak = 0
    if measure:
        tracemalloc.start()
        decoded(message)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if fell is None and peak > room:
            fell = f"{peak / 1e6:.1f} MB of {room / 1e6:.1f}"
    return Judged(payload, seconds, seconds / allowed, peak, peak / room, fell)
