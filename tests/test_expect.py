"""Contracts on bytes: wrong programs break them, with a message that says where, and their mended forms keep them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ledger import UNKNOWN, with_instruction
from worlds import mesh_of

import jaxcomp as jc
from jaxcomp.expect import parse
from jaxcomp.ledger import read

GRID, LINE = mesh_of((2, 2)), mesh_of(kind=AxisType.Explicit)
CUT = P("data")


def shaped(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


# ------------------------------------------------------------------------------------------------
# Five wrong programs, and the same mended


def unreduced(is_tagged):
    """Each worker's part of the gradient, for a method that compresses it; without the tag JAX adds the parts up."""

    def step(w, x):
        w = jax.reshard(w, NamedSharding(LINE, P(reduced={"data"}) if is_tagged else P()))
        grads = jax.grad(loss)(w, x)
        spec = jax.typeof(grads).sharding.spec
        rows = lambda g: g[None]
        return jax.shard_map(rows, mesh=LINE, in_specs=(spec,), out_specs=P("data"), check_vma=False)(grads)

    return step, (shaped(LINE, P(), 64, 32), shaped(LINE, CUT, 8, 64)), LINE, {"data": "<= 1 kB"}


def narrow(is_moved_as_words):
    """A gather of parameters in bf16, which XLA for CPU widens to f32, whatever one asks for."""

    def gathered(w):
        if is_moved_as_words:
            words = lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16)
            return lax.bitcast_convert_type(lax.all_gather(words, "data", tiled=True), jnp.bfloat16)
        return lax.all_gather(w.astype(jnp.bfloat16), "data", tiled=True)

    step = jax.shard_map(gathered, mesh=GRID, in_specs=CUT, out_specs=P(), check_vma=False)
    return step, (shaped(GRID, CUT, 64, 32),), GRID, {"data": {"f32": "none", "all-gather": "<= 2048 B"}}


def gathered(is_kept_cut):
    """A layer that is cut over "model"; a constraint too many brings the whole of it to each device."""

    def step(w, x):
        w = w if is_kept_cut else lax.with_sharding_constraint(w, NamedSharding(GRID, P()))
        return x @ w

    args = shaped(GRID, P(None, "model"), 64, 32), shaped(GRID, CUT, 8, 64)
    return jax.jit(step, out_shardings=NamedSharding(GRID, P("data", "model"))), args, GRID, {"all_gather": "none"}


def accumulated(is_summed_once):
    """Micro-batches whose gradients are exchanged one by one."""

    def grads(w, x):
        mine = lax.pcast(w, "data", to="varying")
        one = lambda total, part: total + jax.grad(loss)(mine if is_summed_once else w, part)
        zero = mine * 0 if is_summed_once else w * 0
        total = lax.fori_loop(0, 8, lambda i, total: one(total, x[i]), zero)
        return lax.psum(total, "data") if is_summed_once else total

    step = jax.shard_map(grads, mesh=GRID, in_specs=(P(), P(None, "data")), out_specs=P())
    args = shaped(GRID, P(), 64, 32), shaped(GRID, P(None, "data"), 8, 4, 64)
    return step, args, GRID, {"data": "<= 8 KiB", "rest": "none"}


def watched(is_silent):
    """A print of a number that was left in the step: the host is asked, and nobody counts what crosses."""

    def step(x):
        if not is_silent:
            jax.debug.callback(lambda mean: None, x.mean())
        return 2 * x

    return step, (shaped(GRID, P(), 8),), GRID, {"total": "<= 1 kB"}


WRONG = {
    unreduced: (r"data was promised '<= 1 kB', and 12.29 kB are sent", "all-reduce f32[32,64] over data", "reduced="),
    narrow: (
        r"data['f32'] was promised 'none', and 4,096 B",
        "all-gather f32[32,32] over data",
        "bitcast_convert_type",
    ),
    gathered: ("all_gather was promised 'none', and 4,096 B", "over model", "the whole of args[0] (float32[64, 32])"),
    accumulated: ("data was promised '<= 8 KiB', and 65.54 kB", "8 times", "exchange once behind it"),
    watched: ("communicates in 1 ways that the ledger does not know", "callback", 'unknown="any"'),
}


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_a_wrong_program_breaks_its_promise(program):
    step, args, mesh, promises = program(False)
    with pytest.raises(AssertionError) as caught:
        jc.expect(step, *args, mesh=mesh, **promises)
    for part in WRONG[program]:
        assert part in str(caught.value)
    assert f"at {__file__}:" in str(caught.value)
    if program is watched:
        jc.expect(step, *args, mesh=mesh, unknown="<= 4 B")


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_its_mended_form_keeps_it(program):
    step, args, mesh, promises = program(True)
    assert isinstance(jc.expect(step, *args, mesh=mesh, **promises), jc.Ledger)


