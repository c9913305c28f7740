"""The laws of compressors and algorithms (`jaxcomp.base`), for those of your own. Needs no test framework.

`check` and `check_algorithm` try every law and raise one `LawBroken` with a sentence for each that does not hold. The
laws stand in `LAWS` and `ALGORITHM_LAWS` by name; each is a function that raises `LawBroken` with one sentence.
"""

import functools
import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcomp import wire
from jaxcomp.base import (
    Algorithm,
    Compressor,
    State,
    accumulate,
    advance,
    check_compressor,
    for_worker,
    has_role,
    residual,
)
from jaxcomp.base import (
    check_algorithm as check_is_algorithm,
)
from jaxcomp.compressors.roundtrip import roundtrip
from jaxcomp.payloads import lane_bytes
from jaxcomp.state.specs import init_state
from jaxcomp.state.workers import redistribute
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = ["ALGORITHM_LAWS", "LAWS", "LawBroken", "Subject", "check", "check_algorithm"]

Array = jax.Array
FALSE_ALARM = 1e-6  # of each statistical law
KINDS = ("student", "sparse", "flat", "one", "tiny", "huge")


class LawBroken(AssertionError):
    """A compressor or an algorithm breaks a law. laws: their names."""

    def __init__(self, message: str, laws: tuple[str, ...] = ()):
        super().__init__(message)
        self.laws = laws


def _broken(text: str) -> NoReturn:
    raise LawBroken(text)


