"""Federated learning on Flower: the plan of a run, what hostile clients send, the strategy and the mod, whole runs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.federated import main, parser
from experiments.federated.deploy import Federation
from experiments.federated.plan import HOSTILE, asked_of, plan_of, tampered
from experiments.lib.cli import UserError
from jaxcomp.federated import Member, Server
from jaxcomp.federated.flower import RECORD, FlowerRounds, members_mod
from jaxcomp.files import read_arrays

ROOT = Path(__file__).parents[2]
D = 60
WITHOUT = 'Flower is not installed here; it is in the extra "federated"'
flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason=WITHOUT)
simulation = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=WITHOUT)
quiet = pytest.mark.filterwarnings("ignore")  # of Flower's own


# ------------------------------------------------------------------------------------------------
# The plan, and hostile clients


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_its_changes_and_each_is_possible(seed):
    plan = plan_of(8, 2, 30, 20, seed)
    count = Counter(event for now in plan.events for event in now.values())
    assert 18 <= count.total() <= 20
    assert count["joins"] >= 2
    assert not plan.events[0]
    for t, (before, now) in enumerate(zip(plan.present, plan.present[1:], strict=False)):
        gone = {client for client, event in plan.events[t].items() if event != "joins"}
        joined = {client for client, event in plan.events[t + 1].items() if event == "joins"}
        assert set(now) == set(before) - gone | joined
        assert {6, 7} <= set(before)
        assert len(set(before) - {6, 7}) >= 2
    assert plan == plan_of(8, 2, 30, 20, seed)
    assert plan_of(4, 0, 3, 0, seed).present == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(("share", "number"), [(0.01, 1), (0.5, 4), (0.51, 5), (1.0, 8)])
def test_a_share_of_those_there_is_asked_each_in_its_turn(share, number):
    drawn = [asked_of(range(2, 10), {}, share, [0, t]) for t in range(200)]
    assert {len(set(who)) for who in drawn} == {number}
    count = Counter(i for who in drawn for i in who)
    assert set(count) == set(range(2, 10))
    assert all(abs(n - 25 * number) < 40 for n in count.values())  # six standard deviations of the widest
    assert drawn[3] == asked_of({9, 8, 7, 6, 5, 4, 3, 2}, {}, share, [0, 3]) == sorted(drawn[3])


def test_who_dies_or_leaves_in_a_round_is_asked_in_it():
    events = {2: "dies late", 5: "leaves", 6: "joins", 9: "dies early"}  # 9 is not there
    drawn = [asked_of(range(8), events, 0.375, [t]) for t in range(50)]
    assert all({2, 5} < set(who) and len(who) == 3 for who in drawn)
    assert len({tuple(who) for who in drawn}) == 6
    assert asked_of(range(8), events, 0.01, [0]) == [2, 5]
    assert asked_of([], {}, 0.5, [0]) == []


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_hostile_clients_send_is_refused_and_named(kind):
    server = Server(np.zeros(D), {"good": 1, "bad": 1}, 0.1, max_norm=100.0)
    for _ in range(2):
        tasks = server.open({"good", "bad"})
        members = {name: Member() for name in tasks}
        answers = {}
        for name, task in tasks.items():
            task = task._replace(since=-1, updates=[_whole(server)])
            answers[name] = members[name].answer(task, members[name].take(task) - np.arange(D, dtype=np.float32))
        record = tampered(answers["bad"]._asdict(), D, kind)
        assert server.receive("bad", type(answers["bad"])(**record))
        if "bad" in server.missing():
            server.lost("bad")  # as the strategy says of a node that has replied
        assert server.receive("good", answers["good"]._replace(round=server.number)) in ("", REPEATED)
        happened = server.close()
        assert "bad" in dict(happened.refused)
        assert server.counts["bad"]["used"] == 0


REPEATED = "replay: a message that was used before"


def _whole(server):
    import jaxcomp as jc

    return jc.wire.encode(jc.payloads.Dense(server.shown))


# ------------------------------------------------------------------------------------------------
# Strategy and mod


def reply_of(record, node=7, number="m1", error=False):
    metadata = SimpleNamespace(src_node_id=node, reply_to_message_id=number)
    content = SimpleNamespace(config_records={} if record is None else {RECORD: record})
    return SimpleNamespace(metadata=metadata, content=content, has_error=lambda: error)


@pytest.mark.parametrize(
    ("record", "error", "kind"),
    [
        (None, True, "lost"),
        (None, False, "replay"),  # of no round at all
        ({"behind": True}, False, "out of step"),
        ({"round": 1, "data": b"noise"}, False, "garbage"),
        ({"round": 1, "data": "text"}, False, "garbage"),
        ({"round": "1", "data": b""}, False, "garbage"),
        ({"round": 1, "data": b"", "share": "1"}, False, "garbage"),
        ({"round": 9, "data": b""}, False, "replay"),
    ],
)
def test_whatever_a_reply_holds_the_round_goes_on_and_it_is_counted(record, error, kind):
    server = Server(np.zeros(D), {"a": 1}, 0.5)
    rounds = FlowerRounds(server, lambda grid: {7: "a"})
    server.open({"a"})
    rounds._take("a", reply_of(record, error=error))
    assert server.counts["a"][kind] == 1
    assert not server.missing()
    assert server.close().used == 0


def test_a_round_asks_whom_choose_names_among_those_there(monkeypatch):
    server, asked = Server(np.zeros(D), dict.fromkeys("abc", 1), 0.5), []
    here = lambda grid: {1: "a", 3: "c"} if server.number < 2 else {1: "a", 2: "b", 3: "c"}
    rounds = FlowerRounds(server, here, choose=lambda there: sorted(there)[-2:], poll=0.0)

    def push(grid, node, member, task):
        asked.append((node, member))
        server.lost(member)
        return ""

    monkeypatch.setattr(rounds, "_push", push)
    done = list(rounds._rounds(None, 3))
    assert asked == [(1, "a"), (3, "c"), (1, "a"), (3, "c"), (2, "b"), (3, "c")]
    assert [now.asked for now in done] == [2, 2, 2]


@flower
@quiet
def test_a_model_that_no_message_of_flower_carries_fails_before_the_first(monkeypatch):
    import flwr.common

    server = Server(np.zeros(D), {"a": 1}, 0.5)
    asked = []
    rounds = FlowerRounds(server, lambda grid: asked.append(grid) or {7: "a"}, deadline=0.1, poll=0.01)
    monkeypatch.setattr(flwr.common, "GRPC_MAX_MESSAGE_LENGTH", 2**16 + 4 * D - 1)
    with pytest.raises(
        ValueError, match=rf"point has {D} entries, .* bytes; Flower carries .*: train at most {D - 1} "
    ):
        rounds.start(None, 3)
    assert not asked
    assert server.number == 0
    monkeypatch.setattr(flwr.common, "GRPC_MAX_MESSAGE_LENGTH", 2**16 + 4 * D)
    assert list(rounds.start(None, 0)) == []


class InProcess:
    """A grid whose nodes answer when they are asked: `say(node, message)` is a reply, and whether it comes at once."""

    def __init__(self, say):
        self.say, self.replies, self.late, self.count = say, {}, {}, 0

    def push_messages(self, messages):
        for message in messages:
            self.count += 1
            number = str(self.count)
            message.metadata.__dict__["_message_id"] = number
            reply, now = self.say(message.metadata.dst_node_id, message)
            (self.replies if now else self.late)[number] = reply
            yield number

    def pull_messages(self, numbers):
        return [self.replies.pop(number) for number in numbers if number in self.replies]


@flower
@quiet
def test_the_mod_around_a_train_function_and_the_strategy(tmp_path):
    """Named arrays, a node that fails, one that is late, one that loses its disk, one that leaves and returns."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    like = {"w": np.zeros((5, 10), np.float32), "b": np.zeros(10, np.float32)}
    goal = np.linspace(1, 2, D).astype(np.float32)
    mod = members_mod(tmp_path, like=like)
    happens = {}

    def train(message, context):
        arrays = message.content["arrays"]
        assert {key: x.numpy().shape for key, x in arrays.items()} == {"w": (5, 10), "b": (10,)}
        if happens.get((context.node_id, message.content[RECORD]["round"])) == "leaves":
            return Message(RecordDict({RECORD: ConfigRecord({"leaves": True})}), reply_to=message)
        point = np.concatenate([x.numpy().ravel() for x in arrays.values()])
        after = point - 0.3 * (point - goal)
        trained = ArrayRecord({"w": Array(after[:50].reshape(5, 10)), "b": Array(after[50:])})
        return Message(RecordDict({"mine": trained}), reply_to=message)

    def say(node, message):
        event = happens.get((node, message.content[RECORD]["round"]))
        if event == "fails":
            return Message(Error(0, "died"), reply_to=message), True
        if event == "loses its disk":
            (tmp_path / f"client-{node}.npz").unlink()
        reply = mod(message, SimpleNamespace(node_id=node, node_config={}), train)
        assert not reply.content.array_records
        return reply, event != "late"

    grid = InProcess(say)
    happens |= {(1, 3): "fails", (2, 4): "late", (1, 6): "loses its disk", (0, 7): "leaves"}
    server = Server(np.zeros(D), {"a": 60, "b": 30, "c": 10}, 0.3, down=0.5)
    here = lambda grid: {i: name for i, name in enumerate("abc") if (i or server.number != 7)}
    rounds = FlowerRounds(server, here, deadline=0.3, poll=0.01)
    done = []
    for now in rounds.start(grid, 40):
        done.append(now)
        grid.replies |= grid.late
        grid.late = {}
    assert [now.used for now in done[:5]] == [3, 3, 2, 2, 3]
    assert [now.missing for now in done[:5]] == [0, 0, 0, 1, 0]
    assert done[4].late == 1
    assert (done[5].used, server.counts["b"]["out of step"]) == (2, 1)
    assert done[6].left == ["a"]
    assert (done[7].asked, done[8].returned) == (2, ["a"])
    assert [(now.number, now.refused) for now in done[8:16] if now.used != 3] == []
    np.testing.assert_allclose(server.point, goal, rtol=0.05)
    assert sum(now.up_bytes for now in done) < 0.7 * 40 * 3 * 4 * D


