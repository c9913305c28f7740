"""What is rounded, and how exactly products are taken, in the programs that we trace: the same on every backend.

No compiler of an accelerator is needed: these laws hold in the jaxpr. What compilers make of it stands in
`tests/accelerators`.
"""

import ast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jaxprs import equations, imprecise_products, lost_roundings, traced
from jitted import traced_for
from laws import ROWS, D
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.arrays import bounded, rounded_to, stored, wide_like
from jaxcomp.backend import platform
from jaxcomp.base import State, accumulate, for_worker, residual
from jaxcomp.exchange.routes import VIAS

N = 4
KEY = jax.eval_shape(lambda: jax.random.key(0))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# ------------------------------------------------------------------------------------------------
# The analysis finds what it is for


BF16, F16, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2


def words_of(x):
    return jax.lax.bitcast_convert_type(x.astype(BF16), jnp.uint16)


LOST = {
    "back at once": lambda x: x.astype(BF16).astype(x.dtype),
    "moved in a loop": lambda x: (
        jax.lax.map(lambda y: y[::-1], x.astype(F16).reshape(2, -1)).reshape(-1).astype(x.dtype)
    ),
    "one of two": lambda x: jax.lax.cond(x[0] > 0, lambda y: y.astype(BF16), lambda y: y.astype(BF16), x).astype(
        x.dtype
    ),
    "as words": lambda x: jax.lax.bitcast_convert_type(words_of(x)[1:] ^ jnp.uint16(0), BF16).astype(x.dtype),
    "f16 by bf16": lambda x: x.astype(F16).astype(BF16).astype(F16).astype(x.dtype),
    "bf16 by f16": lambda x: rounded_to(x, BF16).astype(F16).astype(x.dtype),
    "e4m3 by e5m2": lambda x: rounded_to(x, E4M3).astype(E5M2).astype(E4M3),
    "in a condition": lambda x: jax.lax.while_loop(
        lambda y: jnp.sum(y - y.astype(BF16).astype(y.dtype)) > 0, lambda y: y + 1, x
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_rounding_that_a_compiler_may_remove_is_found(name):
    assert lost_roundings(traced(LOST[name], shape(8)))


def test_a_rounding_that_stays_is_none():
    kept = lambda x: x - rounded_to(x, BF16).astype(x.dtype)
    through = lambda x: rounded_to(rounded_to(x, F16), BF16).astype(x.dtype)
    for function in (kept, through, jax.grad(lambda x: jnp.sum(through(x)))):
        assert not lost_roundings(traced(function, shape(8)))


def test_a_sum_that_a_compiler_may_round_later_is_found():
    for late in (lambda x, y: (x + y).astype(jnp.float32) - 1, lambda x, y: jnp.tanh(x) * y + y):
        assert lost_roundings(traced(late, shape(8, dtype=BF16), shape(8, dtype=BF16)), arithmetic=True)
    now = lambda x, y: stored(x + y).astype(jnp.float32) - 1
    both = shape(8, dtype=jnp.bfloat16), shape(8, dtype=jnp.bfloat16)
    assert not lost_roundings(traced(now, *both), arithmetic=True)


def test_a_product_without_a_precision_is_found():
    plain, exact = (lambda a, b, how=how: jnp.matmul(a, b, precision=how) for how in (None, "highest"))
    assert len(imprecise_products(traced(plain, shape(3, 3), shape(3)))) == 1
    assert not imprecise_products(traced(exact, shape(3, 3), shape(3)))


# ------------------------------------------------------------------------------------------------
# Rounding itself

KINDS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]
KINDS += ["float8_e5m2fnuz", "float8_e4m3", "float8_e3m4"]


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_the_type(kind, seed):
    """Against `ml_dtypes`, for random bits and magnitudes, at the ends of the type, among its subnormal numbers."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(kind)
    info = jnp.finfo(dtype)
    ends = float(info.max) * np.array([1, 1 + 2.0**-12, 1.03, 1.07, 1.2, 2])
    tiny = np.float32(info.smallest_subnormal) * np.array([0.25, 0.5, 0.501, 1, 1.5, 2.5, 3.5], np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate(
            [
                rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32),
                np.float32(rng.standard_normal(100_000) * np.exp(rng.uniform(-25, 14, 100_000))),
                np.float32(ends),
                np.float32(-ends),
                tiny,
                -tiny,
                np.float32([0, -0.0, np.inf, -np.inf, np.nan]),
            ]
        )
        want = x.astype(dtype).astype(np.float64)
    got = np.asarray(jax.jit(rounded_to, static_argnums=1)(x, kind)).astype(np.float64)
    np.testing.assert_array_equal(got, want)
    assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


def test_what_is_rounded_is_a_number_of_the_type_before_it_is_converted():
    for kind in ("bfloat16", "float16", "float8_e4m3fn"):
        inner = [e for e in equations(traced(lambda x: rounded_to(x, kind), shape(8))) if "name" in e.params]  # noqa: B023
        names = {each.primitive.name for each in equations(inner[0].params["jaxpr"].jaxpr)}
        assert names & {"reduce_precision", "round"}


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float8_e4m3fn"])
def test_the_derivative_is_that_of_a_conversion(kind):
    back = lambda x: rounded_to(x, kind).astype(jnp.float32)
    assert jax.grad(back)(1.3) == 1
    assert jax.jit(jax.vmap(jax.grad(back)))(jnp.arange(3.0)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_bounded_is_finite(kind):
    """Also where the largest number of the type is none of the source's: 65504 in bfloat16 is 65536."""
    largest = float(jnp.finfo(kind).max)
    for source in (jnp.float32, BF16, F16, E5M2):
        x = jnp.asarray([jnp.finfo(source).max, jnp.inf, -jnp.inf], source)
        got = np.asarray(bounded(x, kind)).astype(np.float64)
        beyond = min(largest, float(jnp.finfo(source).max))
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got[0], beyond, rtol=0.1)
        if largest <= float(jnp.finfo(source).max):
            assert got.tolist() == [largest, largest, -largest]


