"""Members who come and go: what a round makes of whoever is there, what is let in, and what is never lost."""

from fractions import Fraction

import jax
import numpy as np
import optax
import pytest
from conservation import answered

import jaxcomp as jc
from jaxcomp.federated import Answer, Member, OutOfStep, Server, largest, parted
from jaxcomp.federated.messages import opened
from jaxcomp.payloads import Dense, Sparse

D = 12


def vector(*values, size=D):
    return np.float32([*values, *[0] * (size - len(values))])


def sparse(indices, values):
    return jc.wire.encode(Sparse(np.float32(values), np.int32(indices)))


# ------------------------------------------------------------------------------------------------
# Arithmetic


def test_both_parts_add_up_exactly_and_the_used_one_is_about_its_share():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2000) * 10.0 ** rng.integers(-44, 38, 2000)).astype(np.float32)
    for share in (0.0, 1e-9, 0.1, 0.4999999, 0.5, 0.7, 1 - 1e-7, 1.0):
        used, rest = parted(values, share)
        assert all(
            Fraction(float(u)) + Fraction(float(r)) == Fraction(float(v))
            for u, r, v in zip(used, rest, values, strict=True)
        )
        np.testing.assert_allclose(used, values * share, rtol=1e-6, atol=1e-7 * np.abs(values).max())


def test_the_largest_entries_without_zeros():
    x = vector(0, -3, 1, 0, 2)
    assert [a.tolist() for a in largest(x, 2)] == [[-3, 2], [1, 4]]
    assert [a.tolist() for a in largest(x, D)] == [[-3, 1, 2], [1, 2, 4]]
    assert largest(x, 0).values.size == largest(np.zeros(0, np.float32), 3).values.size == 0


def oracle(point, targets, volumes, counts, rounds, rate):
    """Error feedback with a ratio for each member and a mean by volumes, float64."""
    point, memories = np.float64(point), np.zeros((len(targets), len(point)))
    for _ in range(rounds):
        mean = np.zeros(len(point))
        for i, (target, volume, k) in enumerate(zip(targets, volumes, counts, strict=True)):
            whole = memories[i] + rate * (point - target)
            kept = np.argsort(-np.abs(whole), kind="stable")[:k]
            sent = np.zeros(len(point))
            sent[kept] = whole[kept]
            memories[i] = whole - sent
            mean += volume / sum(volumes) * sent
        point = point - mean
    return point, memories


def test_rounds_of_all_are_those_of_the_specification():
    rng = np.random.default_rng(1)
    start, targets, volumes = rng.standard_normal(D), rng.standard_normal((3, D)), [70, 20, 10]
    server = Server(start, dict(enumerate(volumes)), 0.25, bound=1e9)
    server._limit = lambda used: np.inf  # nothing is clipped
    members = {i: Member() for i in range(3)}
    limits = list(server.entries_of(members).values())
    assert sum(limits) == round(0.25 * 3 * D)
    assert limits == jc.allocate.counts(jc.allocate.ratios(volumes, 0.25), D).tolist()
    for _ in range(8):
        happened = answered(server, members, away=lambda i, point: point - 0.3 * (point - targets[i]))
        assert (happened.used, happened.missing, happened.refused) == (3, 0, [])
    point, memories = oracle(start.astype(np.float32), targets, volumes, limits, 8, 0.3)
    np.testing.assert_allclose(server.point, point, atol=2e-6)
    np.testing.assert_allclose(server.shown, server.point, rtol=1e-6)
    server.open(())  # what members remember once they are told
    for i, member in members.items():
        np.testing.assert_allclose(member.take(server._task(i, 1)), server.point)
        np.testing.assert_allclose(member.memory, memories[i], atol=2e-6)


def test_an_outer_optimizer_and_updates_of_few_entries():
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    plain, few = (Server(vector(), {0: 1}, 1.0, outer=outer, down=down) for down in (1.0, 0.2))
    trace, velocity = np.zeros(D), np.zeros(D)
    member, other, goal = Member(), Member(), np.linspace(1, 2, D)
    for _ in range(12):
        answered(plain, {0: member}, away=lambda _, point: point - 0.5 * (point - goal))
        gradient = 0.5 * (trace - goal)
        velocity = gradient + 0.9 * velocity
        trace = trace - 0.7 * (gradient + 0.9 * velocity)
        answered(few, {0: other}, away=lambda _, point: point - 0.5 * (point - goal))
        assert np.count_nonzero(opened(few._updates[-1], D, D).values) <= 2
    np.testing.assert_allclose(plain.point, trace, rtol=2e-3)
    assert not np.array_equal(few.shown, few.point)  # the rest comes later: nothing of it is forgotten
    for _ in range(12):
        few._show()
    np.testing.assert_allclose(few.shown, few.point, rtol=1e-6)