# ------------------------------------------------------------------------------------------------
# Processes

WITH_CHILD = ["sh", "-c", "sleep 300 & echo $! > child; wait"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="process groups and their end are those of Linux here")


def child_of(folder):
    file, end = folder / "child", time.monotonic() + 60
    while not (file.is_file() and file.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(file.read_text())


def gone(pid):
    end = time.monotonic() + 60
    stat = Path(f"/proc/{pid}/stat")
    while stat.is_file() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)
    return True


@linux
def test_a_process_heads_a_group_and_all_of_it_ends_with_the_run(tmp_path):
    (tmp_path / "clients").mkdir()
    federation = Federation(tmp_path, 1)
    federation.home = tmp_path
    for end in (lambda pid: os.killpg(pid, signal.SIGKILL), lambda pid: federation.__exit__()):
        federation.start("client-0", list(WITH_CHILD))
        child, process = child_of(tmp_path), federation.processes["client-0"]
        assert os.getpgid(child) == process.pid
        end(process.pid)
        assert process.wait(60) < 0
        assert gone(child)
        (tmp_path / "child").unlink()


# ------------------------------------------------------------------------------------------------
# Whole runs


def experiment(tmp_path, *options, timeout=900):
    words = [sys.executable, "-m", "experiments", "federated", "--runs", tmp_path, "--name", "r", *options]
    result = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    return result.stdout, lines, json.loads((tmp_path / "r" / "clients.json").read_text())


