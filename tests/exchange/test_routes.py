"""Every route on the level of `Route.reduce`: the right mean, of the right type, wherever workers run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import route_worlds as rw
from jax import lax
from route_worlds import LIKES, bits, messages, on_mesh, on_replicas, on_shards, on_vmap, uneven
from variants import variants

import jaxcomp as jc
from jaxcomp.arrays import like_of as like_of_array
from jaxcomp.arrays import wide_like
from jaxcomp.base import for_worker, keys_of
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.tree import each_of, per_leaf
from jaxcomp.exchange import collectives
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.routes import ROUTES, VIAS, route_of
from jaxcomp.exchange.routes.ladder import decode_messages, encode_messages, rungs
from jaxcomp.groups import Layout
from jaxcomp.plan.programs import collectives_in

N = 4
COUNTS = (40, 3, 11, 60)
SLOW = Link(latency=0, bandwidth=1e6)


@pytest.fixture(autouse=True)
def _ragged_everywhere(monkeypatch):
    monkeypatch.setattr(collectives, "has_ragged", lambda: True)
    monkeypatch.setattr(lax, "ragged_all_to_all", rw.ragged_by_definition)


def like_of(via, small, workers):
    if via == "two_shot":
        return rw.shape(workers, 96)
    return LIKES["small" if small else "none"]


def step_of(via, compressor, like, **options):
    def step(message, way):
        return rw.send(via, compressor, like, message, way._replace(**options)).mean

    return step


def mean_of_decoded(compressor, like, given, weights=None):
    """In float64, of what each of the workers on the leading axis sent."""
    workers = len(jax.tree.leaves(given)[0])
    shares = np.full(workers, 1 / workers) if weights is None else np.asarray(weights)
    here = rw.round_of(compressor, like, jax.random.key(0))

    @jax.jit
    def one(i, message):
        decoded = []
        states = here.start(rw.shapes_of(here))
        keys = keys_of(jax.random.key(1), here.groups)
        message = (message,) if rw.is_bare(like) else message
        for c, key, x, state in zip(here.compressors, keys, message, states, strict=True):
            mine = state._replace(shared=for_worker(c, state.shared, i, workers))
            decoded.append(c.decompress(c.compress(key, x, mine)[0], mine.shared, wide_like(like_of_array(x))))
        return decoded[0] if rw.is_bare(like) else tuple(decoded)

    decoded = [one(i, jax.tree.map(lambda a: a[i], given)) for i in range(workers)]  # noqa: B023
    return jax.tree.map(lambda *x: np.tensordot(shares, np.float64(x), 1), *decoded)


def assert_near(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Sharded parameters and hierarchies crashed with gather, ladder, concat and ring where no leaf was small.
CASES = [(via, world, small) for via in VIAS for world in ("mesh", "shards", "replicas") for small in (True, False)]
QUICK = [case for case in CASES if case[0] in ("auto", "gather", "two_shot") or not case[2]]
QUICK = [case for case in QUICK if case[0] != "ladder" or case[1] == "replicas"]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize("case", variants(CASES, QUICK), ids=lambda case: "-".join(map(str, case)))
def test_every_route_on_every_mesh(case, seed):
    """The mean is right, and typed as the out specs ask for under check_vma=True."""
    via, world, small = case
    compressor = identity() if via in ("sum", "two_shot") else uneven((40, 3))
    like = like_of(via, small, 2)
    step = step_of(via, compressor, like)
    if world == "shards":
        given = messages(seed, like, (2, 2))
        got = on_shards(step, given)
        for shard in range(2):
            own = jax.tree.map(lambda a: a[:, shard], given)  # noqa: B023
            assert_near(jax.tree.map(lambda a: a[shard], got), mean_of_decoded(compressor, like, own))  # noqa: B023
        return
    given = messages(seed, like, (2,))
    got = (on_mesh if world == "mesh" else on_replicas)(step, given)
    assert_near(got, mean_of_decoded(compressor, like, given))


# ------------------------------------------------------------------------------------------------
# Routes that bring payloads together give the same mean, bit for bit

GATHERING = [name for name, route in ROUTES.items() if route.gather is not None]
TOGETHER = [name for name in GATHERING if name != "ladder"]  # which has a test of its own
COMPRESSORS = {
    "uneven": uneven(COUNTS),
    "bf16": uneven(COUNTS, jnp.bfloat16),
    "natural": natural(),
    "fp8": cast("float8_e4m3fn"),
    "dithering": dithering(7),
}
WEIGHTS = {"equal": None, "weighted": (0.1, 0.4, 0.3, 0.2)}
WAYS = [(name, weights) for name in COMPRESSORS for weights in WEIGHTS]


@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize("case", variants(WAYS, {("uneven", "weighted")}), ids="-".join)
def test_gathered_means_are_bitwise_equal(case, seed, optimized):
    """In one program, under vmap and on a mesh; as another compressor reads them, too."""
    name, weights = case[0], WEIGHTS[case[1]]
    compressor, like = COMPRESSORS[name], LIKES["small"]
    w = None if weights is None else jnp.asarray(weights, jnp.float32)

    def step(message, way):
        results = {via: rw.send(via, compressor, like, message, way._replace(weights=w)) for via in TOGETHER}
        again = each_of(compressor, like)
        return {via: (result.mean, result.message.read_by(again)[0]) for via, result in results.items()}

    given = messages(seed, like, (N,))
    for world in (on_vmap, on_mesh):
        got = world(step, given)
        assert len({bits(mean) for means in got.values() for mean in means}) == 1
    if name in ("uneven", "bf16"):
        assert_near(got["ring"][0], mean_of_decoded(compressor, like, given, weights), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize("like", ["small", "none", "vector", "stack"])
@pytest.mark.parametrize("name", ["uneven", "natural", "dithering"])
def test_ladder_gives_bitwise_the_gathered_mean(name, like, seed):
    compressor, like = COMPRESSORS[name], LIKES[like]

    def step(message, way):
        results = {via: rw.send(via, compressor, like, message, way) for via in ("gather", "ladder")}
        return {via: (result.mean, jnp.float32(result.carried.sent_bytes)) for via, result in results.items()}

    for world in (on_vmap, on_mesh):
        got = world(step, messages(seed, like, (N,)))
        assert bits(got["gather"][0]) == bits(got["ladder"][0])
    agreed = 2 * (N - 1) / N * 4  # bytes, of the length; codes of entries that hardly differ in length save nothing
    assert got["ladder"][1] < got["gather"][1] + (0 if name == "uneven" else agreed + 1)


FEW = {"workers": [3], "algorithms": {"error_feedback(top_k)": jc.error_feedback(jc.top_k(0.05))}}
BY_DATA = {"ragged", "ladder"}  # whose bytes depend on the data, or are not those of a CPU
TRIED = [
    pytest.param(name, options, id=f"{name}-{'few' if options else 'all'}", marks=[pytest.mark.slow] * slow)
    for name in GATHERING
    for options in (FEW, {})
    for slow in [name == "ladder" or not options]
]


@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize(("name", "options"), TRIED)
def test_every_route_that_brings_payloads_obeys_the_laws_of_routes(name, options):
    laws = [law for law in jc.testing.ROUTE_LAWS if law != "sent" or name not in BY_DATA]
    assert jc.testing.check_route(ROUTES[name], laws=laws, **options) == tuple(laws)


def test_mean_is_that_of_vmap_and_of_a_mesh_without_types(seed):
    """Equal weights: bit for bit."""
    like, given = LIKES["small"], messages(seed, LIKES["small"], (N,))
    step = step_of("auto", uneven(COUNTS), like, link=SLOW)
    one, two, three = on_vmap(step, given), on_mesh(step, given), on_mesh(step, given, check_vma=False)
    assert bits(one) == bits(two) == bits(three)


# ------------------------------------------------------------------------------------------------
# What "auto" takes


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("compressor", "like", "link", "name"),
    [
        (identity(), "small", SLOW, "sum"),
        (natural(), "small", SLOW, "gather"),
        (natural(), "dense", SLOW, "sum"),
        (uneven(COUNTS), "vector", SLOW, "ring"),
        (uneven(COUNTS), "vector", Link(1.0, 1e6), "gather"),
        (uneven((9, 9, 9, 9)), "vector", SLOW, "gather"),
        (uneven(COUNTS), "stack", SLOW, "sum"),  # even ring would send more than an all-reduce of f32
    ],
    ids=["linear", "equal", "dense", "slow-link", "late-link", "equal-lengths", "stack"],
)
def test_auto_takes_the_fastest(compressor, like, link, name, seed, monkeypatch):
    monkeypatch.setattr(collectives, "has_ragged", lambda: False)
    chosen, like = [], LIKES[like]

    def step(message, way):
        result = rw.send("auto", compressor, like, message, way._replace(link=link))
        chosen.append(result.carried.route)
        return result.mean

    given = messages(seed, like, (N,))
    assert_near(
        on_vmap(step, given), mean_of_decoded(compressor, like, given), 1 if "natural" in str(compressor) else 1e-5
    )
    assert set(chosen) == {name}


LEVELS = {"host": Link(3e-6, 450e9, 8), "net": Link(2e-5, 12.5e9)}


@pytest.mark.parametrize(
    ("algorithm", "size", "link", "chosen"),
    [
        (jc.error_feedback(jc.block_scaled("int8")), 2**20, None, "two_shot"),
        (jc.error_feedback(jc.block_scaled("int8")), 2**20, LEVELS, "sum"),  # a quarter of the bytes, twice the time
        (jc.error_feedback(jc.block_scaled("int4")), 2**26, LEVELS | {"host": Link(3e-6, 450e9, 1)}, "two_shot"),
        (jc.error_feedback(jc.top_k(0.001)), 2**20, LEVELS, "gather"),
        (jc.direct(jc.identity()), 2**20, LEVELS, "sum"),
    ],
    ids=["one-link", "levels", "levels-of-one", "sparse", "dense"],
)
def test_auto_takes_the_faster_one_on_levels_of_links(algorithm, size, link, chosen):
    """Of 32 workers in hosts of eight: what leaves a host is less in a sum of f32 than in an all-to-all of int8."""
    options = {} if link is None else {"link": link}
    transform = jc.compressed_mean(algorithm, "data", **options)
    grads = jax.ShapeDtypeStruct((size,), jnp.float32)
    step = lambda grads: transform.update(grads, transform.init(grads))[0]
    program = jax.make_jaxpr(step, axis_env=[("data", 32)])(grads)
    kinds = {x.kind for x in collectives_in(program.jaxpr, joined=False) if x.operand_bytes > 4}
    of_route = {"sum": {"all_reduce"}, "gather": {"all_gather"}, "two_shot": {"all_to_all", "all_gather"}}
    assert kinds == of_route[chosen]


def test_levels_that_do_not_make_the_workers():
    transform = jc.compressed_mean(jc.direct(jc.identity()), "data", link=LEVELS | {"net": Link(1e-3, 1e6, 3)})
    with pytest.raises(ValueError, match="compressed_mean: link must have widths whose product is the 32 workers"):
        jax.make_jaxpr(lambda x: transform.update(x, transform.init(x))[0], axis_env=[("data", 32)])(jnp.ones(2000))
    with pytest.raises(ValueError, match="compressed_mean: link must map names without commas to links"):
        jc.compressed_mean(jc.direct(jc.identity()), "data", link={})


def test_gathering_padded_messages_warns(seed):
    step = step_of("gather", uneven(COUNTS), LIKES["vector"])
    with pytest.warns(UserWarning, match=r"2\.1\d times the mean"):
        on_vmap(step, messages(seed, LIKES["vector"], (N,)))


# ------------------------------------------------------------------------------------------------
# Registry and refusals


def test_registry():
    assert list(ROUTES) == ["sum", "gather", "concat", "ring", "ragged", "ladder", "two_shot"]
    assert ("auto", *ROUTES) == VIAS
    assert all(route_of(via).name == via for via in VIAS)
    given = Layout("leaf")
    assert [via for via in VIAS if route_of(via).layout is not None] == ["ladder", "two_shot"]
    assert route_of("two_shot").layout(given, 3) == Layout("chunks", chunks=3)
    with pytest.raises(ValueError, match=r"via must be one of 'auto', 'sum'.*; got 'fast'"):
        route_of("fast")


def test_refusals():
    assert "needs a linear compressor; natural is not. Use" in ROUTES["sum"].refuses(natural(), {})
    assert ROUTES["sum"].refuses(identity(), {}) is None
    two_shot = ROUTES["two_shot"].refuses
    assert two_shot(natural(), {"memory": "memory", "compressor": "compressor"}) is None
    assert "keeps a shift in step" in two_shot(natural(), {"inner": {"h": "shift"}})
    assert "needs a compressor of one array; got per_leaf(identity)" in two_shot(per_leaf(identity()), {})
    assert "has a plan for each" in two_shot(uneven(COUNTS), {})
    unknown = natural()._replace(spec=natural().spec._replace(omega=None, alpha=None))
    assert "known error bound" in two_shot(unknown, {})
    for via in ("auto", "gather", "concat", "ring", "ragged", "ladder"):
        assert route_of(via).refuses(uneven(COUNTS), {"h": "shift"}) is None


def test_ragged_is_refused_where_the_backend_has_none(seed, monkeypatch):
    monkeypatch.setattr(collectives, "has_ragged", lambda: False)
    with pytest.raises(ValueError, match='this backend has no ragged_all_to_all; use via="ring"'):
        on_vmap(step_of("ragged", uneven(COUNTS), LIKES["vector"]), messages(seed, LIKES["vector"], (N,)))


def test_lengths_of_another_number_of_workers_are_refused(seed):
    step = step_of("ring", uneven((40, 3))._replace(for_worker=None), LIKES["vector"])
    with pytest.raises(ValueError, match="lengths for 2 workers; the axis has 4"):
        on_vmap(step, messages(seed, LIKES["vector"], (N,)))


@pytest.mark.sampled
@pytest.mark.parametrize("via", ["auto", "gather", "sum", "concat", "ring", "ragged", "ladder"])
@pytest.mark.parametrize("size", [0, 1])
def test_tiny_messages(via, size, seed):
    given = messages(seed, rw.shape(size), (N,))
    got = on_vmap(step_of(via, identity(), rw.shape(size)), given)
    np.testing.assert_allclose(got, np.asarray(given).mean(0), atol=1e-6)


def test_one_worker(seed):
    given = messages(seed, LIKES["small"], (1,))
    for via in VIAS[:-1]:
        got = on_vmap(step_of(via, identity(), LIKES["small"]), given)
        assert_near(got, jax.tree.map(lambda a: a[0], given))


def test_rungs():
    assert rungs(10) == ()
    for words in (17, 1000, 10**6):
        steps = rungs(words)
        assert list(steps) == sorted(set(steps))
        assert steps[-1] < words
        assert all(b <= 2 * a for a, b in itertools.pairwise(steps))
        assert all(b <= 1.2 * a + 1 for a, b in itertools.pairwise(steps) if a > words / 16)


@pytest.mark.sampled
@pytest.mark.parametrize("like", ["vector", pytest.param("stack", marks=pytest.mark.slow), "small"])
def test_payloads_of_stacks_survive_their_codes(like, seed):
    """Group after group, a stack row by row."""
    compressor, like = natural() if like == "small" else uneven((7,)), LIKES[like]
    here = rw.round_of(compressor, like, jax.random.key(0))
    message = messages(seed, like, ())
    given = zip(
        here.compressors, (message,) if rw.is_bare(like) else message, here.start(rw.shapes_of(here)), strict=True
    )
    payload = tuple(jax.jit(c.compress)(jax.random.key(1), x, state)[0] for c, x, state in given)
    is_stack = [len(x.shape) > 1 for x in rw.shapes_of(here)]
    coded = jax.jit(lambda payload: encode_messages(payload, is_stack))(payload)
    assert coded.fits
    assert not np.any(coded.words[coded.used :])
    assert bits(jax.jit(lambda words: decode_messages(words, payload, is_stack))(coded.words)) == bits(payload)


# ------------------------------------------------------------------------------------------------
# 64-bit mode


@pytest.mark.sampled
@pytest.mark.parametrize("via", ["auto", "sum", "gather", "ring", "two_shot"])
@pytest.mark.parametrize("weights", [None, (0.1, 0.9)], ids=["equal", "weighted"])
def test_messages_in_double_precision_are_added_in_double_precision(via, weights, seed):
    with jax.enable_x64(True):
        like = rw.shape(2, 32, dtype=jnp.float64) if via == "two_shot" else rw.shape(64, dtype=jnp.float64)
        given = messages(seed, like, (2,))
        w = None if weights is None else jnp.asarray(weights, jnp.float64)
        got = on_vmap(step_of(via, identity(), like, weights=w), given)
        want = np.average(np.asarray(given), axis=0, weights=weights)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)


def test_narrow_payloads_of_double_messages_are_added_in_double_precision():
    """1/3 in bf16 and weights that f32 cannot hold."""
    with jax.enable_x64(True):
        like, w = rw.shape(8, dtype=jnp.float64), jnp.asarray([0.1, 0.9], jnp.float64)
        given = jnp.full((2, 8), 1 / 3, jnp.float64)
        got = on_vmap(step_of("sum", cast("bfloat16"), like, weights=w, exact=True), given)
        np.testing.assert_allclose(got, np.float64(jnp.bfloat16(1 / 3)), rtol=1e-15)
