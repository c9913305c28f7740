"""`experiments accelerator` on CPUs: it runs, what it calls equal is equal, and what differs is found."""

import json
import os
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FACTORIES
from programs import ROOT, command, run_inside

import jaxcomp as jc
from experiments import accelerator
from experiments.accelerator import parts
from experiments.accelerator.laws import BROKEN, LAWS, Round, laws_of, op_by_op_of, verdict
from experiments.accelerator.parity import Difference, cpu, difference, parity_of
from experiments.accelerator.steps import default_tree, summed
from experiments.accelerator.times import default_log2, times_of
from experiments.lib.cli import UserError
from experiments.lib.codecs import CODECS, Codec, chosen, heavy_tailed

MARKERS = "# Page\n\n<!-- accelerator -->\nnothing\n<!-- end accelerator -->\n\ntext\n"


def test_every_public_factory_has_a_codec():
    assert {name.partition("-")[0] for name in CODECS} == set(FACTORIES)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("d", [1, 1003])
def test_codecs_are_good_for_any_length(name, d, key):
    codec = CODECS[name].make(d, 0.1)
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    decoded, _ = jax.eval_shape(lambda x, key: jc.roundtrip(codec, x, key=key), like, key)
    assert (decoded.shape, decoded.dtype) == ((d,), jnp.float32)
    assert codec.spec.name.startswith(name.partition("-")[0])


def test_the_input_holds_zeros_and_subnormal_numbers(seed):
    x = heavy_tailed(10_003, seed)
    tiny = np.finfo(np.float32).tiny
    assert 50 < np.sum(x == 0) < 200
    assert 50 < np.sum((x != 0) & (np.abs(x) < tiny)) < 200
    assert np.max(np.abs(x)) > 8
    assert not np.any((x != 0) & (np.abs(heavy_tailed(10_003, seed, subnormal=False)) < tiny))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_gaps_are_in_units_of_the_last_place(dtype):
    one = jnp.asarray([1, -1, 0, 2], dtype)
    eps = float(jnp.finfo(dtype).eps)
    other = jnp.asarray([1 + 3 * eps, -1, -0.0, 2], dtype)
    assert difference({"a": one}, {"a": one}) == (0, 0, 0)
    assert difference({"a": one}, {"a": other}) == (3, 0.5, 0)
    words = np.uint32([1, 2, 3, 4])
    found = difference((one, words), (one, words ^ np.uint32([0, 8, 0, 0])))
    assert found == (0, 0, 0.25)
    assert str(found) == "25 % of the integers"


def test_a_law_is_broken_by_more_than_rounding():
    one = np.float32([1, 2, 3])
    assert verdict(one, one.copy()).held == "bits"
    assert verdict(one, one * np.float32(1 + 2e-7)).held == "rounding"
    assert verdict(one, one * np.float32(1 + 2e-7), bitwise=True).held == BROKEN
    assert verdict(one, np.float32(one.astype(jnp.bfloat16)) + np.float32(2**-8)).held == BROKEN
    assert verdict(np.int32([1, 2]), np.int32([1, 3])).held == BROKEN


@pytest.mark.parametrize("name", ["identity", "cast"])
def test_codecs_have_parity_and_keep_the_laws(name, seed):
    x = heavy_tailed(1003, seed)
    assert parity_of(CODECS[name], x, 0.1, seed, (cpu(), jax.devices()[1])) == dict.fromkeys(
        ("payload", "decoded"), Difference(0, 0, 0)
    )
    one_round = Round(CODECS[name], heavy_tailed(1003, seed, subnormal=False), 0.1, seed)
    found = laws_of(one_round)
    assert list(found) == list(LAWS)
    assert {row.held for row in found.values()} <= {"bits", "rounding", "-"}
    assert op_by_op_of(one_round)["jit"].held == "bits"
    assert found["sum"].held == ("bits" if CODECS[name].exact else "-")


def test_times_are_multiples_of_a_copy():
    row = times_of(CODECS["dagc"], 10, 0.1, 2)  # whose shared state has a part for each worker
    for part in ("compress", "decompress"):
        assert row[part] == pytest.approx(row[f"{part}_ms"] / row["copy_ms"])
    assert row["copy_gbs"] == pytest.approx(8e-6 * 2**10 / row["copy_ms"])


