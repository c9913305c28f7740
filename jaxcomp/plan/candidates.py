"""The candidates of a plan: what is compared, what each sends, and what a message of it loses.

What a candidate exchanges is read from its traced program: every collective with its operands, so that a prediction
holds for routes, hierarchies and algorithms that were written after it.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxcomp.algorithms import direct, error_feedback, power_sgd
from jaxcomp.arrays import like_of
from jaxcomp.base import Algorithm, Round, TooLong, alpha_of, keys_of, omega_of, require_algorithm
from jaxcomp.checks import is_integer, is_within
from jaxcomp.compressors import block_scaled, cast, dithering, eden, identity, narrow, sidco, sign, top_k
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.links import KINDS, Link, check_links
from jaxcomp.groups import join, split
from jaxcomp.plan.links import Collective, workers_of
from jaxcomp.plan.programs import collectives_in
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = [
    "Candidate",
    "ErrorBound",
    "Limits",
    "bucket_shares",
    "candidates_of",
    "collectives_of",
    "compresses_nothing",
    "default_candidates",
    "dense_candidates",
    "error_bound",
    "hierarchies",
    "sent_back",
    "sent_bytes",
    "traced",
]

AXIS = "data"  # of workers of which only the number counts
USEFUL = 1e-4  # least alpha whose bound on transient steps says something


class Candidate(NamedTuple):
    """One way to train.

    name: in tables.
    algorithm: as for `compressed_mean`; or a mapping from mesh axes to algorithms, a hierarchy.
    via, bucket_bytes: as for `compressed_mean`.
    every: H, steps at each worker to an exchange (`local_updates`); 1: an exchange at every step.
    dense: whether it sends every entry in 16 bits or more.
    link: as for `compressed_mean`, by which via="auto" chooses; None: its default.
    """

    name: str
    algorithm: Algorithm | Mapping[Any, Algorithm]
    via: str = "auto"
    bucket_bytes: int | None = None
    every: int = 1
    dense: bool = False
    link: Link | Mapping[str, Link] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of `compressed_mean` and `value_and_grad`, besides the algorithm."""
        options = {"bucket_bytes": self.bucket_bytes} if self.bucket_bytes else {}
        return {"via": self.via, **options} | ({} if self.link is None else {"link": self.link})

    def in_buckets(self, size: int) -> "Candidate":
        """The same with an exchange for each bucket of so many bytes."""
        return self._replace(name=f"{self.name}, {size / 2**20:g} MiB", bucket_bytes=size)

    def with_every(self, every: int) -> "Candidate":
        """The same with so many steps to an exchange."""
        return self._replace(name=f"{self.name}, H={every}", every=every)

    def placed(self, axis: Any) -> tuple[Any, Any]:
        """Algorithm and axis, as `compressed_mean` takes them: of a hierarchy none, and the mapping."""
        if isinstance(self.algorithm, Mapping):
            return None, self.algorithm
        return require_algorithm("plan", self.algorithm), axis

    def transformation(self, axis: Any) -> Any:
        """The candidate's `compressed_mean` over an axis."""
        return compressed_mean(*self.placed(axis), **self.options)


def dense_candidates() -> list[Candidate]:
    """All entries, in f32 and bf16, by their best routes."""
    bf16 = direct(cast("bfloat16"))
    return [
        Candidate("f32", direct(identity()), dense=True),
        Candidate("bf16", bf16, dense=True),
        Candidate("bf16:two_shot", bf16, "two_shot", dense=True),
    ]


