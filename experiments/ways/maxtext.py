"""MaxText's own model and loss on Explicit axes, `shard_mode=explicit`: fifty steps beside plain JAX, what crosses.

MaxText's logical rules name "data" and "fsdp", and its loss is a sum over tokens that are not padding. Nothing of it is
changed, and `gradients="auto"` takes the whole batch.
"""

import os
from typing import Any

import numpy as np

__all__ = ["CHOICES", "LAYOUTS", "rows"]

CHOICES = [
    "hardware=cpu",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "enable_goodput_recording=false",
    "gcs_metrics=false",
    "monitor_goodput=false",
    "enable_tensorboard=false",
    "skip_jax_distributed_system=true",
    "run_name=ways",
    "log_config=false",
    "base_emb_dim=64",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "base_mlp_dim=128",
    "base_num_decoder_layers=2",
    "head_dim=16",
    "vocab_size=256",
    "max_target_length=32",
    "per_device_batch_size=4",
    "attention=dot_product",
    "dtype=float32",
    "weight_dtype=float32",
    "shard_mode=explicit",
    "base_output_directory=runs/ways",
]
LAYOUTS = {"data 4": ((4, 1), "data"), "data 2, fsdp 2": ((2, 2), ("data", "fsdp"))}
STEPS = 50


def rows(layout: str) -> list[list[str]]:
    """Rows of the table for one layout: identity, and error feedback with top-k 0.05."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    import jax
    import jax.numpy as jnp
    import maxtext  # pyright: ignore[reportMissingImports]
    from flax import nnx
    from flax.linen import logical_axis_rules
    from jax.sharding import NamedSharding, PartitionSpec
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train.train import loss_fn  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils, model_creation_utils  # pyright: ignore[reportMissingImports]

    import jaxcomp as jc

    (data, fsdp), axis = LAYOUTS[layout]
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    config: Any = pyconfig.initialize(
        ["", base, *CHOICES, f"ici_data_parallelism={data}", f"ici_fsdp_parallelism={fsdp}"]
    )
    mesh = maxtext_utils.get_mesh_from_config(config)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32)
    lengths = np.random.default_rng(1).integers(4, 33, (16, 1))
    places = np.broadcast_to(np.arange(32, dtype=np.int32), (16, 32))
    masks = (places < lengths).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch |= {f"{name}_{what}": x for name in batch for what, x in (("position", places), ("segmentation", masks))}
    found = []
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1))
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(axis)))
        graph, start, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params, batch, rest: loss_fn(nnx.merge(graph, params, rest), config, dict(batch), None, None)[0]
        plain = jax.jit(jax.value_and_grad(loss))
        for name, algorithm in (("identity", jc.direct(jc.identity())), ("top_k", jc.error_feedback(jc.top_k(0.05)))):
            grad_fn = jc.value_and_grad(loss, algorithm, mesh, axis)
            params, state, other, away = start, grad_fn.init(start), start, 0.0
            step = jax.jit(lambda *args, grad_fn=grad_fn: grad_fn(*args[:3], rest=args[3]))
            book = [row for row in jc.ledger(step, params, state, batch, rest).rows if row.counted]
            value = want = jnp.zeros(())
            for _ in range(STEPS):
                value, grads, state = step(params, state, batch, rest)
                want, dense = plain(other, batch, rest)
                params, other = (
                    jax.tree.map(lambda p, g: p - 0.3 * g, *pair) for pair in ((params, grads), (other, dense))
                )
                away = max(away, abs(float(value - want)))
            sent = f"{sum(row.sent_bytes for row in book):,.0f}"
            found.append(
                [layout, name, f"{float(want):.4f}", f"{float(value):.4f}", f"{away:.0e}", str(len(book)), sent]
            )
    return found
