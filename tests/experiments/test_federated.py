"""Server and clients: what they accept, what they keep, and a whole run between processes."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from experiments.cli import UserError
from experiments.federated import Clients, parser
from experiments.federated.client import Client, garbage
from experiments.federated.protocol import OPTIONS, BadCall, call_of, pack, unpack
from experiments.federated.server import Server, averaged, checked
from jaxcomp.payloads import Dense, Sparse

ROOT = Path(__file__).parents[2]
D = 50


def message(indices, values=None, size=D):
    indices = np.asarray(indices, np.int32)
    values = np.arange(1.0, len(indices) + 1) if values is None else values
    return jc.wire.encode(Sparse(np.asarray(values, np.float32), indices))


# ------------------------------------------------------------------------------------------------
# Messages


def test_a_good_message_is_taken_without_its_padding():
    got = checked(message([3, 9, D, D], [1, 2, 0, 0]), D, 4)
    np.testing.assert_array_equal(got.indices, [3, 9])
    np.testing.assert_array_equal(got.values, [1, 2])


BAD = {
    "noise": (np.random.default_rng(0).bytes(100), "wire: magic"),
    "nothing": (b"", "wire: "),
    "short": (message([1, 2, 3])[:-3], "wire: "),
    "dense": (jc.wire.encode(Dense(np.ones(3, np.float32))), "expected Sparse; got Dense"),
    "too many": (message(range(5)), "5 entries; this client may send 4"),
    "outside": (message([1, D + 1]), "ascend within"),
    "twice": (message([7, 7, 8]), "ascend within"),
    "backwards": (message([7, 3]), "ascend within"),
    "nan": (message([1, 2], [np.nan, 1]), "finite"),
    "infinite": (message([1, 2], [1, np.inf]), "finite"),
    "half": (jc.wire.encode(Sparse(np.ones(2, np.float16), np.array([1, 2], np.int32))), "f32"),
    "nested": (jc.wire.encode(Sparse(Dense(np.ones(2, np.float32)), np.array([1, 2], np.int32))), "f32"),
}


@pytest.mark.parametrize("name", BAD)
def test_garbage_is_refused_with_a_reason(name):
    body, why = BAD[name]
    with pytest.raises(ValueError, match=why):
        checked(body, D, 4)


@pytest.mark.parametrize("round_", range(8))
def test_what_the_bad_client_sends_is_refused(round_):
    with pytest.raises(ValueError, match=r"wire|finite"):
        checked(garbage(message(range(20)), round_), D, 30)


def test_the_mean_is_weighted_by_samples():
    messages = [(30, Sparse(np.float32([1.0]), np.array([2]))), (10, Sparse(np.float32([2.0, 4.0]), np.array([1, 2])))]
    got = averaged(np.ones(4, np.float32), messages)
    np.testing.assert_allclose(got, [1, 1.5, 1 + 0.75 + 1, 1])
    np.testing.assert_array_equal(averaged(np.ones(4, np.float32), []), np.ones(4))
    assert got.dtype == np.float32


DEEP = b"\xa0\x0f\0\0" + b"[" * 4000  # a parser that recurses gives up on it


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\xff\xff\xff\xff{}", pack({})[:-1], b"\2\0\0\0[]", b"\3\0\0\0\xff\xff\xff", DEEP]
)
def test_calls_that_are_not_of_the_protocol(data):
    with pytest.raises(BadCall):
        unpack(data)


def test_calls_round_trip():
    assert unpack(pack({"round": 3}, b"abc")) == ({"round": 3}, b"abc")


# ------------------------------------------------------------------------------------------------
# Server and clients in one process, over real sockets


def test_rounds_close_without_the_missing_and_count_what_is_bad():
    server = Server(np.zeros(D), 3, 0.1, "sqrt", seed=0)
    volumes = [90, 9, 1]
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=OPTIONS) as channel:
            join, pull, push = (call_of(channel, name) for name in ("Join", "Pull", "Push"))
            rooms = {}

            def client(i):
                rooms[i] = join({"client": i, "samples": volumes[i]})[0]["room"]
                for t in (1, 2):
                    task, body = pull({"client": i, "after": t - 1})
                    assert (task["round"], task["k"]) == (t, rooms[i])
                    assert jc.wire.decode(body).values.shape == (D,)
                    if i == 0:
                        assert push({"client": i, "round": t}, message([t]))[0]["accepted"]
                    elif i == 1 and t == 1:
                        assert "wire" in push({"client": i, "round": t}, b"nonsense")[0]["why"]
                        assert push({"client": i, "round": t}, message([5]))[0]["why"] == "the round is closed"
                    elif i == 1:
                        assert push({"client": i, "round": t}, message([t]))[0]["accepted"]

            threads = [threading.Thread(target=client, args=(i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            server.wait_for_clients(30)
            np.testing.assert_array_equal(server.rooms, jc.allocate.counts(jc.allocate.ratios(volumes, 0.1), D))
            first, second = server.rounds(2, 2.0)
            for thread in threads:
                thread.join()
            assert rooms == dict(enumerate(server.rooms))
            assert (first.accepted, first.rejected, first.missing) == (1, 1, 1)
            assert (second.accepted, second.rejected, second.missing) == (2, 0, 1)
            assert first.up_bytes == 2 * len(message([1])) + len(b"nonsense")  # the late one came, too
            np.testing.assert_allclose(second.vector[:4], [0, 1, 1, 0])
            with pytest.raises(grpc.RpcError, match="client must be an integer"):
                pull({"client": 3, "after": 0})
            for samples in (-1, 0, True, 10**400, 0.5, None):
                with pytest.raises(grpc.RpcError, match=r"samples must be an integer in \[1, 9007199254740992\)"):
                    join({"client": 0, "samples": samples})
            with pytest.raises(grpc.RpcError, match="client must be an integer"):
                push({"client": True, "round": 2}, message([1]))
            for data in (DEEP, b"\xff" * 9):
                with pytest.raises(grpc.RpcError, match="header"):
                    channel.unary_unary("/jaxcomp.Federated/Push")(data)
            assert server.refused == 10  # and the server is still there
            assert push({"client": 0, "round": 2}, message([1]))[0]["why"] == "the round is closed"
    finally:
        server.stop()


def test_a_round_that_would_not_be_finite_changes_nothing_and_is_counted():
    server = Server(np.zeros(D), 2, 0.5, "uniform", seed=0)
    here = lambda: True

    def client(i):
        server.join({"client": i, "samples": 1}, b"", here)
        for t, value in ((1, 3.4e38), (2, 3.4e38), (3, 1.0)):
            server.pull({"client": i, "after": t - 1}, b"", here)
            server.push({"client": i, "round": t}, message([4], [value]), here)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(2)]
    try:
        for thread in threads:
            thread.start()
        server.wait_for_clients(30)
        rounds = list(server.rounds(3, 30))
    finally:
        server.stop()
    assert [now.skipped for now in rounds] == [0, 1, 0]
    assert [float(now.vector[4]) for now in rounds[:2]] == [float(np.float32(3.4e38))] * 2
    assert all(np.all(np.isfinite(now.vector)) for now in rounds)


def test_the_clients_of_a_round_share_its_budget():
    volumes, asked = [70, 20, 8, 2], []
    server = Server(np.zeros(1000), 4, 0.1, "sqrt", seed=0, participation=0.5)
    lock, here = threading.Lock(), lambda: True

    def client(i):
        room = json.loads(server.join({"client": i, "samples": volumes[i]}, b"", here)[4:])["room"]
        after = 0
        while "round" in (task := unpack(server.pull({"client": i, "after": after}, b"", here))[0]):
            after = task["round"]
            assert task["k"] <= room == 200
            with lock:
                asked.append((after, i, task["k"]))
            server.push({"client": i, "round": after}, message([0], size=1000), here)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        server.wait_for_clients(30)
        assert len(list(server.rounds(6, 30))) == 6
    finally:
        server.stop()
    for t in range(1, 7):
        now = sorted((i, k) for number, i, k in asked if number == t)
        chosen = [i for i, _ in now]
        ratios = jc.allocate.ratios([volumes[i] for i in chosen], 0.1)
        assert [k for _, k in now] == jc.allocate.counts(ratios, 1000).tolist()
        assert sum(k for _, k in now) == 200


@pytest.mark.parametrize(("share", "clients", "asked"), [(0.07, 100, 7), (0.6, 3, 2), (1.0, 3, 3), (0.01, 3, 1)])
def test_how_many_are_asked(share, clients, asked):
    server = Server(np.zeros(1), clients, 0.1, "sqrt", seed=0, participation=share)
    server.stop()
    assert server.asked == asked


class Children(Clients):
    """Processes that do something else than learn."""

    script = "exit 0"

    def start(self, number):
        self.starts[number] += 1
        with self.log(number).open("a") as log:
            return subprocess.Popen(["sh", "-c", self.script], stdout=log, stderr=log)


def test_a_client_that_dies_before_the_first_round_is_started_again(tmp_path, monkeypatch):
    """Here always: the run ends at once and says why, not when patience does."""
    monkeypatch.setattr("experiments.federated.server.GLANCE", 0.02)
    monkeypatch.setattr(Children, "script", "echo first; echo no module named digits; exit 3")
    (tmp_path / "clients").mkdir()
    server = Server(np.zeros(D), 1, 0.1, "sqrt", seed=0)
    clients = Children(1, server.port, tmp_path)
    server.look_after = lambda: clients.look_after(server.ready)
    try:
        with pytest.raises(UserError, match="client 0 died 4 times before it was ready; its log ends: no module named"):
            server.wait_for_clients(60)
    finally:
        server.stop()
    assert clients.restarts == 3


def test_a_client_that_had_been_ready_may_die_as_often_as_it_likes(tmp_path, monkeypatch):
    monkeypatch.setattr(Children, "script", "exit 75")
    (tmp_path / "clients").mkdir()
    clients = Children(2, 0, tmp_path)
    for _ in range(6):
        for process in clients.processes:
            process.wait()
        ready = {0, 1}
        clients.look_after(ready)
        assert ready == set()
    assert clients.restarts == 12
    monkeypatch.setattr(Children, "script", "sleep 60")
    clients.processes[1].wait()
    clients.processes[1] = clients.start(1)
    start = time.monotonic()
    clients.stop(ready={0})  # the sleeper is not: nobody waits for it
    assert time.monotonic() - start < 10


OPTIONS_OF_CLIENT = {
    "data": "digits",
    "data_dir": None,
    "model": "mlp",
    "clients": 3,
    "skew": 10.0,
    "alpha": 1.0,
    "seed": 0,
    "lr": 0.1,
    "local_steps": 2,
    "batch": 4,
}


def test_a_client_keeps_what_it_did_not_send_across_its_own_death(tmp_path):
    client = Client(1, OPTIONS_OF_CLIENT, tmp_path)
    client.compile(9)
    vector = np.asarray(client.model.start)
    body, rest, whole = client.train(1, vector, 7)
    sent = checked(body, vector.size, 7)
    assert sent.indices.size == 7
    np.testing.assert_array_equal(np.asarray(whole)[sent.indices], sent.values)
    np.testing.assert_array_equal(np.delete(rest, sent.indices), np.delete(whole, sent.indices))
    assert not np.asarray(rest)[sent.indices].any()
    client.keep(1, rest)
    again = Client(1, OPTIONS_OF_CLIENT, tmp_path)
    assert again.after == 1
    np.testing.assert_array_equal(again.memory, rest)
    again.compile(9)
    _, _, more = again.train(2, vector, 9)
    # What was left over is added to the next change, not weighted, not lost.
    again.memory = jnp.zeros_like(again.memory)
    _, _, alone = again.train(2, vector, 9)
    np.testing.assert_array_equal(more, rest + alone)


# ------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.slow
def test_a_whole_run_with_deaths_garbage_and_partial_participation(tmp_path):
    """With this seed two of three are asked in each round; in the first one, client 1 dies. It may be back in time."""
    options = ["--clients", 3, "--rounds", 6, "--local-steps", 4, "--ratio", 0.02, "--skew", 20, "--seed", 209]
    options += ["--garbage", 1, "--dropout", 0.2, "--participation", 0.6, "--deadline", 6]
    words = [sys.executable, "-m", "experiments", "federated", "--runs", tmp_path, "--name", "r", *options]
    result = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    for text in ("samples", "accepted", "rejected", "federated.png", "last message refused"):
        assert text in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, 7))
    for line in lines:
        assert line["accepted"] + line["rejected"] + line["missing"] == line["selected"] == 2
    assert lines[0]["rejected"] == 1
    assert lines[0]["restarts"] > 0
    assert sum(line["accepted"] for line in lines) >= 2
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "r" / "federated.png").read_bytes()[:4] == b"\x89PNG"
    kept = np.load(tmp_path / "r" / "clients" / "client-0.npz")
    assert kept["memory"].any()


def test_wrong_options_are_one_line(tmp_path):
    words = [sys.executable, "-m", "experiments", "federated", "--runs", str(tmp_path), "--clients", "2"]
    for more, why in (
        (["--garbage", "2"], "leaves none of 2 clients"),
        (["--rule", "x"], "must be sqrt, phi"),
    ):
        result = subprocess.run([*words, *more], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert result.returncode == 2
        assert why in result.stderr
        assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_options_are_those_of_the_other_experiments(capsys):
    assert parser().parse_args(["--rule", "2/3"]).rule == 2 / 3
    with pytest.raises(SystemExit):
        parser().parse_args(["--skew", "0.5"])
    assert "argument --skew: must be a number of at least 1; got '0.5'" in capsys.readouterr().err
