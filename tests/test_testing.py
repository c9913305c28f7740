"""`jc.testing`: what obeys the laws passes, and each law is broken by something that says so in words."""

import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import DEVELOPMENT, code_of

import jaxcomp as jc
from jaxcomp.arrays import bounded, finite
from jaxcomp.base import Spec, State, on_vectors
from jaxcomp.exchange.routes import GATHER, ROUTES
from jaxcomp.exchange.routes.route import gathering_route
from jaxcomp.payloads import Dense, Several
from jaxcomp.testing.compressors import FALSE_ALARM, KINDS, chance_above

pytestmark = pytest.mark.usefixtures("standard_promotion")
IDENTITY, TOP, RANDOM = jc.identity(), jc.top_k(0.1), jc.contract(jc.rand_k(0.1))


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
    "entrywise": (
        decoded(lambda values, like: values[::-1])._replace(compress=lambda key, x, state: (Dense(x[::-1]), ())),
        "from the numbers of its own tile of 1024 .*; of entries 0 to 1024, decoded without the others, 1024 of 1024",
    ),
}
BROKEN["entrywise"] = (spec(BROKEN["entrywise"][0], entrywise=True), BROKEN["entrywise"][1])


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
    nothing_to_say = {"top_k": {"unbiased", "omega", "linear", "new rounds"}, "flat": {"alpha"}}[name] | {"entrywise"}
    tried = tuple(law for law in jc.testing.LAWS if law not in nothing_to_say)
    assert jc.testing.check(compressor, draws=1024) == tried
    assert jc.testing.check(compressor, laws=nothing_to_say) == ()


# ------------------------------------------------------------------------------------------------
# Statistics


@functools.cache
def of_page(name):
    """What a page of `docs/development` defines."""
    names = {}
    first = re.split(r"\nimport optax|\nimport jaxcomp as jc", code_of(DEVELOPMENT / name))[0]
    exec(compile(first, name, "exec"), names)
    return names


def alternating():
    """The even entries in even rounds and the odd ones in odd rounds, of which the first is drawn: alpha = 1/2."""
    starts = lambda shared_key, like: State(shared=jax.random.bernoulli(shared_key).astype(jnp.int32))
    sent = lambda x, parity: jnp.where(jnp.arange(x.size, dtype=jnp.int32) % 2 == parity, x, 0)
    return on_vectors(
        init=starts,
        compress=lambda key, x, state: (Dense(sent(finite(x), state.shared)), state.local),
        decompress=lambda payload, shared, like: payload.values.astype(like.dtype),
        advance=lambda parity: 1 - parity,
        spec=Spec("alternating", omega=None, alpha=lambda d: 0.5, linear=True),
    )


def seldom_all():
    """All entries in one of 500 rounds, else none: alpha = 1/500. In most runs 64 draws agree, and send nothing."""
    return on_vectors(
        compress=lambda key, x, state: (Dense(jnp.where(jax.random.bernoulli(key, 0.002), finite(x), 0)), state.local),
        decompress=lambda payload, shared, like: payload.values.astype(like.dtype),
        spec=Spec("seldom_all", omega=None, alpha=lambda d: 0.002, linear=True),
    )


FEW_OUTCOMES = {
    "every_nth(2)": lambda: of_page("compressor.md")["every_nth"](2),
    "every_nth(3)": lambda: of_page("compressor.md")["every_nth"](3),
    "every_nth(10)": lambda: of_page("compressor.md")["every_nth"](10),
    "contract(every_nth(2))": lambda: jc.contract(of_page("compressor.md")["every_nth"](2)),
    "alternating": alternating,
    "seldom_all": seldom_all,
}


@pytest.mark.parametrize("name", FEW_OUTCOMES)
def test_few_outcomes_are_no_broken_bound(name):
    subject = jc.testing.Subject(FEW_OUTCOMES[name](), draws=512)
    for seed in range(16):
        for law in ("unbiased", "omega", "alpha"):
            jc.testing.LAWS[law](subject.at(seed))


@pytest.mark.parametrize(("bound", "factor"), [("omega", 0.5), ("alpha", 1.5)])
def test_a_bound_that_is_wrong_by_half_is_found_of_few_outcomes(bound, factor):
    compressor = FEW_OUTCOMES["every_nth(3)" if bound == "omega" else "contract(every_nth(2))"]()
    true = getattr(compressor.spec, bound)
    with pytest.raises(jc.testing.LawBroken, match=f"{bound}: .* a student vector gives .* over 1024 draws"):
        jc.testing.check(spec(compressor, **{bound: lambda d: factor * true(d)}), laws=[bound])


