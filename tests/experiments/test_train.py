"""Training in several processes: the same bits as in one, whatever is killed, and an end with the first cause."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hostile import same
from programs import ROOT, command, run, run_to
from worlds import mesh_of

import jaxcomp as jc
from experiments import train
from experiments.lib import data, processes
from experiments.lib.cli import UserError
from experiments.lib.folders import Journal
from experiments.lib.job import Job, taken_up, train_one
from experiments.lib.launch import end_all, start
from experiments.lib.methods import algorithm_for
from experiments.lib.training import Checkpoints, State, Trainer, own_workers

METHOD = ("--method", "dithering", "--steps", 30, "--checkpoint-every", 5, "--batch", 8)


def outcome(folder):
    """What must not depend on how a run came about: bits of the state, losses."""
    (row,) = json.loads((folder / "results.json").read_text())
    return (
        row["sha256"],
        row["sha256_optimizer"],
        row["accuracy"],
        {x["step"]: x["loss"] for x in Journal(folder).lines()},
    )


def killed(runs, kills, in_a_row, seed):
    """What `soak` prints, and where it wrote: two processes killed again and again, against one that was not."""
    some = ("--kills-only", "--kills", kills, "--in-a-row", in_a_row, "--soak-seed", seed, "--processes", 2)
    result = run_to(0, "soak", *some, "--reference-processes", 1, *METHOD, "--runs", runs, "--name", "k")
    return result.stdout, runs / "k"


@pytest.fixture(scope="module")
def once(tmp_path_factory, request):
    return killed(tmp_path_factory.mktemp("once"), 2, 2, request.config.getoption("--seed"))


# ------------------------------------------------------------------------------------------------
# Whole programs


def check_recovered(output, folder, kills):
    assert f"{kills} of {kills} disturbances in 30 steps recovered bitwise" in output
    rows = json.loads((folder / "soak.json").read_text())
    assert len(rows) == kills
    assert all(row["recovered"] and row["named"] and row["resumed"] <= row["step"] for row in rows)
    assert outcome(folder / "run-0") == outcome(folder / "run-1")


def test_a_run_killed_twice_recovers_bitwise(once):
    check_recovered(*once, 2)


@pytest.mark.slow
def test_twenty_killed_runs_recover_bitwise(tmp_path, seed):
    check_recovered(*killed(tmp_path, 20, 1, seed), 20)


@pytest.mark.slow
def test_a_cluster_gives_bitwise_the_single_run(once, tmp_path):
    """Two processes that find each other in what Open MPI leaves in the environment."""
    job = 4096 * (os.getpid() % 4096)
    cluster = {"OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2"}
    words = command("train", *METHOD, "--cluster", "--runs", tmp_path, "--log-every", 1)
    each = []
    for i in range(2):
        rank = {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i), "JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if i else subprocess.DEVNULL}
        each.append(start(words, cwd=ROOT, env=os.environ | cluster | rank, text=True, **pipes))
    said = [process.communicate(timeout=300)[0] for process in each]
    assert [process.returncode for process in each] == [0, 0], said
    assert said[0].startswith("digits, mlp, 2 workers in 2 processes on cpu, 30 steps")
    assert said[0].count("\n") == 2
    assert "loss" not in said[1]
    assert outcome(tmp_path / "train-1") == outcome(once[1] / "run-0")
    names = {"checkpoints", "config.json", "lock", "metrics.jsonl", "results.json"}
    assert {path.name for path in (tmp_path / "train-1").iterdir()} == names


@pytest.mark.slow
def test_interrupted_processes_go_on_as_another_number_of_workers(tmp_path):
    """Ctrl-C stops all after the same step; three workers in one process take over what two in two left."""
    where = ("--runs", tmp_path, "--name", "r")
    long = ("--steps", 4000, "--checkpoint-every", 4000, "--batch", 8, "--processes", 2, "--log-every", 1)
    words = command("train", *METHOD, *long, *where)
    process = start(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    journal, end = Journal(tmp_path / "r"), time.monotonic() + 200
    while time.monotonic() < end and len(journal.lines()) < 3 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.endswith(f"interrupted; continue with --resume --runs {tmp_path} --name r\n")
    (step,) = [int(path.name) for path in (tmp_path / "r" / "checkpoints").glob("*/*")]
    assert step == journal.lines()[-1]["step"] >= 3
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    (tmp_path / "r" / "config.json").write_text(json.dumps(config | {"steps": step + 2}))
    result = run_to(0, "train", "--resume", *where, "--workers", 3)
    assert "3 workers on cpu" in result.stdout
    lines = journal.lines()
    assert [line["step"] for line in lines] == list(range(1, step + 3))
    assert lines[-1]["sent_bytes"] - lines[-2]["sent_bytes"] > 1.1 * lines[0]["sent_bytes"]
    assert json.loads((tmp_path / "r" / "results.json").read_text())[0]["workers"] == 3


@pytest.mark.slow
def test_an_error_in_the_processes_is_one_line(tmp_path):
    """The same line from two processes as from one, and nothing left behind."""
    result = run("train", "--processes", 2, "--data", "mnist", "--data-dir", tmp_path, "--runs", tmp_path / "runs")
    assert result.returncode == 2
    assert result.stderr == f"error: no file train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz in {tmp_path}\n"
    assert list((tmp_path / "runs").iterdir()) == []


ERRORS = [
    (["--coordinator", "localhost:1"], "--coordinator, --num-processes and --process-id belong together"),
    (["--processes", "2", "--cluster"], "choose one of --processes, --coordinator and --cluster"),
    (["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "--process-id must be below"),
    (["--coordinator", "localhost:99999", "--num-processes", "2", "--process-id", "0"], "--coordinator must be HOST:P"),
    (["--coordinator", "localhost", "--num-processes", "2", "--process-id", "0"], "--coordinator must be HOST:PORT wi"),
    (["--processes", "2", "--workers", "3"], "2 processes cannot share 3 workers equally; use --workers 2, or a mul"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message[:30] for _, message in ERRORS])
def test_wrong_options(arguments, message, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="^" + message.replace("(", r"\(")[:200]):
        train.main([*arguments, "--runs", str(tmp_path)])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert list(tmp_path.iterdir()) == []


def test_methods_refuse_an_exchange():
    with pytest.raises(UserError, match=r'^top-k: compressed_mean: via="sum" needs a linear compressor'):
        algorithm_for("top-k", 0.01, 7, "sum")


# ------------------------------------------------------------------------------------------------
# Processes, without JAX

# Process 1 fails; process 0 loses its connection and says so first.
FAILS = """
import sys, time
from experiments.lib import processes
if sys.argv[1] == "0":
    processes.leave(RuntimeError("Gloo: connection closed by peer"))
