"""The network laboratory: its links, what it leaves behind (nothing), and what is measured in it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import ROOT, run_to

from experiments import network
from experiments.lib import netlab
from experiments.lib.cli import UserError
from experiments.lib.launch import start
from experiments.lib.netlab import Link, delay_of, laboratory, rate_name, rate_of
from experiments.lib.pool import Pool
from experiments.network import results
from experiments.network.methods import AXIS, method_name, transformation
from experiments.network.scoreboard import break_even
from jaxcomp.plan.programs import Inseparable, offline, settled


def refusal():
    """Why there can be no laboratory here, or None."""
    try:
        with laboratory(1, 1e6):
            return None
    except UserError as error:
        return str(error)


REFUSAL = refusal()
in_laboratory = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

# A host that answers what it is asked: to listen, to send so many bytes to another, or how much came.
HOST = """
import socket, sys, threading, time
from experiments.lib.pool import answer, or_die, requests
server, came = socket.create_server(("0.0.0.0", 5000)), []

def receive():
    while True:
        connection, total = server.accept()[0], 0
        while part := connection.recv(1 << 16):
            total += len(part)
        connection.sendall(b"!")
        came.append(total)

threading.Thread(target=receive, daemon=True).start()
answer("ready")
with or_die():
    for request in requests():
        to = request["to"].get(sys.argv[1])
        start = time.perf_counter()
        if to:
            with socket.create_connection((to, 5000)) as connection:
                connection.sendall(bytes(request["size"]))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
        answer(time.perf_counter() - start)