def test_a_rounding_that_is_removed_where_compression_is_compiled_breaks_a_law(seed):
    """As XLA for GPUs does to f32 -> bf16 -> f32: the message is rounded, and its sender subtracts the exact one."""
    rounded, sent = jc.cast("bfloat16"), []

    def compress(key, x, state):
        payload, local = rounded.compress(key, x, state)
        sent.append((jax.tree.leaves(payload)[0], x))
        return payload, local

    def decompress(payload, shared, like):
        exact = [x for leaf, x in sent if leaf is jax.tree.leaves(payload)[0]]
        return exact[0] if exact else rounded.decompress(payload, shared, like)

    removed = rounded._replace(compress=compress, decompress=decompress)
    found = laws_of(Round(Codec(lambda d, ratio: removed), heavy_tailed(1003, seed, subnormal=False), 0.1, seed))
    assert found["apart"].held == BROKEN
    assert found["apart"].by.ulps > 1000


def event(name, start, nanoseconds):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=nanoseconds)


def line(name, *events):
    return SimpleNamespace(name=name, events=events)


def plane(name, *lines):
    return SimpleNamespace(name=name, lines=lines)


def test_kernels_are_summed_by_name_over_the_streams_of_one_device():
    streams = line("Stream #1", event("a", 0, 10), event("b", 10, 50)), line("Stream #2", event("a", 5, 30))
    planes = [
        plane("/host:CPU", line("Stream of thoughts", event("host", 0, 99))),
        plane("/device:GPU:1", line("Stream #1", event("other", 0, 7))),
        plane("/device:GPU:0", *streams, line("XLA Modules", event("whole", 0, 90))),
    ]
    assert summed(planes, 2) == [("b", pytest.approx(25e-9), 0.5), ("a", pytest.approx(20e-9), 1.0)]
    assert summed(planes[:1], 2) == []


def test_a_loop_of_a_tpu_does_not_count_its_body_twice():
    inner = event("while", 10, 40), event("body", 12, 10), event("condition", 30, 5), event("body", 40, 10)
    ops = line("XLA Ops", event("after", 100, 20), *inner, event("call", 5, 90))
    found = summed([plane("/device:TPU:0", line("XLA Modules", event("whole", 0, 120)), ops)], 1)
    nanoseconds = {name: round(1e9 * seconds) for name, seconds, _ in found}
    assert nanoseconds == {"call": 50, "after": 20, "body": 20, "while": 15, "condition": 5}
    assert found[0][0] == "call"


@pytest.mark.parametrize(
    ("gigabytes", "log2", "tree"), [(80, 27, (1024, 24)), (8, 26, (1024, 6)), (None, 27, (1024, 24))]
)
def test_sizes_fit_the_memory_of_a_device(gigabytes, log2, tree):
    stats = None if gigabytes is None else {"bytes_limit": gigabytes * 10**9}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert default_log2(device) == log2
    assert default_tree(device) == tree
    assert default_log2(jax.devices()[0]) < 20


def test_names_that_fit_nothing_are_refused():
    assert chosen(CODECS, ["eden", "sidco"], "--codecs") == ["sidco", "eden"]
    with pytest.raises(UserError, match="--codecs: no name contains 'magic'; choose from identity, cast"):
        chosen(CODECS, ["magic"], "--codecs")


def ran(tmp_path, *words, devices=1):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    few = ("--codecs", "identity", "--methods", "pmean", "bf16", "--repeats", 1, "--log2-size", 10)
    small = (*few, "--entries", 1003, "--width", 16, "--layers", 1, "--kernels", "direct(cast bf16)")
    words = command("accelerator", "--runs", tmp_path, "--name", "r", *small, *words)
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_whole_command_on_two_devices_of_the_cpu(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MARKERS)
    result = ran(tmp_path, "--page", page, devices=2)
    assert result.returncode == 0, result.stderr
    assert "parity compares the CPU with the CPU" in result.stdout
    assert "a profile of the cpu backend names none" in result.stdout
    rows = json.loads((tmp_path / "r" / "results.json").read_text())
    assert [row["codec"] for row in rows["times"]] == ["identity"]
    assert all(row["payload"] == row["decoded"] == [0, 0, 0] for row in rows["parity"])
    assert all(row["copy_gbs"] > 0 and row["compress"] > 0 for row in rows["times"])
    sent = {row["method"]: row["sent_bytes"] for row in rows["exchanges"]}
    assert 0 < sent["direct(cast bf16)"] < 0.6 * sent["pmean"]
    assert {row["sent_bytes"] for row in rows["steps"]} == {0}
    assert (tmp_path / "r" / "accelerator.png").read_bytes()[:4] == b"\x89PNG"
    text = page.read_text()
    assert text.startswith("# Page\n\n<!-- accelerator: 20")
    assert text.endswith("<!-- end accelerator -->\n\ntext\n")
    assert "nothing" not in text
    assert str(tmp_path) not in text
    for title in (
        "### Parity of cpu",
        "### Laws on cpu",
        "### Codecs at 2^10",
        "on one device",
        "on 2 devices",
        "op by op on cpu",
    ):
        assert title in text


