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

import importlib.util
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxcomp as jc
from experiments.lib.methods import METHODS
from experiments.lib.training import OPTIMIZERS
from experiments.local.methods import CODES, Setup
from jaxcomp.exchange.axes import proven_equal
from jaxcomp.exchange.routes import VIAS

__all__ = ["AXIS", "DEFAULT", "DENSE", "KNOWN", "KNOWN_TRAINED", "PEERS"]
__all__ += ["local_of", "method_name", "trained_by", "trained_name", "transformation"]

AXIS = "data"


def two_shot_bf16(x: jax.Array) -> jax.Array:
    """The mean of one array; on the wire as words, since backends widen bfloat16."""
    bits = lambda values: lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    values = lambda words: lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)
    workers = lax.axis_size(AXIS)
    rows = jnp.pad(x.reshape(-1), (0, -x.size % workers)).reshape(workers, -1)
    mean = values(lax.all_to_all(bits(rows), AXIS, 0, 0, tiled=True)).mean(0)
    whole = values(proven_equal(lax.all_gather(bits(mean), AXIS), AXIS))
    return whole.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)


# Means of one array without this library.
PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum-f32": lambda x: lax.pmean(x, AXIS),
    "psum-bf16": lambda x: lax.pmean(x.astype(jnp.bfloat16), AXIS).astype(x.dtype),
    "lax-two-shot-bf16": two_shot_bf16,
}
PEERS = ("ddp-f32", "ddp-bf16", "ddp-powersgd")
DENSE = ("psum-f32", "psum-bf16", "dense-bf16:two_shot")  # that others are held against, where they were measured
DEFAULT = [*PLAIN, "dense-bf16:two_shot", "fp8:two_shot", "natural:two_shot", "dithering", "dithering:two_shot"]
DEFAULT += ["top-k", "sidco", "sidco-narrow"]
KNOWN = f"{', '.join(PLAIN)} (without this library), or METHOD or METHOD:VIA with METHOD one of {', '.join(METHODS)}"
KNOWN_TRAINED = "demo (the optimizer), local-CODE@H and stream-CODE@H (local updates, CODE one of "
KNOWN_TRAINED += f"{', '.join(CODES)}), or, where PyTorch is installed, {', '.join(PEERS)}"


def method_name(text: str) -> str:
    """An option: the name of a method, checked."""
    name, colon, via = text.partition(":")
    if text not in PLAIN and name not in METHODS:
        raise ArgumentTypeError(f"unknown method {text!r}; choose from {KNOWN}")
    if colon and via not in VIAS:
        raise ArgumentTypeError(f"{text!r}: there is no via {via!r}; choose from {', '.join(VIAS)}")
    return text


def trained_name(text: str) -> str:
    """An option: of a method or a peer, checked."""
    if text.startswith("overlap-"):
        raise ArgumentTypeError(f"{text!r} does not stop at a loss; the scoreboard takes it")
    if text == "demo" or local_of(text) is not None:
        return text
    if text not in PEERS:
        return method_name(text)
    if importlib.util.find_spec("torch") is None:
        raise ArgumentTypeError(f"{text!r} needs PyTorch: pip install 'jaxcomp[peers]'")
    return text


def local_of(text: str) -> Setup | None:
    """The setup of local-CODE@H, stream- or overlap-CODE@H; None for any other name.

    >>> local_of("stream-int4@20").delay, local_of("local-int4@20").delay, local_of("sidco")
    (5, 0, None)
    """
    found = re.fullmatch(r"(local|stream|overlap)-(.+)@([1-9]\d*)", text)
    if found is None or found[2] not in CODES:
        return None
    every = int(found[3])
    times: tuple[Any, ...] = () if found[1] == "local" else (min(3, every), every // 4, 0.5)
    return Setup(text, found[2], every, *times)


def transformation(text: str, ratio: float, levels: int) -> Any:
    """The optax transformation that makes the mean of the workers' gradients."""
    if text in PLAIN:
        return optax.stateless(lambda grads, _: jax.tree.map(PLAIN[text], grads))
    name, _, via = text.partition(":")
    return jc.compressed_mean(METHODS[name].make(ratio, levels), AXIS, via=via or "auto", seed=0)


def trained_by(
    text: str, ratio: float, levels: int, optimizer: str, rate: float, outer: Sequence[float | None] = (None, None)
) -> Any:
    """The optax transformation that makes updates of the workers' gradients.

    outer: learning rate and momentum of the outer optimizer of local updates, as for `Setup.outer`.
    """
    if text == "demo":
        return jc.demo(rate, AXIS)
    local = local_of(text)
    if local is not None:
        return local.transform(OPTIMIZERS[optimizer](rate), local.outer(*outer), ratio, levels, 0)
    return optax.chain(transformation(text, ratio, levels), OPTIMIZERS[optimizer](rate))
