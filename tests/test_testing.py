"""`jc.testing`: what obeys the laws passes, and each law is broken by something that says so in words."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import DEVELOPMENT, code_of

import jaxcomp as jc
from jaxcomp.base import State
from jaxcomp.exchange.routes import GATHER, ROUTES
from jaxcomp.exchange.routes.route import gathering_route
from jaxcomp.payloads import Dense

pytestmark = pytest.mark.usefixtures("standard_promotion")
IDENTITY, TOP = jc.identity(), jc.top_k(0.1)


def spec(compressor, **facts):
    return compressor._replace(spec=compressor.spec._replace(**facts))


def decoded(change):
    """The identity, which decodes something else."""
    plain = IDENTITY._replace(accumulate=None, entries=None)
    return plain._replace(decompress=lambda p, shared, like: change(p.values, like))


class Grows(NamedTuple):
    count: jax.Array


class Kept(NamedTuple):
    values: jax.Array
    length: int


@jax.custom_batching.custom_vmap
def doubled_where_mapped(x):
    return x


@doubled_where_mapped.def_vmap
def _(size, batched, x):
    return 2 * x, batched[0]


BROKEN = {
    "shapes": (
        decoded(lambda values, like: values.astype(jnp.float32).reshape(like.shape)),
        r"bfloat16\[300\] becomes float32\[300\]",
    ),
    "zeros": (decoded(lambda values, like: (values + 1).astype(like.dtype)), "300 of 300 entries differ"),
    "nonfinite": (
        decoded(lambda v, like: v)._replace(compress=lambda key, x, state: (Dense(x), ())),
        "with nan in the vector, C.x. is not finite",
    ),
    "unbiased": (spec(TOP, omega=lambda d: 9.0), "since spec.omega is not None; over 4096 draws entry .* is always"),
    "omega": (spec(jc.rand_k(0.1), omega=lambda d: 0.5), "with omega = 0.5; a student vector gives"),
    "alpha": (spec(TOP, alpha=lambda d: 0.9), "with alpha = 0.9; a student vector gives"),
    "residual": (spec(jc.cast("bfloat16"), selects=True), "some are split between what is sent and the residual"),
    "accumulate": (
        IDENTITY._replace(accumulate=lambda total, payloads, weights, shared: payloads.values.sum(0)),
        "accumulate adds the weighted messages",
    ),
    "linear": (spec(jc.sign(), linear=True), "payloads may be added on the way, since spec.linear"),
    "traced once": (
        IDENTITY._replace(
            init=lambda key, like: State(Grows(jnp.zeros((), jnp.int32))),
            compress=lambda key, x, state: (Dense(x), Grows(state.local.count + 1.0)),
        ),
        "before State.*int32.*after State.*float32",
    ),
    "new rounds": (jc.rand_k(0.1)._replace(advance=lambda shared: shared), "it gives the same message again"),
    "jit": (
        decoded(lambda values, like: values if isinstance(values, jax.core.Tracer) else 2 * values),
        "jit changes nothing but the last place; .* entries differ",
    ),
    "vmap": (decoded(lambda values, like: doubled_where_mapped(values)), "vmap gives what a loop gives; .* differ"),
    "tiny": (
        decoded(lambda values, like: values.reshape(like.shape) / (like.size > 3)),
        r"shape \(\) gives shape \(\) or is not finite",
    ),
    "payload": (
        IDENTITY._replace(compress=lambda key, x, state: (Kept(x, 7), ()), decompress=lambda p, *_: p.values),
        "a payload holds arrays alone; there is one of type int",
    ),
    "x64": (
        IDENTITY._replace(compress=lambda key, x, state: (Dense(x + jnp.asarray(np.zeros(x.size))), ())),
        r"the payload of an f32 vector is the same; got \['float64\[300\]'\]",
    ),
    "wire": (decoded(lambda values, like: values)._replace(compress=lambda key, x, state: ((x,), ())), "it raises"),
}


OF_ROUTES = {
    "gathered": (
        lambda parcels, way: (jax.tree.map(lambda a: jnp.roll(a, 1, 0), GATHER.gather(parcels, way)[0]), 0.0),
        "directions of error_feedback.top_k. among 3 workers are those of via=.gather., bit for bit; .* entries differ",
    ),
    "sent": (lambda parcels, way: (GATHER.gather(parcels, way)[0], 9.0), "a device sends .* among 3; the route says 9"),
}
OF_ROUTES["on devices"] = (OF_ROUTES["gathered"][0], "on 3 devices are those of")


@pytest.mark.parametrize("law", OF_ROUTES)
def test_a_broken_law_of_a_route_is_said_in_words(law):
    gather, said = OF_ROUTES[law]
    few = {"workers": [3], "algorithms": {"error_feedback(top_k)": jc.error_feedback(jc.top_k(0.05))}}
    with pytest.raises(jc.testing.LawBroken, match=rf"(?s)the route 'own' breaks 1 of 1 laws\n  {law}: .*{said}"):
        jc.testing.check_route(gathering_route("own", gather), laws=[law], **few)


def test_what_is_no_route_that_gathers_is_refused():
    with pytest.raises(TypeError, match=r"needs a jaxcomp\.exchange\.routes\.Route; got 'gather'"):
        jc.testing.check_route("gather")
    with pytest.raises(ValueError, match="'sum' does not bring the payloads"):
        jc.testing.check_route(ROUTES["sum"])


def test_each_law_is_broken_by_something():
    assert set(OF_ROUTES) == set(jc.testing.ROUTE_LAWS)
    assert set(BROKEN) == set(jc.testing.LAWS)
    assert set(BAD) == set(jc.testing.ALGORITHM_LAWS)


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_law_is_said_in_words(law):
    compressor, said = BROKEN[law]
    with pytest.raises(jc.testing.LawBroken, match=rf"(?s)breaks 1 of 1 laws\n  {law}: .*{said}") as error:
        jc.testing.check(compressor, laws=[law])
    assert error.value.laws == (law,)


@pytest.mark.parametrize("name", ["top_k", "flat"])
def test_what_obeys_passes_every_law(name):
    compressor = {"top_k": TOP, "flat": jc.flat(jc.rand_k(0.25))}[name]
    assert jc.testing.check(compressor, draws=1024) == tuple(jc.testing.LAWS)


# Of which some entries change so seldom that no draw shows it: their spread was taken for their error.
SELDOM = [jc.dithering(1), jc.natural(), jc.terngrad(), jc.rand_k(0.003), jc.bernoulli(0.01)]


@pytest.mark.parametrize("compressor", SELDOM, ids=lambda compressor: compressor.spec.name)
def test_rare_events_are_no_bias(compressor):
    for seed in range(3):
        assert jc.testing.check(compressor, laws=["unbiased"], draws=512, seed=seed) == ("unbiased",)


@pytest.mark.parametrize(("factor", "place"), [(0.9, slice(None)), (0.97, slice(None)), (0.0, 3)])
def test_a_bias_is_found_among_rare_events(factor, place):
    natural = jc.natural()
    less = lambda payload, shared, like: natural.decompress(payload, shared, like).at[place].mul(factor)
    with pytest.raises(jc.testing.LawBroken, match="unbiased"):
        jc.testing.check(natural._replace(decompress=less, accumulate=None), laws=["unbiased"])


def test_names_of_laws_and_kinds_of_arguments_are_checked():
    for call, error, said in (
        (lambda: jc.testing.check(TOP, laws=["zero"]), ValueError, "laws must be of shapes, jit, .*; got 'zero'"),
        (lambda: jc.testing.check(TOP, size=10), ValueError, "size must be at least 40; got 10"),
        (lambda: jc.testing.check(jc.top_k), TypeError, "the function top_k; call it first"),
        (lambda: jc.testing.check_algorithm(TOP), TypeError, "check_algorithm needs an algorithm; got the compressor"),
        (lambda: jc.testing.check_algorithm(jc.direct(TOP), workers=1), ValueError, "workers must be at least 2"),
    ):
        with pytest.raises(error, match=said):
            call()


# ------------------------------------------------------------------------------------------------
# Algorithms


class Memory(NamedTuple):
    memory: tuple
    compressor: tuple


def remembering(update, roles=None):
    init = lambda here, like: Memory(tuple(jnp.zeros(x.shape, x.dtype) for x in like), here.start(like))
    return jc.Algorithm(init, update, roles or {"memory": "memory", "compressor": "compressor"}, TOP)


def own_direction(here, grads, state):
    """Each worker's own gradient, which differs."""
    sent = yield here.mean(grads, state.compressor)
    return jax.tree.map(jnp.add, sent.mean, grads), Memory(state.memory, sent.states)


