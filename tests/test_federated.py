"""Server and clients: what they accept, what they keep, and a whole run between processes."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from experiments.federated.client import Client, garbage
from experiments.federated.protocol import OPTIONS, BadCall, call_of, pack, unpack
from experiments.federated.server import Server, averaged, checked
from jaxcomp.payloads import Dense, Sparse

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\xff\xff\xff\xff{}", pack({})[:-1], b"\2\0\0\0[]", b"\3\0\0\0\xff\xff\xff"]
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
            told = {}

            def client(i):
                told[i] = join({"client": i, "samples": volumes[i]})[0]["k"]
                for t in (1, 2):
                    task, body = pull({"client": i, "after": t - 1})
                    assert task["round"] == t
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
            np.testing.assert_array_equal(server.counts, jc.allocate.counts(jc.allocate.ratios(volumes, 0.1), D))
            first, second = server.rounds(2, 1.0, 2.0)
            for thread in threads:
                thread.join()
            assert told == dict(enumerate(server.counts))
            assert (first.accepted, first.rejected, first.missing) == (1, 1, 1)
            assert (second.accepted, second.rejected, second.missing) == (2, 0, 1)
            assert first.up_bytes == len(message([1])) + len(b"nonsense")
            np.testing.assert_allclose(second.vector[:4], [0, 1, 1, 0])
            with pytest.raises(grpc.RpcError, match="client must be an integer"):
                pull({"client": 3, "after": 0})
            with pytest.raises(grpc.RpcError, match="samples must be an integer"):
                join({"client": 0, "samples": -1})
            assert push({"client": 0, "round": 2}, message([1]))[0]["why"] == "the round is closed"
    finally:
        server.stop()


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
    client.compile(7)
    vector = np.asarray(client.model.start)
    body, rest, whole = client.train(1, vector)
    sent = checked(body, vector.size, 7)
    assert sent.indices.size == 7
    np.testing.assert_array_equal(np.asarray(whole)[sent.indices], sent.values)
    np.testing.assert_array_equal(np.delete(rest, sent.indices), np.delete(whole, sent.indices))
    assert not np.asarray(rest)[sent.indices].any()
    client.keep(1, rest)
    again = Client(1, OPTIONS_OF_CLIENT, tmp_path)
    assert again.after == 1
    np.testing.assert_array_equal(again.memory, rest)
    again.compile(7)
    _, _, more = again.train(2, vector)
    # What was left over is added to the next change, not weighted, not lost.
    again.memory = jnp.zeros_like(again.memory)
    _, _, alone = again.train(2, vector)
    np.testing.assert_array_equal(more, rest + alone)


# ------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.slow
def test_a_whole_run_with_deaths_garbage_and_partial_participation(tmp_path):
    """With this seed two of three are asked in each round; in the first one, client 1 dies."""
    options = ["--clients", 3, "--rounds", 6, "--local-steps", 4, "--ratio", 0.02, "--skew", 20, "--seed", 209]
    options += ["--garbage", 1, "--dropout", 0.2, "--participation", 0.6, "--deadline", 3]
    words = [sys.executable, "-m", "experiments", "federated", "--runs", tmp_path, "--name", "r", *options]
    result = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    for text in ("samples", "accepted", "rejected", "federated.png", "last message refused"):
        assert text in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, 7))
    for line in lines:
        assert line["accepted"] + line["rejected"] + line["missing"] == line["selected"] == 2
    assert (lines[0]["rejected"], lines[0]["missing"]) == (1, 1)
    assert lines[2]["accepted"] >= 1
    assert lines[-1]["restarts"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "r" / "federated.png").read_bytes()[:4] == b"\x89PNG"
    kept = np.load(tmp_path / "r" / "clients" / "client-0.npz")
    assert kept["memory"].any()


def test_wrong_options_are_one_line(tmp_path):
    words = [sys.executable, "-m", "experiments", "federated", "--runs", str(tmp_path), "--clients", "2"]
    for more, why in ((["--garbage", "2"], "leaves none of 2 clients"), (["--rule", "x"], "must be sqrt, phi")):
        result = subprocess.run([*words, *more], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert result.returncode == 2
        assert why in result.stderr
        assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
