"""Rounds over a transport: when they end, what becomes of who is late, and that nothing is lost or counted twice."""

import numpy as np
import pytest
from conservation import Watched, answered, exact, remembered

import jaxcomp as jc
from jaxcomp.exchange.agreement import greeting
from jaxcomp.federated import Answer, Journal, Member, Participant, Rounds, Server, flower, load, replay, save
from jaxcomp.federated.messages import options_here
from jaxcomp.federated.packets import answer_of, packed_answer, packed_task, task_of
from jaxcomp.payloads import Dense
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

D = 12


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Slow:
    """Messages that arrive after a delay of the clock; `delay` draws it. None: never."""

    def __init__(self, clock, delay=lambda: 0.0):
        self.clock, self.delay, self.on_way = clock, delay, []

    def link(self, name):
        link = type("Link", (), {})()
        link.name, link.send = name, lambda to, tag, data: self.send(name, to, tag, data)
        link.receive = lambda tag, seconds: self.receive(name, tag)
        return link

    def send(self, source, to, tag, data):
        for name in to:
            delay = self.delay()
            if delay is not None:
                before = [at for at, who, *rest in self.on_way if (who, *rest[:2]) == (source, name, tag)]
                self.on_way.append((max([self.clock() + delay, *before]), source, name, tag, data))

    def receive(self, name, tag):
        mine = [m for m in self.on_way if m[0] <= self.clock() and m[2:4] == (name, tag)]
        self.on_way = [m for m in self.on_way if not any(m is each for each in mine)]
        return [(source, data) for _, source, _, _, data in sorted(mine, key=lambda m: m[0])]


def world(names="abcd", *, server=None, tokens=False, **options):
    clock = Clock()
    room = Slow(clock)
    weights = "tokens" if tokens else "volumes"
    server = server or Server(np.zeros(D), dict.fromkeys(names, 10), 1.0, weights=weights)
    rounds = Rounds(server, room.link("server"), clock=clock, **options)
    members = {name: Participant(Member(), room.link(name)) for name in names}
    for member in members.values():
        member.hello()
    assert rounds.step() is None
    return clock, room, server, rounds, members


def answer(members, name, value=1.0, tokens=0):
    task, point = members[name].task()
    members[name].answer(task, point - np.float32(value) * np.eye(1, D, 0, np.float32)[0], tokens)


def hello(options=None):
    """What a member says that was just started."""
    return packed({"kind": "hello", "idle": 0.0}, [options or greeting(options_here())])


# ------------------------------------------------------------------------------------------------
# When a round ends


def test_it_ends_when_all_have_answered_and_not_before():
    clock, _, _, rounds, members = world(quorum=2, grace=5.0)
    for name in "abc":
        answer(members, name)
        assert rounds.step() is None
    clock.now = 4.9
    answer(members, "d")
    result = rounds.step()
    assert (result.asked, result.used, result.missing) == (4, 4, 0)


@pytest.mark.parametrize("quorum", [2, 0.5, 0.3])
def test_it_ends_a_grace_time_after_the_quorum(quorum):
    clock, _, _, rounds, members = world(quorum=quorum, grace=5.0)
    clock.now = 100.0
    answer(members, "a")
    assert rounds.step() is None
    clock.now = 200.0
    assert rounds.step() is None  # no quorum, however long
    answer(members, "b")
    assert rounds.step() is None
    clock.now = 204.9
    assert rounds.step() is None
    clock.now = 205.0
    result = rounds.step()
    assert (result.used, result.missing) == (2, 2)


def test_it_ends_at_the_deadline_without_a_quorum_and_who_is_silent_is_not_asked_again():
    clock, _, server, rounds, members = world(deadline=60.0)
    for name in "abc":
        answer(members, name)
    assert rounds.step() is None
    clock.now = 59.9
    assert rounds.step() is None
    clock.now = 60.0
    assert rounds.step().missing == 1
    for number in (2, 3):  # rounds without d end as soon as the others have answered
        assert rounds.step() is None
        for name in "abc":
            answer(members, name, float(number))
        result = rounds.step()
        assert (result.asked, result.used) == (3, 3)
    assert rounds.here == set("abc")
    assert server.counts["d"]["lost"] == 1
    members["d"].hello()
    rounds.step()
    assert rounds.here == set("abcd")