def test_a_cast_without_scales_saturates_in_the_type_it_sends():
    x = jnp.asarray([1, 65536], BF16)
    x_hat, payload = jc.roundtrip(jc.cast("float16", scaled=False), x, key=jax.random.key(0))
    assert payload.values.tolist() == [1, 65504]
    assert x_hat.tolist() == [1, 65536]


def test_wide_types_are_left_as_they_are():
    x = jnp.arange(4.0)
    assert rounded_to(x, jnp.float32) is x
    assert stored(x) is x
    assert rounded_to(jnp.bfloat16(1.5), jnp.float32).dtype == jnp.float32
    assert ml_dtypes.finfo(jnp.bfloat16).nmant == 7


# ------------------------------------------------------------------------------------------------
# Every codec, and every algorithm by every route


def of_codec(row):
    """x, key -> all that a worker computes from a message of a codec."""
    compressor = row.compressor

    def run(x, key):
        like = shape(*x.shape, dtype=x.dtype)
        shared_key, private_key = jax.random.split(key)
        state = compressor.init(shared_key, like)
        mine = State(state.local, for_worker(compressor, state.shared, 0))
        payload, _ = compressor.compress(private_key, x, mine)
        rows = jax.tree.map(lambda a: jnp.stack([a] * N), payload)
        total = accumulate(compressor, wide_like(like), rows, None, state.shared)
        x_hat = compressor.decompress(payload, mine.shared, like)
        return payload, x_hat, residual(compressor, x, payload, mine.shared), total

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_codec_keeps_its_roundings_and_products(row):
    """As it is traced for GPUs and TPUs, and in one dtype as for CPUs."""
    for where, dtype in (("gpu", jnp.float32), ("gpu", BF16), ("gpu", F16), ("cpu", BF16)):
        with traced_for(where):
            program = traced(of_codec(row), shape(D, dtype=dtype), KEY)
        assert not lost_roundings(program)
        assert dtype != jnp.float32 or not imprecise_products(program)


@pytest.mark.parametrize("name", ["cast-bf16", "dithering-7", "drive", "precondition-bernoulli", "sign"])
def test_a_codec_keeps_its_roundings_of_f64(name):
    (row,) = [row for row in ROWS if row.name == name]
    with jax.enable_x64(True):
        assert not lost_roundings(traced(of_codec(row), shape(D, dtype=jnp.float64), KEY))


ALGORITHMS = {
    "direct-bf16": jc.direct(jc.cast("bfloat16")),
    "direct-e4m3": jc.direct(jc.cast("float8_e4m3fn")),
    "ef-bf16": jc.error_feedback(jc.cast("bfloat16")),
    "ef-narrow": jc.error_feedback(jc.narrow(jc.sidco(0.05), values="bfloat16", indices="uint16")),
    "ef-int4": jc.error_feedback(jc.block_scaled("int4")),
    "diana": jc.diana(jc.dithering(7)),
    "ef21": jc.ef21(jc.top_k(0.05), momentum=0.5, plus=True),
    "ef_bv": jc.methods.ef_bv(jc.top_k(0.05), shift_step=0.5),
    "loco": jc.loco(jc.block_scaled("int4"), memory="int8"),
    "power_sgd": jc.power_sgd(2),
    "sparse_loco": jc.sparse_loco(),
    "majority_vote": jc.majority_vote(),
    "fetch_sgd": jc.fetch_sgd(0.05),
    "momentum": jc.contrib.momentum_correction(jc.top_k(0.05)),
    "by_path": jc.by_path({"w": jc.power_sgd(2), ".*": jc.error_feedback(jc.cast("bfloat16"))}),
}


def tree(dtype):
    return {"b": jnp.zeros(7, dtype), "s": jnp.zeros((), dtype), "w": jnp.zeros((400, 50), dtype)}