"""


def hosts_of(lab):
    return Pool([[*prefix, sys.executable, "-c", HOST, str(i)] for i, prefix in enumerate(lab.prefixes)])


def namespaces(process):
    return [path for place in netlab.PLACES for path in place.glob(f"{netlab.NAME}-{process}-*")]


@in_laboratory
def test_rates_hold_both_ways_and_every_byte_is_counted():
    with laboratory(3, 8e6) as lab, hosts_of(lab) as pool:
        pool.hear()
        pool.ask(to={0: lab.addresses[1]}, size=1000)
        # A busy machine makes it longer, never shorter: the least of a few.
        seconds = lambda to, times=3: sorted(max(pool.ask(to=to, size=300_000)) for _ in range(times))
        before = lab.counters()
        first = seconds({0: lab.addresses[1]}, 1)
        links = [new.since(old) for new, old in zip(lab.counters(), before, strict=True)]
        alone = first + seconds({0: lab.addresses[1]})
        # Both send to host 2, each over a link of its own: what it receives is limited as well.
        together = seconds({0: lab.addresses[2], 1: lab.addresses[2]})
        lab.shape(None)
        unlimited = seconds({0: lab.addresses[1]})
    assert 0.3 < min(alone) < 0.4
    assert 0.6 < min(together) < 0.75
    assert min(unlimited) < 0.2
    assert links[0].sent_payload == pytest.approx(300_000, rel=0.01)
    assert links[0].sent_bytes > 1.04 * 300_000
    assert links[1].received_bytes == pytest.approx(links[0].sent_bytes, rel=0.01)
    assert links[2].sent_bytes < 10_000
    assert not namespaces(os.getpid())


@in_laboratory
def test_a_delay_is_met_twice_by_every_message():
    delay = 0.02
    with laboratory(2, 8e6) as lab, hosts_of(lab) as pool:
        pool.hear()
        [at_once, *_] = pool.ask(to={0: lab.addresses[1]}, size=1000)
        try:
            lab.shape(8e6, delay)
        except UserError as error:
            if "no netem" not in str(error):
                raise
            pytest.skip(str(error))
        [late, *_] = pool.ask(to={0: lab.addresses[1]}, size=1000)
        [longer, *_] = pool.ask(to={0: lab.addresses[1]}, size=300_000)
        lab.shape(8e6)
        [again, *_] = pool.ask(to={0: lab.addresses[1]}, size=1000)
    # Two messages open a connection, one carries the bytes, one is the answer.
    assert 8 * delay < late < at_once + 10 * delay
    assert 8 * delay + 0.3 < longer < 24 * delay + 0.4
    assert again < 8 * delay


@pytest.mark.sampled
@in_laboratory
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(end):
    code = (
        "import sys, time\nfrom experiments.lib.pool import Pool\nfrom experiments.lib.netlab import laboratory\n"
        "worker = 'import time; from experiments.lib.pool import *\\nwith or_die(): answer(0); time.sleep(600)'\n"
        "with laboratory(2, 1e6) as lab:\n"
        "    commands = [[*prefix, sys.executable, '-c', worker] for prefix in lab.prefixes]\n"
        "    with Pool(commands) as pool:\n"
        "        pool.hear()\n"
        "        print(*(process.pid for process in pool.processes), flush=True)\n"
        "        time.sleep(600)\n"
    )
    # In a session of its own: where tests run in the background, SIGINT is ignored and would be by its children.
    program = start(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        workers = [int(word) for word in program.stdout.readline().split()]
        assert len(workers) == 2
        assert len(namespaces(program.pid)) == 5  # two hosts and the switch, and files for the hosts
        program.send_signal(end)
        program.wait(20)
    for _ in range(100):  # the kernel ends the workers of a process that was killed
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    # What a killed program left behind is removed by the next laboratory, which may be that of a test beside this one.
    assert end == signal.SIGKILL or not namespaces(program.pid)
    with laboratory(1):
        assert not namespaces(program.pid)


@in_laboratory
def test_two_laboratories_leave_each_other_alone():
    with laboratory(2) as one:
        with laboratory(2) as other:
            assert not set(one.names) & set(other.names)
        assert len(one.counters()) == 2
        with pytest.raises(RuntimeError, match="of the test"), laboratory(1):
            raise RuntimeError("of the test")
        assert len(one.counters()) == 2


def test_a_laboratory_that_is_not_permitted_says_so(monkeypatch):
    def command(*words):
        raise UserError(f"{' '.join(words)}: mount --make-shared /run/netns failed: Operation not permitted")

    monkeypatch.setattr(netlab, "missing", lambda: None)
    monkeypatch.setattr(netlab, "command", command)
    monkeypatch.setattr(netlab.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(UserError, match=r"^network namespaces are not permitted here"), laboratory(2):
        pass
    monkeypatch.setattr(netlab, "missing", lambda: "root and the commands ip and tc")
    with pytest.raises(UserError, match=r"^a network laboratory needs root"), laboratory(2):
        pass


def test_rates_and_delays():
    read = network.parser().parse_args
    assert read([]).rates == [1e7, 1e8, 1e9, None]
    assert read([]).delay == 0.0
    assert [rate_of(text) for text in ("10mbit", "1gbit", "2.5Mbit", "500kbit", "none")] == [1e7, 1e9, 2.5e6, 5e5, None]
    assert [rate_name(rate) for rate in (1e7, 1e9, 2.5e6, None)] == ["10 Mbit/s", "1 Gbit/s", "2.5 Mbit/s", "no limit"]
    assert [delay_of(text) for text in ("0.2ms", "50us", "1s")] == pytest.approx([2e-4, 5e-5, 1.0])
    for read, text in (
        (rate_of, "10"),
        (rate_of, "0mbit"),
        (rate_of, "0.4bit"),
        (rate_of, 400 * "9" + "bit"),
        (rate_of, "1..2mbit"),
        (delay_of, "5"),
        (method_name, "x"),
    ):
        with pytest.raises(Exception, match=r"got|unknown"):
            read(text)
    assert Link(1000, 5, 0, 0).sent_payload == 1000 - 5 * 66


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("raise ValueError('the cause')", r"process 1 failed: ValueError: the cause; all were stopped\."),
        ("os.kill(os.getpid(), 9)", "process 1 was killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_shown_and_all_are_stopped(ends, said):
    code = (
        "import atexit, os, sys, time\nfrom experiments.lib.pool import answer, or_die, requests\n"
        "atexit.register(time.sleep, 60)\n"  # as the farewell of jax.distributed, which waits for the others
        "with or_die():\n    for request in requests():\n"
        f"        if sys.argv[1] == '1':\n            {ends}\n        time.sleep(60)\n"
    )
    start = time.perf_counter()
    with (
        pytest.raises(UserError, match=rf"^{said}"),
        Pool([[sys.executable, "-c", code, str(i)] for i in range(3)], {"PYTHONPATH": str(ROOT)}) as pool,
    ):
        pool.ask(what="anything")
    assert time.perf_counter() - start < 20
    assert all(process.returncode is not None for process in pool.processes)


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["psum-f32", "psum-bf16", "top-k", pytest.param("sidco", marks=pytest.mark.slow)])
def test_the_program_without_its_network_computes_the_same(method, key):
    workers, size = 4, 3000
    gradient = jax.random.normal(key, (size,))
    tx = transformation(method, 0.01, 7)
    update = lambda _, state: tx.update(gradient, state)
    states = jax.jit(jax.vmap(lambda _: tx.init(gradient), axis_name=AXIS))(jnp.arange(workers))
    mean, after = jax.jit(jax.vmap(update, axis_name=AXIS))(jnp.arange(workers), states)
    state = jax.tree.map(lambda x: x[2], states)
    halves = offline(tx.update, {AXIS: workers}, gradient, state)
    whole = jax.jit(halves.whole)
    run = lambda received: whole(jnp.asarray(2, jnp.int32), received, gradient, state)
    received = settled(halves.arrivals, lambda received: run(received)[0])
    sent, results = run(received)
    assert len(sent) == len(received) == 1
    for mine, theirs in zip(jax.tree.leaves(results), jax.tree.leaves((mean, after)), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs[2]))


def test_a_program_whose_exchange_depends_on_data_has_no_offline_form():
    tx = transformation("top-k:ladder", 0.01, 7)
    gradient = jnp.ones(30_000)
    state = jax.jit(jax.vmap(lambda _: tx.init(gradient), axis_name=AXIS))(jnp.arange(2))
    with pytest.raises(Inseparable, match="collective within cond"):
        offline(tx.update, {AXIS: 2}, gradient, jax.tree.map(lambda x: x[0], state))


def test_break_even_and_limit():
    dense, compressed = (lambda rate: 0.01 + 1e6 / rate), (lambda rate: 0.06 + 1e5 / rate)
    points = [(rate, compressed(rate), dense(rate)) for rate in (1e6, 1e7, 1e9)]
    assert break_even(points) == pytest.approx(9e5 / 0.05)
    assert break_even([*points[:2], (None, 0.06, 0.01)]) == pytest.approx(9e5 / 0.05)
    assert break_even(points[:2]) is None
    assert results.limit_of({"compute": 0.2, "rate": 1e8, "ledger_bytes": 1e6}) == 0.2
    assert results.limit_of({"compute": 0.2, "rate": 1e7, "ledger_bytes": 1e6}) == 0.8
    assert results.limit_of({"compute": 0.2, "rate": None, "ledger_bytes": 1e6}) == 0.2


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(3, 6, 8, 2), (2, 9, 7, 3), (1, 1, 1, 1)])
def test_pooling_is_that_of_flax_with_its_gradient(shape, seed):
    """Bit for bit, with equal pixels, too."""
    from flax import nnx

    from experiments.lib.models import pooled

    rng = np.random.default_rng(seed)
    for x in (rng.standard_normal(shape), rng.integers(-1, 2, shape), np.zeros(shape)):
        want, back = jax.vjp(lambda x: nnx.max_pool(x, (2, 2), (2, 2)), jnp.asarray(x, jnp.float32))
        got, other = jax.vjp(pooled, jnp.asarray(x, jnp.float32))
        np.testing.assert_array_equal(got, want)
        cotangent = jnp.asarray(rng.standard_normal(want.shape), jnp.float32)
        np.testing.assert_array_equal(other(cotangent)[0], back(cotangent)[0])


def test_the_peer_has_the_same_model():
    torch = pytest.importorskip("torch", reason="the peers are not installed")
    from flax import nnx

    from experiments.lib.models import MODELS
    from experiments.network.ddp import Net

    x = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    for make in MODELS.values():
        model = make((8, 8, 1), 10, rngs=nnx.Rngs(0))
        net = Net(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))))
        got = net(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(got, model(jnp.asarray(x)), rtol=1e-4, atol=1e-5)


@in_laboratory
@pytest.mark.slow
def test_the_peer_trains_as_an_all_reduce_does(tmp_path):
    pytest.importorskip("torch", reason="the peers are not installed")
    options = ["--only", "training", "--workers", 2, "--rates", "none", "--steps", 12, "--target", 0.01]
    methods = ["psum-f32", "ddp-f32", "ddp-bf16", "ddp-powersgd"]
    run_to(0, "network", *options, "--train-methods", *methods, "--runs", tmp_path)
    trained = json.loads((tmp_path / "network-1" / "results.json").read_text())["training"]
    losses = {row["method"]: row["losses"] for row in trained}
    np.testing.assert_allclose(losses["ddp-f32"], losses["psum-f32"], rtol=1e-3)
    np.testing.assert_allclose(losses["ddp-bf16"], losses["psum-f32"], rtol=2e-2)
    sent = {row["method"]: row["payload_bytes"] for row in trained}
    assert sent["ddp-bf16"] < 0.6 * sent["ddp-f32"]
    assert sent["ddp-powersgd"] < 0.6 * sent["ddp-f32"]


def test_rounds_end_with_the_last_worker():
    """And they add up to the time that all of them took, whoever began a round early."""
    answers = [{"ends": [1.0, 2.5, 3.0]}, {"ends": [0.5, 2.0, 4.0]}]
    assert network.rounds_of(answers).tolist() == [1.0, 1.5, 1.5]


@in_laboratory
@pytest.mark.slow
def test_the_experiment(tmp_path):
    options = ["--workers", 2, "--size", 120_000, "--rates", "20mbit", "none", "--rounds", 3]
    options += ["--methods", "psum-f32", "psum-bf16", "sidco", "--train-methods", "psum-f32", "--train-seeds", 0, 1]
    options += ["--target", 2, "--steps", 30, "--model", "mlp", "--runs", tmp_path]
    result = run_to(0, "network", *options)
    folder = tmp_path / "network-1"
    kept = json.loads((folder / "results.json").read_text())
    rows = {(row["method"], row["rate"]): row for row in kept["exchange"]}
    assert len(rows) == 6
    assert all(row["equal"] for row in rows.values())
    dense, sidco = rows["psum-f32", 2e7], rows["sidco", 2e7]
    # All-reduce of bf16 is widened by this backend: the counters say so, not the name.
    assert rows["psum-bf16", 2e7]["payload_bytes"] == pytest.approx(dense["payload_bytes"], rel=0.05)
    assert dense["payload_bytes"] == pytest.approx(dense["ledger_bytes"], rel=0.05)
    assert dense["seconds"] > 8 * dense["ledger_bytes"] / 2e7
    assert sidco["seconds"] < dense["seconds"] / 3
    assert sidco["sent_bytes"] == sidco["ledger_bytes"] < dense["ledger_bytes"] / 300
    first, second = (row for row in kept["training"] if row["rate"] == 2e7)
    assert [first["seed"], second["seed"]] == [0, 1]
    assert first["losses"] != second["losses"]
    for trained in (first, second):
        assert trained["reached"]
        assert np.mean(trained["losses"][-10:]) <= 2
    assert "psum-f32" in result.stdout
    assert (folder / "exchange.md").read_text().count("\n| ") >= 6
    assert (folder / "network.png").stat().st_size > 10_000
    assert (folder / "training.md").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rates", "fast"], "must be a rate such as 10mbit"),
        (["--methods", "gzip"], "unknown method 'gzip'"),
        (["--methods", "top-k:air"], "there is no via 'air'"),
    ],
)
def test_wrong_options_are_said_in_one_line(options, said, capsys):
    with pytest.raises(SystemExit) as end:
        network.main(options)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


@in_laboratory
@pytest.mark.slow
def test_a_small_scoreboard(tmp_path):
    options = ["--workers", 2, "--models", "mlp", "--methods", "top-k", "local-int4@5", "stream-f32@5", "overlap-f32@5"]
    options += ["--rates", "20mbit", "none", "--steps", 20]
    run_to(0, "scoreboard", *options, "--seconds", 1, "--runs", tmp_path)
    folder = tmp_path / "scoreboard-1"
    rows = json.loads((folder / "results.json").read_text())
    assert [r["method"] for r in rows] == ["psum-f32", "top-k", "local-int4@5", "stream-f32@5", "overlap-f32@5"]
    assert all(r["equal"] for r in rows)
    assert rows[0]["steps"] == [20]
    assert rows[0]["step_seconds"][0] > 8 * rows[0]["ledger_bytes"] / 2e7
    assert rows[2]["ledger_bytes"] < rows[0]["ledger_bytes"] / 20
    assert rows[2]["step_seconds"][0] < rows[0]["step_seconds"][0] / 3
    assert (folder / "scoreboard.png").stat().st_size > 10_000
    assert "MLP on digits" in (folder / "table.md").read_text()
