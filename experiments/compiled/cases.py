"""Programs that users run, by name, for the compilers of accelerators: codecs, algorithms, routes, whole steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.targets import mesh_on, shapes_on, state_on, update_on
from jaxcomp.base import Algorithm, Compressor, State, for_worker, residual

__all__ = ["ALGORITHMS", "FORMS", "ITERATES", "ROUTES", "Case", "codec", "length_of", "update"]

Shape = jax.ShapeDtypeStruct
WORKERS = 4
# Two leaves of equal shapes, one of another, and one that is small: 688,428 entries.
TREE = {
    "b": Shape((300,), jnp.float32),
    "u": Shape((384, 512), jnp.float32),
    "v": Shape((384, 512), jnp.float32),
    "w": Shape((576, 512), jnp.float32),
}
LENGTH = 2**18 + 100  # of the vector of a codec
# A sixth and a quarter of that, for cases whose time in the compiler of TPUs grows with their entries. What the library
# does with long vectors, leaves and rows alone is in the other cases.
SHORT_TREE = TREE | {name: Shape((rows, 512), jnp.float32) for name, rows in {"u": 64, "v": 64, "w": 96}.items()}
SHORT_LENGTH = 2**16 + 100
SHORT = {"adiana", "dct", "demo", "descend(diana)", "diana(dithering)", "direct(eden)", "drive", "eden", "isega"}
SHORT |= {"local_updates, streaming", "loco(int4, int8)", "majority_vote", "onebit_adam", "rotate"}
SHORT |= {"zero_one_adam"}


def tree_of(name: str) -> dict[str, Any]:
    return SHORT_TREE if name in SHORT else TREE


def length_of(name: str) -> int:
    return SHORT_LENGTH if name in SHORT else LENGTH


def entries_of(tree: dict[str, Any]) -> int:
    return sum(x.size for x in tree.values())


class Case(NamedTuple):
    """What is compiled. axes: of the mesh. build: mesh -> (function, shapes of its arguments). donated: whether the
    program may take the place of its state."""

    name: str
    axes: dict[str, int]
    build: Callable[[Mesh], tuple[Any, tuple[Any, ...]]]
    entries: int
    donated: bool = True

    def __hash__(self) -> int:
        return hash(self.name)  # axes are a dictionary

    def on(self, devices: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The jitted function and the shapes of its arguments, for devices that are there or described."""
        return self.build(mesh_on(devices, self.axes))


def codec(name: str, compressor: Compressor) -> Case:
    """What a worker with a memory does with a codec: the payload, and what it did not send of the vector."""
    length = length_of(name)

    def run(x, key):
        shared_key, private_key = jax.random.split(key)
        state = compressor.init(shared_key, Shape(x.shape, x.dtype))
        mine = State(state.local, for_worker(compressor, state.shared, 0))
        payload, _ = compressor.compress(private_key, x, mine)
        return payload, residual(compressor, x, payload, mine.shared)

    def build(mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        # In a mesh, as a program for its devices: else what is chosen by backend would be what this process takes.
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped), (shapes_on(mesh, Shape((length,), jnp.float32)), shapes_on(mesh, key))

    return Case(name, {"data": 1}, build, length, donated=False)


def update(name: str, algorithm: Algorithm, via: str = "auto") -> Case:
    """One update of `compressed_mean` among four workers, in the place of its state."""
    return transformed(name, lambda: jc.compressed_mean(algorithm, "data", via))


def transformed(name: str, make: Callable[[], Any]) -> Case:
    tree = tree_of(name)
    return Case(name, {"data": WORKERS}, lambda mesh: update_on(mesh, make(), tree), entries_of(tree))


ALGORITHMS: dict[str, Algorithm] = {
    "direct(identity)": jc.direct(jc.identity()),
    "direct(bf16)": jc.direct(jc.cast("bfloat16")),
    "direct(dithering)": jc.direct(jc.dithering(7)),
    "direct(eden)": jc.direct(jc.eden(4)),
    "error_feedback(bf16)": jc.error_feedback(jc.cast("bfloat16")),
    "error_feedback(top_k)": jc.error_feedback(jc.top_k(0.01)),
    "error_feedback(sidco)": jc.error_feedback(jc.sidco(0.01)),
    "error_feedback(narrow)": jc.error_feedback(jc.narrow(jc.top_k(0.01), values="bfloat16", indices="uint16")),
    "error_feedback(int4)": jc.error_feedback(jc.block_scaled("int4")),
    "error_feedback(skcompress)": jc.error_feedback(jc.skcompress(jc.top_k(0.01))),
    "error_feedback(dagc)": jc.error_feedback(jc.dagc([4, 1, 1, 2], 0.01)),
    "diana(dithering)": jc.diana(jc.dithering(7)),
    "ef21(top_k)": jc.ef21(jc.top_k(0.01)),
    "ef_bv(sidco)": jc.methods.ef_bv(jc.sidco(0.01), shift_step=0.5),
    "loco(int4, int8)": jc.loco(jc.block_scaled("int4"), memory="int8"),
    "power_sgd(4)": jc.power_sgd(4),
    "sparse_loco": jc.sparse_loco(),
    "majority_vote": jc.majority_vote(),
    "fetch_sgd": jc.fetch_sgd(0.01),
    "momentum_correction(sidco)": jc.contrib.momentum_correction(jc.sidco(0.01)),
    "by_path": jc.by_path({"w": jc.power_sgd(2), ".*": jc.error_feedback(jc.cast("bfloat16"))}),
}

