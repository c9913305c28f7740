"""Times of codecs on long vectors, as multiples of a copy of the vector on the same device."""

from typing import Any

import jax

from experiments.bench.timing import codec_calls, time_all
from experiments.lib.codecs import Codec

__all__ = ["COLUMNS", "default_log2", "memory_of", "times_of"]

LONGEST, SHORTEST, ON_CPU = 27, 16, 18  # log2 of entries: at most and at least on an accelerator, on a CPU
VECTORS = 16  # so many of them fit besides one another: input, message, output, and what sorting rows needs

COLUMNS = {
    "codec": "{name}",
    "compress, copies": "{compress:.2f}",
    "decompress, copies": "{decompress:.2f}",
    "compress ms": "{compress_ms:.3f}",
    "decompress ms": "{decompress_ms:.3f}",
    "copy ms": "{copy_ms:.3f}",
    "copy GB/s": "{copy_gbs:,.0f}",
}


def memory_of(device: Any) -> int | None:
    """Bytes that arrays may take on a device, where its backend says so."""
    return (device.memory_stats() or {}).get("bytes_limit")


def default_log2(device: Any) -> int:
    """log2 of the entries of a vector of which VECTORS fit in the device's memory."""
    if device.platform == "cpu":
        return ON_CPU
    limit = memory_of(device)
    fits = [k for k in range(SHORTEST, LONGEST + 1) if limit is None or 4 * VECTORS * 2**k <= limit]
    return max(fits, default=SHORTEST)


def times_of(codec: Codec, log2_size: int, ratio: float, repeats: int) -> dict[str, Any]:
    """Medians of compress and decompress and of a copy, all three in turn."""
    d = 2**log2_size
    x = jax.random.laplace(jax.random.key(0), (d,))
    copy, compressor = jax.jit(lambda x: 2 * x), codec.make(d, ratio)
    calls, _, _ = codec_calls("it", compressor, x, jax.random.key(1))
    seconds = time_all({"copy": lambda: copy(x), **calls}, repeats, quiet=True)
    parts = {part: seconds[f"{part} it"] for part in ("compress", "decompress")}
    return {
        "name": compressor.spec.name,
        **{part: value / seconds["copy"] for part, value in parts.items()},
        **{f"{part}_ms": 1e3 * value for part, value in parts.items()},
        "copy_ms": 1e3 * seconds["copy"],
        "copy_gbs": 1e-9 * 8 * d / seconds["copy"],
    }
