"""What members may not gain by what they claim: that they leave, that little of a message counts, or by repeating."""

import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp import federated
from jaxcomp.federated import Answer, Member, Server, parted
from jaxcomp.federated import server as server_module
from jaxcomp.federated.messages import share_within
from jaxcomp.payloads import Dense, Sparse

D = 100


def dense(value):
    return jc.wire.encode(Dense(np.full(D, value, np.float32)))


def sparse(indices, values, code="fixed"):
    return jc.wire.encode(Sparse(np.float32(values), np.int32(indices)), code=code)


def length(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def round_with(server, honest, attack=None):
    """A round in which honest members send a vector of norm 1, and one more what `attack` makes of its task."""
    tasks = server.open([*honest, "bad"] if attack else honest)
    for name, task in tasks.items():
        if name == "bad":
            server.receive("bad", attack(task))
        else:
            step = np.zeros(D, np.float32)
            step[ord(name) % 50] = 1 + server.number / 1e6  # the same message again would be a repetition
            assert server.receive(name, honest[name].answer(task, honest[name].take(task) - step)) == ""
    return server.close()


def test_who_says_that_it_leaves_is_bounded_like_everybody_in_the_first_round():
    server = Server(np.zeros(D), {"bad": 1}, 0.1, max_norm=3.0)
    server.open({"bad"})
    assert server.receive("bad", Answer(1, dense(1e30), 1.0, True)).startswith("leaves: no answer of this member")
    assert server.close().used == 0
    assert length(server.point) == 0
    server.open({"bad"})
    assert server.receive("bad", Answer(2, sparse([1], [2.5]))) == ""
    server.close()
    server.open({"bad"})  # memories may be 2 / alpha times longer than what is sent, and no more
    assert server.receive("bad", Answer(3, dense(6.1), 1.0, True)) == "norm: 6.10e+01; at most 6.00e+01 is allowed"


def test_who_leaves_again_and_again_has_no_more_weight_than_one_who_stays():
    server = Server(np.zeros(D), {"a": 1, "b": 1, "c": 1, "bad": 1}, 0.1)
    honest = {name: Member() for name in "abc"}
    round_with(server, honest, lambda task: Answer(task.round, sparse([99], [-1])))

    def attack(task):
        if task.round % 2:
            return Answer(task.round, sparse([99], [-1 - task.round / 1e3]))
        big = np.zeros(D, np.float32)
        big[99] = -100 - task.round
        return Answer(task.round, jc.wire.encode(Dense(big)), 1.0, True)

    before = server.point[99]
    for _ in range(40):
        round_with(server, honest, attack)
    assert len(server._held) <= 1
    assert server.counts["bad"]["leaves"] > 10
    # A quarter of a round's weight, times the median norm of 1, in each round.
    assert server.point[99] - before <= 1.01 * 40 / 4


def test_a_leave_is_for_who_gave_something_and_left_nothing():
    server = Server(np.zeros(D), {"a": 1, "b": 1}, 0.1)
    members = {"a": Member(), "b": Member()}
    step = np.arange(D, dtype=np.float32)
    for number in range(1, 5):
        for name, task in server.open(members).items():
            point = members[name].take(task)
            leaves = name == "b" and number in (2, 4)
            away = point - step * (ord(name) + number)
            said = server.receive(name, members[name].leave(task) if leaves else members[name].answer(task, away))
            assert said[:7] == ("leaves:" if (name, number) == ("b", 4) else ""), said
        happened = server.close()
        assert happened.left == (["b"] if number == 2 else [])
    assert "is not used up yet" in happened.refused[0][1]
    kept = members["b"].memory.copy()  # who is refused keeps what it remembers
    members["b"].take(server.open({"b"})["b"])
    np.testing.assert_array_equal(members["b"].memory, kept)
    assert length(kept) > 0


def test_a_member_that_has_left_and_returned_shares_its_limit_between_both():
    server = Server(np.zeros(D), {"a": 1}, 0.1)
    server.open({"a"})
    assert server.receive("a", Answer(1, sparse([0], [-1]))) == ""
    server.close()
    server.open({"a"})
    assert server.receive("a", Answer(2, dense(-1), 1.0, True)) == ""
    server.close()
    for number in (3, 4):
        before = server.point
        server.open({"a"})
        assert server.receive("a", Answer(number, sparse([0], [-1 - number / 1000]))) == ""
        happened = server.close()
        assert length(server.point - before) <= 1.01
        assert happened.clipped[0][0] == "a"
        server._entries["a"].norm = 1.0


def test_a_small_share_of_huge_values_is_as_small_as_it_says():
    """Rounding made the used part of such a share several times longer than the share of its norm."""
    for mantissa in (1.0, 1 + 2**-23, 1.5, 1.9999999):
        for share in 2.0 ** -np.arange(20, 30) * 1.001:
            values = np.full(D, mantissa * 2.0**100, np.float32)
            allowed = share * length(values)
            used, rest = parted(values, share_within(values, share, allowed))
            assert length(used) <= 1.01 * allowed
            np.testing.assert_array_equal(used + rest, values)
    assert share_within(np.ones(3, np.float32), 0.5, 10.0) == 0.5
    server = Server(np.zeros(D), {"a": 1, "b": 1, "bad": 1}, 1.0)
    honest = {name: Member() for name in "ab"}
    round_with(server, honest)
    share = 1.0001 * 2.0**-25
    values = np.full(D, 0.999 / share / D**0.5 * (1 + 2**-23), np.float32)
    before = server.point[98]
    round_with(server, honest, lambda task: Answer(task.round, jc.wire.encode(Dense(values)), share))
    assert 0 <= before - server.point[98] <= 1.01 / 3 / D**0.5
    assert server.counts["bad"]["used"] == 1
    server.open({"bad"})
    assert server.receive("bad", Answer(3, dense(3e38), share, True)).startswith("shape: who leaves hands over all")


@pytest.mark.parametrize("code", ["fixed", "elias", "best", "zeros"])
def test_a_repetition_under_a_valid_round_is_refused_and_named(code):
    """From the same member and from another one, as the same bytes, in another code, and with zeros added."""
    server = Server(np.zeros(D), {"a": 1, "b": 1}, 0.1)
    server.open({"a", "b"})
    assert server.receive("a", Answer(1, sparse([3, 7], [1, -2]))) == ""
    server.lost("b")
    server.close()
    again = sparse([3, 5, 7], [1, 0, -2]) if code == "zeros" else sparse([3, 7], [1, -2], code)
    before = server.point
    server.open({"a", "b"})
    for name in "ab":
        assert server.receive(name, Answer(2, again)) == "replay: a message that was used before"
    happened = server.close()
    assert happened.used == 0
    assert [name for name, _ in happened.refused] == ["a", "b"]
    assert server.counts["b"]["replay"] == 1
    np.testing.assert_array_equal(server.point, before)


@pytest.mark.parametrize(("leaves", "most"), [(False, 64 + 8 * 10), (True, 64 + 4 * D)])
def test_a_message_that_is_too_long_is_refused_before_it_is_decoded(leaves, most, monkeypatch):
    server = Server(np.zeros(D), {"a": 1}, 0.1)
    server.open({"a"})
    assert server.receive("a", Answer(1, sparse([3], [1]))) == ""
    server.close()
    server.open({"a"})
    opened = []
    monkeypatch.setattr(server_module, "opened", lambda data, *_: opened.append(len(data)))
    refused = server.receive("a", Answer(2, b"\0" * (most + 1), 1.0, leaves))
    assert refused == f"bytes: {most + 1} bytes; {D if leaves else 10} entries take at most {most}"
    assert not opened


@pytest.mark.parametrize("entries", [0, 1, 10, 1000, 5000])
def test_what_members_send_is_never_too_long(entries):
    rng = np.random.default_rng(entries)
    for scale in (1.0, 10.0 ** rng.integers(-40, 38, 5000)):
        x = (rng.standard_normal(5000) * scale).astype(np.float32)
        message = federated.largest(x, entries)
        for code in ("fixed", "elias", "best"):
            room = server_module.HEAD_BYTES + 8 * entries
            assert len(jc.wire.encode(message, code=code)) <= room or code == "elias"
            assert len(jc.wire.encode(Dense(x), code=code)) <= server_module.HEAD_BYTES + 4 * x.size


@pytest.mark.parametrize("field", [("round", "1"), ("data", "text"), ("share", 1), ("leaves", 1), ("leaves", "no")])
def test_fields_of_other_types_are_garbage(field):
    server = Server(np.zeros(D), {"a": 1}, 0.1)
    server.open({"a"})
    answer = Answer(1, sparse([3], [1]))._replace(**dict([field]))
    assert server.receive("a", answer).startswith("garbage: an answer is")
