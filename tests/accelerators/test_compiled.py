"""Every codec, algorithm, route and form of a step, compiled for four H100 and for four chips of a TPU v5e.

Products are exact, roundings stay, the ledger's bytes are those of the CPU, states are updated in place, and memory and
lines stay within `bounds.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators.bounds import BOUNDS, needs
from jaxprs import lost_roundings, traced
from laws import ROWS, D

import jaxcomp as jc
from experiments.compiled import all_cases, made, padding_on
from experiments.compiled.cases import ALGORITHMS, FORMS, ROUTES, TREE, update
from experiments.lib.targets import compiled, described, mesh_on, shapes_on
from jaxcomp.base import State, accumulate, for_worker, residual

CASES = all_cases()
TARGETS = ("h100", "v5e:2x2")
# What another case compiles as well: a codec that an algorithm uses, a route that "auto" takes. Alone with -m "" only.
WITHIN = {
    "identity": "direct(identity)",
    "cast": "direct(bf16)",
    "top_k": "error_feedback(top_k)",
    "sidco": "error_feedback(sidco)",
    "dithering": "direct(dithering)",
    "eden": "direct(eden)",
    "narrow": "error_feedback(narrow)",
    "skcompress": "error_feedback(skcompress)",
    "dagc": "error_feedback(dagc)",
    "chunked": "sparse_loco",
    "binned": "sparse_loco",
    "compose": "sparse_loco",
    "dct": "demo",
    "via=sum": "error_feedback(bf16)",
}


# Of codecs and algorithms, what is compiled for TPUs without -m "", too: one of each family.
ON_TPU = {"rand_k", "sign", "count_sketch", "precondition", "direct(identity)", "direct(dithering)", "power_sgd(4)"}
ON_TPU |= {"error_feedback(top_k)", "error_feedback(int4)", "diana(dithering)"}
SLOW_ON_TPU = {"via=ragged", "via=concat", "local_updates, streaming"}  # each 10 to 27 s
SLOW_ON_TPU |= {"value_and_grad, fsdp over the workers", "value_and_grad, data x fsdp"}
SLOW = {"via=ladder", "via=ring"}  # 10 to 29 s on each


def variant(target, name):
    # Those of one case run in one process, which compiles it for the CPU once.
    is_codec = not any(name.startswith(other) for other in ("via=", *ALGORITHMS, *FORMS))
    on_tpu = name in ON_TPU or not (is_codec or name in ALGORITHMS or name in SLOW_ON_TPU)
    rest = name in SLOW or WITHIN.get(name) in CASES or (target != "h100" and not on_tpu)
    marks = [pytest.mark.xdist_group(name)] + [pytest.mark.slow] * rest
    return pytest.param(target, name, id=f"{target}-{name}", marks=marks)


VARIANTS = [variant(target, name) for name in CASES for target in TARGETS]


@functools.cache
def devices(target):
    return described(target)


def products(stable):
    """Lines of StableHLO with a product of floats that says neither HIGHEST nor six products in bfloat16."""
    lines = [line for line in stable.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)\b", line)]
    floats = [line for line in lines if re.search(r"tensor<[\dx]*f(32|64)>", line)]
    exact = lambda line: line.count("HIGHEST") == 2 or "num_primitive_operations = 6" in line
    return [line.strip() for line in floats if not exact(line)]


def inexact(text):
    """Lines of a compiled program with a product of floats in less than their precision."""
    lines = [line for line in text.splitlines() if re.search(r"= f32\S* (dot|convolution)\(|__cublas\S*gemm", line)]
    full = re.compile(
        r'operand_precision=\{highest,highest\}|"operand_precision":\["HIGHEST","HIGHEST"\]|algorithm=dot_bf16_bf16_f32_x6'
    )
    return [line.strip() for line in lines if not full.search(line)]


@functools.cache
def on_cpu(name):
    """What it sends is made before LLVM has anything to optimize."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return made(CASES[name], jax.devices("cpu"))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(("target", "name"), VARIANTS)
def test_a_case_compiles_to_what_the_cpu_sends(target, name):
    needs(target)
    case = CASES[name]
    got = made(case, devices(target))
    program = got.program
    assert not products(program.stable)
    assert not inexact(program.text)
    assert not program.ledger.unknown
    assert name not in ALGORITHMS or "jc_exchange_" in program.text  # for profiles
    if got.mesh.size == 1:
        assert got.sent() == 0
    elif name != "via=ragged":  # which a CPU does not have
        cpu = on_cpu(name)
        assert cpu.sent() <= got.sent() <= cpu.sent(padding_on(target))  # of GPUs equal
    lines, on_gpu, on_tpu = BOUNDS[name]
    assert program.lines <= lines
    assert program.memory / 4 / case.entries <= (on_gpu if target == "h100" else on_tpu)
    if case.donated:
        state = got.args[1]
        held = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert program.aliased >= held * 0.99 - 4096


