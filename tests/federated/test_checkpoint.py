"""A server that is killed and goes on from its file is the one that was never killed."""

import numpy as np
import optax
import pytest

from jaxcomp.federated import Member, Server, load, save

D = 40
OPTIONS = {"outer": optax.sgd(0.7, momentum=0.9), "down": 0.3, "history": 4, "bound": 5.0}
ROSTER = {"a": 50, "b": 20, "c": 10, 4: 5}


def made(**options):
    return Server(np.linspace(-1, 1, D), ROSTER, 0.3, **(OPTIONS | options))


def one_round(server, members, rng):
    """Deaths before and after the answer, leaves, refusals; those who are there follow from the round."""
    here = [name for name in members if (server.number + len(str(name)) * ord(str(name))) % 4]
    for name, task in server.open(here).items():
        member = members[name] = Member(members[name].file)  # killed after every round
        point = member.take(task)
        away = point - (rng.standard_normal(D) * 10.0 ** rng.integers(-1, 2)).astype(np.float32)
        fate = rng.random()
        answer = member.leave(task) if fate < 0.1 else member.answer(task, away)
        if fate > 0.9:
            server.lost(name)
        else:
            server.receive(name, answer._replace(data=answer.data[:-1]) if fate > 0.8 else answer)
    return server.close()


def test_a_run_that_is_cut_after_every_round_is_bitwise_the_unbroken_one(tmp_path):
    whole, cut = made(), made()
    worlds = [{name: Member(tmp_path / f"{world}-{name}") for name in ROSTER} for world in "wc"]
    rngs = [np.random.default_rng(3) for _ in worlds]
    kinds = set()
    for number in range(1, 41):
        expected, happened = one_round(whole, worlds[0], rngs[0]), one_round(cut, worlds[1], rngs[1])
        assert happened == expected
        assert cut.point.tobytes() == whole.point.tobytes()
        assert cut.shown.tobytes() == whole.shown.tobytes()
        assert cut.counts == whole.counts
        kinds |= {kind for counter in cut.counts.values() for kind in counter}
        save(tmp_path / "server", cut, rng=rngs[1].bit_generator.state, lines=["é", number])
        cut = made()
        about = load(tmp_path / "server", cut)
        assert about["lines"] == ["é", number]
        rngs[1] = np.random.default_rng()
        rngs[1].bit_generator.state = about["rng"]
    assert {"used", "clipped", "lost", "garbage"} <= kinds
    assert sum(len(vector) for _, vector in whole._held) == sum(len(vector) for _, vector in cut._held)
    assert cut._digests == whole._digests
    for name in ROSTER:
        assert worlds[0][name].memory.tobytes() == worlds[1][name].memory.tobytes()


def test_a_round_that_was_open_is_opened_again_and_nothing_counts_twice(tmp_path):
    """The server dies with answers in its hands: they come once more, as the same bytes."""
    server = made()
    members = {name: Member(tmp_path / str(name)) for name in ROSTER}
    rng = np.random.default_rng(0)
    for _ in range(3):
        one_round(server, members, rng)
    save(tmp_path / "server", server)
    tasks = server.open("a")
    steps = rng.standard_normal(D).astype(np.float32)
    answer = members["a"].answer(tasks["a"], members["a"].take(tasks["a"]) - steps)
    server.receive("a", answer)
    server.close()
    again = made()
    load(tmp_path / "server", again)
    task = again.open("a")["a"]
    assert task == tasks["a"]
    assert members["a"].answer(task, members["a"].take(task) - 2 * steps) == answer
    assert again.receive("a", answer) == ""
    again.close()
    assert again.point.tobytes() == server.point.tobytes()


def test_answers_that_were_awaited_are_lost_and_stay_with_their_members(tmp_path):
    server, member = made(), Member(tmp_path / "a")
    task = server.open("a")["a"]
    late = member.answer(task, member.take(task) - 1)
    memory = member.memory.copy()
    assert server.close().missing == 1
    save(tmp_path / "server", server)
    again = made()
    load(tmp_path / "server", again)
    assert not again.missing()
    assert again.counts["a"] == {"lost": 1}
    again.open(())
    assert again.receive("a", late).startswith("late: round 1")
    again.close()
    task = again.open("a")["a"]
    assert dict(zip(task.rounds, task.shares, strict=True)) == {1: 0.0}
    member.take(task)
    np.testing.assert_array_equal(member.memory, memory)


