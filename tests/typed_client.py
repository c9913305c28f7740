"""What a user writes with the public names, as a type checker sees it from outside (`make lint`). Never run.

Every result has the type that its use here needs; an argument of another type is an error, which the last lines show.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnnecessaryTypeIgnoreComment=true, reportMissingTypeStubs=false

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp as jc


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2)


def compressors() -> list[jc.Compressor]:
    top: jc.Compressor = jc.top_k(0.01)
    return [
        top,
        jc.top_k(k=3),
        jc.compose(top, jc.dithering(7)),
        jc.narrow(top, values="bfloat16"),
        jc.contract(jc.rand_k(0.1)),
    ]


def algorithms() -> list[jc.Algorithm]:
    feedback: jc.Algorithm = jc.error_feedback(jc.sidco(0.001), decay=0.9)
    return [
        feedback,
        jc.direct(jc.identity()),
        jc.diana(jc.natural()),
        jc.power_sgd(rank=2),
        jc.by_path({".*": feedback}),
    ]


def chained(params: dict[str, jax.Array], mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    tx: optax.GradientTransformation = optax.chain(
        jc.compressed_mean(jc.error_feedback(jc.top_k(0.01)), axis_name="data"), optax.adamw(1e-3)
    )
    state, specs = jc.init_state(tx, params, mesh, "data")
    updates, state = tx.update(jc.per_worker(params, "data"), state, params)
    return optax.apply_updates(params, updates), specs


def in_jit(params: dict[str, jax.Array], x: jax.Array) -> jc.Info:
    grad_fn = jc.value_and_grad(loss, jc.error_feedback(jc.top_k(0.01)), axis_name="data", micro_batches=2)
    state = grad_fn.init(params)
    _, grads, state = grad_fn(params, state, x)
    del grads
    seen: jc.Info = jc.info(state)
    ratio: jax.Array = seen.achieved_ratio
    del ratio
    return seen


def sizes(x: jax.Array) -> tuple[int, bytes]:
    _, payload = jc.roundtrip(jc.top_k(0.1), x, key=jax.random.key(0))
    written: bytes = jc.wire.encode(payload)
    book: jc.Ledger = jc.ledger(jnp.sum, x)
    print(book)
    return len(written), written


def mistakes() -> None:
    jc.error_feedback("top_k")  # pyright: ignore[reportArgumentType]
    jc.compressed_mean(jc.top_k(0.1), "data")  # pyright: ignore[reportArgumentType]
    jc.value_and_grad(3, jc.direct(jc.identity()))  # pyright: ignore[reportArgumentType]
    jc.top_k(0.1, 3)  # pyright: ignore[reportCallIssue]
