"""How things were made: descriptions by which processes compare them, and algorithms from plain data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp.factories import described, factory, options_in

EF = {"name": "error_feedback", "compressor": {"name": "top_k", "ratio": 0.01}, "decay": 0.9}
CONFIGS = {
    "nested": (EF, "error_feedback(compressor=top_k(ratio=0.01), decay=0.9)"),
    "string": ("error_feedback(top_k(0.01), decay=0.9)", "error_feedback(compressor=top_k(ratio=0.01), decay=0.9)"),
    "front door": ("jc.diana(jc.dithering(7, norm='inf'))", "diana(compressor=dithering(levels=7, norm='inf'))"),
    "string inside": (
        {"name": "direct", "compressor": "dithering(bits=4, block_size=64)"},
        "direct(compressor=dithering(bits=4, block_size=64))",
    ),
    "parts": (
        {"name": "by_path", "parts": {"norm|bias": {"name": "direct", "compressor": "identity()"}, ".*": EF}},
        "by_path(parts={'norm|bias': direct(compressor=identity()), "
        "'.*': error_feedback(compressor=top_k(ratio=0.01), decay=0.9)})",
    ),
    "parts in a string": (
        "by_path({'b': direct(identity), '.*': power_sgd(2)})",
        "by_path(parts={'b': direct(compressor=identity()), '.*': power_sgd(rank=2)})",
    ),
    "lists": ("dagc([3, 0, 9, 1], 0.1)", "dagc(volumes=[3, 0, 9, 1], mean_ratio=0.1)"),
    "schedule": (
        {"name": "top_k", "ratio": {"name": "warm_up", "ratios": [0.25, 0.01], "rounds": 10}},
        "top_k(ratio=a schedule with [0.25, 0.25, 0.01, 0.01, 0.01, 0.01] at rounds [0, 1, 10, 100, 1000, 10000])",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_from_plain_data_and_back(name):
    config, text = CONFIGS[name]
    made = jc.from_config(config)
    assert described(made) == text
    if "schedule" not in text:
        assert described(jc.from_config(text)) == text


def without(name, **changes):
    return {key: value for key, value in {**EF, **changes}.items() if key != name}


WRONG = [
    ({"compressor": {}}, TypeError, 'config must be a mapping with "name", or a string'),
    (3, TypeError, 'config must be a mapping with "name", or a string'),
    ("warm_up([0.1], 2)", TypeError, "config must describe a compressor or an algorithm"),
    ("top_k(0.1", ValueError, "config must be a call like top_k"),
    ("top_k(1 + x)", ValueError, r"config\[0\] must be a number, a string or a call; got 1 \+ x"),
    ("error_feedback(topk(0.1))", ValueError, r"config\[0\] has the unknown name 'topk'; did you mean 'top_k'\?"),
    (
        without("", compressor={"name": "top_k", "rato": 0.1}),
        ValueError,
        r"config\['compressor'\] has the unknown option 'rato'; did you mean 'ratio'\?; top_k takes ratio, k, peak",
    ),
    (
        without("", compressor={"name": "top_k", "ratio": 2}),
        ValueError,
        r"config\['compressor'\]: top_k: ratio must be in \(0, 1\].*; got the integer 2",
    ),
    (without("compressor"), TypeError, r"config: .*missing 1 required positional argument: 'compressor'"),
    (
        {"name": "by_path", "parts": {".*": {"name": "diana", "compressor": "top_k(0.1)"}}},
        ValueError,
        r"config\['parts'\]\['\.\*'\]: diana",
    ),
]


@pytest.mark.parametrize(("config", "error", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_errors_name_the_key(config, error, said):
    with pytest.raises(error, match=f"from_config: .*{said}"):
        jc.from_config(config)


def test_an_own_factory_is_known_by_its_name():
    @factory
    def own_tenth(share=0.1):
        return jc.top_k(share)

    assert described(jc.error_feedback(own_tenth(0.2))) == "error_feedback(compressor=own_tenth(share=0.2))"
    assert described(jc.from_config("direct(own_tenth)")) == "direct(compressor=own_tenth())"
    assert described(own_tenth(0.1)) == "own_tenth()"  # the default


def test_equal_options_have_equal_descriptions_and_others_have_others():
    steps = np.linspace(0.1, 0.5, 300)
    pairs = [
        (lambda: jc.dithering(steps=steps), lambda: jc.dithering(steps=np.where(steps > 0.4, 0.4, steps))),
        (lambda: jc.top_k(jc.warm_up([0.2, 0.1], 10)), lambda: jc.top_k(jc.warm_up([0.2, 0.1], 200))),
        (
            lambda: jc.precondition(jc.natural(), jc.smoothness.diagonal_of(steps)),
            lambda: jc.precondition(jc.natural(), jc.smoothness.diagonal_of(steps + 1)),
        ),
        (lambda: jc.dagc([1, 2], 0.1), lambda: jc.dagc([1, 2], 0.1, sparsifier=jc.sidco)),
        (lambda: jc.cast("bfloat16"), lambda: jc.cast("float16")),
    ]
    for one, other in pairs:
        assert described(one()) == described(one())
        assert described(one()) != described(other())
        assert options_in("compressor", one()) != options_in("compressor", other())
    assert described(jc.cast(jnp.bfloat16)) == described(jc.cast("bfloat16"))
    assert described(jc.error_feedback(jc.top_k(0.1), decay=1)) == described(jc.error_feedback(jc.top_k(0.1)))


def test_every_factory_of_the_front_door_says_how_it_was_made():
    """So that none that is added is left out."""
    others = {"roundtrip", "refresh", "set_amounts", "by_leaf"}
    for module in (jc, jc.methods, jc.contrib):
        for name in module.__all__:
            value = getattr(module, name)
            where = getattr(value, "__module__", "") or ""
            if callable(value) and where.startswith(("jaxcomp.algorithms", "jaxcomp.compressors", "jaxcomp.contrib")):
                assert name in others or hasattr(value, "__wrapped__"), f"{name} needs @factory"


def test_bits_of_dithering():
    assert jc.dithering(bits=4).spec.name == jc.dithering(7).spec.name
    x, key = jnp.linspace(-1, 1, 1000), jax.random.key(0)
    for bits in (2, 4, 8, 16):
        _, payload = jax.eval_shape(functools.partial(jc.roundtrip, jc.dithering(bits=bits)), x, key=key)
        assert payload.words.shape[0] == bits
    for wrong in ({"bits": 1}, {"bits": 17}, {"bits": 4, "levels": 7}, {"bits": 4.5}, {"bits": True}):
        with pytest.raises(
            ValueError, match=r"dithering: bits must be an integer in 2 \.\. 16, in place of levels; got"
        ):
            jc.dithering(**wrong)


def test_flax_saves_and_restores_a_state():
    serialization = pytest.importorskip("flax.serialization")
    jc.state.register_flax()
    params = {"b": jnp.zeros(5), "w": jnp.ones((40, 50))}
    grad_fn = jc.value_and_grad(lambda p, x: jnp.mean(p["w"] ** 2) * jnp.mean(x), jc.error_feedback(jc.top_k(0.1)))
    fresh = grad_fn.init(params)
    _, _, state = jax.jit(grad_fn)(params, fresh, jnp.ones((4, 1)))
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(restored.exchange.local.algorithm.memory[-1])
