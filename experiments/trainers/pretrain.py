"""MaxText on four virtual devices: its DiLoCo and its own step, each as it is and with a compressed mean.

Text is read by MaxText's own pipeline (dataset_type=hf), a line an example, a byte a token: lines have unequal lengths,
and what is behind their ends is masked.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import UserError

__all__ = ["CASES", "RESTORED", "Case", "MaxText", "made_lines"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples" / "trainers"
SMALL = """hardware=cpu base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4
base_num_decoder_layers=2 head_dim=16 vocab_size=260 max_target_length=32 attention=dot_product dtype=float32
weight_dtype=float32 enable_goodput_recording=false monitor_goodput=false skip_jax_distributed_system=true
gcs_metrics=false enable_tensorboard=false log_config=false learning_rate=0.003 learning_rate_schedule_steps=200
async_checkpointing=false"""
SYNTHETIC = "dataset_type=synthetic"
TEXT = "dataset_type=hf hf_path=text packing=false num_epoch=100 grain_worker_count=0"
DILOCO = "per_device_batch_size=2 enable_diloco=true ici_diloco_parallelism=2 ici_fsdp_parallelism=2"
WHOLE = f"{DILOCO} diloco_sync_period=5"
STREAMING = f"""{DILOCO} enable_streaming_diloco=true num_diloco_fragments=3 diloco_sync_period=6
num_communication_overlapping_steps=1 communication_overlapping_alpha=0.5"""
STEP = "per_device_batch_size=4 shard_mode=explicit"
DATA = f"{STEP} ici_data_parallelism=4 ici_fsdp_parallelism=1"
FSDP = f"{STEP} ici_data_parallelism=2 ici_fsdp_parallelism=2"
MICRO = f"{FSDP} gradient_accumulation_steps=2"
OWN, IDENTITY = ("MaxText's own", ""), ("identity", "direct(identity())")
INT4 = ("int4 + error feedback", "error_feedback(block_scaled('int4'))")
SPARSE = (("top_k(0.01) + error feedback", "error_feedback(top_k(0.01))"), ("sparse_loco", "sparse_loco()"))
TOP_K = ("top_k(0.05) + error feedback", "error_feedback(top_k(0.05))")


class Case(NamedTuple):
    """form: what of MaxText, on which data. algorithm: for `jc.from_config`; "" for MaxText as it is.

    file: what takes MaxText's place. axis: whose bytes are compared. options: of MaxText.
    """

    form: str
    method: str
    algorithm: str
    file: str
    axis: str
    options: str

    @property
    def text(self) -> bool:
        return TEXT in self.options


def cases_of(form: str, methods: Any, file: str, axis: str, options: str) -> list[Case]:
    return [Case(form, name, algorithm, file, axis, options) for name, algorithm in methods]


CASES = (
    *cases_of("DiLoCo", (OWN, INT4, *SPARSE), "maxtext_diloco.py", "diloco", f"{WHOLE} {SYNTHETIC}"),
    *cases_of("DiLoCo, streaming", (OWN, INT4), "maxtext_diloco.py", "diloco", f"{STREAMING} {SYNTHETIC}"),
    *cases_of("DiLoCo, text", (OWN, IDENTITY, INT4, *SPARSE), "maxtext_diloco.py", "diloco", f"{WHOLE} {TEXT}"),
    *cases_of("step, data 4, text", (OWN, IDENTITY, INT4), "maxtext_step.py", "data", f"{DATA} {TEXT}"),
    *cases_of(
        "step, data 2 of fsdp 2, text", (OWN, IDENTITY, INT4, TOP_K), "maxtext_step.py", "data", f"{FSDP} {TEXT}"
    ),
    *cases_of("the same, 2 micro-batches", (OWN, IDENTITY, INT4), "maxtext_step.py", "data", f"{MICRO} {TEXT}"),
)
RESTORED = (
    Case("DiLoCo", *INT4, "maxtext_diloco.py", "diloco", f"{WHOLE} {SYNTHETIC}"),
    Case("DiLoCo, streaming", *INT4, "maxtext_diloco.py", "diloco", f"{STREAMING} {SYNTHETIC}"),
    Case("step, data 2 of fsdp 2", *INT4, "maxtext_step.py", "data", f"{FSDP} {SYNTHETIC}"),
)


def made_lines(lines: int = 2000) -> str:
    """Letters in steps of one, two or three, in lines of very unequal lengths."""
    rng = np.random.default_rng(0)
    each = zip(rng.integers(0, 26, lines), rng.integers(1, 4, lines), rng.integers(2, 31, lines), strict=True)
    return "\n".join("".join(chr(97 + (a + i * b) % 26) for i in range(n)) for a, b, n in each)


class MaxText:
    """Runs MaxText, each time in a process of its own that is forked from one that has imported it.

    folder: of text, tokenizer, compiled programs and checkpoints.
    """

    def __init__(self, folder: Path, text: str):
        self.folder = folder.resolve()
        (self.folder / "lines.txt").write_text("\n".join(line for line in text.splitlines() if line), encoding="utf-8")
        of_bytes(self.folder / "bytes")
        flags = {
            "JAX_PLATFORMS": "cpu",
            "DECOUPLE_GCLOUD": "TRUE",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        }
        flags |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "HF_HUB_OFFLINE": "1"}
        flags |= {"HF_HOME": str(self.folder / "hf"), "JAXCOMP": ""}
        flags["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.trainers.told"],
            cwd=self.folder,
            env=os.environ | flags,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> "MaxText":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.communicate()

    def trained(self, case: Case, steps: int, *, name: str = "run", every: int = 0) -> dict[str, Any]:
        """A row: losses of each step, and bytes by axis.

        every: steps between checkpoints; 0 for none.
        """
        spec = find_spec("maxtext")
        (place,) = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ("",)
        script = FOLDER / case.file if case.algorithm else Path(place) / "trainers" / "pre_train" / "train.py"
        words = [str(script), f"{place}/configs/base.yml", *SMALL.split(), *case.options.split(), f"steps={steps}"]
        words += [
            f"base_output_directory={self.folder}",
            f"run_name={name}",
            f"jax_cache_dir={self.folder / 'programs'}",
        ]
        words += [f"enable_checkpointing={bool(every)}".lower(), f"checkpoint_period={every or steps}"]
        words += [f"hf_train_files={self.folder / 'lines.txt'}"] if case.text else []
        words += [f"tokenizer_path={self.folder / 'bytes'}", "tokenizer_type=huggingface"]
        words += ["save_checkpoint_on_completion=false"]
        log = self.folder / "log.txt"
        task = {"words": words, "environment": {"JAXCOMP": case.algorithm}, "log": str(log)}
        sent, answers = self.process.stdin, self.process.stdout
        assert sent is not None
        assert answers is not None
        sent.write(json.dumps(task) + "\n")
        sent.flush()
        ended = next((line.split()[1] for line in answers if line.startswith("ENDED")), "")
        out = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        if ended != "0":
            last = (out.strip().splitlines() or [""])[-1][:300]
            raise UserError(f"{case.form}, {case.method}: MaxText ended with {ended or 'its process'}: {last}")
        done = [int(step) for step in re.findall(r"completed step: (\d+),", out)]
        losses = dict(zip(done, map(float, re.findall(r"^LOSS (.*)$", out, re.M)), strict=True))
        found = re.search(r"^LEDGER (.*)$", out, re.M)
        return {
            "form": case.form,
            "method": case.method,
            "losses": losses,
            "axes": json.loads(found[1]) if found else {},
        }

    def restored(self, case: Case, steps: int, stop: int) -> bool:
        """Whether a training that goes on from MaxText's checkpoint has the losses of the one that wrote it."""
        name = re.sub(r"\W+", "-", case.form)
        once = self.trained(case, steps, name=name, every=stop)["losses"]
        after = self.trained(case, steps, name=name, every=stop)["losses"]
        return stop <= min(after, default=0) <= stop + 1 and all(once[step] == loss for step, loss in after.items())


def of_bytes(folder: Path) -> None:
    """A tokenizer as HuggingFace stores them: a byte is a token, after four special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # pyright: ignore[reportMissingImports]

    special = ("<pad>", "<s>", "</s>", "<unk>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate((*special, *letters))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