time.sleep(0.3)
processes.leave({error})
"""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("ValueError('boom')", processes.Failed, "process 1 failed: ValueError: boom; all were stopped"),
        ("processes.UserError('no such file')", UserError, "no such file"),
    ],
)
def test_the_first_cause_is_shown(error, kind, message):
    words = [sys.executable, "-c", FAILS.format(error=error)]
    group = processes.Group([[*words, str(i)] for i in range(2)])
    with pytest.raises(kind, match=f"^{message}") as raised:
        group.wait()
    assert ("ValueError: boom\n" in str(raised.value)) == (kind is processes.Failed)
    assert all(code is not None for code in group.codes())


def test_a_killed_process_is_named():
    group = processes.Group([[sys.executable, "-c", "import time; time.sleep(60)"]] * 3)
    group.processes[1].kill()
    with pytest.raises(processes.Failed, match=r"^process 1 was killed by SIGKILL"):
        group.wait()
    assert all(code == -signal.SIGKILL for code in group.codes())


def test_no_orphans():
    """Processes end when the one that started them is killed."""
    sleeper = "import time; time.sleep(60)"
    starter = (
        "import sys; from experiments.lib.processes import Group; "
        f"group = Group([[sys.executable, '-c', {sleeper!r}]] * 2); "
        "print(*(p.pid for p in group.processes), flush=True); group.wait()"
    )
    process = start([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    assert len(children) == 2
    time.sleep(0.5)
    assert all(alive(child) for child in children)
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(alive(child) for child in children):
        time.sleep(0.05)
    assert not any(alive(child) for child in children)


@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_ended_processes_take_their_own_with_them(patience):
    process = start(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    with process.stdout as out:
        child = int(out.readline())
    assert alive(child)
    end_all([process], patience)
    assert process.returncode in (-signal.SIGKILL, -signal.SIGTERM)
    end = time.monotonic() + 20
    while time.monotonic() < end and alive(child):
        time.sleep(0.05)
    assert not alive(child)


def alive(pid):
    """Whether it runs; a process that nobody has waited for yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