def default_candidates(max_every: int = 1) -> list[Candidate]:
    """The candidates where the user names none: dense first, then codes, sparse messages, factors and buckets.

    Args:
        max_every: H; where it is more than one, local updates with 4, 16, .. and at most so many steps, too.

    >>> sorted({each.every for each in default_candidates(20)})
    [1, 4, 16, 20]
    """
    Limits(max_every=max_every).check("default_candidates")
    dense = dense_candidates()
    quarter, hundredth = direct(dithering(7, block_size=512)), error_feedback(sidco(0.01))
    sparse = Candidate("sidco(0.01)+ef", hundredth)
    every_step = [
        *dense,
        Candidate("fp8+ef:two_shot", error_feedback(cast("float8_e4m3fn")), "two_shot"),
        Candidate("dithering(7):two_shot", quarter, "two_shot"),
        Candidate("dithering(7):gather", quarter, "gather"),
        Candidate("block_scaled(int4)+ef:two_shot", error_feedback(block_scaled("int4")), "two_shot"),
        Candidate("eden(4):two_shot", direct(eden(4)), "two_shot"),
        Candidate("sign+ef:two_shot", error_feedback(sign()), "two_shot"),
        Candidate("top_k(0.01)+ef", error_feedback(top_k(0.01))),
        sparse,
        Candidate("sidco(0.01)+ef:two_shot", hundredth, "two_shot"),
        Candidate("sidco(0.001)+ef", error_feedback(sidco(0.001))),
        Candidate("narrow(sidco(0.001))+ef", error_feedback(narrow(sidco(0.001), values="bfloat16", indices="uint16"))),
        Candidate("power_sgd(2)", power_sgd(2)),
        Candidate("power_sgd(4)", power_sgd(4)),
        *(each.in_buckets(2**size) for each in (dense[0], sparse) for size in (22, 24)),
    ]
    lengths = [4**i for i in range(1, 16) if 4**i < max_every]
    if max_every > 1:
        lengths.append(max_every)
    return every_step + [each.with_every(steps) for steps in lengths for each in (dense[0], sparse)]


def hierarchies(axes: Sequence[Any]) -> list[Candidate]:
    """For workers along several axes: dense within all of them but one, then sparse or in 4 bits along that one.

    Each is that one in its turn.

    >>> [each.name for each in hierarchies(("dcn", "ici"))][:2]
    ['f32 over ici, sidco(0.01)+ef over dcn', 'f32 over ici, int4+ef over dcn']
    """
    outer = {"sidco(0.01)+ef": error_feedback(sidco(0.01)), "int4+ef": error_feedback(block_scaled("int4"))}
    found = []
    for last in axes if len(axes) > 1 else ():
        within = [name for name in axes if name != last]
        first = tuple(within) if len(within) > 1 else within[0]
        for name, algorithm in outer.items():
            words = f"f32 over {', '.join(map(str, within))}, {name} over {last}"
            found.append(Candidate(words, {first: direct(identity()), last: algorithm}))
    return found


def candidates_of(name: str, candidates: Any, axes: Sequence[Any], max_every: int | None) -> list[Candidate]:
    """The candidates as a list, for None the usual ones for workers along these axes.

    Raises:
        TypeError, ValueError: there are none, or their names do not differ; named after the function `name`.
    """
    if candidates is None:
        return [*default_candidates(1 if max_every is None else max_every), *hierarchies(axes)]
    found = list(candidates) if isinstance(candidates, Iterable) else []
    if not found or not all(isinstance(each, Candidate) for each in found):
        raise TypeError(f"{name}: candidates must be a list of jc.Candidate, not empty; got {candidates!r}")
    for each in found:
        if each.link is not None:
            check_links(f"{name}: candidate {each.name!r}", each.link)
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{name}: candidates must have different names; got {names}")
    return found


class Limits(NamedTuple):
    """The conditions under which a candidate is eligible. max_error: share of |x|^2 that a message may lose; max_every:
    most steps to an exchange; None: any."""

    max_error: float | None = None
    max_every: int | None = None

    def check(self, name: str) -> "Limits":
        """The same; raises ValueError, named after the function `name`, where one is out of range."""
        if self.max_error is not None and not is_within(self.max_error, 0, math.inf):
            raise ValueError(f"{name}: max_error must be a number >= 0; got {self.max_error!r}")
        if self.max_every is not None and not is_integer(self.max_every):
            raise ValueError(f"{name}: max_every must be an integer of at least 1; got {self.max_every!r}")
        return self

    def refusal(self, every: int, lost: float | None) -> str | None:
        """Why a candidate is not eligible, if it is not. lost: of a message; None: not known."""
        if self.max_every is not None and every > self.max_every:
            return f"an exchange every {every} steps, and max_every is {self.max_every}"
        if self.max_error is not None and (lost is None or lost > self.max_error):
            share = "an unknown part" if lost is None else f"{lost:.3g}"
            return f"a message loses {share} of |x|^2, more than allowed"
        return None