def test_what_cannot_be_saved_or_loaded_is_named(tmp_path):
    file = tmp_path / "server"
    server = made()
    server.open("a")
    with pytest.raises(ValueError, match="round 1 is open; close it, then save"):
        save(file, server)
    server.close()
    with pytest.raises(ValueError, match="has not begun; this one is at round 1"):
        load(file, server)
    with pytest.raises(ValueError, match="no file"):
        load(file, made())
    save(file, server)
    for option, text in (({"bound": 6.0}, "bound 5.0; this server has 6.0"), ({"outer": None}, "saved with outer")):
        with pytest.raises(ValueError, match=text):
            load(file, made(**option))
    with pytest.raises(ValueError, match="saved with size 40; this server has 3"):
        load(file, Server(np.zeros(3), ROSTER, 0.3, **OPTIONS))
    with pytest.raises(ValueError, match=r"the volume of 'a' is 50 in .* and 51 here"):
        load(file, Server(np.zeros(D), ROSTER | {"a": 51}, 0.3, **OPTIONS))
    joined = Server(np.zeros(D), {"new": 3}, 0.3, **OPTIONS)
    load(file, joined)
    assert set(joined._entries) == {"new", *ROSTER}
    with pytest.raises(ValueError, match=r"names must be strings or integers to be saved; got \('a', 1\)"):
        save(file, Server(np.zeros(D), {("a", 1): 1}, 0.3))
    data = file.read_bytes()
    for broken in (b"", b"no archive", data[: len(data) // 2], data[:-40]):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"is not a file of federated.save"):
            load(file, made())
        with pytest.raises(ValueError, match="is not the file of a member"):
            Member(file)


def test_no_flipped_byte_raises_anything_but_value_error(tmp_path):
    """One turns a part of a zip file into another compression method, or an encrypted one."""
    path = tmp_path / "server.npz"
    save(path, made())
    good = bytearray(path.read_bytes())
    for place in range(0, len(good), 23):
        for flip in (0x01, 0x08, 0xFF):
            bad = bytearray(good)
            bad[place] ^= flip
            path.write_bytes(bad)
            try:
                load(path, made())
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("point", np.full(D, np.nan), "point is not finite"), ("shown", np.zeros(D - 1), "vectors in it have the shapes")],
)
def test_a_good_file_with_bad_vectors_is_refused(tmp_path, name, value, said):
    path = tmp_path / "server.npz"
    save(path, made())
    with np.load(path) as kept:
        arrays = dict(kept) | {name: value.astype(np.float32)}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=f"is damaged: {said}"):
        load(path, made())


def test_files_without_tokens_patience_and_weights_are_read(tmp_path):
    """As they were before answers had tokens."""
    import json

    from jaxcomp.files import read_arrays, write_arrays

    server, members = made(), {name: Member(tmp_path / f"member-{name}") for name in ROSTER}
    for _ in range(3):
        one_round(server, members, np.random.default_rng(1))
    save(tmp_path / "server", server)
    arrays = read_arrays(tmp_path / "server")
    content = json.loads(str(arrays["header"]))
    for _, fields, _ in content["entries"]:
        assert fields.pop("tokens") == 0
    assert [content["options"].pop(name) for name in ("weights", "patience")] == ["volumes", 1]
    write_arrays(tmp_path / "old", arrays | {"header": np.array(json.dumps(content))})
    again = made()
    load(tmp_path / "old", again)
    assert again.point.tobytes() == server.point.tobytes()
    with pytest.raises(ValueError, match="was saved with weights 'volumes'; this server has 'tokens'"):
        load(tmp_path / "server", made(weights="tokens"))
    kept = read_arrays(tmp_path / "member-a")
    assert kept.pop("tokens") == 0
    write_arrays(tmp_path / "member", kept)
    assert Member(tmp_path / "member").memory.tobytes() == Member(tmp_path / "member-a").memory.tobytes()