# ------------------------------------------------------------------------------------------------
# What a process keeps


def test_each_process_keeps_the_images_of_its_workers():
    whole = data.load("digits")
    rows = np.array([3, 5, 700])
    own = data.load("digits", choose=lambda labels: rows, test=False)
    assert own.train_x.shape == (3, 8, 8, 1)
    assert own.test_x.shape == (0, 8, 8, 1)
    np.testing.assert_array_equal(own.images_of(np.array([700, 3, 3])), whole.train_x[[700, 3, 3]])
    assert (own.num_classes, len(own.train_y)) == (whole.num_classes, len(whole.train_y))


# ------------------------------------------------------------------------------------------------
# One job, on the devices of this process

OPTIONS = {"steps": 6, "log_every": 1, "test_every": 0, "checkpoint_every": 4, "check_every": 0}
JOB = Job("sidco", 0)


class Tiny(nnx.Module):
    """One layer, which compiles quickly."""

    def __init__(self, shape, num_classes, rngs):
        self.only = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.only(x.reshape(x.shape[0], -1))


def trainer_of(workers, nonfinite="mask", images=None, method=None):
    digits = data.load("digits")
    digits = digits if images is None else digits._replace(train_x=images(digits.train_x))
    method = method or jc.error_feedback(jc.flat(jc.top_k(0.02)))
    mesh = mesh_of(workers, ("data",))
    options = {"optimizer": "adam", "lr": 1e-3, "batch": 4, "via": "auto", "nonfinite": nonfinite, "spoil": None}
    with jax.numpy_dtype_promotion("standard"):
        return Trainer(method, Tiny, digits, mesh, options)


def parts_of(trainer, seed=0):
    return data.split(trainer.data.train_y, trainer.mesh.size, None, seed)


@pytest.fixture(scope="module")
def four():
    with jax.numpy_dtype_promotion("standard"):
        yield trainer_of(4)


def after(trainer, steps):
    with jax.numpy_dtype_promotion("standard"):
        *_, last = trainer.steps(trainer.initial_state(0), parts_of(trainer), 0, 0, steps)
    return last.state


def test_other_workers_take_over_the_sum_of_memories(four, tmp_path):
    state = after(four, 5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state, {"workers": 4, "sent_bytes": 50.0})
    with jax.numpy_dtype_promotion("standard"):
        two = trainer_of(2)
        taken, step, about = taken_up(two, checkpoints, 0)
        checkpoints.close()
        old, new = (
            [np.asarray(x, np.float64).sum(0) for x in jax.tree.leaves(s.optimizer[0].local.algorithm.memory)]
            for s in (state, taken)
        )
        assert any(np.any(x != 0) for x in old)
        for a, b in zip(old, new, strict=True):
            np.testing.assert_allclose(b, a.reshape(b.shape), rtol=1e-12, atol=1e-14)
        assert same(two.whole(taken.params), four.whole(state.params))
        assert (step, about["workers"], about["sent_bytes"]) == (5, 4, 50.0)
        *_, last = two.steps(taken, parts_of(two), 0, 5, 7)
    assert np.isfinite(last.loss)
    assert int(last.state.optimizer[0].shared.count) == 7


def test_a_half_written_checkpoint_is_not_taken(four, tmp_path):
    state = after(four, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, {"workers": 4})
    checkpoints.close()
    shutil.copytree(tmp_path / "2", tmp_path / "4.orbax-checkpoint-tmp")
    next((tmp_path / "4.orbax-checkpoint-tmp" / "state" / "d").iterdir()).write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 2
    about = checkpoints.about(2)
    assert about["workers"] == 4
    back = checkpoints.restore(2, four.abstract_state(state.params), about)
    checkpoints.close()
    assert same(four.whole(back), four.whole(state))
    assert not (tmp_path / "4.orbax-checkpoint-tmp").exists()


