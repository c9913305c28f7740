"""The laws of compressors (`jaxcomp.base`): each is a function that raises `LawBroken` with one sentence."""

import functools
import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import wire
from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.base import Compressor, State, accumulate, advance, check_compressor, for_worker, residual
from jaxcomp.compressors.roundtrip import roundtrip
from jaxcomp.jaxprs import called_program, inner_of
from jaxcomp.payloads import lane_bytes, per_tile
from jaxcomp.testing.law import NOT_TRIED, ROUNDING, all_hold, broken, differ, equal, is_rounding, same_bits, same_types

__all__ = ["LAWS", "Subject", "check", "monte_carlo", "z_bound"]

Array = jax.Array
FALSE_ALARM = 1e-6  # of each statistical law
DRAWS = 16  # of laws that are no statistics
KINDS = ("student", "sparse", "flat", "one", "tiny", "huge")


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
    was sent and the residual add up, bitwise where `spec.selects`; `spec.omega`, `spec.alpha`, `spec.linear` and
    `spec.entrywise` are true; messages survive the wire; nothing is traced a second time; vectors of 0 to 33 entries
    work.

    Args:
        compressor: of one array; of one of trees (`flat`, `per_leaf`) what is inside is checked.
        size: entries of the vectors, at least 40; another one than `size` is not tried where only that is accepted.
        workers: whose plans there are, where they differ (`bernoulli(..., per_worker=True)`).
        draws: for the statistical laws, each of which gives a false alarm at most once in 10^6 runs, also of a
            compressor with two outcomes. A C(x) that no key can reach is made once.
        seed: of vectors and keys.
        laws: names of `LAWS`; None: all.

    Returns:
        The names of the laws that were tried: not of "unbiased" where the Spec knows no omega, and the like.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: no compressor.

    >>> import jaxcomp as jc
    >>> half = jc.identity()._replace(decompress=lambda payload, shared, like: payload.values / 2)
    >>> jc.testing.check(half, laws=["zeros", "linear", "unbiased"], draws=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxcomp.testing.law.LawBroken: identity breaks 1 of 3 laws
      unbiased: E C(x) = x, since spec.omega is not None; over 1 draws entry ... is always ...
    """
    spec = check_compressor("testing.check", compressor)
    if size < 40:
        raise ValueError(f"testing.check: size must be at least 40; got {size}")
    inside = spec.lifted.compressor if spec.lifted else compressor
    subject = Subject(inside, size, workers, draws, seed)
    return all_hold(spec.name, LAWS, laws, lambda law: LAWS[law](subject))


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
        if any_length is not None:
            self.any_length = any_length

    def at(self, seed: int) -> "Subject":
        """The same with other vectors and keys."""
        self.seed, self.key = seed, jax.random.key(seed)
        return self

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), jnp.float32)

    @functools.cached_property
    def any_length(self) -> bool:
        try:
            for size in (self.size + 1, 3):
                jax.eval_shape(self.one_round, jax.ShapeDtypeStruct((size,), jnp.float32), self.key)
        except (TypeError, ValueError):
            return False
        return True

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
        """Whether no key can reach C(x), as its program says. That draws agree is no proof: a rare one may not."""
        traced = jax.make_jaxpr(lambda key, x: self.one_round(x, key)[2])(self.key, self.like)
        return not any(reached(traced.jaxpr, [True, False]))

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
        """Mean of |C(x) - x|^2, by how much chance may lift it (`chance_above`), and |x|^2, all over max|x|^2."""
        exact = np.float64(x)
        largest = np.abs(exact).max()
        error = lambda x_hats: self.norms((np.float64(x_hats) - exact) / largest)
        if self.deterministic:
            mean, chance = error(self.one_round(x, self.key)[2][None])[0], 0.0
        else:
            values = many(lambda keys: error(self.drawn(keys, x)), self.key, draws)
            mean, chance = values.mean(), chance_above(values, FALSE_ALARM / len(KINDS))
        return float(mean), float(chance), float(self.norms(np.asarray(exact)[None] / largest)[0])

    def told(self, draws: int) -> str:
        """Over how many draws an error was taken, for sentences."""
        return "whatever the key" if self.deterministic else f"over {draws} draws"


def reached(program: Any, marks: list[bool]) -> list[bool]:
    """For each output of a jaxpr whether one of the marked inputs may change it. Of loops and branches any input may
    change all outputs."""
    marked = {var for var, mark in zip(program.invars, marks, strict=True) if mark}
    is_marked = lambda var: not hasattr(var, "val") and var in marked  # literals cannot be hashed
    for equation in program.eqns:
        given, inner = [is_marked(var) for var in equation.invars], called_program(equation)
        if equation.primitive.name == "custom_vmap_call":
            inner = inner_of(equation)[0]
        if inner is not None and len(inner.invars) == len(given):
            out = reached(inner, given)
        else:
            out = [any(given)] * len(equation.outvars)
        marked |= {var for var, mark in zip(equation.outvars, out, strict=True) if mark}
    return [is_marked(var) for var in program.outvars]


def many(draws: Callable[[Array], Any], key: Array, num_draws: int, batch: int = 256) -> np.ndarray:
    """Values [num_draws, ...] over independent keys, in float64. draws: keys [batch] -> values [batch, ...]."""
    keys = jax.random.split(key, num_draws)
    return np.concatenate([np.asarray(draws(keys[i : i + batch]), np.float64) for i in range(0, num_draws, batch)])


def monte_carlo(draws: Callable[[Array], Any], key: Array, num_draws: int) -> tuple[Any, Any]:
    """Mean and standard error of `many` values."""
    values = many(draws, key, num_draws)
    spread = values.std(0, ddof=1) if num_draws > 1 else np.zeros_like(values[0])
    return values.mean(0), spread / np.sqrt(num_draws)


def z_bound(false_alarm: float, num_tests: int) -> float:
    """|z| that any of `num_tests` normal statistics exceeds with probability below `false_alarm`."""
    return NormalDist().inv_cdf(1 - false_alarm / (2 * num_tests))


def within(values: np.ndarray, largest: Any, z: float) -> Any:
    """Largest error of the mean of draws [n, ...] by chance, where single draws change by up to `largest`.

    z sqrt(V / n + (z J / 2 n)^2) + z^2 J / 2 n,  with the sample variance V and J = largest: Wilson's interval, also
    where an event is so rare that no draw shows it, and V is 0. That of a normal mean would be z sqrt(V / n).

    Reference: Wilson 1927; Agresti, Coull 1998. Theirs is shifted towards the middle, this one holds on both sides.
    """
    n = len(values)
    jump = np.asarray(largest) / (2 * n)
    return z * np.hypot(values.std(0, ddof=min(1, n - 1)) / np.sqrt(n), z * jump) + z**2 * jump


def chance_above(values: np.ndarray, false_alarm: float) -> float:
    """Excess of the mean of n draws >= 0 over the true mean that has probability `false_alarm` at most.

    The draws lie between 0 and the largest of them. A larger one, which no draw shows, only makes the true mean larger;
    smaller ones, which a bounded mean may owe to a rare event, are allowed for (`within`).
    """
    return float(within(values, values.max(), z_bound(false_alarm, 1)))


def shapes(s: Subject, dtypes: Iterable[str] = ("float32", "bfloat16")) -> None:
    """Shapes and dtypes of arrays are kept."""
    for dtype in dtypes:
        for shape in ((s.size,), (1, s.size), (s.size // 4, 2, 2))[: 3 if s.size % 4 == 0 else 2]:
            x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            x_hat, _ = jax.eval_shape(lambda x, key: roundtrip(s.compressor, x, key=key), x, s.key)
            if (x_hat.shape, x_hat.dtype) != (x.shape, x.dtype):
                broken(f"shape and dtype are kept; {dtype}{list(shape)} becomes {x_hat.dtype}{list(x_hat.shape)}")


def jit(s: Subject) -> None:
    """Jit changes nothing but the last place of floats."""
    x = s.vector()
    plain = roundtrip(s.compressor, x, key=s.key)
    _, payload, x_hat, _ = s.one_round(x, s.key)
    if found := differ((x_hat, payload), plain, 3e-7, 1e-7):
        cure = f". {ROUNDING}" if is_rounding((x_hat, payload), plain) else ""
        broken(f"jit changes nothing but the last place; {found}{cure}")


def vmap(s: Subject, atol: float = 1e-7) -> None:
    """Vmap is a loop."""
    xs, keys = jnp.stack([s.vector(i) for i in range(3)]), jax.random.split(s.key, 3)
    mapped = jax.jit(jax.vmap(lambda x, key: roundtrip(s.compressor, x, key=key)[0]))(xs, keys)
    looped = np.stack([s.one_round(x, key)[2] for x, key in zip(xs, keys, strict=True)])
    # Products with a matrix are added in another order when mapped.
    atol = atol if s.compressor.spec.norm is None else 1e-4
    equal("vmap gives what a loop gives", mapped, looped, 1e-6 if s.compressor.spec.norm is None else 1e-4, atol)


def conservation(s: Subject) -> None:
    """Sent + residual = message, bitwise where entries are copied."""
    x = s.vector()
    _, _, x_hat, rest = s.one_round(x, s.key)
    if s.exact:
        said = "what was sent and the residual add up to the message, bitwise"
        equal(said, np.asarray(x_hat + rest).view(np.uint32), np.asarray(x).view(np.uint32))
        if np.any((np.asarray(x_hat) != 0) & (np.asarray(rest) != 0)):
            broken("entries are copied or left (spec.selects); some are split between what is sent and the residual")
    total = np.float64(x_hat) + np.float64(rest)
    equal("what was sent and the residual add up to the message", total, np.float64(x), 1e-6, 1e-6)


def zeros(s: Subject) -> None:
    """C(0) = 0, with a finite payload."""
    _, payload, x_hat, _ = s.one_round(jnp.zeros(s.size), s.key)
    equal("zeros stay zero", x_hat, jnp.zeros(s.size))
    if not all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves(payload)):
        broken("the payload of zeros is finite; it has NaN or infinite entries")


def _nonfinite(s: Subject, bad: Iterable[float] = (math.nan, math.inf, -math.inf)) -> None:
    """C(x) = C(where(isfinite(x), x, 0)), of a third of the entries and over several draws: a sparsifier sends few."""
    rng, d = np.random.default_rng(s.seed), s.size
    some = rng.choice(d, d // 6, replace=False)
    places = [0, d - 1, *range(d // 2, d // 2 + d // 6), *some]  # a whole block, too
    keys = jax.random.split(s.key, DRAWS)
    for value in bad:
        x = np.array(s.vector())
        x[places] = value
        both = (jnp.asarray(y) for y in (x, np.where(np.isfinite(x), x, 0).astype(x.dtype)))
        got, want = (s.one_round(y, s.key)[2] if s.deterministic else s.drawn(keys, y) for y in both)
        if not np.isfinite(got).all():
            broken(f"entries that are not finite count as zero; with {value} in the vector, C(x) is not finite")
        equal(f"entries that are not finite ({value}) count as zero", got, want, 1e-6, 1e-7)


def tiny(s: Subject, shapes: Iterable[tuple[int, ...]] = ((), (0,), (1,), (2,), (3,), (31,), (33,))) -> str | None:
    """Vectors of few entries, of none, and a scalar."""
    if not s.any_length:
        return NOT_TRIED
    for shape in shapes:
        x = jnp.arange(1.0, math.prod(shape) + 1).reshape(shape)
        _, payload, x_hat, _ = s.one_round(x, s.key)
        if x_hat.shape != shape or not np.isfinite(x_hat).all():
            broken(f"vectors of any length are compressed; shape {shape} gives shape {x_hat.shape} or is not finite")
        if lane_bytes(payload) > 4 * x.size + 256:
            broken(f"a message is not longer than the vector by much; shape {shape} takes {lane_bytes(payload)} bytes")


def unbiased(s: Subject) -> str | None:
    """E C(x) = x, where omega is known."""
    if s.compressor.spec.omega is None:
        return NOT_TRIED
    x = s.vector()
    rare = _unseen(s, x, s.key)
    if rare.any():  # larger entries in their places, whose events are less rare
        larger = jnp.where(rare, jnp.copysign(0.71 * jnp.abs(x).max(), x), x)
        _unseen(s, larger, jax.random.fold_in(s.key, 1))


def _unseen(s: Subject, vector: Array, key: Array) -> np.ndarray:
    """Raises for a bias; mask of the entries that are always the same, and not what they should be.

    Of an entry that seldom changes the mean is not normal: Wilson's interval for the number of rare events holds for
    that as well. An event that no draw shows has a probability below log(1 / FALSE_ALARM) / n.
    """
    x, n = np.asarray(vector, np.float64), s.draws
    values = many(lambda keys: s.drawn(keys, vector), key, n)
    told = f"E C(x) = x, since spec.omega is not None; over {n} draws"

    def beyond(values: np.ndarray, true: np.ndarray) -> np.ndarray:
        """How often the interval fits into the distance from the true mean; 0 where nothing ever changes."""
        largest = np.abs(values - np.median(values, 0)).max(0)
        chance = within(values, largest, z_bound(FALSE_ALARM, true.size))
        return np.where(largest == 0, 0, np.abs(values.mean(0) - true) / (chance + 1e-5 * np.abs(true).max() + 1e-300))

    far = beyond(values, x)
    if far.max() > 1:
        i = int(far.argmax())
        broken(
            f"{told} the mean of entry {i} is {values.mean(0)[i]:.6g} for {x[i]:.6g}, {far[i]:.1f} times what is chance"
        )
    few = np.minimum(np.abs(x), 2 * np.median(np.abs(x))) ** 2  # all entries together, of which none has a great part
    along = few / np.where(x == 0, 1, x)
    if beyond((values @ along)[:, None], few.sum()[None]).max() > 1:
        broken(f"{told} the mean is too long or too short, {np.mean(values @ along) / few.sum():.4g} of x in the mean")
    away = values.mean(0) - x
    same = (np.ptp(values, 0) == 0) & (np.abs(away) > 1e-5 * np.abs(x).max())
    most = -math.log(FALSE_ALARM) * s.compressor.spec.omega(s.size) * np.sum(x**2)  # pyright: ignore[reportOptionalCall]
    if n * np.sum(away[same] ** 2) > most:
        i = int(np.abs(np.where(same, away, 0)).argmax())
        broken(f"{told} entry {i} is always {values[0, i]:.6g} for {x[i]:.6g}: more than omega leaves to rare events")
    return same


def omega(s: Subject, kinds: Iterable[str] = KINDS) -> str | None:
    """E|C(x) - x|^2 <= omega |x|^2."""
    if s.compressor.spec.omega is None:
        return NOT_TRIED
    most = s.compressor.spec.omega(s.size)
    _bounded(s, kinds, most, f"omega |x|^2 with omega = {most:.6g}", rounding=1e-12)


def alpha(s: Subject, kinds: Iterable[str] = KINDS) -> str | None:
    """E|C(x) - x|^2 <= (1 - alpha) |x|^2, with alpha in (0, 1]."""
    if s.compressor.spec.alpha is None:
        return NOT_TRIED
    least = s.compressor.spec.alpha(s.size)
    if not 0 < least <= 1:
        broken(f"alpha is in (0, 1]; for {s.size} entries it is {least:.6g}")
    _bounded(s, kinds, 1 - least, f"(1 - alpha) |x|^2 with alpha = {least:.6g}")


def _bounded(s: Subject, kinds: Iterable[str], most: float, said: str, rounding: float = 0.0) -> None:
    """Raises where the mean of |C(x) - x|^2 is above most |x|^2. rounding: of the error itself, in float32."""
    draws = min(s.draws, 1024)
    for kind in kinds:
        mean, chance, norm = s.squared_error(s.kind(kind), draws)
        if not mean <= most * norm * (1 + 1e-6) + rounding * norm + chance:
            found = f"a {kind} vector gives {mean / norm:.6g} {s.told(draws)} instead of at most {most:.6g}"
            broken(f"E|C(x) - x|^2 <= {said}; {found}")


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
    equal("accumulate adds the weighted messages", got, total + np.tensordot(weights, decoded, 1), 1e-5, 1e-5)
    equal("accumulate without weights adds the messages", plain, total + decoded.sum(0), 1e-5, 1e-5)
    equal("accumulate onto a shape is accumulate onto zeros", from_shape, from_zeros)


def on_the_wire(s: Subject) -> None:
    """A payload that was decoded from bytes decompresses to the same."""
    state, payload, x_hat, _ = s.one_round(s.vector(), s.key)
    decoded = wire.decode(wire.encode(payload))
    said = "a message survives wire.encode and wire.decode, bit for bit"
    same_bits(said, decoded, jax.tree.map(np.asarray, payload))
    got = s.compressor.decompress(decoded, state.shared, s.like)
    if found := differ(got, x_hat, 1e-6, 1e-7):
        if is_rounding(got, x_hat):
            broken(
                f"the bytes bring back the same payload; decoding it once more rounds otherwise: {found}. {ROUNDING}"
            )
        broken(f"the bytes bring back the same payload; decompress makes something else of it outside of jit: {found}")


def linear(s: Subject) -> str | None:
    """decompress(p + q) = decompress(p) + decompress(q), where spec.linear."""
    if not s.compressor.spec.linear:
        return NOT_TRIED
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
    equal(said, summed, parts[0] + parts[1], 4 * eps, 4 * eps * largest)


def entrywise(s: Subject) -> str | None:
    """An entry is decoded from the numbers of its own tile of 1024 entries, where spec.entrywise.

    GPUs decode some leaves while other sections of the message are still to come (`backend_gpu.made_in_pieces`). Those
    arrays come in sections that are cut where the vector is (`payloads.per_tile`, and of its length).
    """
    c, size = s.compressor, s.size if s.size > TOGETHER and s.size % TOGETHER == 0 else 6 * TOGETHER
    if not c.spec.entrywise or (size != s.size and not s.any_length):
        return NOT_TRIED
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    x = jnp.asarray(np.random.default_rng(s.seed).standard_t(3, size), jnp.float32)
    state, payload, _, _ = s.one_round(x, s.key)
    decode = jax.jit(lambda payload: c.decompress(payload, state.shared, like))
    arrays, structure = jax.tree.flatten(payload)
    whole, last = np.asarray(decode(payload)), size // TOGETHER - 1
    for first, end in ((0, 1), (last // 2, last // 2 + 2), (last, last + 1)):
        there = [_section(array, held, first, end, size) for array, held in zip(arrays, per_tile(payload), strict=True)]
        part, run = np.asarray(decode(jax.tree.unflatten(structure, there))), slice(first * TOGETHER, end * TOGETHER)
        said = f"an entry is decoded from the numbers of its own tile of {TOGETHER} entries, since spec.entrywise"
        if found := differ(part[run], whole[run]):
            broken(f"{said}; of entries {run.start} to {run.stop}, decoded without the others, {found}")


def _section(array: Array, held: int, first: int, end: int, size: int) -> Array | np.ndarray:
    """The array with zeros in the place of what stands for tiles outside of [first, end); whole if it is not cut."""
    if not held or array.size * TOGETHER != held * size:  # as in `exchange.routes.route`: it comes as a whole
        return array
    tile = np.arange(array.size) // held
    own = np.asarray(array).reshape(-1)
    return np.where((first <= tile) & (tile < end), own, np.zeros((), own.dtype)).reshape(array.shape)


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
    same_types("a compressor", state, jax.eval_shape(step, s.like, state, s.key))


def new_rounds(s: Subject) -> str | None:
    """Shared randomness moves on from round to round: with `advance`, the next message is another one."""
    c, x = s.compressor, s.vector()
    if c.advance is None:
        return NOT_TRIED
    state = c.init(s.key, s.like)
    state = State(state.local, for_worker(c, state.shared, 0))
    later = State(state.local, advance(c, state.shared))
    sent = jax.jit(lambda state: c.decompress(c.compress(s.key, x, state)[0], state.shared, s.like))
    if np.array_equal(sent(state), sent(later)):
        broken("advance makes the next round another one; it gives the same message again")


def payload(s: Subject) -> None:
    """A payload holds arrays alone, whose shapes follow from that of the vector; no array of the state is empty."""
    made: list[Any] = []  # as it is while it is traced: a program would make arrays of whatever it returns

    def run(x, key):
        made.append(roundtrip(s.compressor, x, key=key)[1])
        return made[-1]

    like = jax.eval_shape(run, s.like, s.key)
    others = [type(leaf).__name__ for leaf in jax.tree.leaves(made[-1]) if not isinstance(leaf, jax.Array)]
    if others:
        broken(f"a payload holds arrays alone; there is one of type {others[0]}")
    _, sent, _, _ = s.one_round(s.vector(), s.key)
    if lane_bytes(sent) != lane_bytes(like):
        broken(f"the bytes of a payload follow from shapes; got {lane_bytes(sent)} and {lane_bytes(like)}")
    state = s.compressor.init(s.key, s.like)
    if not all(np.size(leaf) for leaf in jax.tree.leaves(state)):
        broken("no array of a state is empty, as checkpoints do not save such; leave it out as ()")


def x64(s: Subject) -> None:
    """The payload of an f32 vector is the same with 64 bits enabled: no index, count or number becomes wider."""
    described = lambda tree: [f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(tree)]
    made = lambda: described(jax.eval_shape(lambda x, key: roundtrip(s.compressor, x, key=key)[1], s.like, s.key))
    usual = made()
    with jax.enable_x64(True):
        wider = made()
    if wider != usual:
        broken(f"with jax_enable_x64 the payload of an f32 vector is the same; got {wider} in place of {usual}")


LAWS: dict[str, Callable[[Subject], str | None]] = {
    "shapes": shapes,
    "jit": jit,
    "vmap": vmap,
    "residual": conservation,
    "zeros": zeros,
    "nonfinite": _nonfinite,
    "tiny": tiny,
    "unbiased": unbiased,
    "omega": omega,
    "alpha": alpha,
    "accumulate": accumulation,
    "wire": on_the_wire,
    "linear": linear,
    "entrywise": entrywise,
    "traced once": traced_once,
    "new rounds": new_rounds,
    "payload": payload,
    "x64": x64,
}