@pytest.mark.slow
@pytest.mark.parametrize("name", ["direct(dithering)", "error_feedback(sidco)", "error_feedback(int4)", "via=two_shot"])
def test_a_case_compiles_for_sixteen_chips(name):
    needs("v5e:4x4")
    algorithm, via = (ROUTES["two_shot"], "two_shot") if name == "via=two_shot" else (ALGORITHMS[name], "auto")
    case = update(name, algorithm, via)._replace(axes={"data": 16})
    assert made(case, devices("v5e:4x4")).sent() > 0


# ------------------------------------------------------------------------------------------------
# Roundings


NARROW = [
    "cast-bf16",
    "cast-f16",
    "cast-f16-unscaled",
    "cast-e4m3",
    "cast-e4m3b11fnuz",
    "cast-e5m2",
    "compose-top_k-bf16",
]
NARROW += ["narrow-top_k", "sidco-pareto", "compose-chunked-bf16", "block_scaled-int4-nearest", "block_scaled-mxfp8"]
ROUNDS = re.compile(r"reduce-precision|round-nearest-even")
OF = {row.name: row for row in ROWS}


def one_device(target, function, *like):
    mesh = mesh_on(devices(target), {"x": 1})
    return compiled(function, *(shapes_on(mesh, x) for x in like))


def parts_of(row):
    """x, key -> state of one worker, payload."""

    def parts(x, key):
        shared_key, private_key = jax.random.split(key)
        state = row.compressor.init(shared_key, jax.ShapeDtypeStruct(x.shape, x.dtype))
        mine = State(state.local, for_worker(row.compressor, state.shared, 0))
        return state, mine, row.compressor.compress(private_key, x, mine)[0]

    return parts


def left_by(row):
    """x, key -> what a message does not say."""

    def left(x, key):
        _, mine, payload = parts_of(row)(x, key)
        return residual(row.compressor, x, payload, mine.shared)

    return left


X, KEY = jax.ShapeDtypeStruct((D,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NARROW)
def test_what_a_rounding_lost_is_remembered(target, name):
    """Of a residual alone, in whose program nothing else could hold the rounding."""
    needs(target)
    assert ROUNDS.search(one_device(target, left_by(OF[name]), X, KEY).text)
    assert not lost_roundings(traced(left_by(OF[name]), X, KEY))


@pytest.mark.parametrize("name", ["block_scaled-int4-nearest", "block_scaled-mxfp8"])
def test_what_a_rounding_lost_is_remembered_where_codes_fill_the_lanes(name):
    needs("v5e:2x2")
    whole_lanes = jax.ShapeDtypeStruct((32 * 1024,), jnp.float32)
    assert ROUNDS.search(one_device("v5e:2x2", left_by(OF[name]), whole_lanes, KEY).text)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["narrow-top_k", "cast-bf16"])
def test_what_is_added_up_was_rounded(target, name):
    """`test_accumulate_is_weighted_sum_of_decompress`, which failed on a GPU for narrow-top_k."""
    needs(target)
    row = OF[name]

    def total(x, key):
        state, _, payload = parts_of(row)(x, key)
        return accumulate(row.compressor, X, jax.tree.map(lambda a: a[None], payload), None, state.shared)

    assert ROUNDS.search(one_device(target, total, X, KEY).text)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["precondition-bernoulli", "precondition-natural", "precondition-dithering"])
def test_roots_are_multiplied_in_full_precision(target, name):
    """`test_vmap_equals_loop`, which failed on a GPU for precondition-bernoulli: several vectors at once."""
    needs(target)
    row = OF[name]

    def both(x, key):
        _, mine, payload = parts_of(row)(x, key)
        return payload, row.compressor.decompress(payload, mine.shared, X)

    rows = jax.ShapeDtypeStruct((8, D), jnp.float32)
    program = one_device(target, jax.vmap(both, in_axes=(0, None)), rows, KEY)
    assert "dot_general" in program.stable
    assert not products(program.stable)
    assert not inexact(program.text)


@pytest.mark.parametrize("target", TARGETS)
def test_the_branch_is_that_of_the_devices(target):
    """Compiled in a process whose own devices are CPUs: loops of one step and false conditions are for those alone."""
    needs(target)
    case = update("", jc.error_feedback(jc.cast("bfloat16")))
    here, there = (made(case, where).program.stable for where in (jax.devices("cpu"), devices(target)))
    assert "stablehlo.while" in here
    assert "stablehlo.while" not in there
    assert sum(x.size for x in jax.tree.leaves(TREE)) == case.entries
