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
from laws import ROWS, D
from worlds import AXIS, mesh_of

import jaxcomp as jc
from jaxcomp.backend import platform
from jaxcomp.base import State, accumulate, for_worker, residual, wide_like
from jaxcomp.exchange.routes import VIAS
from jaxcomp.floats import rounded_to, stored

N = 4
KEY = jax.eval_shape(lambda: jax.random.key(0))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# ------------------------------------------------------------------------------------------------
# The analysis finds what it is for


def test_a_rounding_that_a_compiler_may_remove_is_found():
    kept = lambda x: x - rounded_to(x, jnp.bfloat16).astype(x.dtype)
    lost = lambda x: x - x.astype(jnp.bfloat16).astype(x.dtype)
    moved = lambda x: (
        x - jax.lax.map(lambda y: y[::-1], x.astype(jnp.float16).reshape(2, -1)).reshape(-1).astype(x.dtype)
    )
    branch = lambda x: jax.lax.cond(x[0] > 0, lambda y: y.astype(jnp.bfloat16), jnp.zeros_like, x).astype(x.dtype)
    words = lambda x: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)[1:], jnp.bfloat16
    ).astype(x.dtype)
    assert not lost_roundings(traced(kept, shape(8)))
    for function in (lost, moved, words):
        assert len(lost_roundings(traced(function, shape(8)))) == 1
    with pytest.raises(TypeError):  # of branches with other types
        traced(branch, shape(8))


def test_a_sum_that_a_compiler_may_round_later_is_found():
    late = lambda x, y: (x + y).astype(jnp.float32) - 1
    now = lambda x, y: stored(x + y).astype(jnp.float32) - 1
    both = shape(8, dtype=jnp.bfloat16), shape(8, dtype=jnp.bfloat16)
    assert len(lost_roundings(traced(late, *both), arithmetic=True)) == 1
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


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_codec_keeps_its_roundings_and_products(row):
    for dtype in DTYPES:
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_keeps_its_roundings_and_products_by_every_route(name):
    carried = 0
    for via in VIAS:
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
    return traced(lambda grads, state: step(grads, state), params, state)


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
        mean = lambda x: widened(jc.pmean(x, AXIS, wire=WIRES[wire], key=jax.random.key(0)))
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
        described = jax.sharding.AbstractMesh((2,), (AXIS,), abstract_device=device)
        jax.eval_shape(jax.shard_map(body, mesh=described, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)), shape(2))
    with jax.default_device(jax.devices("cpu")[0]):
        seen.append(platform())
    assert seen == ["cpu", "gpu", "tpu", "cpu"]
    assert platform(mesh) == "cpu"


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