@pytest.mark.filterwarnings("ignore:compressed_mean. this exchange sends")
@pytest.mark.sampled
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_keeps_its_roundings_and_products_by_every_route(name):
    carried = 0
    for via in VIAS:
        if via == "ragged":  # vmap has no rule for it; see tests/accelerators
            continue
        for dtype in (jnp.float32, jnp.bfloat16) if via == "auto" else (jnp.bfloat16,):
            try:
                program = traced_update(ALGORITHMS[name], via, tree(dtype))
            except ValueError:  # a route that does not carry this message says so
                continue
            carried += 1
            assert not lost_roundings(program, arithmetic=True)
            assert not imprecise_products(program)
    assert carried >= 4


def traced_update(algorithm, via, params):
    tx = jc.compressed_mean(algorithm, AXIS, via=via)
    state, axes = jc.init_state(tx, params, N, AXIS)
    step = jax.vmap(tx.update, in_axes=(None, axes), out_axes=(None, axes), axis_name=AXIS, axis_size=N)
    with traced_for("gpu"):
        return traced(lambda grads, state: step(grads, state), params, state)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"mixing": 0.5}, {"fragments": 2, "delay": 1, "mixing": 0.5}, {"every": 1}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_local_updates_keep_their_roundings(dtype, options):
    """Parameters in 16 bits: the difference of a worker that has not moved is zero, not the rounding of the point."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jc.local_updates(optax.identity(), outer, jc.sparse_loco(), AXIS, **({"every": 4} | options))
    state, axes = jc.init_state(tx, tree(dtype), N, AXIS)
    rows = jax.tree.map(lambda x: shape(N, *x.shape, dtype=x.dtype), tree(dtype))
    step = jax.vmap(lambda g, s, p: tx.update(g, s, p), in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    assert not lost_roundings(traced(step, rows, state, rows), arithmetic=True)


WIRES = {"none": None, "bf16": "bf16", "f16": "f16", "e4m3": "float8_e4m3fn", "int4": jc.block_scaled("int4")}


@pytest.mark.parametrize("wire", WIRES)
def test_drop_in_collectives_keep_their_roundings(wire):
    def both(x, dtype):
        widened = lambda y: jnp.sum(y.astype(jnp.float32))
        mean = lambda x: widened(jc.collectives.pmean(x, AXIS, wire=WIRES[wire], key=jax.random.key(0)))
        part = lambda x: widened(jc.collectives.psum_scatter(x, AXIS, wire=WIRES[wire], key=jax.random.key(0)))
        return jax.vmap(lambda x: (jax.grad(mean)(x), jax.grad(part)(x)), axis_name=AXIS)(x)

    for dtype in DTYPES:
        assert not lost_roundings(traced(lambda x, dtype=dtype: both(x, dtype), shape(N, N, 100, dtype=dtype)))


def test_roots_of_smoothness_matrices_are_multiplied_exactly(seed):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((40, 12))
    options = {"dense": {}, "diagonal": {}, "low_rank": {"rank": 3}, "block": {"blocks": 3}}
    forms = [jc.smoothness.glm(features, form=form, l2=0.1, **more) for form, more in options.items()]
    for operator in forms:
        for apply in (type(operator).root, type(operator).inv_root):
            narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), operator)
            assert not imprecise_products(traced(jax.vmap(apply, (None, 0)), narrow, shape(3, 12)))


# ------------------------------------------------------------------------------------------------
# Which devices a program is for


def test_the_platform_is_that_of_the_mesh():
    seen = []

    def body(x):
        seen.append(platform())
        return x

    mesh = mesh_of(2)
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)), shape(2))
    for name in ("gpu", "tpu"):
        device = jax.sharding.AbstractDevice(device_kind="", num_cores=None, platform=name)
        automatic = (jax.sharding.AxisType.Auto,)
        described = jax.sharding.AbstractMesh((2,), (AXIS,), automatic, abstract_device=device)
        jax.eval_shape(jax.shard_map(body, mesh=described, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)), shape(2))
    with jax.default_device(jax.devices("cpu")[0]):
        seen.append(platform())
    assert seen == ["cpu", "gpu", "tpu", "cpu"]


def test_one_file_asks_for_the_backend(pytestconfig):
    package = pytestconfig.rootpath / "jaxcomp"
    files = [path for path in package.rglob("*.py") if "default_backend" in path.read_text()]
    assert [path.name for path in files] == ["backend.py"]


PRODUCTS = {"conv", "conv_general_dilated", "dot", "dot_general", "einsum", "inner", "matmul", "tensordot", "vdot"}


def test_every_product_in_the_library_says_how_exact_it_is(pytestconfig):
    """Also those that no case above traces. Products of NumPy arrays are in float64."""
    silent = []
    for path in (pytestconfig.rootpath / "jaxcomp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_jax = isinstance(node.func.value, ast.Name) and node.func.value.id in ("jnp", "lax")
            if of_jax and node.func.attr in PRODUCTS and "precision" not in {each.arg for each in node.keywords}:
                silent.append(f"{path.name}:{node.lineno}")
    assert not silent