def test_options_out_of_range():
    server = Server(np.zeros(2), {"a": 1}, 1.0)
    for name, value, said in (
        ("quorum", 0, "an integer of at least 1, or a float"),
        ("quorum", 1.5, "a float in"),
        ("quorum", True, "got True"),
        ("grace", -1.0, "grace must be in"),
        ("deadline", 0.0, "deadline must be in"),
        ("least", 0, "least must be an integer"),
    ):
        with pytest.raises(ValueError, match=said):
            Rounds(server, None, **{name: value})
    for options, said in (({"weights": "all"}, "'volumes' or 'tokens'"), ({"patience": 0}, "patience must be")):
        with pytest.raises(ValueError, match=said):
            Server(np.zeros(2), {"a": 1}, 1.0, **options)


# ------------------------------------------------------------------------------------------------
# Who is late, and who weighs how much


def test_who_is_late_counts_in_the_next_round_with_the_weight_of_its_own_tokens():
    clock, room, server, rounds, members = world("ab", tokens=True, quorum=1, grace=1.0)
    answer(members, "a", 2.0, tokens=4)
    rounds.step()
    clock.now = 1.0
    assert rounds.step().used == 1
    np.testing.assert_array_equal(server.point[0], -2.0)
    room.delay = lambda: 5.0
    answer(members, "b", 1.0, tokens=2)  # of the first round
    room.delay = lambda: 0.0
    assert rounds.step() is None  # the second one opens, without b
    clock.now = 6.0
    task, point = members["a"].task()
    members["a"].answer(task, point - np.float32(2) * np.eye(1, D, 1, np.float32)[0], tokens=6)
    result = rounds.step()
    assert (result.used, result.late) == (2, 1)
    np.testing.assert_allclose(server.point[:2], [-2 - 2 / 8, -2 * 6 / 8 / 2], rtol=1e-6)  # that of a is clipped


def test_tokens_are_within_the_volume_of_the_roster():
    server, member = Server(np.zeros(D), {"a": 10}, 1.0, weights="tokens"), Member()
    for number, tokens in enumerate((0, 11, 10), 1):
        task = server.open({"a"})["a"]
        point = member.take(task)
        why = server.receive("a", member.answer(task, point - np.float32(1), tokens=tokens))
        assert why == ("" if tokens == 10 else f"tokens: {tokens} tokens; this member may have 1 to 10 in a round")
        assert server.close().used == (number == 3)
    np.testing.assert_array_equal(server.point, -np.full(D, 3, np.float32))  # what was refused came with the third


def test_who_has_left_weighs_like_its_last_answer():
    server = Server(np.zeros(2), {"a": 100, "b": 100}, 0.5, weights="tokens")
    server._limit = lambda used: np.inf
    members = {"a": Member(), "b": Member()}
    for leaves in (False, True):
        for name, task in server.open("ab").items():
            point = members[name].take(task)
            if name == "b" and leaves:
                reply = members[name].leave(task)  # its second entry, 1
            else:
                after = point - np.float32([2, 1] if name == "b" else [0, 0])
                reply = members[name].answer(task, after, tokens=30 if name == "a" else 10)
            assert server.receive(name, reply) == ""
        server.close()
    np.testing.assert_allclose(server.point, [-2 * 10 / 40, -1 * 10 / 40], rtol=1e-6)


def test_patience_is_the_number_of_rounds_that_a_late_answer_is_waited_for():
    for patience in (1, 3):
        server = Server(np.zeros(D), {"a": 1, "b": 1}, 1.0, patience=patience)
        member = Member()
        task = server.open({"a", "b"})["b"]
        late = member.answer(task, member.take(task) - np.float32(1))
        for _ in range(3):
            server.close()
            server.open({"a"})
        assert bool(server.receive("b", late)) == (patience == 1)


# ------------------------------------------------------------------------------------------------
# The law