# ------------------------------------------------------------------------------------------------
# What it sends


def collectives_of(
    candidate: Candidate,
    like: Any,
    axis: Any,
    sizes: Mapping[str, int],
    *,
    joined: bool = True,
    platform: str | None = None,
) -> tuple[Collective, ...]:
    """The collectives of one exchange, from its traced program (`programs.collectives_in`).

    like: shapes of the gradients of one device; axis: of the workers, where it is no hierarchy; sizes: axis -> workers;
    platform: "cpu", "gpu" or "tpu", whose program it is (on TPUs operands fill tiles); None: of the devices here.

    >>> import jax.numpy as jnp
    >>> collectives_of(dense_candidates()[0], jnp.zeros(5000), "data", {"data": 4})
    (Collective(kind='all_reduce', operand_bytes=20000.0, axis='data', times=1),)
    """
    transform = candidate.transformation(axis)

    def exchange(grads):
        return transform.update(grads, transform.init(jax.tree.map(jnp.zeros_like, grads)))[0]

    device = None if platform is None else AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    here = nullcontext() if device is None else use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with warnings.catch_warnings(), here:
        warnings.filterwarnings("ignore", message=".* this exchange sends ")  # which the table says of each
        program = jax.make_jaxpr(exchange, axis_env=list(sizes.items()))(like_of(like))
    return tuple(collectives_in(program.jaxpr, joined))


def traced(
    candidates: Sequence[Candidate], like: Any, axis: Any, sizes: Mapping[str, int], **options: Any
) -> dict[str, tuple[Collective, ...] | str]:
    """The collectives of each by its name (`collectives_of`, with these options), or why it cannot carry so many
    entries. Local updates exchange the same."""
    found: dict[Any, tuple[Collective, ...] | str] = {}
    place = lambda each: (id(each.algorithm), each.via, each.bucket_bytes)
    for each in candidates:
        if place(each) not in found:
            try:
                found[place(each)] = collectives_of(each, like, axis, sizes, **options)
            except TooLong as error:
                found[place(each)] = str(error)
    return {each.name: found[place(each)] for each in candidates}


def sent_bytes(collectives: Sequence[Collective], sizes: Mapping[str, int]) -> float:
    """Bytes that a worker sends in them, as the ledger counts."""
    return sum(x.times * KINDS[x.kind].sent(x.operand_bytes, workers_of(x.axis, sizes)) for x in collectives)


# ------------------------------------------------------------------------------------------------
# How it lays out a tree, and what a message of it loses


def _about(candidate: Candidate, like: Any, workers: int) -> Any:
    """How a candidate lays out a tree among so many workers, as its state says: via="auto" may take two shots, in their
    layout. None for a hierarchy."""
    if isinstance(candidate.algorithm, Mapping):
        return None
    leaves, structure = jax.tree.flatten(like_of(like))
    link = tuple(candidate.link.items()) if isinstance(candidate.link, Mapping) else candidate.link
    return _about_of(candidate._replace(name="", every=1, link=None), link, tuple(leaves), structure, workers)


@functools.lru_cache(maxsize=256)
def _about_of(candidate: Candidate, link: Any, leaves: tuple[Any, ...], structure: Any, workers: int) -> Any:
    candidate = candidate._replace(link=link if link is None or isinstance(link, Link) else dict(link))
    init, like = candidate.transformation(AXIS).init, jax.tree.unflatten(structure, leaves)
    return jax.make_jaxpr(init, axis_env=[(AXIS, workers)], return_shape=True)(like)[1].about


def bucket_shares(candidate: Candidate, like: Any) -> list[float]:
    """Share of the entries in each bucket, in the order in which buckets are ready.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> like = [jnp.zeros(6000), jnp.zeros(2000)]
    >>> bucket_shares(Candidate("f32", jc.direct(jc.identity()), bucket_bytes=1), like)
    [0.25, 0.75]
    """
    if isinstance(candidate.algorithm, Mapping) or not candidate.bucket_bytes:
        return [1.0]
    sizes: dict[int, float] = {}
    for group in (group for group in _about(candidate._replace(link=None), like, 2).groups.groups if not group.small):
        sizes[group.bucket] = sizes.get(group.bucket, 0.0) + math.prod(group.shape)
    total = sum(sizes.values())
    return [sizes[number] / total for number in sorted(sizes)] if total else [1.0]