def check(
    compressor: Compressor,
    *,
    size: int = 300,
    workers: int = 4,
    draws: int = 4096,
    seed: int = 0,
    laws: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Holds a compressor to the laws of `jaxcomp.base`.

    Shapes and dtypes are kept; jit and vmap change nothing; zeros stay zero; NaN and infinities count as zeros; what
    was sent and the residual add up, bitwise where `spec.selects`; `spec.omega`, `spec.alpha` and `spec.linear` are
    true; messages survive the wire; nothing is traced a second time; vectors of 0 to 33 entries work.

    Args:
        compressor: of one array; of one of trees (`flat`, `per_leaf`) what is inside is checked.
        size: entries of the vectors, at least 40; another one than `size` is not tried where only that is accepted.
        workers: whose plans there are, where they differ (`bernoulli(..., per_worker=True)`).
        draws: for the statistical laws, each of which gives a false alarm once in 10^6 runs.
        seed: of vectors and keys.
        laws: names of `LAWS`; None: all.

    Returns:
        The names of the laws that were tried.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: no compressor.

    >>> import jaxcomp as jc
    >>> half = jc.identity()._replace(decompress=lambda payload, shared, like: payload.values / 2)
    >>> jc.testing.check(half, laws=["zeros", "linear", "unbiased"], draws=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxcomp.testing.LawBroken: identity breaks 1 of 3 laws
      unbiased: E C(x) = x, since spec.omega is not None; over 1 draws the mean of entry ...
    """
    spec = check_compressor("testing.check", compressor)
    if size < 40:
        raise ValueError(f"testing.check: size must be at least 40; got {size}")
    inside = spec.lifted.compressor if spec.lifted else compressor
    subject = Subject(inside, size, workers, draws, seed)
    return _all_hold(spec.name, LAWS, laws, lambda law: LAWS[law](subject))


def _all_hold(
    name: str, table: dict[str, Any], chosen: Iterable[str] | None, run: Callable[[str], None]
) -> tuple[str, ...]:
    names = tuple(table if chosen is None else chosen)
    unknown = [law for law in names if law not in table]
    if unknown:
        raise ValueError(f"testing: laws must be of {', '.join(table)}; got {unknown[0]!r}")
    broken = {}
    for law in names:
        try:
            run(law)
        except LawBroken as error:
            broken[law] = str(error)
        except Exception as error:  # what it raises itself
            broken[law] = f"it raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if broken:
        lines = "".join(f"\n  {law}: {text}" for law, text in broken.items())
        raise LawBroken(f"{name} breaks {len(broken)} of {len(names)} laws{lines}", tuple(broken))
    return names


# ------------------------------------------------------------------------------------------------
# Compressors


class Subject:
    """A compressor and what the laws try it with. What is compiled is kept.

    exact: whether entries are copied, so that the residual is exact. any_length: whether it takes other vectors.
    """

    def __init__(
        self,
        compressor: Compressor,
        size: int = 300,
        workers: int = 4,
        draws: int = 4096,
        seed: int = 0,
        *,
        exact: bool | None = None,
        any_length: bool | None = None,
    ):
        self.compressor, self.size, self.workers, self.draws = compressor, size, workers, draws
        self.seed, self.key = seed, jax.random.key(seed)
        self.exact = compressor.spec.selects if exact is None else exact
        self._any_length = any_length

    def at(self, seed: int) -> "Subject":
        """The same with other vectors and keys."""
        self.seed, self.key = seed, jax.random.key(seed)
        return self

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), jnp.float32)

    @property
    def any_length(self) -> bool:
        if self._any_length is None:
            try:
                for size in (self.size + 1, 3):
                    jax.eval_shape(self.one_round, jax.ShapeDtypeStruct((size,), jnp.float32), self.key)
                self._any_length = True
            except (TypeError, ValueError):
                self._any_length = False
        return self._any_length

    def vector(self, seed: int = 0) -> Array:
        return jnp.asarray(np.random.default_rng(self.seed + seed).standard_t(3, self.size), jnp.float32)

    def kind(self, kind: str) -> Array:
        """Vectors for the bounds: `KINDS`."""
        rng, d = np.random.default_rng(self.seed), self.size
        made = {
            "student": lambda: rng.standard_t(3, d),
            "sparse": lambda: np.where(rng.random(d) < 0.05, rng.standard_normal(d), 0),
            "flat": lambda: np.full(d, -2.0),
            "one": lambda: np.eye(1, d, 17)[0],
            "tiny": lambda: 1e-30 * rng.standard_normal(d),
            "huge": lambda: 1e30 * rng.standard_normal(d),
        }
        return jnp.asarray(made[kind](), jnp.float32)

    @functools.cached_property
    def one_round(self) -> Callable[[Array, Array], tuple[State, Any, Array, Array]]:
        """(x, key) -> state, payload, decoded vector and residual, with the keys of `jc.roundtrip`; jitted."""
        c = self.compressor

        def run(x, key):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            shared_key, private_key = jax.random.split(key)
            state = c.init(shared_key, like)
            state = State(state.local, for_worker(c, state.shared, 0))
            payload, local = c.compress(private_key, x, state)
            x_hat = c.decompress(payload, state.shared, like)
            return State(local, state.shared), payload, x_hat, residual(c, x, payload, state.shared)

        return jax.jit(run)

    @functools.cached_property
    def drawn(self) -> Callable[[Array, Array], Array]:
        """(keys, x) -> C(x) for each key; jitted."""
        return jax.jit(jax.vmap(lambda key, x: roundtrip(self.compressor, x, key=key)[0], in_axes=(0, None)))

    @functools.cached_property
    def deterministic(self) -> bool:
        x = self.vector()
        draws = self.drawn(jax.random.split(self.key, 2), x)
        return bool(np.array_equal(draws[0], draws[1]))

    @functools.cached_property
    def norms(self) -> Callable[[Any], np.ndarray]:
        """x [n, d] -> |x|^2 of each, in the norm in which omega and alpha hold."""
        c, norm_of = self.compressor, self.compressor.spec.norm
        if norm_of is None:
            return lambda x: np.asarray(np.sum(np.square(x), axis=1))

        def norm(x):
            state = c.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))
            return norm_of(x, for_worker(c, state.shared, 0))

        run = jax.jit(jax.vmap(norm))
        return lambda x: np.asarray(run(jnp.asarray(x, jnp.float32)))

    def squared_error(self, x: Array, draws: int) -> tuple[float, float, float]:
        """Mean and standard error of |C(x) - x|^2, and |x|^2, all over max|x|^2."""
        exact = np.float64(x)
        largest = np.abs(exact).max()
        error = lambda x_hats: self.norms((np.float64(x_hats) - exact) / largest)
        if self.deterministic:
            mean, spread = error(self.one_round(x, self.key)[2][None])[0], 0.0
        else:
            mean, spread = monte_carlo(lambda keys: error(self.drawn(keys, x)), self.key, draws)
        return float(mean), float(spread), float(self.norms(np.asarray(exact)[None] / largest)[0])


def monte_carlo(draws: Callable[[Array], Any], key: Array, num_draws: int, batch: int = 256) -> tuple[Any, Any]:
    """Mean and standard error over independent keys, in float64. draws: keys [batch] -> values [batch, ...]."""
    keys = jax.random.split(key, num_draws)
    values = np.concatenate([np.asarray(draws(keys[i : i + batch]), np.float64) for i in range(0, num_draws, batch)])
    spread = values.std(0, ddof=1) if num_draws > 1 else np.zeros_like(values[0])
    return values.mean(0), spread / np.sqrt(num_draws)


def z_bound(false_alarm: float, num_tests: int) -> float:
    """|z| that any of `num_tests` normal statistics exceeds with probability below `false_alarm`."""
    return NormalDist().inv_cdf(1 - false_alarm / (2 * num_tests))


def _close(got: Any, want: Any, rtol: float, atol: float) -> str | None:
    """Says where and how far two arrays differ; None where they do not."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    bad = ~np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if not bad.any():
        return None
    i = np.unravel_index(np.argmax(np.where(bad, np.abs(got - want), -1)), got.shape) if got.ndim else ()
    furthest = f"{got[i]:.9g} instead of {want[i]:.9g} at {list(map(int, i))}"
    return f"{bad.sum()} of {got.size} entries differ; the furthest is {furthest}"


def _equal(what: str, got: Any, want: Any, rtol: float = 0, atol: float = 0) -> None:
    leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        _broken(f"{what}; structures are {jax.tree.structure(got)} and {jax.tree.structure(want)}")
    for a, b in zip(*leaves, strict=True):
        exact = not jnp.issubdtype(jnp.result_type(a), jnp.floating)
        if found := _close(a, b, *((0, 0) if exact else (rtol, atol))):
            _broken(f"{what}; {found}")


def shapes(s: Subject, dtypes: Iterable[str] = ("float32", "bfloat16")) -> None:
    """Shapes and dtypes of arrays are kept."""
    for dtype in dtypes:
        for shape in ((s.size,), (1, s.size), (s.size // 4, 2, 2))[: 3 if s.size % 4 == 0 else 2]:
            x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            x_hat, _ = jax.eval_shape(lambda x, key: roundtrip(s.compressor, x, key=key), x, s.key)
            if (x_hat.shape, x_hat.dtype) != (x.shape, x.dtype):
                _broken(f"shape and dtype are kept; {dtype}{list(shape)} becomes {x_hat.dtype}{list(x_hat.shape)}")


def jit(s: Subject) -> None:
    """Jit changes nothing but the last place of floats."""
    x = s.vector()
    plain = roundtrip(s.compressor, x, key=s.key)
    _, payload, x_hat, _ = s.one_round(x, s.key)
    _equal("jit changes nothing but the last place", (x_hat, payload), plain, 3e-7, 1e-7)


def vmap(s: Subject, atol: float = 1e-7) -> None:
    """Vmap is a loop."""
    xs, keys = jnp.stack([s.vector(i) for i in range(3)]), jax.random.split(s.key, 3)
    mapped = jax.jit(jax.vmap(lambda x, key: roundtrip(s.compressor, x, key=key)[0]))(xs, keys)
    looped = np.stack([s.one_round(x, key)[2] for x, key in zip(xs, keys, strict=True)])
    # Products with a matrix are added in another order when mapped.
    atol = atol if s.compressor.spec.norm is None else 1e-4
    _equal("vmap gives what a loop gives", mapped, looped, 1e-6 if s.compressor.spec.norm is None else 1e-4, atol)


def conservation(s: Subject) -> None:
    """Sent + residual = message, bitwise where entries are copied."""
    x = s.vector()
    _, _, x_hat, rest = s.one_round(x, s.key)
    if s.exact:
        said = "what was sent and the residual add up to the message, bitwise"
        _equal(said, np.asarray(x_hat + rest).view(np.uint32), np.asarray(x).view(np.uint32))
        if np.any((np.asarray(x_hat) != 0) & (np.asarray(rest) != 0)):
            _broken("entries are copied or left (spec.selects); some are split between what is sent and the residual")
    total = np.float64(x_hat) + np.float64(rest)
    _equal("what was sent and the residual add up to the message", total, np.float64(x), 1e-6, 1e-6)


def zeros(s: Subject) -> None:
    """C(0) = 0, with a finite payload."""
    _, payload, x_hat, _ = s.one_round(jnp.zeros(s.size), s.key)
    _equal("zeros stay zero", x_hat, jnp.zeros(s.size))
    if not all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves(payload)):
        _broken("the payload of zeros is finite; it has NaN or infinite entries")


def nonfinite(s: Subject, bad: Iterable[float] = (math.nan, math.inf, -math.inf)) -> None:
    """C(x) = C(where(isfinite(x), x, 0))."""
    for value in bad:
        x = np.array(s.vector())
        x[[0, 5, s.size - 1]] = value
        got, want = (s.one_round(jnp.asarray(y), s.key)[2] for y in (x, np.where(np.isfinite(x), x, 0).astype(x.dtype)))
        if not np.isfinite(got).all():
            _broken(f"entries that are not finite count as zero; with {value} in the vector, C(x) is not finite")
        _equal(f"entries that are not finite ({value}) count as zero", got, want, 1e-6, 1e-7)


def tiny(s: Subject, shapes: Iterable[tuple[int, ...]] = ((), (0,), (1,), (2,), (3,), (31,), (33,))) -> None:
    """Vectors of few entries, of none, and a scalar."""
    for shape in shapes if s.any_length else ():
        x = jnp.arange(1.0, math.prod(shape) + 1).reshape(shape)
        _, payload, x_hat, _ = s.one_round(x, s.key)
        if x_hat.shape != shape or not np.isfinite(x_hat).all():
            _broken(f"vectors of any length are compressed; shape {shape} gives shape {x_hat.shape} or is not finite")
        if lane_bytes(payload) > 4 * x.size + 256:
            _broken(f"a message is not longer than the vector by much; shape {shape} takes {lane_bytes(payload)} bytes")


def unbiased(s: Subject) -> None:
    """E C(x) = x, where omega is known."""
    if s.compressor.spec.omega is None:
        return
    x = s.vector()
    mean, error = monte_carlo(lambda keys: s.drawn(keys, x), s.key, s.draws)
    z = np.abs(mean - np.float64(x)) / np.maximum(error, 1e-6 * np.abs(x).max())
    if not z.max() < z_bound(FALSE_ALARM, x.size):
        i = int(z.argmax())
        _broken(
            f"E C(x) = x, since spec.omega is not None; over {s.draws} draws the mean of entry {i} is {mean[i]:.6g} "
            f"for {float(x[i]):.6g}, {z[i]:.1f} standard errors away"
        )


def omega(s: Subject, kinds: Iterable[str] = KINDS) -> None:
    """E|C(x) - x|^2 <= omega |x|^2."""
    if s.compressor.spec.omega is None:
        return
    most = s.compressor.spec.omega(s.size)
    for kind in kinds:
        mean, error, norm = s.squared_error(s.kind(kind), min(s.draws, 1024))
        # float32 rounds the error itself
        if not mean <= most * norm * (1 + 1e-6) + 1e-12 * norm + z_bound(FALSE_ALARM, 1) * error:
            _broken(f"E|C(x) - x|^2 <= omega |x|^2 with omega = {most:.6g}; a {kind} vector gives {mean / norm:.6g}")


def alpha(s: Subject, kinds: Iterable[str] = KINDS) -> None:
    """E|C(x) - x|^2 <= (1 - alpha) |x|^2, with alpha in (0, 1]."""
    if s.compressor.spec.alpha is None:
        return
    least = s.compressor.spec.alpha(s.size)
    if not 0 < least <= 1:
        _broken(f"alpha is in (0, 1]; for {s.size} entries it is {least:.6g}")
    for kind in kinds:
        mean, error, norm = s.squared_error(s.kind(kind), min(s.draws, 1024))
        if not mean <= (1 - least) * norm * (1 + 1e-6) + z_bound(FALSE_ALARM, 1) * error:
            _broken(
                f"E|C(x) - x|^2 <= (1 - alpha) |x|^2 with alpha = {least:.6g}; a {kind} vector gives {mean / norm:.6g} "
                f"instead of at most {1 - least:.6g}"
            )


def accumulation(s: Subject) -> None:
    """`accumulate` adds the weighted decoded messages, onto an array and onto its shape."""
    c, n = s.compressor, s.workers

    @jax.jit
    def run(xs, keys, weights, total):
        state = c.init(s.key, s.like)

        def one(x, k, worker):
            mine = for_worker(c, state.shared, worker, n)
            payload, _ = c.compress(k, x, State(state.local, mine))
            return payload, c.decompress(payload, mine, s.like)

        stacked, decoded = jax.vmap(one)(xs, keys, jnp.arange(n))
        totals = (total, weights), (total, None), (s.like, None), (jnp.zeros_like(total), None)
        return *(accumulate(c, given, stacked, by, state.shared) for given, by in totals), decoded

    weights, total = np.resize([0.5, -1.0, 2.0, 0.25], n), s.vector(9)
    xs, keys = jnp.stack([s.vector(i) for i in range(n)]), jax.random.split(s.key, n)
    got, plain, from_shape, from_zeros, decoded = run(xs, keys, jnp.asarray(weights, jnp.float32), total)
    decoded, total = np.float64(decoded), np.float64(total)
    _equal("accumulate adds the weighted messages", got, total + np.tensordot(weights, decoded, 1), 1e-5, 1e-5)
    _equal("accumulate without weights adds the messages", plain, total + decoded.sum(0), 1e-5, 1e-5)
    _equal("accumulate onto a shape is accumulate onto zeros", from_shape, from_zeros)


def on_the_wire(s: Subject) -> None:
    """A payload that was decoded from bytes decompresses to the same."""
    state, payload, x_hat, _ = s.one_round(s.vector(), s.key)
    decoded = wire.decode(wire.encode(payload))
    _equal("a message survives wire.encode and wire.decode", decoded, jax.tree.map(np.asarray, payload))
    got = s.compressor.decompress(decoded, state.shared, s.like)
    _equal("a message that was decoded from bytes decompresses to the same", got, x_hat, 1e-6, 1e-7)


def linear(s: Subject) -> None:
    """decompress(p + q) = decompress(p) + decompress(q), where spec.linear."""
    if not s.compressor.spec.linear:
        return
    c = s.compressor

    @jax.jit
    def run(xs):
        state = c.init(s.key, s.like)
        decompress = lambda payload: c.decompress(payload, state.shared, s.like)
        payloads = jax.vmap(lambda x: c.compress(s.key, x, state)[0])(xs)
        one, two = (jax.tree.map(lambda a: a[i], payloads) for i in range(2))  # noqa: B023
        return one, jax.vmap(decompress)(payloads), decompress(jax.tree.map(jnp.add, one, two))

    one, parts, summed = run(jnp.stack([s.vector(), s.vector(1)]))
    floats = [leaf.dtype for leaf in jax.tree.leaves(one) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    eps = max(float(jnp.finfo(dtype).eps) for dtype in floats or [jnp.float32])
    largest = max(1.0, float(np.max(np.abs(parts))))  # of what is rounded: entries may be differences of such numbers
    said = "payloads may be added on the way, since spec.linear"
    _equal(said, summed, parts[0] + parts[1], 4 * eps, 4 * eps * largest)


def traced_once(s: Subject) -> None:
    """The state after a round has the structure, shapes, dtypes and weak types of the one before."""
    c = s.compressor

    def first(key):
        state = c.init(key, s.like)
        return State(state.local, for_worker(c, state.shared, 1))

    def step(x, state, key):
        payload, local = c.compress(key, x, state)
        c.decompress(payload, state.shared, s.like)
        return State(local, advance(c, state.shared))

    state = jax.eval_shape(first, s.key)
    _same_types("a compressor", state, jax.eval_shape(step, s.like, state, s.key))


def _same_types(what: str, before: Any, after: Any) -> None:
    described = lambda state: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}{' weak' * a.weak_type}", state)
    if described(before) != described(after):
        _broken(
            f"the state of {what} has the same structure, shapes and dtypes after a round, or it is traced again; "
            f"before {described(before)}, after {described(after)}"
        )


def new_rounds(s: Subject) -> None:
    """Shared randomness moves on from round to round: with `advance`, the next message is another one."""
    c, x = s.compressor, s.vector()
    if c.advance is None:
        return
    state = c.init(s.key, s.like)
    state = State(state.local, for_worker(c, state.shared, 0))
    later = State(state.local, advance(c, state.shared))
    sent = jax.jit(lambda state: c.decompress(c.compress(s.key, x, state)[0], state.shared, s.like))
    if np.array_equal(sent(state), sent(later)):
        _broken("advance makes the next round another one; it gives the same message again")


def payload(s: Subject) -> None:
    """A payload holds arrays alone, whose shapes follow from that of the vector; no array of the state is empty."""
    made: list[Any] = []  # as it is while it is traced: a program would make arrays of whatever it returns

    def run(x, key):
        made.append(roundtrip(s.compressor, x, key=key)[1])
        return made[-1]

    like = jax.eval_shape(run, s.like, s.key)
    others = [type(leaf).__name__ for leaf in jax.tree.leaves(made[-1]) if not isinstance(leaf, jax.Array)]
    if others:
        _broken(f"a payload holds arrays alone; there is one of type {others[0]}")
    _, sent, _, _ = s.one_round(s.vector(), s.key)
    if lane_bytes(sent) != lane_bytes(like):
        _broken(f"the bytes of a payload follow from shapes; got {lane_bytes(sent)} and {lane_bytes(like)}")
    state = s.compressor.init(s.key, s.like)
    if not all(np.size(leaf) for leaf in jax.tree.leaves(state)):
        _broken("no array of a state is empty, as checkpoints do not save such; leave it out as ()")


def x64(s: Subject) -> None:
    """The payload of an f32 vector is the same with 64 bits enabled: no index, count or number becomes wider."""
    described = lambda tree: [f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(tree)]
    made = lambda: described(jax.eval_shape(lambda x, key: roundtrip(s.compressor, x, key=key)[1], s.like, s.key))
    usual = made()
    with jax.enable_x64(True):
        wider = made()
    if wider != usual:
        _broken(f"with jax_enable_x64 the payload of an f32 vector is the same; got {wider} in place of {usual}")


LAWS: dict[str, Callable[[Subject], None]] = {
    "shapes": shapes,
    "jit": jit,
    "vmap": vmap,
    "residual": conservation,
    "zeros": zeros,
    "nonfinite": nonfinite,
    "tiny": tiny,
    "unbiased": unbiased,
    "omega": omega,
    "alpha": alpha,
    "accumulate": accumulation,
    "wire": on_the_wire,
    "linear": linear,
    "traced once": traced_once,
    "new rounds": new_rounds,
    "payload": payload,
    "x64": x64,
}


# ------------------------------------------------------------------------------------------------
# Algorithms


class _Run(NamedTuple):
    """An algorithm among some workers under vmap.

    tx: compressed_mean of it. params: shapes. step(grads, state): one round, jitted. state: the first.
    """

    tx: Any
    algorithm: Algorithm
    params: Any
    workers: int
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any

    def grads(self, seed: int, scale: float = 1.0) -> Any:
        """A row for each worker, which differ."""
        rng = np.random.default_rng(seed)
        draw = lambda p: jnp.asarray(scale * rng.standard_normal((self.workers, *p.shape)), p.dtype)
        return jax.tree.map(draw, self.params)


AXIS = "workers"
SHAPES = {"bias": (7,), "empty": (0, 3), "scalar": (), "kernel": (40, 50)}


def check_algorithm(
    algorithm: Algorithm,
    *,
    params: Any = None,
    workers: int = 4,
    seed: int = 0,
    laws: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Holds an algorithm to the laws of `jaxcomp.base`, in `compressed_mean` among some workers.

    Directions are like the gradients, equal on all workers and finite; so is what `roles` call shared; gradients with
    NaN, infinities or the largest numbers leave none behind; a round can be replayed; nothing is traced a second time;
    gradients of 16 bits work; on average directions point along the mean gradient; with as many devices as workers,
    `shard_map` gives what `vmap` gives; the state can be handed on to fewer workers.

    Args:
        algorithm: whose gradients are taken at the caller's parameters.
        params: a tree of arrays, or of their shapes, of f32; None: a matrix, a vector, a scalar and an empty array.
        workers: at least 2.
        seed: of gradients.
        laws: names of `ALGORITHM_LAWS`; None: all.

    Returns:
        The names of the laws that were tried.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: no algorithm, or one that keeps its own iterate.

    >>> import jaxcomp as jc
    >>> "replayed" in jc.testing.check_algorithm(jc.error_feedback(jc.top_k(0.1)), laws=["replayed", "non-finite"])
    True
    """
    check_is_algorithm("testing.check_algorithm", algorithm)
    if workers < 2:
        raise ValueError(f"testing.check_algorithm: workers must be at least 2; got {workers}")
    if params is None:
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    params = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params)
    run = functools.cache(lambda: _run_of(algorithm, params, workers))
    return _all_hold(repr(algorithm).strip("<>"), ALGORITHM_LAWS, laws, lambda law: ALGORITHM_LAWS[law](run(), seed))


def _run_of(algorithm: Algorithm, params: Any, workers: int) -> _Run:
    tx = compressed_mean(algorithm, AXIS)
    state, axes = init_state(tx, params, workers, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS))
    return _Run(tx, algorithm, params, workers, step, state)


def _like_gradients(run: _Run, seed: int) -> None:
    """Directions have the structure, shapes and dtypes of the gradients, also of 16 bits, and are finite."""
    for dtype in ("float32", "bfloat16"):
        params = jax.tree.map(lambda p: p.astype(dtype), run.params)  # noqa: B023
        own = run if dtype == "float32" else _run_of(run.algorithm, params, run.workers)
        direction, _ = own.step(own.grads(seed), own.state)
        described = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
        if described(direction) != described(params):
            _broken(f"directions are like the gradients; got {described(direction)} for {described(params)}")
        _finite(f"directions for {dtype} gradients", direction)


def _finite(what: str, tree: Any) -> None:
    if not all(np.isfinite(np.float64(x)).all() for x in jax.tree.leaves(tree)):
        _broken(f"{what} are finite; there are NaN or infinite entries")


def _shared(run: _Run, seed: int) -> None:
    """Directions, and state that is shared by its role, are equal on all workers."""
    rows = _rows_of(run, seed)
    for what, tree in (("directions", rows[0]), ("shared fields of the state", rows[1].shared)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            leaf = np.asarray(leaf)
            if any(row.tobytes() != leaf[0].tobytes() for row in leaf):
                _broken(f"{what} are equal on all workers, bit for bit; {jax.tree_util.keystr(path)} differs")


def _rows_of(run: _Run, seed: int) -> tuple[Any, Any]:
    """Directions and state after two rounds, with a row for each worker also of what should be equal."""
    every = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (run.workers, *jnp.shape(x))), tree)
    state = run.state
    state = type(state)(state.local, every(state.shared), state.about)
    step = jax.jit(jax.vmap(run.tx.update, axis_name=AXIS))
    _, state = step(run.grads(seed), state)
    return step(run.grads(seed + 1), state)


def _types(run: _Run, seed: int) -> None:
    """The state after a round has the types of the one before."""
    del seed
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct((run.workers, *p.shape), p.dtype), run.params)
    _same_types("an algorithm", jax.eval_shape(lambda s: s, run.state), jax.eval_shape(run.step, like, run.state)[1])


def _nonfinite(run: _Run, seed: int) -> None:
    """NaN and infinities in a gradient enter neither the direction nor the state."""
    bad = lambda g: (
        g.at[0].set(jnp.nan).at[1].set(jnp.inf) if g.ndim == 1 else g.at[0, 0].set(jnp.nan).at[1, 0].set(-jnp.inf)
    )
    grads = jax.tree.map(lambda g: bad(g) if g.size else g, run.grads(seed))
    direction, state = run.step(grads, run.state)
    _finite("directions for gradients with NaN and infinities", direction)
    _finite("memories after gradients with NaN and infinities", [state.local.algorithm, state.shared.algorithm])


def _largest(run: _Run, seed: int) -> None:
    """Gradients of the largest number leave no infinity behind, in no field of the state, over some rounds."""
    limit = float(jnp.finfo(jnp.float32).max)
    huge = lambda g: jnp.full_like(g, 0.9 * min(limit, float(jnp.finfo(g.dtype).max)))
    state = run.state
    for i in range(3):
        ordinary = run.grads(seed + i)
        direction, state = run.step(jax.tree.map(huge, ordinary) if i < 2 else ordinary, state)
        _finite("directions for gradients near the largest number", direction)
        _finite("fields of the state after such gradients", [state.local.algorithm, state.shared.algorithm])


def _replayed(run: _Run, seed: int) -> None:
    """The same gradients and state give the same bits again."""
    _, state = run.step(run.grads(seed), run.state)
    first, again = (run.step(run.grads(seed + 1), state) for _ in range(2))
    numbers = lambda out: [np.asarray(x).tobytes() for x in jax.tree.leaves(out)]
    if numbers(first) != numbers(again):
        _broken("a round can be replayed: the same gradients and state give the same bits; they give others")


def _descends(run: _Run, seed: int, rounds: int = 30) -> None:
    """Summed over some rounds, directions point along the mean gradient."""
    grads, state, total = run.grads(seed), run.state, 0.0
    grads = jax.tree.map(lambda g: g + 1, grads)
    for _ in range(rounds):
        direction, state = run.step(grads, state)
        pairs = zip(jax.tree.leaves(direction), jax.tree.leaves(grads), strict=True)
        total += sum(float(np.sum(np.float64(d) * np.float64(g).mean(0))) for d, g in pairs)
    if not total > 0:
        _broken(f"directions point along the mean gradient; over {rounds} rounds their inner product is {total:.6g}")


def _worlds(run: _Run, seed: int) -> None:
    """`shard_map` gives what `vmap` gives, to rounding. Nothing is tried with fewer devices than workers."""
    if jax.device_count() < run.workers:
        return
    mesh = jax.make_mesh((run.workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[: run.workers])
    state, specs = init_state(run.tx, run.params, mesh, AXIS)
    one = lambda grads, state: run.tx.update(jax.tree.map(lambda g: g[0], grads), state)
    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
    mapped = run.state
    for i in range(2):
        a, state = step(run.grads(seed + i), state)
        b, mapped = run.step(run.grads(seed + i), mapped)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Dithering may round a norm, and so a level at its edge, differently when vmapped.
        close = np.isclose(x, y, rtol=1e-4, atol=1e-4)
        if close.size and not close.mean() > 0.999:
            _broken(f"shard_map gives what vmap gives; {close.size - close.sum()} of {close.size} entries differ")


def _handed_on(run: _Run, seed: int) -> None:
    """The state can be handed on to fewer workers by its roles, unless one is "gradient"."""
    if has_role(run.algorithm.roles, "gradient"):
        return
    _, state = run.step(run.grads(seed), run.state)
    fewer = _run_of(run.algorithm, run.params, run.workers - 1)
    new = redistribute(state, fewer.state)
    direction, _ = fewer.step(fewer.grads(seed), new)
    _finite("directions after redistribute to one worker less", direction)


ALGORITHM_LAWS: dict[str, Callable[[_Run, int], None]] = {
    "like gradients": _like_gradients,
    "shared": _shared,
    "traced once": _types,
    "non-finite": _nonfinite,
    "largest": _largest,
    "replayed": _replayed,
    "descends": _descends,
    "worlds": _worlds,
    "handed on": _handed_on,
}