class Life:
    """One member's process in the simulation: it trains for a while, dies, comes back, leaves."""

    def __init__(self, name, folder, room, clock, rng):
        self.name, self.file, self.room, self.clock, self.rng = name, folder / name, room, clock, rng
        self.made, self.events, self.back = exact(np.zeros(D)), dict.fromkeys(("killed", "left", "unsent"), 0), 0.0
        self.start()

    def start(self):
        self.part = Participant(Member(self.file), self.room.link(self.name), idle=2.0)
        self.work, self.last = None, self.clock()
        self.part.hello()

    def kill(self, seconds):
        self.events["killed"] += 1
        self.part, self.back = None, self.clock() + seconds
        self.room.receive(self.name, "round-task")  # of what its process had taken in, nothing is left

    def step(self):
        rng, now = self.rng, self.clock()
        if self.part is None:
            if now >= self.back:
                self.start()
            return
        if rng.random() < 0.01:
            return self.kill(rng.uniform(0, 12))
        if self.work is None:
            given = self.part.task()
            if given is not None:
                self.work = (*given, now + rng.exponential(1.5))
            elif now - self.last > self.part.idle:
                self.part.hello(self.part.idle)
                self.last = now
            return
        task, point, end = self.work
        if now < end:
            return
        self.work, self.last = None, now
        before = exact(self.part.member.memory) if self.part.member.memory.size else exact(np.zeros(D))
        fate = rng.random()
        if fate < 0.04 and self.part.member.memory.size:
            reply = self.part.member.leave(task)
            self.events["left"] += reply.leaves
        else:
            step = 0.2 * point + 10.0 ** rng.integers(-3, 1) * rng.standard_normal(D)
            reply = self.part.member.answer(task, point - step.astype(np.float32), int(rng.integers(1, 100)))
        self.made = self.made + exact(self.part.member.memory) - before
        if 0.04 < fate < 0.1:  # killed with its answer on disk
            self.events["unsent"] += 1
            return self.kill(rng.uniform(0, 6))
        if 0.85 < fate < 0.95:  # it arrives damaged, then whole
            self.part._sent(reply._replace(data=reply.data[:-2]))
        self.part._sent(reply)
        if fate > 0.95:  # and it arrives twice
            self.part._sent(reply)
        if fate < 0.04:
            self.kill(rng.uniform(5, 10))


@pytest.mark.parametrize(("late", "weights"), [("use", "tokens"), ("drop", "volumes")])
def test_nothing_is_lost_or_counted_twice_over_random_arrivals_deaths_and_returns(tmp_path, seed, late, weights):
    """300 s of six members; each member's sums in exact fractions after every round, and the same bits on replay."""
    rng, clock = np.random.default_rng(seed), Clock()
    delays = lambda: None if rng.random() < 0.05 else rng.exponential(0.5)  # 1 in 20 messages never arrives
    room, names = Slow(clock, delays), list("abcdef")
    options = {"late": late, "weights": weights, "down": 0.5, "patience": 2}
    start = lambda: Watched(np.linspace(-1, 1, D), dict.fromkeys(names, 100), 0.3, **options)
    server = Journal(start(), tmp_path / "log")
    settings = {"quorum": 4, "grace": 0.5, "deadline": 8.0, "least": 3, "clock": clock}
    rounds, results = Rounds(server, room.link("server"), **settings), []
    lives = [Life(name, tmp_path, room, clock, rng) for name in names]

    def check():
        for life in lives:
            member = life.part.member if life.part else Member(life.file)
            held = sum((exact(x) for who, x in server._held if who == life.name), exact(np.zeros(D)))
            now = remembered(server, life.name, member) + held + server.delivered[life.name]
            assert np.all(now == life.made), life.name

    while clock.now < 300:
        clock.now += 0.25
        for life in lives:
            life.step()
        result = rounds.step()
        if result is not None:
            results.append(result)
            check()
            if len(results) % 25 == 0:  # the server is killed, and what was on its way to it is gone
                save(tmp_path / "server.npz", server.server)
                server.finish()
                fresh = start()
                fresh.delivered = server.delivered
                load(tmp_path / "server.npz", fresh)
                server = Journal(fresh, tmp_path / "log")
                rounds = Rounds(server, room.link("server"), **settings)
                check()
    server.finish()
    happened = {kind: sum(life.events[kind] for life in lives) for kind in ("killed", "left", "unsent")}
    counts = sum(server.counts.values(), start=type(server.counts["a"])())
    assert min(happened.values()) >= 1, happened
    assert min(counts[kind] for kind in ("used", "clipped", "lost", "replay")) >= 5, counts
    assert counts["garbage"] >= 1
    assert counts["late"] >= 5 if late == "drop" else sum(result.late for result in results) >= 5
    assert any(result.missing and result.used for result in results)  # ended by its quorum
    again = start()
    assert [(r.number, r.used, r.late, r.refused) for r in replay(tmp_path / "log", again)] == [
        (r.number, r.used, r.late, r.refused) for r in results
    ]
    assert again.point.tobytes() == server.point.tobytes()
    assert again.shown.tobytes() == server.shown.tobytes()
    assert all(np.all(again.delivered[name] == server.delivered[name]) for name in names)