@pytest.fixture
def inside(monkeypatch, capsys, tmp_path):
    """The command within this process, whose settings it leaves alone."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    return lambda *words: run_inside(capsys, "accelerator", "--runs", tmp_path, *words)


class Clocked:
    """A run whose cases take a second each, by a clock of its own."""

    def __init__(self, minutes):
        self.now, self.tried, self.interrupted = 0.0, [], False
        self.options, self.kept = SimpleNamespace(minutes=minutes), {}

    def rows_of(self, cases, name, measure):
        return [measure(case) for case in cases]

    def keep(self, content):
        self.kept = content

    def measure(self, case):
        self.now += 1
        self.tried.append(case)
        return {"case": case}


def test_each_part_has_its_share_of_the_time_and_then_what_is_left(monkeypatch):
    run = Clocked(minutes=10.5 / 60)
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: run.now))
    monkeypatch.setattr(parts, "PARTS", {"a": 0.1, "b": 0.45, "c": 0.0})
    cases = {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"], "c": [f"c{i}" for i in range(9)]}
    done = parts.measured(run, {name: parts.Part(some, run.measure, name, "") for name, some in cases.items()})
    assert run.tried == ["a1", "a2", "b1", "b2", "a3", *(f"c{i}" for i in range(6))]
    assert [row["case"] for row in done["a"].rows] == cases["a"]
    assert done["c"].notes.strip() == f"Left out: c6, c7, c8; {parts.LATE}."
    assert run.kept["b"] == [{"case": "b1"}, {"case": "b2"}]


def test_what_no_time_is_left_for_is_named(monkeypatch, inside):
    (one, *_) = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: [one])
    words = ("--minutes", 1e-9, "--only", "parity", "exchanges", "--codecs", "cast", "--entries", 9)
    result = inside(*words)
    assert result.returncode == 0, result.stderr
    assert "Left out: cast, cast-e4m3; no time was left" in result.stdout
    assert "Exchanges are left out: they need several devices, and there is 1 (cpu)" in result.stdout


def test_a_case_that_fails_is_named_and_the_others_are_kept(monkeypatch, inside):
    def failing(codec, *rest):
        if codec is CODECS["cast"]:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory")
        return {"payload": Difference(0, 0, 0), "decoded": Difference(2, 0.5, 0)}

    monkeypatch.setattr(accelerator, "parity_of", failing)
    result = inside("--only", "parity", "--codecs", "identity", "cast", "--entries", 9)
    assert result.returncode == 1
    assert "Left out: cast; RESOURCE_EXHAUSTED: no memory." in result.stdout
    assert "2 ulp in 50 % of the floats" in result.stdout


def test_ctrl_c_keeps_the_rows_before_and_names_the_others(tmp_path, monkeypatch, inside):
    def stopped(codec, *rest):
        if codec is CODECS["cast"]:
            raise KeyboardInterrupt
        return {"payload": Difference(0, 0, 0), "decoded": Difference(0, 0, 0)}

    monkeypatch.setattr(accelerator, "parity_of", stopped)
    result = inside("--name", "r", "--codecs", "identity", "cast", "--entries", 9)
    assert result.returncode == 130
    table = (tmp_path / "r" / "parity.md").read_text()
    assert "| identity | equal | equal |" in table
    assert "Left out: cast, cast-e4m3; the run was interrupted." in table
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["config.json", "parity.md", "results.json"]


def test_ctrl_c_keeps_the_parts_before_and_leaves_the_page(tmp_path, monkeypatch, inside):
    def stopped(*_):
        raise KeyboardInterrupt

    page = tmp_path / "page.md"
    page.write_text(MARKERS)
    monkeypatch.setattr(accelerator, "laws_of", stopped)
    words = ("--only", "parity", "laws", "op-by-op", "--codecs", "identity", "--entries", 9, "--page", page)
    result = inside("--name", "r", *words)
    assert result.returncode == 130
    assert "Parity of cpu with CPU, 9 entries" in (tmp_path / "r" / "parity.md").read_text()
    assert not (tmp_path / "r" / "laws.md").exists()
    assert page.read_text() == MARKERS


def test_a_page_without_markers_is_refused_before_anything_runs(tmp_path, inside):
    result = inside("--page", tmp_path / "no.md")
    assert result.stderr.startswith(f"error: --page {tmp_path}/no.md: no file with the markers <!-- accelerator -->")
    assert list(tmp_path.iterdir()) == []