def passes_nan(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return sent.mean, Memory(jax.tree.map(jnp.add, state.memory, grads), sent.states)


def adds_up(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    finite = lambda m, g: m + jnp.where(jnp.isfinite(g), g, 0)
    return sent.mean, Memory(jax.tree.map(finite, state.memory, grads), sent.states)


def upwards(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return jax.tree.map(jnp.negative, sent.mean), Memory(state.memory, sent.states)


def of_another_type(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return sent.mean, Memory(jax.tree.map(lambda m: m.astype(jnp.float16), state.memory), sent.states)


def not_finite(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return jax.tree.map(lambda x: x / 0, sent.mean), Memory(state.memory, sent.states)


def drawn_on_the_host(here, grads, state):
    """A number of the host's, another one each time."""
    sent = yield here.mean(grads, state.compressor)
    number = jax.pure_callback(lambda: np.float32(next(HOST)), jax.ShapeDtypeStruct((), jnp.float32))
    return jax.tree.map(lambda x: x + number, sent.mean), Memory(state.memory, sent.states)


def of_its_mesh(here, grads, state):
    """Twice the mean where an axis of a mesh is bound."""
    sent = yield here.mean(grads, state.compressor)
    factor = 1.0 + bool(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.tree.map(lambda x: factor * x, sent.mean), Memory(state.memory, sent.states)


HOST = itertools.count()
BAD = {
    "like gradients": (remembering(not_finite), "directions for float32 gradients are finite"),
    "replayed": (remembering(drawn_on_the_host), "a round can be replayed"),
    "worlds": (remembering(of_its_mesh), "shard_map gives what vmap gives; .* entries differ"),
    "shared": (remembering(own_direction), "directions are equal on all workers, bit for bit; .* differs"),
    "non-finite": (remembering(passes_nan), "memories after gradients with NaN and infinities are finite"),
    "largest": (remembering(adds_up), "fields of the state after such gradients are finite"),
    "descends": (remembering(upwards), "over 30 rounds their inner product is -"),
    "traced once": (remembering(of_another_type), "before .*float32.*after .*float16"),
    "handed on": (
        remembering(upwards, {"memory": "shift", "compressor": "compressor"}),
        "memory has the role 'shift', and is no `State`",
    ),
}


@pytest.mark.parametrize("law", BAD)
def test_a_broken_law_of_an_algorithm_is_said_in_words(law):
    algorithm, said = BAD[law]
    with pytest.raises(jc.testing.LawBroken, match=rf"(?s)breaks 1 of 1 laws\n  {law}: .*{said}"):
        jc.testing.check_algorithm(algorithm, laws=[law])


@pytest.mark.parametrize("name", ["ef21", "page"])
def test_what_obeys_passes_every_law_of_algorithms(name):
    names = {}
    if name == "page":
        exec(compile(code_of(DEVELOPMENT / "algorithm.md").split("import optax")[0], "algorithm.md", "exec"), names)
    algorithm = jc.ef21(TOP) if name == "ef21" else names["averaged_feedback"](TOP)
    assert jc.testing.check_algorithm(algorithm) == tuple(jc.testing.ALGORITHM_LAWS)
