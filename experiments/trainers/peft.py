"""Tunix's PeftTrainer with its own Qwen3 on four virtual devices: its own step, and one with a compressed mean."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer, utils  # pyright: ignore[reportMissingImports]

import jaxcomp as jc
from jaxcomp.base import Algorithm

__all__ = ["METHODS", "restored", "trained"]

FILE = Path(__file__).parents[2] / "docs" / "examples" / "trainers" / "tunix_sft.py"
LENGTH, EXAMPLES, LETTERS = 24, 16, 128
METHODS: dict[str, Algorithm | None] = {
    "Tunix's own": None,
    "identity": jc.direct(jc.identity()),
    "int4 + error feedback": jc.error_feedback(jc.block_scaled("int4")),
    "top_k(0.05) + error feedback": jc.error_feedback(jc.top_k(0.05)),
}


def data(steps: int, mesh: Mesh) -> Iterator[Any]:
    """Arithmetic sequences of very unequal lengths: the last devices have a few tokens each."""
    rng, place = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec("fsdp"))
    lengths = np.array([24, 20, 22, 24, 3, 4, 2, 3, 12, 10, 9, 11, 24, 2, 3, 24])
    for _ in range(steps):
        first, stride = rng.integers(0, LETTERS, (EXAMPLES, 1)), rng.integers(1, 4, (EXAMPLES, 1))
        tokens = ((first + np.arange(LENGTH) * stride) % LETTERS).astype(np.int32)
        mask = np.arange(LENGTH) < lengths[:, None]
        yield peft_trainer.TrainingInput(*jax.device_put((tokens, mask), place))


def inputs_of(x: Any) -> dict[str, Any]:
    """What the loss takes by keyword."""
    positions, attention = utils.build_positions_from_mask(x.input_mask), utils.make_causal_attn_mask(x.input_mask)
    names = {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
    return names | {"positions": positions, "attention_mask": attention}


def mesh_of() -> Mesh:
    return jax.make_mesh((4, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def trainer_of(algorithm: Algorithm | None, mesh: Mesh, **options: Any) -> Any:
    """A trainer, its small model whole on every device; its gradient is clipped, and its rate has a schedule."""
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=LETTERS, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    rate = optax.cosine_decay_schedule(3e-3, 200)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    training = peft_trainer.TrainingConfig(eval_every_n_steps=1000, **options)
    if algorithm is None:
        made = peft_trainer.PeftTrainer(model, optimizer, training)
    else:
        made = runpy.run_path(str(FILE))["Compressed"](model, optimizer, training, algorithm=algorithm)
    return made.with_gen_model_input_fn(inputs_of)


def trained(name: str, steps: int, micro: int | None = None) -> dict[str, Any]:
    """A row: losses of each call, and bytes by axis in a step of the optimizer.

    micro: calls that make one; Tunix's own step exchanges in each of them.
    """
    mesh = mesh_of()
    trainer = trainer_of(METHODS[name], mesh, gradient_accumulation_steps=micro)
    step = nnx.jit(trainer.create_train_step_fn())
    losses, batch = [], None
    for batch in data(steps * (micro or 1), mesh):
        losses.append(float(step(trainer.model, trainer.optimizer, batch)[0]))
    compiled = step.lower(trainer.model, trainer.optimizer, batch).compile()
    axes, times = jc.ledger(getattr(compiled, "compiled", compiled)).by_axes(mesh), 1 if METHODS[name] else micro or 1
    return {"method": name, "losses": losses, "axes": {"+".join(names): times * sent for names, sent in axes.items()}}


def restored(name: str, folder: Path, micro: int | None = None) -> bool:
    """Whether a new trainer finds the model and the optimizer, the exchange in it, in the checkpoint of another."""
    from orbax.checkpoint import CheckpointManagerOptions

    mesh = mesh_of()
    saving = CheckpointManagerOptions(save_interval_steps=4)
    options = {"checkpoint_root_directory": str(folder.resolve()), "checkpointing_options": saving, "max_steps": 4}
    options |= {"gradient_accumulation_steps": micro}
    with mesh:
        first = trainer_of(METHODS[name], mesh, **options)
        first.train(data(4 * (micro or 1), mesh))
        again = trainer_of(METHODS[name], mesh, **options)
    both = [jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer))) for trainer in (first, again)]
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*both, strict=True))
