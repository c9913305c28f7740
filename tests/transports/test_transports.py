"""Transports: whole messages in order, bounded memory, names of who is missing, and damage that is seen."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp as jc
from jaxcomp.transports import Gathering, Missing, hub, mailboxes, site
from jaxcomp.transports.coordination import Coordination
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError


class Service:
    """The map of the coordination service, as its client of JAX shows it."""

    def __init__(self):
        self.map, self.longest = {}, 0
        self.lock = threading.Lock()

    def key_value_set_bytes(self, key, value):
        with self.lock:
            assert key not in self.map, "ALREADY_EXISTS"
            self.map[key], self.longest = value, max(self.longest, len(value))

    def key_value_try_get_bytes(self, key):
        with self.lock:
            if key not in self.map:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.map[key]

    def key_value_dir_get_bytes(self, folder):
        with self.lock:
            return [item for item in self.map.items() if item[0].startswith(folder)]

    def key_value_delete(self, key):
        with self.lock:
            for each in [each for each in self.map if each == key or each.startswith(f"{key.rstrip('/')}/")]:
                del self.map[each]

    @property
    def held_bytes(self):
        with self.lock:
            return sum(map(len, self.map.values()))


def over_service(names, chunk_bytes=2**22):
    service, size = Service(), len(names)
    links = [Coordination(service, (i, size), name, "run", 5.0, chunk_bytes) for i, name in enumerate(names)]
    return links, lambda: service.held_bytes


def over_mailboxes(names):
    room = mailboxes()
    return [room.link(name) for name in names], lambda: room.held_bytes


@pytest.fixture(params=["coordination", "small chunks", "mailboxes", "grpc"])
def made(request):
    """names -> transports of these names, and how many bytes lie unread."""
    closing = []

    def grpc(names):
        pytest.importorskip("grpc")
        boxes = hub("127.0.0.1:0", keys={name: f"of {name}" for name in names})
        sites = [site(boxes.address, name, key=f"of {name}", seconds=20.0) for name in names]
        closing.extend([*sites, boxes])
        return sites, lambda: boxes.held_bytes

    small = lambda names: over_service(names, 1000)
    yield {"coordination": over_service, "small chunks": small, "mailboxes": over_mailboxes, "grpc": grpc}[
        request.param
    ]
    for each in closing:
        each.close()


def all_at_once(functions):
    """What they return, each in a thread."""
    results = [None] * len(functions)

    def run(i, function):
        try:
            results[i] = function()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_messages_arrive_whole_once_and_in_order(made):
    (a, b, c), _ = made("abc")
    long = np.random.default_rng(0).bytes(10_001)
    a.send(["b", "c"], "x", long)
    a.send(["b"], "x", b"")
    a.send(["b"], "y", b"another tag")
    c.send(["b"], "x", b"from c")
    found = b.receive("x", 5.0)
    assert [data for source, data in found if source == "a"] == [long, b""]
    assert sorted(source for source, _ in found) == ["a", "a", "c"]
    assert b.receive("x", 0.0) == []
    assert b.receive("y", 5.0) == [("a", b"another tag")]
    assert c.receive("x", 5.0) == [("a", long)]
    with pytest.raises(ValueError, match='tag must be a string of 1 to 200 visible ASCII characters without "/"'):
        a.send(["b"], "x/y", b"")


def test_what_nobody_reads_is_bounded_and_what_all_read_is_gone(made):
    """Of a receiver that died the last two messages of each sender are kept; 50 rounds of a gather hold two rounds."""
    links, held = made("abc")
    message = bytes(5000)
    for number in range(20):
        links[0].send(["b"], "x", message + bytes([number]))
    assert held() < 2.2 * len(message)
    assert [data[-1] for _, data in links[1].receive("x", 5.0)] == [18, 19]
    assert held() == 0
    gathers = [Gathering(link, "abc", seconds=20.0) for link in links]

    def rounds(gather):
        for number in range(50):
            assert gather(message + bytes([number])) == [message + bytes([number])] * 3
        return held()

    most = all_at_once([lambda gather=gather: rounds(gather) for gather in gathers])
    assert max(most) < 3 * 2.2 * len(message)
    assert all_at_once([gather.close for gather in gathers]) == [None] * 3
    for link in links:
        link.close()


def test_who_is_missing_is_named(made):
    links, _ = made("abc")
    gathers = [Gathering(link, "abc", seconds=0.5) for link in links]
    found = all_at_once([lambda gather=gather: gather(b"one") for gather in gathers[:2]])
    for error, other in zip(found, "ba", strict=True):
        assert isinstance(error, Missing)
        assert error.names == ("c",)
        assert f"no message of worker c within 0.5 s in exchange 0; {other} have sent theirs" in str(error)


def test_a_worker_that_was_started_anew_is_named():
    links, _ = over_mailboxes("ab")
    a, b = (Gathering(link, "ab", seconds=5.0) for link in links)
    for _ in range(2):
        all_at_once([lambda: a(b"x"), lambda: b(b"x")])
    again = Gathering(links[1], "ab", seconds=0.2)
    found = all_at_once([lambda: a(b"x"), lambda: again(b"x")])
    assert "gather is at exchange 2, and worker b sent one of exchange 0: it was started anew" in str(found[0])


def test_arguments_out_of_range():
    link = mailboxes().link("a")
    for names, options, said in (
        (["b"], {}, "names must contain 'a', this process"),
        (["a", "a"], {}, "names must differ"),
        (["a"], {"seconds": 0}, "seconds must be a number above 0"),
        (["a"], {"tag": ""}, "tag must be a string"),
    ):
        with pytest.raises(ValueError, match=said):
            Gathering(link, names, **options)
    with pytest.raises(ValueError, match="name must be a string"):
        mailboxes().link("a/b")
    for options, said in (
        ({"chunk_bytes": 0}, "chunk_bytes must be an integer in"),
        ({"run": "a/b"}, "run must be a string"),
        ({"seconds": -1}, "seconds must be"),
        ({}, "jax.distributed must be initialized before"),
    ):
        with pytest.raises(ValueError, match=said):
            jc.transports.coordination(**options)


def test_a_version_of_jax_without_the_functions_is_named(monkeypatch):
    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", object())
    said = r"has no key_value_set_bytes, .*; jc.transports.hub and site carry the same messages over gRPC"
    with pytest.raises(RuntimeError, match=said):
        jc.transports.coordination()


def test_a_service_that_is_gone_is_a_connection_error():
    (a, _), _ = over_service("ab")

    def gone(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses\nmore")

    a._client = type("Gone", (), dict.fromkeys(("key_value_set_bytes", "key_value_dir_get_bytes"), gone))()
    said = "in process 0, does not answer: UNAVAILABLE: failed to connect to all addresses$"
    for call in (lambda: a.send(["b"], "x", b""), lambda: a.receive("x", 1.0)):
        with pytest.raises(ConnectionError, match=said):
            call()


def test_damage_in_the_service_is_a_wire_error_and_gone_afterwards():
    """Each key of a message in three parts, each of some bytes of it."""
    names = "ab"
    keys = 0
    for place in itertools.count():
        (a, b), held = over_service(names, 1000)
        a.send(["b"], "x", bytes(2500))
        entries = sorted(a._client.map)
        keys = len(entries)
        if place // 3 >= keys:
            break
        key = entries[place // 3]
        value = bytearray(a._client.map[key])
        value[(0, len(value) // 2, len(value) - 1)[place % 3]] ^= 1
        a._client.map[key] = bytes(value)
        with pytest.raises(WireError):
            b.receive("x", 0.0)
        assert b.receive("x", 0.0) == []
        a.send(["b"], "x", b"the next")
        assert b.receive("x", 0.0) == [("a", b"the next")]
        assert held() <= 2500
    assert keys == 4


def test_packets_are_whole_or_a_wire_error(seed):
    rng = np.random.default_rng(seed)
    data = packed({"a": 1, "b": [0.1, "x"]}, [b"one", b"", bytes(300)])
    assert unpacked(data) == ({"a": 1, "b": [0.1, "x"]}, [b"one", b"", bytes(300)])
    for _ in range(300):
        broken = bytearray(data)
        if rng.random() < 0.5:
            broken[rng.integers(len(data))] ^= 1 << rng.integers(8)
        else:
            broken = broken[: rng.integers(len(data))]
        with pytest.raises(WireError):
            unpacked(bytes(broken))


@pytest.mark.parametrize(
    "header", [b"[[], []]", b"[{}]", b"[{}, [1]]", b"[{}, [-1]]", b"[{}, [true]]", b"{}", b"[" * 9]
)
def test_packets_with_another_header(header):
    import zlib

    data = b"jcP1" + zlib.crc32(header).to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    with pytest.raises(WireError):
        unpacked(data)


def test_a_site_with_another_key_is_refused_and_a_long_message_too():
    pytest.importorskip("grpc")
    with hub("127.0.0.1:0", keys={"a": "secret", "b": "other"}, most_bytes=10_000) as boxes:
        said = "the hub refuses a: a has another key here, or none"
        with site(boxes.address, "a", key="other", seconds=20.0) as a, pytest.raises(PermissionError, match=said):
            a.send(["b"], "x", b"")
        with site(boxes.address, "stranger", seconds=20.0) as stranger, pytest.raises(PermissionError):
            stranger.receive("x", 0.0)
        with site(boxes.address, "a", key="secret", seconds=20.0) as a:
            with pytest.raises(ValueError, match="longer than the hub takes"):
                a.send(["b"], "x", bytes(200_000))
            a.send(["b"], "x", b"short")
        with pytest.raises(ValueError, match="cannot be listened at"):
            hub(boxes.address)
    with (
        site(boxes.address, "a", key="secret", seconds=0.2) as a,
        pytest.raises(ConnectionError, match="does not answer a"),
    ):
        a.receive("x", 0.0)


def test_local_processes_over_a_transport_are_those_over_a_list(made):
    """Three workers, each in a thread, with 4-bit messages: the same bits as over a barrier and a list."""
    workers, steps = 3, 8
    algorithm = jc.direct(jc.dithering(bits=4))
    start = jnp.linspace(-1, 1, 300)

    def train(gather, index):
        goal = jnp.sin(jnp.arange(300.0) + index)
        options = {"every": 2, "delay": 1, "mixing": 0.5}
        with jc.local_process(optax.sgd(0.1), optax.sgd(0.9), algorithm, gather, index, workers, **options) as worker:
            w = worker.start(start)
            for _ in range(steps):
                w = worker.step(w - goal, w)
            return np.asarray(worker.point)

    messages, barrier = [b""] * workers, threading.Barrier(workers)

    def by_list(index, message):
        messages[index] = message
        barrier.wait()
        found = list(messages)
        barrier.wait()
        return found

    wanted = all_at_once([lambda i=i: train(lambda message: by_list(i, message), i) for i in range(workers)])
    links, _ = made("012")
    gathers = [
        link.gather if isinstance(link, Coordination) else Gathering(link, "012", seconds=30.0) for link in links
    ]
    found = all_at_once([lambda i=i, gather=gather: train(gather, i) for i, gather in enumerate(gathers)])
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, wanted[0])


def test_the_front_door_imports_transports_when_they_are_first_used():
    import subprocess
    import sys

    code = (
        "import sys, jaxcomp as jc\n"
        "found = lambda: [name for name in sys.modules if name.startswith(('jaxcomp.transports', 'grpc'))]\n"
        "assert not found(), found()\n"
        "jc.transports.mailboxes()\n"
        "assert 'grpc' not in sys.modules and found()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_receiver_may_wait_for_what_is_sent_later(made):
    (a, b), _ = made("ab")
    sender = threading.Timer(0.2, lambda: a.send(["b"], "x", b"now"))
    sender.start()
    assert b.receive("x", 30.0) == [("a", b"now")]
    sender.join()


def test_no_more_is_read_than_a_head_announces():
    (a, b), _ = over_service("ab", 1000)
    a.send(["b"], "x", bytes(50_000))
    (key,) = [key for key in a._client.map if "/in/" in key]
    a._client.map[key] = packed({"parts": 50, "bytes": 1500, "check": 0, "alone": True})
    reads, plain = [], a._client.key_value_try_get_bytes
    a._client.key_value_try_get_bytes = lambda key: reads.append(key) or plain(key)
    with pytest.raises(WireError, match="length of a message of a must be 1500"):
        b.receive("x", 0.0)
    assert len(reads) == 2


def test_closed_mailboxes_say_so_and_large_messages_are_taken_in_turn():
    room = jc.transports.mailboxes()
    a, b = room.link("a"), room.link("b")
    for data in (b"12345", b"678"):
        a.send(["b"], "tag", data)
    assert [room.take("b", "tag", 0, 6), room.take("b", "tag", 0, 1), b.receive("tag", 0)] == [
        [("a", b"12345")],
        [("a", b"678")],
        [],
    ]
    room.close()
    with pytest.raises(ConnectionError, match="mailboxes of b are closed"):
        b.receive("tag", 1.0)


def test_bytes_of_a_stranger_do_not_end_a_gather():
    room = jc.transports.mailboxes()
    a, b = (jc.transports.Gathering(room.link(name), ["a", "b"], seconds=5.0) for name in "ab")
    room.link("c").send(["a"], "gather", b"noise")
    other = threading.Thread(target=b, args=[b"y"])
    other.start()
    assert a(b"x") == [b"x", b"y"]
    other.join()
