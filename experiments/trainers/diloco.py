"""MaxText's DiLoCo on four virtual devices: its own, and the same with a compressed mean."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import UserError

__all__ = ["CASES", "Case", "resumed", "trained"]

FILE = Path(__file__).parents[2] / "docs" / "examples" / "trainers" / "maxtext_diloco.py"
SMALL = """hardware=cpu dataset_type=synthetic base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4
base_num_kv_heads=4 base_num_decoder_layers=2 head_dim=16 vocab_size=256 max_target_length=32 per_device_batch_size=2
attention=dot_product enable_goodput_recording=false monitor_goodput=false skip_jax_distributed_system=true
gcs_metrics=false enable_tensorboard=false enable_diloco=true ici_diloco_parallelism=2 ici_fsdp_parallelism=2
learning_rate=0.003 async_checkpointing=false"""
WHOLE = "diloco_sync_period=5"
STREAMING = """enable_streaming_diloco=true num_diloco_fragments=3 diloco_sync_period=6
num_communication_overlapping_steps=1 communication_overlapping_alpha=0.5"""
INT4 = "error_feedback(block_scaled('int4'))"


class Case(NamedTuple):
    """algorithm: for `jc.from_config`; "" for MaxText as it is. options: of MaxText."""

    name: str
    algorithm: str
    options: str = WHOLE


CASES = (
    Case("MaxText's own", ""),
    Case("identity", "direct(identity())"),
    Case("int4 + error feedback", INT4),
    Case("top_k(0.01) + error feedback", "error_feedback(top_k(0.01))"),
    Case("sparse_loco", "sparse_loco()"),
    Case("MaxText's own, streaming", "", STREAMING),
    Case("int4 + error feedback, streaming", INT4, STREAMING),
)


def trained(
    case: Case, folder: Path, steps: int, *, name: str = "run", every: int = 0, last: int = 0
) -> dict[str, Any]:
    """A row: losses of each step, and bytes by axis.

    every: steps between checkpoints; 0 for none. last: the step up to which this process trains, of a schedule of
    `steps`; 0: all of them.
    """
    spec = find_spec("maxtext")
    (place,) = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ("",)
    script = FILE if case.algorithm else Path(place) / "trainers" / "pre_train" / "train.py"
    options = [*SMALL.split(), *case.options.split(), f"base_output_directory={folder.resolve()}", f"run_name={name}"]
    options += [f"steps={last or steps}", f"learning_rate_schedule_steps={steps}"]
    options += [f"enable_checkpointing={bool(every)}".lower(), f"checkpoint_period={every or steps}"]
    words = [sys.executable, "-m", "experiments.trainers.told", str(script), f"{place}/configs/base.yml", *options]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    root = str(FILE.parents[3])
    flags["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | flags | {"JAXCOMP": case.algorithm}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        raise UserError(f"{case.name}: MaxText ended with {done.returncode}: {text.strip().splitlines()[-1][:300]}")
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"completed step: (\d+),.* loss: ([\d.]+), lm_loss", text)
    }
    found = re.search(r"LEDGER (.*)", text)
    axes = json.loads(found[1]) if found else {}
    return {"method": case.name, "losses": losses, "axes": axes}


def resumed(case: Case, folder: Path, steps: int, stop: int) -> bool:
    """Whether a training that ends after `stop` steps and goes on from MaxText's checkpoint has the same losses."""
    whole = trained(case, folder, steps, name="whole", every=stop - 1)["losses"]
    trained(case, folder, steps, name="parts", every=stop - 1, last=stop)
    after = trained(case, folder, steps, name="parts", every=stop - 1)["losses"]
    return min(after) == stop and all(whole[step] == loss for step, loss in after.items())