def test_fragments_go_on_without_lockstep():
    """Two halves of a model, each with rounds of its own: the second one has five while the first one has one."""
    clock = Clock()
    room, halves = Slow(clock), [np.zeros(5), np.ones(3)]
    servers = [Server(half, {"a": 1, "b": 1}, 1.0) for half in halves]
    drivers = [
        Rounds(server, room.link("server"), tag=f"part{p}", least=2, clock=clock) for p, server in enumerate(servers)
    ]
    parts = {(name, p): Participant(Member(), room.link(name), tag=f"part{p}") for name in "ab" for p in (0, 1)}
    for part in parts.values():
        part.hello()
    for second in range(12):
        for driver in drivers:
            driver.step()
        for (name, p), part in parts.items():
            if p == 0 and name == "a" and second < 11:
                continue  # its first half takes longer
            given = part.task()
            if given is not None:
                part.answer(given[0], given[1] - np.float32(1))
        for driver in drivers:
            driver.step()
    assert servers[0].number == 1 < 5 <= servers[1].number
    np.testing.assert_array_equal(servers[0].point, -np.ones(5, np.float32))


# ------------------------------------------------------------------------------------------------
# Messages


def test_another_version_is_turned_away_in_a_sentence():
    _, room, _, rounds, _ = world("ab")
    other = greeting({**options_here(), "jaxcomp": "0.0.9"})
    link = room.link("b")
    link.send(["server"], "round-answer", hello(other))
    rounds.step()
    assert "jaxcomp is 0.0.9 on member b" in rounds.turned_away["b"]
    link.receive("round-task", 0)  # the task of before
    rounds._greeted("b", "b", {"idle": 0.0}, [other])
    with pytest.raises(ValueError, match=r"jaxcomp is 0\.0\.9 on member b"):
        Participant(Member(), link).task()


def test_bytes_that_are_no_message_are_counted_and_change_nothing():
    clock, room, server, rounds, members = world("ab")
    good = packed_answer(Answer(1, jc.wire.encode(Dense(np.ones(D, np.float32)))))
    fields, blobs = unpacked(good)
    bad = [b"", good[:-1], good[:20], b"noise" * 9, packed({"kind": "answer"}, [b""]), packed({}), packed(fields)]
    bad += [packed({"kind": "hello", "idle": -1.0}, [b""]), packed({**fields, "share": "much"}, blobs)]
    for data in bad:
        room.link("a").send(["server"], "round-answer", data)
        rounds.step()
    assert server.counts["a"]["garbage"] == len(bad)
    room.link("stranger").send(["server"], "round-answer", good)
    for name in "ab":
        answer(members, name)
    result = rounds.step()
    assert (result.used, len(result.refused)) == (2, len(bad))  # a stranger is not listened to
    assert clock.now == 0.0


def test_tasks_and_answers_cross_as_bytes_and_damage_is_a_wire_error():
    server = Server(np.arange(5), {"a": 1}, 0.5)
    task = server.open({"a"})["a"]
    assert task.norm == np.inf
    assert task_of(*unpacked(packed_task(task))) == task
    reply = Answer(3, b"\0bytes", 1 / 3, False, 7)
    assert answer_of(*unpacked(packed_answer(reply))) == reply
    data = packed_task(task)
    for place in range(len(data)):
        broken = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        with pytest.raises(WireError):
            unpacked(broken)
    fields, blobs = unpacked(data)
    for name, value in (
        ("round", 0),
        ("round", 1.5),
        ("norm", -1.0),
        ("norm", float("nan")),
        ("norm", 10**400),
        ("since", -2),
        ("version", True),
        ("rounds", [1]),
        ("rounds", "1"),
        ("options", None),
        ("kind", "hello"),
    ):
        with pytest.raises(WireError):
            task_of({**fields, name: value}, blobs)
    with pytest.raises(WireError, match="shares of a task"):
        task_of({**fields, "rounds": [1], "shares": [2.0]}, blobs)
    with pytest.raises(WireError, match="updates of a task"):
        task_of(fields, [])