# ------------------------------------------------------------------------------------------------
# Who is there


def test_a_round_goes_on_with_whoever_answers_and_weighs_by_them():
    server = Server(vector(), {"a": 30, "b": 10, "c": 60}, 1.0)
    tasks = server.open({"a", "b", "c", "stranger"})
    assert set(tasks) == {"a", "b", "c"}
    members = {name: Member() for name in tasks}
    for name, value in (("a", 1.0), ("b", 1.0)):
        point = members[name].take(tasks[name])
        server.receive(name, members[name].answer(tasks[name], point + vector(value, value * (name == "b"))))
    happened = server.close()
    assert (happened.asked, happened.used, happened.missing) == (3, 2, 1)
    assert happened.joined == ["a", "b", "c"]
    np.testing.assert_allclose(server.point[:2], [(30 + 10 / 2**0.5) / 40, 10 / 2**0.5 / 40], rtol=1e-6)  # b is clipped
    assert [member for member, _ in happened.clipped] == ["b"]
    assert server.open(()) == {}
    before = server.point
    assert server.close().used == 0
    np.testing.assert_array_equal(server.point, before)


def test_the_order_of_arrivals_changes_nothing():
    rng = np.random.default_rng(2)
    names = list("abcdefgh")
    servers = [Server(vector(), dict.fromkeys(names, 3), 1.0) for _ in range(2)]
    for number in range(1, 4):
        data = {name: jc.wire.encode(Dense(rng.standard_normal(D).astype(np.float32))) for name in names}
        for server, order in zip(servers, (names, names[::-1]), strict=True):
            server.open(names)
            for name in order:
                server.receive(name, Answer(number, data[name] if name not in "bd" else b"noise"))
        assert servers[0].close() == servers[1].close()
        assert servers[0].point.tobytes() == servers[1].point.tobytes()
        assert list(servers[0]._digests) == list(servers[1]._digests)


def test_who_joins_starts_from_the_shared_point_and_who_was_away_catches_up():
    server = Server(np.arange(500), {"a": 1, "b": 1}, 0.1, down=0.1, history=3)
    members = {"a": Member(), "b": Member()}
    step = lambda _, point: point * 0.9
    for here in ({"a"}, {"a"}, {"a", "b"}, {"a"}, {"a", "b"}):
        answered(server, members, here, step)
    for rounds in (2, 4):  # within the history, and beyond it
        for _ in range(rounds):
            answered(server, members, {"a"}, step)
        task = server.open({"b"})["b"]
        assert (task.since < 0) == (rounds == 4)
        np.testing.assert_array_equal(members["b"].take(task), server.shown)
        server.receive("b", members["b"].answer(task, server.shown))
        assert server.close().returned == ["b"]
    server.admit("c", 5)
    members["c"] = Member()
    assert answered(server, members, away=step).joined == ["c"]
    np.testing.assert_array_equal(members["c"].take(server.open({"c"})["c"]), server.shown)
    with pytest.raises(ValueError, match="on the roster; its volume stays 1"):
        server.admit("a", 2**40)
    for volume in (0, True, 2**53, 0.5):
        with pytest.raises(ValueError, match="must be an integer in"):
            server.admit("d", volume)


def test_a_member_without_the_point_asks_for_the_whole():
    server = Server(np.arange(500), {"a": 1}, 0.1, down=0.1)
    answered(server, {"a": Member()}, away=lambda _, point: point * 0.9)
    task = server.open({"a"})["a"]
    fresh = Member()
    with pytest.raises(OutOfStep, match="starts from version 0; this member has -1"):
        fresh.take(task)
    server.behind("a")
    assert server.close().missing == 0
    np.testing.assert_array_equal(fresh.take(server.open({"a"})["a"]), server.shown)
    assert server.counts["a"]["out of step"] == 1


@pytest.mark.parametrize("late", ["use", "drop"])
def test_a_straggler_is_used_in_the_next_round_or_dropped(late):
    server = Server(vector(), {"a": 1, "b": 1}, 1.0, late=late)
    members = {"a": Member(), "b": Member()}
    tasks = server.open(members)
    slow = members["b"].answer(tasks["b"], members["b"].take(tasks["b"]) + vector(0, 2))
    server.receive("a", members["a"].answer(tasks["a"], members["a"].take(tasks["a"]) + vector(1)))
    assert server.close().missing == 1
    second = server.open(members)
    assert set(second) == ({"a"} if late == "use" else {"a", "b"})
    why = server.receive("b", slow)
    happened = server.close()
    if late == "use":
        assert (why, happened.late, happened.used) == ("", 1, 1)
        np.testing.assert_allclose(server.point[:2], [1, 1])  # clipped to the median
        rest = server.open({"b"})["b"]
        members["b"].take(rest)
        np.testing.assert_allclose(members["b"].memory, -vector(0, 1))  # which leaves it the other half
    else:
        assert (why.split(":")[0], happened.late) == ("late", 0)
        members["b"].take(second["b"])
        np.testing.assert_array_equal(members["b"].memory, -vector(0, 2))
        assert server.counts["b"] == {"lost": 2, "late": 1}