def compresses_nothing(candidate: Candidate, like: Any, workers: int) -> bool:
    """Whether a candidate that compresses finds nothing to compress, in the layout of its route: two shots cut small
    leaves into chunks with the others."""
    if candidate.dense or candidate.every > 1 or isinstance(candidate.algorithm, Mapping):
        return False
    return all(group.small for group in _about(candidate, like, workers).groups.groups)


def sent_back(candidate: Candidate, grads: Any, workers: int) -> Any:
    """The tree after one message, compressed and decompressed; None for an algorithm without a compressor."""
    about, compressor = _about(candidate, grads, workers), getattr(candidate.algorithm, "compressor", None)
    if about is None or compressor is None:
        return None
    plan = about.groups
    compressors = each_of(compressor, plan.groups)
    here = Round(jax.random.key(0), plan.groups, compressors)

    @jax.jit
    def back(grads):
        arrays = split(plan, grads)
        like, keys = like_of(arrays), keys_of(jax.random.key(1), plan.groups)
        found = []
        for c, key, x, state, shape in zip(compressors, keys, arrays, here.start(like), like, strict=True):
            payload, _ = c.compress(key, x, state)
            found.append(c.decompress(payload, state.shared, shape))
        return join(plan, tuple(found))

    return back(grads)


class ErrorBound(NamedTuple):
    """A bound of theory on the error of one message.

    bound: on E|C(x) - x|^2 / |x|^2: omega, or 1 - alpha; None where neither is known.
    unbiased: whether it is omega. memory: whether what is lost is sent later.
    words: the effect on training.
    """

    bound: float | None = None
    unbiased: bool = False
    memory: bool = False
    words: str = "no bound is known"

    @property
    def is_useful(self) -> bool:
        """Whether the bound says something of the steps that training takes."""
        return self.bound is not None and (self.unbiased or 1 - self.bound >= USEFUL)


def error_bound(candidate: Candidate, like: Any, workers: int) -> ErrorBound:
    """The error that theory bounds, and its effect.

    Unbiased C with omega: the mean of n messages has at most omega / n times the mean |g_i|^2 as additional variance.
    Contraction with alpha and error feedback: what is lost comes later; the leading term of the stochastic rate is that
    without compression, a term of higher order grows with 1 / alpha (Stich and Karimireddy 2020), alpha = 1 - bound.
    In two shots the mean is compressed once more, which the bound is not of.
    """
    if candidate.dense:
        return ErrorBound(0.0, True, False, "none, or rounding to 16 bits")
    if isinstance(candidate.algorithm, Mapping):
        outer = [
            x for x in candidate.algorithm.values() if x.compressor is None or x.compressor.spec.name != "identity"
        ]
        if len(outer) != 1:
            return ErrorBound()
        return error_bound(candidate._replace(algorithm=outer[0], link=None), like, 2)  # the others are exact means
    memory = any("memory" in str(role) for role in candidate.algorithm.roles.values())
    late = f"; gradients are of points up to {candidate.every - 1} steps apart" if candidate.every > 1 else ""
    compressor = getattr(candidate.algorithm, "compressor", None)
    if compressor is None or (compressor.spec.omega is None and compressor.spec.alpha is None):
        return ErrorBound(None, False, memory, ("sent later; " if memory else "") + "no bound is known" + late)
    about = _about(candidate, like, workers)
    late += "; the mean is compressed once more" if "two_shot" in (candidate.via, about.route) else ""
    groups = about.groups
    compressors = each_of(compressor, groups.groups)
    if compressor.spec.omega is not None:
        omega = float(omega_of(compressors, groups.like))
        words = f"unbiased: at most {omega / workers:.3g} times the mean |g|^2 more variance"
        return ErrorBound(omega, True, memory, words + late)
    alpha = float(alpha_of(compressors, groups.like))
    if not memory:
        words = f"biased: at most {1 - alpha:.3g} of |g|^2 is lost"
    elif alpha >= USEFUL:
        words = f"sent later: at most {1 / alpha:.3g} times as many transient steps"
    else:
        words = "sent later; theory has no useful bound"
    return ErrorBound(1 - alpha, False, memory, words + late)