def test_a_log_that_was_cut_or_changed(tmp_path):
    start, member = lambda: Server(np.zeros(4), {"a": 1}, 1.0), Member()
    server = Journal(start(), tmp_path / "log")
    for _ in range(2):
        answered(server, {"a": member}, away=lambda _, point: 2 * point - 1)
    server.open(["a"])
    server.finish()
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole[:-3])
    again = start()
    assert len(list(replay(tmp_path / "log", again))) == 2
    assert again.point.tobytes() == server.point.tobytes()
    with pytest.raises(ValueError, match="replay with a server that has not begun"):
        replay(tmp_path / "log", again)
    again.open([])
    again.close()
    with pytest.raises(ValueError, match="holds 2 closed rounds; the server has closed 3"):
        Journal(again, tmp_path / "log")
    (tmp_path / "log").write_bytes(whole[:30] + b"x" + whole[31:])
    with pytest.raises(WireError):
        list(replay(tmp_path / "log", start()))


def test_a_member_serves_until_it_is_told_to_end_and_outlasts_its_server():
    """The transport is gone for two calls, in which the server was started again; then for ever."""
    server, room = Server(np.zeros(D), {"a": 10}, 1.0), jc.transports.mailboxes()
    rounds, link, gone = Rounds(server, room.link("server")), room.link("a"), iter([0, 0, 1, 0, 1, 0, 0])

    def send(to, tag, data, plain=link.send):
        if next(gone, 1):
            raise ConnectionError("gone")
        plain(to, tag, data)
        rounds.step()

    link.send, results = send, []

    def train(point, task):
        results.append(task.round)
        return point - np.float32(task.round), 1

    part = Participant(Member(), link, idle=0.01)
    with pytest.raises(ConnectionError, match="gone"):
        part.serve(train, patience=0.05)
    assert results[:2] == [1, 2]
    assert server.point[0] < 0
    part.serve(train, until=lambda: True)


def test_a_log_that_is_gone_on_with_after_a_kill_gives_up_what_the_server_gave_up(tmp_path):
    """Round 1 is closed without b; the server is killed in round 2, and b is asked in the new one."""
    start, members = lambda: Server(np.zeros(D), {"a": 1, "b": 1}, 1.0), {"a": Member(), "b": Member()}
    server = Journal(start(), tmp_path / "log")
    tasks = server.open("ab")
    server.receive("a", members["a"].answer(tasks["a"], members["a"].take(tasks["a"]) - np.float32(1)))
    server.close()
    save(tmp_path / "server.npz", server.server)
    server.open("ab")
    server.finish()
    fresh = start()
    load(tmp_path / "server.npz", fresh)
    server = Journal(fresh, tmp_path / "log")
    assert answered(server, members, away=lambda _, point: point - 2).used == 2
    server.finish()
    again = start()
    assert [result.used for result in replay(tmp_path / "log", again)] == [1, 2]
    assert again.point.tobytes() == server.point.tobytes()


def test_a_member_that_was_started_anew_gets_its_task_again_and_answers_with_the_same_bytes():
    clock, room, server, rounds, members = world("ab")
    task, point = members["a"].task()
    first = members["a"].member.answer(task, point - np.float32(1))  # on disk; its process dies before it is sent
    again = Participant(members["a"].member, room.link("a"))
    again.hello()
    assert rounds.step() is None
    same, _ = again.task()
    assert same == task
    again.answer(same, np.zeros(D))
    answer(members, "b")
    assert rounds.step().used == 2
    assert again.member._pending.answer == first
    assert clock.now == 0
    assert server.counts["a"]["used"] == 1


