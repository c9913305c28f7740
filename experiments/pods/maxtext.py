"""MaxText's own training step with DiLoCo between slices of TPUs, compiled ahead of time in MaxText's released package.

`train_compile` of MaxText makes the program of a step with an exchange for slices that are not there: its own, and with
docs/examples/trainers/maxtext_diloco.py in its place. Each is compiled in a process of its own, whose ledger, memory
and seconds stand beside the bytes that the planner counts for the shards of a chip. Writes to runs/NAME: config.json,
results.json, table.md, pods.png.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from experiments import pods  # first: it sets what JAX reads of the environment  # isort: skip
import jax
import jax.numpy as jnp

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.run import Run, parser_of

__all__ = ["METHODS", "main"]

OWN = "MaxText's own"
# Name -> for `jc.from_config`; "" for MaxText as it is.
METHODS = {
    OWN: "",
    "identity": "direct(identity())",
    "bf16": "direct(cast('bfloat16'))",
    "int4 + error feedback": "error_feedback(block_scaled('int4'))",
    "top_k(0.01) + error feedback": "error_feedback(top_k(0.01))",
    "sidco(0.001) + error feedback": "error_feedback(sidco(0.001))",
    "sparse_loco": "sparse_loco()",
}
OPTIONS = """dataset_type=synthetic enable_checkpointing=false enable_goodput_recording=false monitor_goodput=false
gcs_metrics=false enable_tensorboard=false skip_jax_distributed_system=true per_device_batch_size=1 run_name=pods
max_target_length=2048 enable_diloco=true diloco_sync_period=36"""


def compiled(run: Run, name: str) -> dict[str, Any]:
    """A row: MaxText's step with one method."""
    o, spec = run.options, find_spec("maxtext")
    (place,) = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ("",)
    words = [sys.executable, "-m", "experiments.pods.step", f"{place}/configs/base.yml", *OPTIONS.split()]
    words += [f"model_name={o.model}", f"compile_topology={o.topology}", f"compile_topology_num_slices={o.slices}"]
    words += [f"dcn_diloco_parallelism={o.slices}", f"base_output_directory={run.path('.').resolve()}"]
    flags = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "DECOUPLE_GCLOUD": "TRUE", "JAXCOMP": METHODS[name]}
    done = subprocess.run(words, env=os.environ | flags, capture_output=True, text=True, check=False)
    found = re.search(r"^STEP (.*)$", done.stdout, re.MULTILINE)
    about = {"pods": f"{o.slices} x {o.topology}", "method": name}
    if done.returncode or found is None:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        return about | {"error": f"MaxText ended with {done.returncode}: {''.join(last)[:300]}"}
    told = json.loads(found[1])
    like = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in told.pop("shards")]
    algorithm = jc.from_config(METHODS[name] or METHODS["identity"])
    over = told.pop("axes")
    between = over.pop("diloco", 0.0)
    row = about | told | {"dcn": between, "ici": sum(over.values()), "axes": over}
    row["planned"], _ = pods.planned(algorithm, like, {"dcn": o.slices}, "tpu")
    return row | {"fits": row["held"] + row["temporary"] <= pods.memory_of(o.topology)}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("pods maxtext", __doc__)
    p.add_argument("--model", default="llama2-7b", metavar="NAME", help="a model of MaxText")
    p.add_argument("--topology", default="v5e-256", metavar="NAME", help="a slice, as MaxText names it: v5e-256, ...")
    p.add_argument("--slices", type=int, default=2, metavar="N", help="how many, a worker each")
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="methods whose name contains one of these")
    run = Run(p, arguments, "pods-maxtext", resumable=True)
    o = run.options
    if o.slices < 2:
        raise UserError(f"--slices must be at least 2; got {o.slices}")
    names = pods.chosen(METHODS, o.only)
    for package in ("maxtext", "libtpu"):
        if find_spec(package) is None:
            run.say(f"maxtext: left out, {package} is not installed (pip install '.[trainers]', on Python 3.12)")
            return 0
    rows = run.rows_of(names, str, lambda name: compiled(run, name))
    notes = (
        f"MaxText's {o.model}: a step of AdamW, and DiLoCo's exchange of all parameters in f32 after it; 2048 tokens a "
        f"chip, parameters cut over the chips of each slice ({o.topology}). Compiled ahead of time for devices that "
        "are not here: bytes and memory are of that program; seconds are computed from its bytes, without latency or "
        "work. Bytes: of the ledger, padding of TPU tiles included, as the planner counts it; inside: all of the step."
    )
    return pods.reported(run, f"MaxText's {o.model}, compiled by JAX {jax.__version__}", rows, OWN, notes)
