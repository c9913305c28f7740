"""Decoding of bytes that lie: the worst time and memory of mutated messages with correct checksums."""

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.timing import machine
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["SECONDS", "main", "mutated", "payloads_of_size"]

HEAD = ["message", "kB", "tried", "decoded", "worst ms", "of the bound", "worst MB", "of the bound"]
SECONDS = 0.05, 1e-6  # allowed for any message; for each of its bytes


class Case(NamedTuple):
    """name: of the payload.  body: of a valid message."""

    name: str
    body: bytes


class Worst(NamedTuple):
    """Of all messages of a case: seconds and bytes of memory, each with its share of what is allowed."""

    size: int = 0
    tried: int = 0
    decoded: int = 0
    seconds: float = 0.0
    time: float = 0.0
    peak: int = 0
    memory: float = 0.0


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench wire", description=__doc__)
    p.add_argument("--messages", type=at_least(1), default=100_000, help="mutated messages")
    p.add_argument("--scale", type=at_least(1), default=1000, help="entries of the largest payloads, in thousands")
    p.add_argument("--seed", type=at_least(0), default=0)
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    o = p.parse_args(arguments)

    rng = np.random.default_rng(o.seed)
    cases = list(_cases(rng, o.scale))
    worst = dict.fromkeys((case.name for case in cases), Worst())
    _try(cases[0].body, Worst())  # tables are made once
    for case in cases:
        worst[case.name] = _try(case.body, worst[case.name])
    # As many bytes of short messages as of long ones.
    shares = 1 / np.array([2000 + len(case.body) for case in cases])
    console = new_console()
    with console.status("decoding") as status:
        for i, number in enumerate(rng.choice(len(cases), o.messages, p=shares / shares.sum())):
            case = cases[number]
            worst[case.name] = _try(mutated(rng, case.body), worst[case.name])
            if i % 1000 == 0:
                status.update(f"{i:,} of {o.messages:,} messages")
    rows = [
        [
            name,
            f"{w.size / 1e3:.1f}",
            f"{w.tried:,}",
            f"{w.decoded:,}",
            f"{1e3 * w.seconds:.1f}",
            f"{w.time:.2f}",
            f"{w.peak / 1e6:.2f}",
            f"{w.memory:.2f}",
        ]
        for name, w in worst.items()
    ]
    time_share, memory_share = max(w.time for w in worst.values()), max(w.memory for w in worst.values())
    notes = (
        f"Worst of {o.messages:,} messages: {100 * time_share:.0f} % of the time allowed, 50 ms and 1 ms a kB on one "
        f"core; {100 * memory_share:.0f} % of the memory allowed, 64 bytes a byte and a fixed workspace.\n"
        "Bits, bytes and lengths of valid messages are changed, parts repeated or cut; checksums are made anew."
    )
    show(console, f"decode; {machine()}", HEAD, rows, notes, o.markdown)
    return int(time_share > 1 or memory_share > 1)


def payloads_of_size(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Payloads of every family, of about n entries."""
    from jaxcomp.payloads import Chunks, Dense, Leaves, LocalIndices, Quantized, Scaled, Several, Sketch, Sparse
    from jaxcomp.wire.bitstream import pack_words

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


def _cases(rng: np.random.Generator, scale: int):
    """Valid messages of every payload in three sizes and every code."""
    import jaxcomp as jc
    from jaxcomp.wire.frame import unseal

    for n in (40, 1000 * scale // 50, 1000 * scale):
        for name, payload in payloads_of_size(rng, n).items():
            for code in ("fixed", "elias", "best"):
                yield Case(name, bytes(unseal(jc.wire.encode(payload, code=code))))


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
            changed[place : place + 1] = _varint(int(2 ** rng.uniform(0, 40)))
        elif kind == 3:
            del changed[place : place + int(rng.integers(1, 9))]
        elif kind == 4 and size < 200_000:
            start, length = int(rng.integers(size + 1)), int(rng.integers(1, 200))
            changed[place:place] = changed[start : start + length] * int(rng.integers(1, 50))
        elif kind == 5:
            changed[place : place + 200] = bytes([int(rng.choice([0, 255, 85]))]) * 200
    return bytes(changed)


def _varint(value: int) -> bytes:
    from jaxcomp.wire.frame import varint

    return varint(value)


def _try(body: bytes, worst: Worst) -> Worst:
    """Decodes a body twice: once against the clock, and again if that was the slowest; once with memory counted."""
    import jaxcomp as jc
    from jaxcomp.wire.frame import seal
    from jaxcomp.wire.limits import PAD_BYTES, WORKSPACE

    message = seal(body)
    decoded = True

    def run():
        nonlocal decoded
        try:
            jc.wire.decode(message)
        except jc.WireError:
            decoded = False

    def clock():
        start = time.process_time()
        run()
        return time.process_time() - start

    seconds, allowed = clock(), SECONDS[0] + SECONDS[1] * len(message)
    if seconds / allowed > max(worst.time, 0.1):
        seconds = min(seconds, clock(), clock())  # what else the machine does is not what is measured
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    room = PAD_BYTES * len(message) + WORKSPACE
    return Worst(
        max(worst.size, len(message)),
        worst.tried + 1,
        worst.decoded + decoded,
        max(worst.seconds, seconds),
        max(worst.time, seconds / allowed),
        max(worst.peak, peak),
        max(worst.memory, peak / room),
    )