@pytest.mark.parametrize("draws", [64, 512, 1024])
@pytest.mark.parametrize("chance", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_two_outcomes_raise_no_more_false_alarms_than_are_promised(draws, chance):
    """The exact probability of an alarm of `omega` and `alpha`, whose mean is as large as it may be."""
    log_of = np.cumsum([0.0, *np.log(np.arange(1, draws + 1))])
    ones = np.arange(draws + 1)
    log_chance = log_of[-1] - log_of - log_of[::-1] + ones * np.log(chance) + ones[::-1] * np.log1p(-chance)
    values = (np.arange(draws) < ones[:, None]).astype(float)
    alarms = [one.mean() > chance + chance_above(one, FALSE_ALARM / len(KINDS)) for one in values]
    assert np.exp(log_chance)[alarms].sum() < FALSE_ALARM / len(KINDS)


def test_a_bound_is_exact_where_no_key_plays_a_part():
    with pytest.raises(jc.testing.LawBroken, match=r"with alpha = 0\.101; a flat vector gives 0\.9 whatever the key"):
        jc.testing.LAWS["alpha"](jc.testing.Subject(spec(TOP, alpha=lambda d: 0.101)), ["flat"])


# ------------------------------------------------------------------------------------------------
# Other laws of compressors


def clipped(compressor):
    """Clips before it is asked what is finite, so that an infinity counts as the largest number."""
    compress = lambda key, x, state: compressor.compress(key, jnp.clip(x, -1e3, 1e3), state)
    return compressor._replace(compress=compress)


@pytest.mark.parametrize("compressor", [jc.rand_k(0.1), jc.bernoulli(0.1)], ids=lambda compressor: compressor.spec.name)
def test_infinities_that_count_are_found_whatever_is_sent(compressor):
    right, wrong = (jc.testing.Subject(each) for each in (compressor, clipped(compressor)))
    for seed in range(12):
        jc.testing.LAWS["nonfinite"](right.at(seed))
        with pytest.raises(jc.testing.LawBroken, match=r"entries that are not finite \(inf\) count as zero"):
            jc.testing.LAWS["nonfinite"](wrong.at(seed))


def outside_of_jit(change):
    return decoded(lambda values, like: values if isinstance(values, jax.core.Tracer) else change(values))


def test_a_rounding_is_told_from_a_broken_payload():
    little, much = outside_of_jit(lambda x: x * (1 + 2.0**-18)), outside_of_jit(lambda x: 2 * x)
    cure = r"one rounding.*Make the product exact .* or add first: \(a \+ c\) \* b"
    rounding = rf"decoding it once more rounds otherwise: .* entries differ.*{cure}"
    with pytest.raises(jc.testing.LawBroken, match=f"the bytes bring back the same payload; {rounding}"):
        jc.testing.check(little, laws=["wire"])
    with pytest.raises(
        jc.testing.LawBroken, match=f"jit changes nothing but the last place; .* entries differ.*{cure}"
    ):
        jc.testing.check(little, laws=["jit"])
    with pytest.raises(jc.testing.LawBroken, match="the same payload; decompress makes something else") as error:
        jc.testing.check(much, laws=["wire", "jit"])
    assert "rounding" not in str(error.value)


def test_a_payload_has_its_bits_after_the_wire(monkeypatch):
    negative = IDENTITY._replace(compress=lambda key, x, state: (Dense(-jnp.zeros_like(x)), ()))
    monkeypatch.setattr(jc.wire, "decode", lambda data: Dense(np.zeros(300, np.float32)))
    with pytest.raises(jc.testing.LawBroken, match=r"in \.values the numbers are equal, and their bits differ"):
        jc.testing.check(negative, laws=["wire"])


@pytest.mark.parametrize("cure", ["power of two", "few bits", "add first"])
def test_what_is_said_of_roundings_is_a_cure(cure):
    """Levels between the least and the largest entry."""

    def compress(key, x, state):
        x = finite(x)
        least = jnp.min(x, initial=0)
        step = jnp.maximum((jnp.max(x, initial=0) - least) / 256, 2.0**-100)
        if cure == "power of two":
            step = jnp.exp2(jnp.ceil(jnp.log2(step)))
        elif cure == "few bits":
            step = step.astype(jnp.bfloat16).astype(jnp.float32)
        return Several((Dense(jnp.round((x - least) / step)), Dense(jnp.stack([least, step])))), state.local

    def decompress(payload, shared, like):
        level, (least, step) = payload.parts[0].values, payload.parts[1].values
        return ((least / step + level) * step if cure == "add first" else least + level * step).astype(like.dtype)

    levels = on_vectors(compress=compress, decompress=decompress, spec=Spec("levels", None, None, False))
    for seed in range(3):
        jc.testing.check(levels, laws=["wire"], seed=seed)


def test_what_gpus_decode_from_sections_is_held_to_its_tiles():
    halved = on_vectors(  # whose shorter array crosses as a whole
        compress=lambda key, x, state: (Dense(finite(x)[::2]), state.local),
        decompress=lambda p, shared, like: jnp.repeat(p.values.astype(like.dtype), 2)[: like.size],
        spec=Spec("halved", None, None, linear=True, entrywise=True),
    )
    for compressor in (jc.block_scaled("int4"), jc.dithering(7), jc.cast("float8_e4m3fn"), halved):
        assert jc.testing.check(compressor, laws=["entrywise"]) == ("entrywise",)
    fixed = jc.dithering(steps=np.full(300, 0.1))
    assert jc.testing.check(fixed, laws=["entrywise"]) == ()  # 300 entries are no tile
    summed = decoded(lambda values, like: jnp.cumsum(values))
    with pytest.raises(jc.testing.LawBroken, match="entries 2048 to 4096, decoded without the others"):
        jc.testing.check(spec(summed, entrywise=True), laws=["entrywise"])


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


def remembering(update, roles=None, compressor=TOP):
    init = lambda here, like: Memory(tuple(jnp.zeros(x.shape, x.dtype) for x in like), here.start(like))
    return jc.Algorithm(init, update, roles or {"memory": "memory", "compressor": "compressor"}, compressor)


def mutant(direction=lambda mean, g: mean, memory=lambda m, g: m):
    """Sends the gradients as they are, with something wrong in the direction, or in the memory."""

    def update(here, grads, state):
        sent = yield here.mean(grads, state.compressor)
        kept = jax.tree.map(memory, state.memory, grads)
        return jax.tree.map(direction, sent.mean, grads), Memory(kept, sent.states)

    return update


own_direction = mutant(jnp.add)  # each worker's own gradient, which differs
passes_nan = mutant(memory=jnp.add)
adds_up = mutant(memory=lambda m, g: m + finite(g))
upwards = mutant(lambda mean, g: -mean)
of_another_type = mutant(memory=lambda m, g: m.astype(jnp.float16))
not_finite = mutant(lambda mean, g: mean / 0)
# Twice the mean where an axis of a mesh is bound.
of_its_mesh = mutant(lambda mean, g: (1.0 + bool(jax.sharding.get_abstract_mesh().manual_axes)) * mean)


def drawn_on_the_host(here, grads, state):
    """A number of the host's, another one each time."""
    sent = yield here.mean(grads, state.compressor)
    number = jax.pure_callback(lambda: np.float32(next(HOST)), jax.ShapeDtypeStruct((), jnp.float32))
    return jax.tree.map(lambda x: x + number, sent.mean), Memory(state.memory, sent.states)


def raises(here, grads, state):
    raise RuntimeError("no such round")


def advances_no_state(here, grads, state):
    """So that all rounds draw the same."""
    message = jax.tree.map(jnp.add, state.memory, jax.tree.map(finite, grads))
    sent = yield here.mean(jax.tree.map(bounded, message), state.compressor)
    return sent.mean, Memory(sent.residual, state.compressor)


def adds_the_residual_with_the_wrong_sign(here, grads, state):
    message = jax.tree.map(jnp.subtract, jax.tree.map(finite, grads), state.memory)
    sent = yield here.mean(jax.tree.map(bounded, message), state.compressor)
    return sent.mean, Memory(sent.residual, sent.states)


def forgets_some_entries(here, grads, state):
    message = jax.tree.map(jnp.add, state.memory, jax.tree.map(finite, grads))
    sent = yield here.mean(jax.tree.map(bounded, message), state.compressor)
    return sent.mean, Memory(jax.tree.map(lambda e: e.at[-5:].set(0), sent.residual), sent.states)


HOST = itertools.count()
BAD = {
    "like gradients": (remembering(not_finite), "directions for float32 gradients are finite"),
    "replayed": (remembering(drawn_on_the_host), "a round can be replayed"),
    "worlds": (remembering(of_its_mesh), "shard_map gives what vmap gives; .* entries differ"),
    "shared": (remembering(own_direction), "directions are equal on all workers, bit for bit; .* differs"),
    "non-finite": (remembering(passes_nan), "memories after gradients with NaN and infinities are finite"),
    "largest": (remembering(adds_up), "fields of the state after such gradients are finite"),
    "descends": (remembering(upwards), "over 30 rounds their inner product is -"),
    "advanced": (
        remembering(advances_no_state, compressor=RANDOM),
        r"keep sent\.states; of contract\(rand_k\(0\.1\)\) in compressor\[1\] 1 of 1 entries differ",
    ),
    "conserves": (
        remembering(adds_the_residual_with_the_wrong_sign),
        "over 5 rounds the directions and the mean of the memories add up to the mean gradients .* entries differ",
    ),
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
    algorithm = jc.ef21(TOP) if name == "ef21" else of_page("algorithm.md")["averaged_feedback"](TOP)
    nothing_to_say = ("conserves", "advanced")  # top_k shares no state
    tried = tuple(law for law in jc.testing.ALGORITHM_LAWS if law not in nothing_to_say)
    assert jc.testing.check_algorithm(algorithm) == tried


@pytest.mark.parametrize("compressor", [TOP, RANDOM, jc.block_scaled("int4")], ids=lambda c: c.spec.name)
def test_what_remembers_the_rest_conserves_gradients(compressor):
    laws = ["advanced", "conserves"] if compressor is not TOP else None
    laws = jc.testing.check_algorithm(jc.error_feedback(compressor), conserves=True, laws=laws)
    assert "conserves" in laws
    assert ("advanced" in laws) == (compressor is RANDOM)


def test_memories_are_found_in_parts_and_inside_of_other_algorithms():
    parts = jc.by_path({"kernel": jc.error_feedback(RANDOM), ".*": jc.direct(IDENTITY)})
    assert jc.testing.check_algorithm(parts, laws=["advanced", "conserves"]) == ("advanced", "conserves")
    with pytest.raises(jc.testing.LawBroken, match=r"conserves: over 5 rounds"):
        jc.testing.check_algorithm(jc.direct(jc.rand_k(0.1)), laws=["conserves"])
    for asked in ({"conserves": True}, {"laws": ["conserves"]}):
        with pytest.raises(ValueError, match="conserves=True does not hold of memories in few bits"):
            jc.testing.check_algorithm(jc.error_feedback(TOP, memory="int8"), **asked)


# Of which the tests of one round, and those of shapes, see nothing.
MUTANTS = {
    "advanced": advances_no_state,
    "conserves, sign": adds_the_residual_with_the_wrong_sign,
    "conserves, some": forgets_some_entries,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_memory_is_found(name):
    laws = ["like gradients", "largest", "descends", "advanced", "conserves"]
    with pytest.raises(jc.testing.LawBroken) as error:
        jc.testing.check_algorithm(remembering(MUTANTS[name], compressor=RANDOM), laws=laws)
    assert error.value.laws == (name.partition(",")[0],)


def test_one_sentence_is_said_once():
    with pytest.raises(jc.testing.LawBroken) as error:
        jc.testing.check_algorithm(remembering(raises))
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  shared, like gradients, traced once, non-finite, ")
    assert lines[1].endswith("it raises RuntimeError: no such round")


def test_what_differs_between_workers_is_said_alone():
    """The others would only see that it cannot be returned as equal on all workers."""
    with pytest.raises(jc.testing.LawBroken) as error:
        jc.testing.check_algorithm(remembering(own_direction))
    assert error.value.laws == ("shared",)
    first, said, end = str(error.value).splitlines()
    assert first.endswith("breaks 1 of 1 laws")
    assert said.startswith("  shared: directions are equal on all workers, bit for bit; ")
    assert end == "  The other laws need 'shared', and were not tried"


def test_laws_that_do_not_apply_are_not_said_to_be_tried(monkeypatch):
    kept = remembering(adds_up, {"memory": "gradient", "compressor": "compressor"})
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    laws = jc.testing.check_algorithm(kept, laws=["worlds", "handed on", "advanced", "replayed"])
    assert laws == ("replayed",)