# ------------------------------------------------------------------------------------------------
# Beside another program, and what there is no other way to see


def summed(*axes):
    fn = lambda x: sum(lax.psum(x, axis) for axis in axes)
    return jax.shard_map(fn, mesh=GRID, in_specs=P(), out_specs=P(), check_vma=False), shaped(GRID, P(), 1000)


def test_unchanged_beside_another_program():
    both, x = summed("data", "model")
    one, _ = summed("data")
    jc.expect(both, x, against=both, data="unchanged", model="unchanged")
    jc.expect(both, x, against=jc.ledger(both, x), total="<= 1 x", data={"all-reduce": "unchanged"})
    with pytest.raises(AssertionError, match=r"model was promised 'unchanged', and 4,000 B are sent, beside 0 B"):
        jc.expect(both, x, against=one, data="unchanged", model="unchanged")
    with pytest.raises(AssertionError, match=r"total was promised '<= 1.5 x', and 8,000 B are sent, beside 6,000 B"):
        jc.expect(both, x, against=one, total="<= 1.5 x")
    with pytest.raises(ValueError, match=r"model='unchanged' needs against="):
        jc.expect(both, x, model="unchanged")


def test_of_several_the_one_that_breaks_it_is_named():
    both, x = summed("data", "model")
    with pytest.raises(AssertionError, match=r"Without all-reduce f32\[1000\] the promise would be kept"):
        jc.expect(both, x, total="<= 4 kB")
    with pytest.raises(AssertionError, match="may have found it to be of no use"):
        jc.expect(lambda x: x, x, data="> 0 B")


def test_what_runs_nobody_knows_how_often_keeps_no_upper_limit():
    loop = lambda x: lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: lax.psum(x, "data"), x)
    step = jax.shard_map(loop, mesh=GRID, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(AssertionError, match="at least 4,000 B are sent"):
        jc.expect(step, shaped(GRID, P(), 1000), data="<= 1 MB")


@pytest.mark.parametrize("instruction", [next(iter(UNKNOWN)), "neighbour-exchange(%x)", "collective-reduce(%x)"])
def test_what_the_ledger_does_not_know_breaks_every_promise(instruction):
    with pytest.raises(AssertionError, match="that the ledger does not know"):
        jc.expect(read(with_instruction(instruction)), total="<= 1 TB")


def test_a_quantized_all_reduce_is_named():
    (row,) = read(with_instruction("collective-reduce(%x), replica_groups={{0,1,2,3}}")).rows
    assert row.op == "unknown: collective-reduce"


# ------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize(
    ("text", "compare", "amount"),
    [
        ("<= 1 MB", "<=", 1e6),
        ("<20kB", "<", 2e4),
        ("== 5120 B", "==", 5120),
        ("<= 1.5 MiB", "<=", 1.5 * 2**20),
        ("none", "==", 0),
    ],
)
def test_limits(text, compare, amount):
    assert parse("data", text)[1:3] == (compare, amount)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<= 1 KB", r"got '<= 1 KB'; did you mean kB\?"),
        ("<= 1 mb", r"did you mean MB\?"),
        ("1 MB", "must be <=, <, ==, >= or >, a number and one of B, kB"),
        ("<= 1", "got '<= 1'"),
        ("<= -1 MB", "got '<= -1 MB'"),
        ("<= 1 Mbit", "got '<= 1 Mbit'"),
        ("=< 1 MB", "got '=< 1 MB'"),
        ("", "got ''"),
    ],
)
def test_what_is_no_limit_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse("data", text)
    with pytest.raises(TypeError, match='must be a text like "<= 1 MB"'):
        parse("data", 1000)


def test_names_that_are_none_are_refused():
    step, x = summed("data")
    with pytest.raises(ValueError, match=r"dta is none of the axes of the mesh \(data, model\), kinds \(all_gather"):
        jc.expect(step, x, dta="none")
    with pytest.raises(ValueError, match="there is no mesh: give mesh="):
        jc.expect(jc.ledger(step, x), data="none")
