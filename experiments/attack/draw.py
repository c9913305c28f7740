"""Random compressors and awkward vectors, as text and as values, so that a case can be named and made again."""

from typing import Any

import jax
import numpy as np

import jaxcomp as jc

__all__ = ["bits_of", "compressor_text", "made", "vector"]


def compressor_text(rng: np.random.Generator, depth: int = 0) -> str:
    """An expression for a compressor of one array; not all of them can be built."""
    ratio = f"{10 ** rng.uniform(-2.5, 0):.3g}"
    some = lambda *choices: str(rng.choice(choices))
    known = [
        *("jc.identity()", "jc.natural()", f"jc.top_k(k={rng.integers(1, 40)})"),
        *(
            f"jc.{name}({ratio})"
            for name in ("top_k", "rand_k", "bernoulli", "contrib.dgc", "contrib.redsync", "contrib.gaussian_k")
        ),
        f"jc.cast({some('float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2')!r})",
        f"jc.cast('float8_e4m3fn', block_size={some('1', '7', '64', 'None')})",
        f"jc.sidco({ratio}, law={some('exponential', 'gamma', 'pareto')!r})",
        f"jc.contrib.hard_threshold({10 ** rng.uniform(-2, 1):.3g}, room={ratio})",
        f"jc.dithering({some('1', '3', '7', '127', '32768')}, block_size={some('1', '5', '64', '512')})",
        f"jc.dithering({some('1', '7')}, blocks={some('1', '3')}, norm={some('2', 'inf')!r})".replace("'2'", "2"),
        f"jc.dithering(steps={10 ** rng.uniform(-3, 0):.3g}, norm_dtype='bfloat16')",
        f"jc.skcompress(jc.top_k({ratio}), buckets={some('2', '8', '16')})",
        f"jc.skcompress(jc.top_k({ratio}), mode={some('recentred', 'paper')!r})",
    ]
    if depth < 2:
        inner = lambda: compressor_text(rng, depth + 1)
        known += [
            f"jc.contract({inner()})",
            f"jc.compose({inner()}, {inner()})",
            f"jc.compose(jc.top_k({ratio}), {inner()})",
            f"jc.narrow({inner()}, values={some('bfloat16', 'float16')!r})",
            f"jc.block_scaled({some('mxfp8', 'mxfp4', 'nvfp4', 'int8', 'int4')!r})",
            *("jc.sign()", "jc.terngrad()", "jc.drive()", f"jc.eden({some('1', '2', '4')})"),
            f"jc.rotate({inner()})",
            f"jc.dct({inner()}, chunk={some('8', '64')})",
            f"jc.chunked({inner()}, {some('16', '64')})",
        ]
    return str(rng.choice(known))


def made(text: str) -> Any:
    """What an expression says. Raises what building it raises."""
    return eval(text, {"jc": jc})


def bits_of(tree: Any) -> tuple[Any, list[Any]]:
    """Of trees that are equal bit for bit, the same."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), [(x.dtype, x.shape, x.tobytes()) for x in leaves]


def vector(rng: np.random.Generator, size: int, spoiled: bool = False) -> tuple[str, np.ndarray]:
    """A kind of vector, f32, perhaps with entries that are not finite."""
    base = rng.standard_normal(size)
    kinds = {
        "normal": lambda: base,
        "heavy": lambda: base / np.maximum(np.abs(rng.standard_normal(size)), 1e-3) ** 2,
        "one entry": lambda: np.where(np.arange(size) == rng.integers(max(size, 1)), 3.0, 0.0),
        "constant": lambda: np.full(size, base[0] if size else 0.0),
        "falling": lambda: np.sign(base) * np.geomspace(1e6, 1e-6, size) if size else base,
        "zero": lambda: np.zeros(size),
        "sparse": lambda: np.where(rng.random(size) < 0.02, base, 0.0),
        "ties": lambda: np.round(base),
        "large": lambda: 1e30 * base,
        "small": lambda: 1e-30 * base,
    }
    name = str(rng.choice(list(kinds)))
    x = np.asarray(kinds[name](), np.float32)
    if spoiled and size and rng.random() < 0.2:
        places = rng.integers(0, size, 1 + size // 50)
        x[places] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, -1e-45], np.float32), places.size)
        name += ", spoiled"
    return name, x