def test_a_hello_while_the_task_may_be_on_its_way_changes_nothing():
    server = Server(np.zeros(D), {"a": 10, "b": 10}, 1.0, patience=5)
    clock, _, _, rounds, members = world("ab", server=server, quorum=1, grace=0.0)
    clock.now = 3.0
    members["b"].hello(2.0)  # sent when it had been idle for 2 s; its task was sent 3 s ago
    assert rounds.step() is None
    assert len(members["b"].transport.receive("round-task", 0)) == 1
    clock.now = 4.0
    members["b"].hello(2.0)
    assert rounds.step() is None
    assert len(members["b"].transport.receive("round-task", 0)) == 1  # again
    answer(members, "a")
    assert rounds.step().missing == 1
    assert rounds.step() is None
    members["b"].hello()  # of a round that is closed nothing can come any more: it was started anew
    answer(members, "a", 2.0)
    assert rounds.step().used == 1
    assert rounds.step() is None
    assert rounds.here == set("ab")
    assert members["b"].task()[0].round == 3


def test_flower_does_not_weigh_by_tokens():
    server = Server(np.zeros(2), {"a": 1}, 1.0, weights="tokens")
    with pytest.raises(ValueError, match="weights must be 'volumes'"):
        flower.FlowerRounds(server, lambda grid: {})


def test_a_log_is_not_overwritten_by_a_server_that_was_not_loaded(tmp_path):
    start = lambda: Server(np.zeros(2), {"a": 1}, 1.0)
    journal = Journal(start(), tmp_path / "log")
    journal.open(["a"])
    journal.close()
    journal.finish()
    with pytest.raises(ValueError, match="holds 1 closed rounds; the server has closed 0"):
        Journal(start(), tmp_path / "log")
    assert len(list(replay(tmp_path / "log", start()))) == 1


def test_strangers_begin_no_round():
    clock, room, server, rounds, _ = world("ab")
    for name in ("x", "y"):
        room.link(name).send(["server"], "round-answer", hello())
    before = server.number
    for _ in range(5):
        rounds.step()
    assert (server.number, rounds.here & {"x", "y"}, clock.now) == (before, set(), 0.0)


def test_a_member_that_is_admitted_between_two_saves_is_replayed(tmp_path):
    start = lambda: Server(np.zeros(2), {"a": 1}, 1.0)
    members, away = {name: Member() for name in "ac"}, lambda name, point: 2 * point + np.float32([1, ord(name)])
    journal = Journal(start(), tmp_path / "log")
    answered(journal, members, "a", away)
    journal.admit("c", 3)
    save(tmp_path / "server.npz", journal.server)
    journal.finish()
    server = start()
    load(tmp_path / "server.npz", server)
    journal = Journal(server, tmp_path / "log")
    answered(journal, members, "ac", away)
    journal.finish()
    again = start()
    assert len(list(replay(tmp_path / "log", again))) == 2
    np.testing.assert_array_equal(again.point, server.point)


def test_what_training_raises_is_not_a_lost_transport():
    _, _, _, rounds, members = world("a")
    calls = []

    def train(point, task):
        calls.append(task)
        raise ConnectionError("the data store is away")

    next(iter(members.values())).hello()
    for _ in range(2):
        rounds.step()
    with pytest.raises(ConnectionError, match="data store"):
        next(iter(members.values())).serve(train)
    assert len(calls) == 1


def test_what_is_nested_deep_or_has_many_keys_ends_nothing(tmp_path):
    _, room, _, rounds, _ = world("ab")
    deep = b"jaxcomp options " + b"[" * 100_000
    many = greeting({f"key {i}": "x" for i in range(20_000)} | options_here())
    for options in (deep, many):
        room.link("a").send(["server"], "round-answer", hello(options))
        rounds.step()
    assert "a" in rounds.here  # of the second, whose other keys are not looked at
    nested = []
    for _ in range(900):
        nested = [nested]
    journal = Journal(Server(np.zeros(2), {"a": 1}, 1.0), tmp_path / "log")
    journal.open(["a"])
    assert journal.receive("a", Answer(nested, b"")).startswith("garbage")
    journal.finish()


def test_a_process_that_is_no_member_s_does_not_answer_for_one():
    clock, room, server = Clock(), jc.transports.mailboxes(), Server(np.zeros(D), {"a": 1}, 1.0)
    rounds = Rounds(server, room.link("server"), {"host": "a"}, clock=clock)
    room.link("a").send(["server"], "round-answer", hello())
    rounds.step()
    assert not rounds.here