def test_an_answer_between_two_rounds_is_dropped_too_and_stays_with_its_member():
    server, member = Server(vector(), {"a": 1}, 1.0, late="drop"), Member()
    task = server.open({"a"})["a"]
    slow = member.answer(task, member.take(task) - vector(1, 2))
    assert server.close().missing == 1
    assert not server.missing()
    assert server.receive("a", slow) == "late: round 1 of this member is decided"
    task = server.open({"a"})["a"]
    assert (task.rounds, task.shares) == ([1], [0.0])
    member.take(task)
    happened = server.close()
    assert (happened.used, happened.late, len(happened.refused)) == (0, 0, 1)
    np.testing.assert_array_equal(server.point, vector())
    np.testing.assert_array_equal(member.memory, vector(1, 2))
    assert server.counts["a"] == {"lost": 2, "late": 1}


def test_an_answer_between_two_rounds_is_used_once():
    server, member = Server(vector(), {"a": 1}, 1.0), Member()
    task = server.open({"a"})["a"]
    slow = member.answer(task, member.take(task) - vector(1, 2))
    assert server.close().missing == 1
    assert server.receive("a", slow) == ""
    assert server.open({"a"}) == {}  # a task would tell it that nothing of its answer was used
    happened = server.close()
    assert (happened.used, happened.late) == (1, 1)
    np.testing.assert_array_equal(server.point, -vector(1, 2))
    member.take(server.open({"a"})["a"])
    np.testing.assert_array_equal(member.memory, vector())


def test_who_is_waited_for_too_long_is_asked_again_and_its_answer_refused():
    server = Server(vector(), {"a": 1}, 1.0)
    first = server.open({"a"})["a"]
    for number in (2, 3):
        server.close()
        again = server.open({"a"})
        assert set(again) == ({"a"} if number == 3 else set())
    assert server.receive("a", Answer(first.round, sparse([0], [1]))).startswith("late")
    assert again["a"].rounds == [1]
    assert again["a"].shares == [0.0]


# ------------------------------------------------------------------------------------------------
# Who is let in

QUANTIZED = jc.wire.encode(jc.roundtrip(jc.dithering(3), np.ones(4, np.float32), key=jax.random.key(0))[1])
BAD = {
    "noise": (np.random.default_rng(0).bytes(100), "garbage: wire: magic"),
    "nothing": (b"", "garbage: wire: message length"),
    "short": (sparse([1, 2, 3], [1, 2, 3])[:-3], "garbage: wire: body length"),
    "another size": (jc.wire.encode(Dense(np.ones(3, np.float32))), "shape: a vector of 3 entries; expected 12"),
    "all": (jc.wire.encode(Dense(np.ones(D, np.float32))), "entries: 12 entries; at most 6"),
    "too many": (sparse(range(7), [1] * 7), "entries: 7 entries; at most 6 are allowed here"),
    "outside": (sparse([1, D + 1], [1, 1]), "shape: indices must ascend within"),
    "twice": (sparse([7, 7, 8], [1] * 3), "shape: indices must ascend within"),
    "backwards": (sparse([7, 3], [1, 1]), "shape: indices must ascend within"),
    "nan": (sparse([1, 2], [np.nan, 1]), "not finite: 1 values are NaN or infinite"),
    "infinite": (sparse([1, 2], [1, np.inf]), "not finite: 1 values are NaN or infinite"),
    "huge": (sparse([1], [5e29]), "norm: 5.00e+29; the median is"),
    "half": (jc.wire.encode(Sparse(np.ones(2, np.float16), np.array([1, 2], np.int32))), "shape: values must be f32"),
    "another payload": (QUANTIZED, "shape: expected Sparse, or Dense of f32; got "),
    "half a vector": (jc.wire.encode(Dense(np.ones(D, np.float16))), "shape: expected Sparse, or Dense of f32"),
}