def flipped(leaf, worker):
    """The same array, with one bit other in the copy of one worker."""
    copies = [np.array(shard.data) for shard in leaf.addressable_shards]
    copies[worker].reshape(-1).view(np.uint32)[0] ^= 1 << 26  # not a denormal, which counts as zero
    devices = [shard.device for shard in leaf.addressable_shards]
    each = [jax.device_put(copy, device) for copy, device in zip(copies, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, each)


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_a_corrupted_worker_stops_the_run(four, part, tmp_path):
    """A bit of one copy flips after step 2; the checkpoint of step 3 would be the first to hold it."""
    journal = Journal(tmp_path)

    class Corrupted:
        def __getattr__(self, name):
            return getattr(four, name)

        def steps(self, state, parts, seed, first, last):
            for now in four.steps(state, parts, seed, first, last):
                yield now
                if now.step == 2:
                    some = now.state.params if part == "params" else now.state.optimizer[1]
                    leaves, structure = jax.tree.flatten(some)
                    number = max(range(len(leaves)), key=lambda i: leaves[i].size)
                    leaves[number] = flipped(leaves[number], 2)
                    some = jax.tree.unflatten(structure, leaves)
                    state = (
                        State(some, now.state.optimizer)
                        if part == "params"
                        else State(now.state.params, (now.state.optimizer[0], some))
                    )
                    yield from four.steps(state, parts, seed, 2, last)
                    return

    options = OPTIONS | {"check_every": 2, "checkpoint_every": 3}
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(jc.replicas.ReplicaDrift, match=r"^step 3: parameters or shared state of worker 2 differ"),
    ):
        train_one(Corrupted(), JOB, options, tmp_path, journal, parts_of(four), lambda *_: None)
    assert [line["step"] for line in journal.lines()] == [1, 2]
    checkpoints = Checkpoints(tmp_path / "checkpoints" / JOB.name)
    assert checkpoints.latest() is None
    checkpoints.close()


@pytest.mark.parametrize("nonfinite", ["skip", pytest.param("mask", marks=pytest.mark.slow)])
def test_nonfinite_gradients(nonfinite, tmp_path):
    """Some images of one worker are NaN. Its steps are skipped by all, or its gradients masked, and counted."""

    def poisoned(images):
        images = images.copy()
        images[::40] = np.nan
        return images

    journal = Journal(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        trainer = trainer_of(2, nonfinite, poisoned)
        row = train_one(trainer, JOB, OPTIONS, tmp_path, journal, parts_of(trainer), lambda *_: None)
        checkpoints = Checkpoints(tmp_path / "checkpoints" / JOB.name)
        state = checkpoints.restore(6, trainer.abstract_state(trainer.initial_state(0).params), checkpoints.about(6))
        checkpoints.close()
    lines = journal.lines()
    spoiled = [not np.isfinite(line["loss"]) for line in lines]
    assert 0 < sum(spoiled) < 6
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trainer.whole(state)) if leaf.dtype == np.float32)
    if nonfinite == "skip":
        assert [line["skipped"] for line in lines] == list(np.cumsum(spoiled))
        assert int(state.optimizer.inner[0].shared.count) == 6 - sum(spoiled)
    else:
        assert [line["nonfinite"] > 0 for line in lines] == spoiled
        assert int(state.optimizer[0].shared.count) == 6
    assert row["steps"] == 6


def test_a_route_with_state_of_its_own(tmp_path):
    small = ("--method", "dithering", "--via", "two_shot", "--workers", "4", "--steps", "2", "--batch", "8")
    with jax.numpy_dtype_promotion("standard"):
        assert train.main([*small, "--runs", str(tmp_path), "--name", "r"]) == 0
    (row,) = json.loads((tmp_path / "r" / "results.json").read_text())
    assert 0 < row["sent_bytes"] < row["parameters"]  # of 4 bits each, in both shots


def test_own_workers(four):
    assert own_workers(four.mesh) == [0, 1, 2, 3]
