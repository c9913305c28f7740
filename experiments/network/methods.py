"""What is exchanged, and how: an optax transformation by name.

psum-f32, psum-bf16    `lax.pmean` of the gradient, as it is or cast, without this library
lax-two-shot-bf16      `lax.all_to_all`, a sum in f32 and `lax.all_gather`, as one would write it by hand
METHOD                 of `experiments.lib.methods`, in `jc.compressed_mean`
METHOD:VIA             the same with via=VIA, as in dithering:two_shot

Only trained:

demo                   the optimizer DeMo, whose momentum is exchanged, in place of --optimizer
local-CODE@H           parameters of each worker's own, whose differences are exchanged every H steps; CODE of
                       `experiments.local.methods`
stream-CODE@H          the same in three fragments; H / 4 steps for each exchange, half of a worker's own point is kept
overlap-CODE@H         the same steps by `jc.local_process`, whose exchanges run beside them (`scoreboard` alone)
ddp-f32, ddp-bf16, ddp-powersgd    where PyTorch is installed, DistributedDataParallel over gloo: as it is, and with its
                       hooks
"""

import argparse
import functools
import importlib.util
from typing import Any

__all__ = [
    "AXIS",
    "DEFAULT",
    "PEERS",
    "known",
    "local_of",
    "method_name",
    "trained_by",
    "trained_name",
    "transformation",
]

AXIS = "data"
PLAIN = ("psum-f32", "psum-bf16", "lax-two-shot-bf16")
PEERS = ("ddp-f32", "ddp-bf16", "ddp-powersgd")
DEFAULT = [
    *PLAIN,
    "dense-bf16:two_shot",
    "fp8:two_shot",
    "natural:two_shot",
    "dithering",
    "dithering:two_shot",
    "top-k",
    "sidco",
    "sidco-narrow",
]


def known() -> str:
    from experiments.lib.methods import METHODS

    return f"{', '.join(PLAIN)} (without this library), or METHOD or METHOD:VIA with METHOD one of {', '.join(METHODS)}"


def method_name(text: str) -> str:
    """An option: the name of a method, checked."""
    from experiments.lib.methods import METHODS
    from jaxcomp.exchange.routes import VIAS

    name, colon, via = text.partition(":")
    if text not in PLAIN and name not in METHODS:
        raise argparse.ArgumentTypeError(f"unknown method {text!r}; choose from {known()}")
    if colon and via not in VIAS:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no via {via!r}; choose from {', '.join(VIAS)}")
    return text


def trained_name(text: str) -> str:
    """An option: of a method or a peer, checked."""
    if text.startswith("overlap-"):
        raise argparse.ArgumentTypeError(f"{text!r} does not stop at a loss; the scoreboard takes it")
    if text == "demo" or local_of(text) is not None:
        return text
    if text not in PEERS:
        return method_name(text)
    if importlib.util.find_spec("torch") is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs PyTorch: pip install 'jaxcomp[peers]'")
    return text


def local_of(text: str) -> Any:
    """The `experiments.local.methods.Setup` of local-CODE@H, stream- or overlap-CODE@H; None for any other name.

    >>> local_of("stream-int4@20").delay, local_of("local-int4@20").delay, local_of("sidco")
    (5, 0, None)
    """
    from experiments.local.methods import CODES, Setup

    name, _, steps = text.partition("@")
    kind, _, code = name.partition("-")
    if kind not in ("local", "stream", "overlap") or code not in CODES or not steps.isdecimal() or int(steps) < 1:
        return None
    every = int(steps)
    return Setup(text, code, every) if kind == "local" else Setup(text, code, every, min(3, every), every // 4, 0.5)


def transformation(text: str, ratio: float, levels: int, seed: int = 0) -> Any:
    """The optax transformation that makes the mean of the workers' gradients."""
    import jax
    import optax

    import jaxcomp as jc
    from experiments.lib.methods import METHODS

    if text in PLAIN:
        mean = two_shot_bf16 if text == "lax-two-shot-bf16" else functools.partial(psum, text.removeprefix("psum-"))

        def update(grads, state, params=None):
            return jax.tree.map(mean, grads), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
    name, _, via = text.partition(":")
    algorithm = METHODS[name].make(ratio, levels)
    return jc.compressed_mean(algorithm, AXIS, via=via or "auto", seed=seed)


def trained_by(
    text: str,
    ratio: float,
    levels: int,
    optimizer: str,
    rate: float,
    outer: tuple[float | None, float | None] = (None, None),
) -> Any:
    """The optax transformation that makes updates of the workers' gradients.

    outer: learning rate and momentum of the outer optimizer of local updates, as for `Setup.outer`.
    """
    import optax

    import jaxcomp as jc
    from experiments.lib.training import OPTIMIZERS

    if text == "demo":
        return jc.demo(rate, AXIS)
    local = local_of(text)
    if local is not None:
        return local.transform(OPTIMIZERS[optimizer](rate), local.outer(*outer), ratio, levels, 0)
    return optax.chain(transformation(text, ratio, levels), OPTIMIZERS[optimizer](rate))


def psum(kind: str, x: Any) -> Any:
    from jax import lax

    return lax.pmean(x.astype({"f32": "float32", "bf16": "bfloat16"}[kind]), AXIS).astype(x.dtype)


def two_shot_bf16(x: Any) -> Any:
    """The mean of one array; on the wire as words, since backends widen bfloat16."""
    import jax.numpy as jnp
    from jax import lax

    from jaxcomp.exchange.varying import proven_equal

    bits = lambda values: lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    values = lambda words: lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)
    workers = lax.axis_size(AXIS)
    rows = jnp.pad(x.reshape(-1), (0, -x.size % workers)).reshape(workers, -1)
    mean = values(lax.all_to_all(bits(rows), AXIS, 0, 0, tiled=True)).mean(0)
    whole = values(proven_equal(lax.all_gather(bits(mean), AXIS), AXIS))
    return whole.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)