# One message that fits each route.
ROUTES: dict[str, Algorithm] = {
    "gather": jc.direct(jc.dithering(7)),
    "sum": jc.error_feedback(jc.cast("bfloat16")),
    "two_shot": jc.error_feedback(jc.block_scaled("int4")),
    "ladder": jc.error_feedback(jc.top_k(0.01)),
    "concat": jc.error_feedback(jc.dagc([4, 1, 1, 2], 0.01)),
    "ring": jc.error_feedback(jc.dagc([4, 1, 1, 2], 0.01)),
    "ragged": jc.error_feedback(jc.dagc([4, 1, 1, 2], 0.01)),
}

# Methods that choose where gradients are taken.
STEP_SIZES = jc.theory.adiana(smoothness=1.0, mu=0.1, workers=WORKERS, omega=1.0, variance=1.0)
ITERATES: dict[str, Algorithm] = {
    "descend(diana)": jc.methods.descend(jc.diana(jc.natural()), 0.1),
    "adiana": jc.methods.adiana(jc.dithering(7), STEP_SIZES),
    "isega": jc.methods.isega(
        np.full(length_of("isega"), 0.1), jc.smoothness.diagonal_of(np.ones(length_of("isega"))), 0.1
    ),
    "marina": jc.methods.marina(jc.dithering(7), 0.1, 0.1),
}


def iterated(name: str, method: Algorithm) -> Case:
    """One round of a method with an iterate of its own, on quadratics around a point of each worker."""
    length = length_of(name)

    def build(mesh):
        run = jc.methods.rounds(method, "data")

        def step(point):
            state, bits = run.step(run.init(jnp.zeros(length)), lambda x: x - point[0])
            return [x[None] for x in jax.tree.leaves((state, bits))]

        mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.jit(mapped), (shapes_on(mesh, Shape((WORKERS, length), jnp.float32), P("data")),)

    return Case(name, {"data": WORKERS}, build, length, donated=False)


# ------------------------------------------------------------------------------------------------
# Whole steps

WIDTH, HIDDEN, BATCH = 256, 1024, 32
PARAMS = {
    "a": Shape((WIDTH, HIDDEN), jnp.float32),
    "b": Shape((HIDDEN, WIDTH), jnp.float32),
    "c": Shape((WIDTH,), jnp.float32),
}


def loss_of(params, x, y):
    # In f32 on every backend: parameters of a product in bfloat16 would be gathered in bfloat16.
    times = lambda x, w: jnp.matmul(x, w, precision="highest")
    return jnp.mean((times(jnp.tanh(times(x, params["a"])), params["b"]) + params["c"] - y) ** 2)


def step(name: str, axes: dict[str, int], specs: dict[str, P], batch: P) -> Case:
    """`value_and_grad` in plain `jax.jit`, with parameters laid out by specs."""

    def build(mesh):
        algorithm = jc.error_feedback(jc.top_k(0.01))
        grad_fn = jc.value_and_grad(loss_of, algorithm, mesh, "data", param_specs=specs)
        params = shapes_on(mesh, PARAMS, specs)
        init = jax.jit(grad_fn.init)
        layouts = init.lower(params).compile().output_shardings
        place = lambda x, sharding: Shape(x.shape, x.dtype, sharding=sharding)
        state = jax.tree.map(place, jax.eval_shape(init, params), layouts)
        rows = [Shape((BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, batch)) for _ in range(2)]
        return jax.jit(grad_fn, donate_argnums=1), (params, state, *rows)

    return Case(name, axes, build, sum(x.size for x in PARAMS.values()))


def local_updates(**options: Any) -> Any:
    inner, outer = optax.sgd(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
    return jc.local_updates(inner, outer, jc.error_feedback(jc.block_scaled("int4")), "data", every=4, **options)


def local(name: str, make: Callable[[], Any]) -> Case:
    """A step at one of four workers, each with parameters of its own."""
    tree = tree_of(name)

    def build(mesh):
        tx = make()
        state, specs = state_on(mesh, tx, tree)

        def step(grads, state, params):
            mine = lambda tree: jax.tree.map(lambda x: x[0], tree)
            updates, state = tx.update(mine(grads), state, mine(params))
            return jax.tree.map(lambda x: x[None], updates), state

        rows = jax.tree.map(lambda x: Shape((WORKERS, *x.shape), x.dtype), tree)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), specs, P("data")), out_specs=(P("data"), specs))
        each = shapes_on(mesh, rows, P("data"))
        return jax.jit(mapped, donate_argnums=1), (each, state, each)

    return Case(name, {"data": WORKERS}, build, entries_of(tree))


WHOLE = {"a": P(), "b": P(), "c": P()}
OVER_MODEL = {"a": P(None, "model"), "b": P("model"), "c": P()}
OVER_FSDP = {"a": P("fsdp"), "b": P("fsdp"), "c": P()}
OVER_DATA = {"a": P("data"), "b": P("data"), "c": P()}

FORMS: dict[str, Case] = {
    case.name: case
    for case in (
        step("value_and_grad, data parallel", {"data": 4}, WHOLE, P("data")),
        step("value_and_grad, tensor parallel", {"data": 2, "model": 2}, OVER_MODEL, P("data")),
        step("value_and_grad, data x fsdp", {"data": 2, "fsdp": 2}, OVER_FSDP, P(("data", "fsdp"))),
        step("value_and_grad, fsdp over the workers", {"data": 4}, OVER_DATA, P("data")),
        local("local_updates", local_updates),
        local("local_updates, streaming", lambda: local_updates(fragments=2, delay=1, mixing=0.5)),
        transformed("demo", lambda: jc.demo(0.1, "data")),
        transformed("onebit_adam", lambda: jc.onebit_adam(0.1, "data", freeze_step=10)),
        local("zero_one_adam", lambda: jc.zero_one_adam(0.1, "data", freeze_step=10)),
        *(iterated(name, method) for name, method in ITERATES.items()),
    )
}
