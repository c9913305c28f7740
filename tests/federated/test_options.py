"""Options of a server: wrong ones are named when it is built, NumPy scalars are the numbers that they are."""

import numpy as np
import optax
import pytest
from conservation import answered

import jaxcomp as jc
from jaxcomp.federated import Answer, Member, Server, load, save

D = 12


def made(**options):
    return Server(np.zeros(D), {"a": 1}, **({"mean_ratio": 0.5} | options))


BAD = [
    ({"rule": "x"}, "rule must be one of 'sqrt', 'phi', 'released', 'uniform' or a number; got 'x'"),
    ({"rule": -1}, "rule must be a name or a finite exponent >= 0; got -1"),
    ({"rule": None}, "rule must be a name or a finite exponent >= 0; got None"),
    ({"mean_ratio": 0}, r"mean_ratio must be in \(0, 1\]; got 0"),
    ({"mean_ratio": "a"}, r"mean_ratio must be in \(0, 1\]; got 'a'"),
    ({"down": 1.5}, r"down must be in \(0, 1\]; got 1.5"),
    ({"down": None}, r"down must be in \(0, 1\]; got None"),
    ({"down": True}, r"down must be in \(0, 1\]; got True"),
    ({"bound": 0.5}, r"bound must be in \[1, inf\]; got 0.5"),
    ({"bound": "x"}, r"bound must be in \[1, inf\]; got 'x'"),
    ({"bound": float("nan")}, r"bound must be in \[1, inf\]; got nan"),
    ({"max_norm": 0}, r"max_norm must be in \(0, inf\]; got 0"),
    ({"late": "never"}, "late must be 'use' or 'drop'; got 'never'"),
    ({"history": -1}, "history must be an integer of at least 0; got -1"),
    ({"history": 1.5}, "history must be an integer of at least 0; got 1.5"),
    ({"history": None}, "history must be an integer of at least 0; got None"),
    ({"outer": 3}, "outer must be None or an optax.GradientTransformation; got 3"),
    ({"outer": optax.sgd}, "outer must be None or an optax.GradientTransformation; got <function sgd"),
    ({"compress": 3}, r"compress must be a function \(vector, entries\) -> Sparse; got 3"),
    ({"compress": jc.top_k(0.1)}, r"compress must be a function \(vector, entries\) -> Sparse; got <compressor top_k"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_options_are_named_when_built(options, message):
    with pytest.raises(ValueError, match="federated: " + message):
        made(**options)


def test_a_member_names_a_compressor_that_is_no_function():
    with pytest.raises(ValueError, match="federated: compress must be a function"):
        Member(compress=jc.top_k(0.1))  # pyright: ignore


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_numpy_scalars_are_saved_as_the_numbers_that_they_are(kind, tmp_path):
    scalars = {"mean_ratio": 0.5, "rule": 0.75, "down": 0.25, "bound": 4, "max_norm": 3}
    server = made(**{name: kind(value) for name, value in scalars.items()}, history=np.int32(2))
    assert {name: getattr(server, name) for name in scalars} == scalars
    assert all(type(getattr(server, name)) is float for name in scalars)
    answered(server, {"a": Member()}, away=lambda _, point: point + 1)
    save(tmp_path / "server", server)
    again = made(**scalars, history=2)
    load(tmp_path / "server", again)
    assert again.point.tobytes() == server.point.tobytes()


@pytest.mark.parametrize("history", [0, 1])
def test_a_server_without_history_sends_the_whole_point(history):
    server, member = Server(np.zeros(500), {"a": 1}, 0.1, history=history), Member()
    for number in range(3):
        task = server.open({"a"})["a"]
        assert (task.since < 0) == (number == 0 or history == 0)
        assert server.receive("a", member.answer(task, member.take(task) - 1)) == ""
        server.close()


@pytest.mark.parametrize("answer", [None, (1, b"x"), (1, b"x", 1.0, False), [], b"x", {"data": b"x"}])
def test_what_is_no_answer_is_garbage(answer):
    server = made()
    task = server.open({"a"})["a"]
    assert server.receive("a", answer) == f"garbage: expected an Answer; got {type(answer).__name__}"
    member = Member()
    right = member.answer(task, member.take(task) + 1)
    assert isinstance(right, Answer)
    assert server.receive("a", right) == ""  # the round is still the member's
    assert [why for _, why in server.close().refused] == [f"garbage: expected an Answer; got {type(answer).__name__}"]