def test_hostile_members_change_nothing_and_are_named():
    names = ["a", "b", "c", *BAD]
    honest, under_attack = (Server(vector(), dict.fromkeys(names, 1), 0.5) for _ in range(2))
    worlds = [{name: Member() for name in "abc"} for _ in range(2)]
    used = {}
    for t in range(1, 5):
        for server, members in zip((honest, under_attack), worlds, strict=True):
            tasks = server.open(names if server is under_attack else "abc")
            for name, member in members.items():
                point = member.take(tasks[name])
                away = point - 0.3 * (point - np.linspace(1, 2, D) * (1 + 0.1 * ord(name) - ord("a") / 10))
                data = member.answer(tasks[name]._replace(entries=6), away)
                server._entries[name].limit = 6  # budgets differ with the number of members
                assert server.receive(name, data) == ""
                used[server is under_attack, name, t] = data
                assert server.receive(name, data).startswith("replay: round")  # at once
            for name, (data, _) in BAD.items() if server is under_attack else ():
                server._entries[name].limit = 6
                server.receive(name, Answer(t, data))
                assert server.receive(name, used[True, "a", t]).startswith("replay")
            if server is under_attack:
                assert server.receive("stranger", used[True, "b", t]).startswith("unknown: not on the roster")
                assert server.receive("a", used[True, "b", t]._replace(round=t + 7)).startswith("replay")
            happened = server.close()
        for name, (_, expected) in BAD.items():
            why = [reason for member, reason in happened.refused if member == name]
            assert any(reason.startswith(expected) for reason in why), (name, why)
        assert happened.used == 3
        np.testing.assert_array_equal(under_attack.point, honest.point)
    assert under_attack.counts["huge"] == {"norm": 4, "replay": 4}
    assert under_attack.counts["a"]["used"] == 4
    # An old message under a new number, from another member or from the same.
    tasks = under_attack.open(names)
    for name in ("b", "noise"):
        why = under_attack.receive(name, used[True, "b", 4]._replace(round=5))
        assert why == "replay: a message that was used before"
    assert under_attack.close().used == 0


def test_a_single_first_answer_is_bounded_by_what_was_agreed():
    server = Server(vector(), {"a": 1}, 1.0, max_norm=3.0)
    server.open({"a"})
    assert server.receive("a", Answer(1, sparse([0], [3.5]))) == "norm: 3.50e+00; at most 3.00e+00 is allowed"
    server.close()
    server.open({"a"})
    assert server.receive("a", Answer(2, sparse([0], [2.5]))) == ""
    assert server.close().used == 1


def test_a_point_that_would_not_be_finite_stays_and_nothing_is_forgotten():
    server = Server(np.full(D, 3e38), {"a": 1, "b": 1}, 1.0)
    member = Member()
    task = server.open({"a"})["a"]
    with np.errstate(over="ignore"):
        whole = vector(-3e38)
        member.take(task)
        answer = member._keep(task, whole, largest(whole, 1), leaves=False)
    assert server.receive("a", answer) == ""
    happened = server.close()
    assert (happened.skipped, happened.used) == (1, 0)
    member.take(server.open({"a"})["a"])
    np.testing.assert_array_equal(member.memory, whole)
    member.answer(server._task("a", 2), np.full(D, np.nan))  # a model that is not finite adds nothing
    np.testing.assert_array_equal(member.memory, whole)


# ------------------------------------------------------------------------------------------------
# What is on disk


def test_a_member_survives_its_death_at_any_moment(tmp_path):
    server = Server(vector(), {"a": 1}, 0.25)
    file = tmp_path / "a.npz"
    member = Member(file)
    task = server.open({"a"})["a"]
    away = -vector(5, 4, 3, 2, 1)
    member.take(task)
    data = member.answer(task, away)
    for step in ("before it is sent", "after"):
        member = Member(file)  # killed, and started again
        np.testing.assert_array_equal(member.take(task), server.shown)
        assert member.answer(task, away * 7) == data  # the same task is the same answer
        np.testing.assert_array_equal(member.memory, -away)
        assert server.receive("a", data) == "" if step == "after" else True
    server.close()
    (tmp_path / "a.npz.tmp").write_bytes(b"half a file")  # of a process killed while it wrote
    task = server.open({"a"})["a"]
    member = Member(file)
    member.take(task)
    np.testing.assert_array_equal(member.memory, vector(0, 0, 0, 2, 1))
    again = Member(file)  # killed after it was told: it is told once more
    again.take(task)
    np.testing.assert_array_equal(again.memory, member.memory)
    with pytest.raises(ValueError, match="call take"):
        Member().answer(task, away)
    file.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is not the file of a member"):
        Member(file)


def test_a_member_of_another_version_is_refused_and_learns_nothing(monkeypatch):
    server, member = Server(vector(1), {"a": 1}, 0.5), Member()
    task = server.open({"a"})["a"]
    monkeypatch.setattr(jc, "__version__", "0.1.9")
    with pytest.raises(ValueError, match=r"federated: jaxcomp is \S+ on the server, and 0.1.9 on this member"):
        member.take(task)
    assert member.point is None
    monkeypatch.undo()
    assert server.receive("a", member.answer(task, member.take(task))) == ""
    numbers = server.metrics()
    assert (numbers["rounds"], numbers["asked"], numbers["answered"]) == (1, 1, 1)
    assert 0 < numbers["waited_mean"] == numbers["waited_longest"] == server.waited["a"] < 60