@pytest.mark.slow
@simulation
def test_twenty_changes_and_hostile_clients_in_simulation(tmp_path):
    options = ["--clients", 8, "--hostile", 2, "--rounds", 24, "--changes", 20, "--deadline", 120]
    shown, lines, clients = experiment(tmp_path, *options)
    for text in ("held by the server", "7 (hostile)", "bytes an entry", "federated.png", "refused: "):
        assert text in shown
    assert len(lines) == 24
    assert lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.1
    assert all("used" not in clients[i]["counts"] for i in "67")
    let_in = [each[:3] for line in lines for each in line["sent"] if each[3] == "in"]
    assert {i for i, _, _ in let_in} == set(range(6))
    assert all(size <= 64 + 8 * entries for _, entries, size in let_in)
    assert all(each[-1] == 0 for line in lines for each in line["sums"].values())
    assert (tmp_path / "r" / "federated.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@flower
def test_processes_over_tls_with_deaths_and_a_hostile_client(tmp_path):
    """Client 0 dies in round 3 and client 1 in round 5; client 3 is hostile."""
    options = ["--processes", "--clients", 4, "--hostile", 1, "--rounds", 6, "--changes", 4, "--deadline", 60]
    _, lines, clients = experiment(tmp_path, *options, "--seed", 7)
    assert len(lines) == 6
    assert sum(line["used"] for line in lines) >= 6
    starts = Counter((tmp_path / "r" / "clients" / "starts").read_text().split())
    assert starts["0"] > 1
    assert starts["1"] > 1
    assert "used" not in clients["3"]["counts"]
    assert {who for line in lines for who, _ in line["refused"]} == {3}
    assert all(each[-1] == 0 for line in lines for each in line["sums"].values())


@pytest.mark.slow
@simulation
def test_a_run_that_is_killed_goes_on_bitwise(tmp_path):
    """With deaths, a hostile client and a random choice of who is asked; killed when a few rounds are closed."""
    options = ["--clients", 5, "--hostile", 1, "--rounds", 9, "--changes", 6, "--participation", 0.7]
    _, whole, clients = experiment(tmp_path / "whole", *options)
    words = [sys.executable, "-m", "experiments", "federated", "--runs", tmp_path / "cut", "--name", "r", *options]
    process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "cut" / "r" / "metrics.jsonl"
    while process.poll() is None and not (journal.is_file() and len(journal.read_text().splitlines()) >= 4):
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shown, cut, others = experiment(tmp_path / "cut", "--resume")
    assert "round 9: " in shown
    assert "round 2: " not in shown
    assert cut == whole
    assert others == clients
    servers = [read_arrays(tmp_path / name / "r" / "server.npz") for name in ("whole", "cut")]
    for key in servers[0].keys() - {"header"}:
        assert servers[0][key].tobytes() == servers[1][key].tobytes(), key


def test_wrong_options_are_one_line(tmp_path, monkeypatch):
    words = ["--runs", str(tmp_path), "--clients", "2"]
    with pytest.raises(UserError, match="--hostile 1 leaves fewer than 2 of 2 clients"):
        main([*words, "--hostile", "1"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'flwr, ray not installed; in an environment of its own: pip install "\.\['):
        main(words)
    assert list(tmp_path.iterdir()) == []


def test_options_are_those_of_the_other_experiments(capsys):
    for option, value, why in (
        ("--skew", "0.5", "must be a number of at least 1; got '0.5'"),
        ("--participation", "0", "must be a number in (0, 1]; got '0'"),
        ("--late", "keep", "invalid choice: 'keep'"),
    ):
        with pytest.raises(SystemExit):
            parser().parse_args([option, value])
        assert f"argument {option}: {why}" in capsys.readouterr().err
