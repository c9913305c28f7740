"""The account of memories: exact, whatever was killed when, and it sees a memory that is gone; that of messages."""

import json
from fractions import Fraction

import numpy as np

from experiments.federated import by_client
from experiments.federated.account import UNIT, Counted, begin, exact, sums_of
from experiments.lib.report import new_console
from jaxcomp.federated import Member, load, save

D = 60


def made(folder):
    return Counted(np.linspace(0, 1, D), {0: 30, 1: 10, 2: 3}, 0.2, folder=folder / "used", down=0.5)


def test_numbers_are_exact():
    x = np.float32([0, 1e-45, -3.4e38, 0.1, 2**-149])
    assert [Fraction(int(value), UNIT) for value in exact(x)] == [Fraction(float(value)) for value in x]
    assert exact(np.zeros(0, np.float32)).shape == (0,)


def test_the_account_is_exact_over_deaths_at_every_moment_and_over_restarts_of_the_server(tmp_path):
    """Clients die before and after each file they write; the server goes on from its file every few rounds."""
    rng, core = np.random.default_rng(5), made(tmp_path)
    seen, left = set(), 0
    for number in range(1, 61):
        for i, task in core.open(range(3)).items():
            fate = rng.integers(0, 12)
            if fate == 0:  # before anything
                core.lost(i)
                continue
            begin(tmp_path, i, task._asdict())
            if fate == 1:  # after that it wrote what it remembers
                core.lost(i)
                continue
            member = Member(tmp_path / f"client-{i}.npz")
            point = member.take(task)
            after = point - (rng.standard_normal(D) * 10.0 ** rng.integers(-2, 2)).astype(np.float32)
            answer = member.leave(task) if fate == 2 else member.answer(task, after)
            if fate == 3:  # with its answer on disk, not sent
                core.lost(i)
                continue
            core.receive(i, answer)
        left += len(core.close().left)
        if number % 4 == 0:
            save(tmp_path / "server.npz", core)
            core = made(tmp_path)
            load(tmp_path / "server.npz", core)
            core.take_up()
        elif number % 4 == 2:  # killed while the next round was open: the answers to it come again
            save(tmp_path / "server.npz", core)
            for i, task in core.open(range(3)).items():
                begin(tmp_path, i, task._asdict())
                member = Member(tmp_path / f"client-{i}.npz")
                member.answer(task, member.take(task) - rng.standard_normal(D).astype(np.float32))
            core = made(tmp_path)
            load(tmp_path / "server.npz", core)
            core.take_up()
        for i in range(3):
            sums = sums_of(core, tmp_path, i)
            if sums is not None:
                assert sums.apart == 0
                assert sums.made == sums.used + sums.remembered + sums.held
                seen.add((bool(sums.used), bool(sums.remembered), bool(sums.held)))
    assert (True, True, True) in seen
    assert left >= 3


def test_what_each_member_sent_is_noted_with_what_it_might_have(tmp_path):
    core, shown = made(tmp_path), []
    for number in range(3):
        for i, task in core.open(range(3)).items():
            member = Member(tmp_path / f"client-{i}.npz")
            after = member.take(task) - np.arange(1, D + 1, dtype=np.float32) - i
            answer = member.leave(task) if (number, i) == (2, 1) else member.answer(task, after)
            answer = answer._replace(data=b"noise" * 9) if i == 2 else answer
            core.receive(i, answer)
            shown.append((i, task.entries, len(answer.data), ("in", "whole" if number == 2 else "in", "refused")[i]))
        core.close()
    assert core.sent == shown
    assert shown[0][1] > shown[1][1] > shown[2][1]
    assert {size for i, _, size, _ in shown if i == 2} == {45}


def test_a_memory_that_is_gone_is_seen(tmp_path):
    core = made(tmp_path)
    for number in range(1, 4):
        task = core.open([0])[0]
        if number == 3:  # its disk is lost; it knows the shared point from somebody else
            (tmp_path / "client-0.npz").unlink()
        begin(tmp_path, 0, task._asdict())
        member = Member(tmp_path / "client-0.npz")
        if number == 3:
            member.point, member.version, member._memory = core.shown, core.version, np.zeros(D, np.float32)
        else:
            member.take(task)
        core.receive(0, member.answer(task, member.point - np.arange(D, dtype=np.float32) - number))
        core.close()
        apart = sums_of(core, tmp_path, 0).apart
        assert apart > D // 2 if number == 3 else apart == 0


def test_each_client_has_a_row_with_its_bytes_and_hostile_ones_why_they_were_refused(tmp_path):
    counts = [{"used": 3, "lost": 1}, {"used": 1}, {"garbage": 1, "norm": 1, "lost": 1}]
    clients = {i: {"samples": n, "counts": c} for i, (n, c) in enumerate(zip((1200, 30, 7), counts, strict=True))}
    (tmp_path / "clients.json").write_text(json.dumps(clients))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "starts").write_text("0\n1\n0\n2\n")
    refused = [[], [[2, "garbage: cut"]], [[2, "norm: 5e29; at most 3"]]]
    sent = [[[0, 100, 500, "in"]], [[0, 200, 1000, "in"], [2, 10, 70, "refused"]]]
    sent += [[[0, 300, 1500, "in"], [1, 20, 40_000, "whole"], [2, 10, 80, "refused"]]]
    lines = [{"entries": 10_000, "refused": refused[t], "sent": sent[t]} for t in range(3)]
    config = {"clients": 3, "hostile": 1, "rounds": 3, "changes": 0, "seed": 0}
    curves = by_client(new_console(quiet=True), config, lines, tmp_path)
    names = ["0: 1,200", "1: 30", "2: 7"]
    assert curves == {"8 bytes an entry": (names, [1.6, 0, 0]), "message": (names, [1, 0, 0])}
    head, _, *rows = (tmp_path / "clients.md").read_text().split("\n\n")[1].splitlines()
    assert head == (
        "| client | samples | ratio | entries | bytes | bytes an entry | largest | starts | its answers | refused |"
    )
    assert rows == [
        "| 0 | 1,200 | 0.02000 | 200 | 1,000 | 5.00 | 1,500 | 2 | lost 1, used 3 | - |",
        "| 1 | 30 | - | - | - | - | 40,000 | 1 | used 1 | - |",
        "| 2 (hostile) | 7 | - | - | - | - | 80 | 1 | lost 1 | garbage 1, norm 1 |",
    ]
