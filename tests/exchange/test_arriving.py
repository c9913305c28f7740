"""Long codes cross in sections on GPUs, while others are decoded: the directions are those of a whole message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import ROWS
from variants import variants
from worlds import at

import jaxcomp as jc
from jaxcomp import backend, backend_gpu
from jaxcomp.backend import LONG
from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.exchange import collectives
from jaxcomp.payloads import per_tile

WORKERS = 3
SHAPES = {
    "a": (7,),
    "b": (LONG // 512, 512),
    "c": (1030,),
    "d": (LONG + 1,),
    "e": (5,),
    "f": (2, LONG // 2),
    "g": (1500,),
}
MANY_SMALL = {"a": (LONG,), **{f"b{i}": (40_000,) for i in range(5)}, "c": (LONG,)}  # too many to be picked
CASES = {
    "int4": {"compressor": lambda: jc.block_scaled("int4")},
    "nvfp4, of two parts": {"compressor": lambda: jc.block_scaled("nvfp4")},
    "8 bits, by gather, weighted": {
        "compressor": lambda: jc.block_scaled("int8", rounding="stochastic", scale="float32"),
        "options": {"via": "gather", "weights": [1, 2, 3]},
    },
    "floats of 8 bits": {"compressor": lambda: jc.cast("float8_e4m3fn")},
    "scaled floats of 8 bits": {"compressor": lambda: jc.cast("float8_e4m3fn", scaled=True)},
    "without types, bf16": {"compressor": lambda: jc.block_scaled("int4"), "vma": False, "dtype": jnp.bfloat16},
    "f16, whose mean is asked for": {"compressor": lambda: jc.block_scaled("int4"), "dtype": jnp.float16, "once": True},
    "a shift, whose mean is asked for": {
        "method": jc.ef21,
        "compressor": lambda: jc.block_scaled("int4"),
        "once": True,
    },
    "direct": {"method": jc.direct, "compressor": lambda: jc.block_scaled("int8")},
    "signs": {"compressor": lambda: jc.sign(block_size=2**10), "once": True},
    "ternary": {"method": jc.direct, "compressor": lambda: jc.terngrad(blocks=50), "once": True},
    "words that are not in order": {"compressor": jc.natural, "once": True},
    "rotated, so that each entry takes a whole block": {
        "compressor": lambda: jc.rotate(jc.block_scaled("int4")),
        "shapes": {name: SHAPES[name] for name in ("a", "d", "f")},
        "once": True,
    },
    "nothing but empty leaves is small": {
        "compressor": lambda: jc.flat(jc.block_scaled("int4")),
        "shapes": {"a": (0,), "b": (2, LONG), "c": (LONG,), "d": (LONG,), "e": (0, 3)},
    },
    "empty leaves by themselves and beside small ones": {
        "compressor": lambda: jc.flat(jc.block_scaled("int4")),
        "shapes": {"a": (0,), "b": (LONG,), "c": (40_000,), "d": (0,), "e": (40_000,), "f": (LONG,), "g": (0,)},
    },
    "one leaf that is nearly all": {
        "compressor": lambda: jc.block_scaled("int4"),
        "shapes": {"a": (4, LONG), "b": (2000,)},
        "once": True,
    },
    "many small leaves": {"compressor": lambda: jc.block_scaled("int4"), "shapes": MANY_SMALL},
}


def gradients(seed, dtype=jnp.float32, shapes=SHAPES):
    """Of two rounds, of all workers."""
    rng = np.random.default_rng(seed)
    drawn = lambda shape: jnp.asarray(rng.standard_normal((WORKERS, *shape), np.float32), dtype)
    return [{name: drawn(shape) for name, shape in shapes.items()} for _ in range(2)]


def two_rounds(section, monkeypatch, rounds, case):
    """Directions, state and counts of two rounds, in the forms of GPUs; and how many long gathers the program has."""
    for module in (backend, collectives):
        monkeypatch.setattr(module, "platform", lambda mesh=None: "gpu")
    monkeypatch.setattr(backend_gpu, "SECTION", section)
    monkeypatch.setattr(collectives, "ALONE_BYTES_ON_GPU", 2**16)
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    algorithm = case.get("method", jc.error_feedback)(case["compressor"]())
    tx = jc.compressed_mean(algorithm, "data", **case.get("options", {}))
    state, specs = jc.init_state(tx, jax.tree.map(jnp.zeros_like, at(rounds[0])), mesh, "data")
    update, check = lambda g, state: tx.update(at(g), state), case.get("vma", True)
    ins, outs = (jax.P("data"), specs), (jax.P(), specs)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check)
    rounds, found = [jax.device_put(grads, jax.NamedSharding(mesh, jax.P("data"))) for grads in rounds], []
    lowered = jax.jit(mapped).lower(rounds[0], state)
    sizes = [int(size) for size in re.findall(r"all_gather.*tensor<1x(\d+)xui\d+>\) ->", lowered.as_text())]
    step = lowered.compile()
    for grads in rounds:
        direction, state = step(grads, state)
        found.append(direction)
    return jax.tree.leaves((found, state)), jc.info(state).sent_bytes, sizes


KEPT = {"int4", "nvfp4, of two parts", "8 bits, by gather, weighted", "scaled floats of 8 bits", "many small leaves"}
KEPT |= {"nothing but empty leaves is small", "empty leaves by themselves and beside small ones"}
KEPT |= {"rotated, so that each entry takes a whole block"}


@pytest.mark.parametrize("name", variants(CASES, KEPT | {"f16, whose mean is asked for"}))
def test_directions_are_those_of_whole_messages(name, monkeypatch, seed):
    case = CASES[name]
    rounds = gradients(seed, **{option: case[option] for option in ("dtype", "shapes") if option in case})
    whole, whole_bytes, one = two_rounds(2**60, monkeypatch, rounds, case)
    parted, parted_bytes, several = two_rounds(2**15, monkeypatch, rounds, case)
    for x, y in zip(whole, parted, strict=True):
        np.testing.assert_array_equal(x, y)
    assert whole_bytes == parted_bytes
    assert sum(one) == sum(several)  # not a word more
    assert len(several) == len(one) if case.get("once") else len(several) > len(one) + 3


ENTRYWISE = {row.name: row.compressor for row in ROWS if row.compressor.spec.entrywise and not row.fixed_length}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ENTRYWISE)
def test_an_entry_is_decoded_from_its_own_tile(name, key):
    """And from arrays that cross whole: so the numbers of other tiles need not be there."""
    compressor = ENTRYWISE[name]
    x, tile = jax.random.normal(key, (8 * TOGETHER,)), slice(3 * TOGETHER, 4 * TOGETHER)

    @jax.jit
    def sent(x):
        state = compressor.init(key, x)
        return compressor.compress(key, x, state)[0], state.shared

    payload, shared = sent(x)
    arrays, structure = jax.tree.flatten(payload)
    left_out = False
    for i, held in enumerate(per_tile(payload)):
        if held and arrays[i].size * TOGETHER == held * x.size:  # else it belongs to another array
            own = np.asarray(arrays[i]).reshape(-1)
            there = (np.arange(own.size) // held) == 3
            arrays[i] = np.where(there, own, np.zeros((), own.dtype)).reshape(arrays[i].shape)
            left_out = True
    other = jax.tree.unflatten(structure, arrays)
    decompress = jax.jit(lambda payload: compressor.decompress(payload, shared, x))
    whole, part = map(decompress, (payload, other))
    np.testing.assert_array_equal(whole[tile], part[tile])
    assert np.any(whole != part) == left_out
