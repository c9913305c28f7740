"""A network laboratory on one machine: hosts joined by a switch, over links as slow as one likes.

Each host is a network namespace with one device, the switch a bridge in a namespace of its own, so that
nothing of the machine's own network is touched. The rate of a link holds in both directions, each by a token
bucket that never drops (`tc tbf`): what the host sends is held back on its side, what it receives on the
switch's. A host hands over one millisecond of its link at once, not 64 kB, behind which every short message would wait
5 ms at 100 Mbit/s. A delay is added in each direction (`tc netem`), so it counts twice between two hosts.
The counters are the kernel's, of every frame that passed, headers included.

Linux and root only. Whatever was made is removed in the end: after an error, Ctrl-C and SIGTERM, and,
where nothing could run any more (SIGKILL), by the next laboratory.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib.cli import UserError
from experiments.lib.launch import handling

__all__ = ["HEADER_BYTES", "Lab", "Link", "add_rates", "delay_of", "laboratory", "link_name", "missing"]
__all__ += ["rate_name", "rate_of"]

NAME = "jaxcomp"  # and the process id: of namespaces
SUBNET = "10.213.77"
HEADER_BYTES = 14 + 20 + 32  # of a frame with TCP in it: Ethernet, IP, and TCP with time stamps
BURST_SECONDS = 3e-4  # that a token bucket lets through at once: short beside any message that matters
FRAME_BYTES = 2000  # the least that it must let through
AT_ONCE_SECONDS = 1e-3  # of a link, that a host hands over in one piece: what TCP itself aims at
AT_ONCE_BYTES = 65536  # and the most that the kernel does; what is said meanwhile on other connections waits
WHOLE_BYTES = 70_000  # more than that, which a larger bucket need not cut into frames
WHOLE_FROM = 1e9  # bit/s from which on it is as large: cutting takes more time than the link there
QUEUE_BYTES = 64_000_000  # a switch that drops would measure TCP's recovery instead of the link
PLACES = (Path("/run/netns"), Path("/etc/netns"))
number = itertools.count()


class Link(NamedTuple):
    """What passed between a host and the switch: bytes with headers, and frames."""

    sent_bytes: int
    sent_frames: int
    received_bytes: int
    received_frames: int

    def since(self, before: "Link") -> "Link":
        return Link(*(new - old for new, old in zip(self, before, strict=True)))

    @property
    def sent_payload(self) -> int:
        """Bytes sent without headers; the acknowledgements of what was received are nothing else."""
        return self.sent_bytes - HEADER_BYTES * self.sent_frames


class Rate(float):
    """In bit/s; the help shows it in words."""

    def __repr__(self) -> str:
        return rate_name(self)


def add_rates(parser: Any, default: str) -> None:
    """The option --rates of the links."""
    rates, what = [rate_of(word) for word in default.split()], "of the links; none: no limit"
    parser.add_argument("--rates", type=rate_of, nargs="+", metavar="RATE", default=rates, help=what)


def quantity(text: str, units: dict[str, float]) -> float:
    """A number and its unit, such as 10mbit; NaN if it is none."""
    found = re.fullmatch(rf"([0-9]+\.?[0-9]*|\.[0-9]+)({'|'.join(units)})", text.lower())
    return float(found[1]) * units[found[2]] if found else math.nan


def rate_of(text: str) -> float | None:
    """10mbit, 1gbit, ... in bit/s, as tc writes them; None for "none", no limit."""
    if text == "none":
        return None
    if 1e3 <= (rate := quantity(text, {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9})) <= 1e12:
        return Rate(rate)
    raise argparse.ArgumentTypeError(f"must be a rate such as 10mbit, from 1kbit to 1000gbit, or none; got {text!r}")


def delay_of(text: str) -> float:
    """0.2ms, 50us, 1s in seconds."""
    if (delay := quantity(text, {"us": 1e-6, "ms": 1e-3, "s": 1.0})) >= 0:
        return delay
    raise argparse.ArgumentTypeError(f"must be a delay such as 0.2ms; got {text!r}")


def rate_name(rate: float | None) -> str:
    if rate is None:
        return "no limit"
    scale, unit = next((scale, unit) for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if rate >= scale)
    return f"{rate / scale:g} {unit}bit/s"


def link_name(rate: float | None, delay: float = 0.0) -> str:
    """
    >>> link_name(1e8), link_name(None, 2e-3)
    ('100 Mbit/s', 'no limit, 2 ms')
    """
    return rate_name(rate) + (f", {1e3 * delay:g} ms" if delay else "")


def missing() -> str | None:
    """What a laboratory needs and is not here, in words; None if nothing is."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    here = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    return None if here else "root and the commands ip and tc"


def command(line: str) -> str:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{line}: {said[-1] if said else f'exit status {done.returncode}'}")
    return done.stdout


class Lab:
    """Hosts 0 .. n - 1.

    prefixes: the words before a command that shall run on each host.
    addresses: theirs, on the slow links.
    """

    def __init__(self, name: str, hosts: int):
        self.switch = f"{name}-switch"
        self.names = [f"{name}-{i}" for i in range(hosts)]
        self.prefixes = [["ip", "netns", "exec", host] for host in self.names]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(hosts)]
        self.shaped = False

    def build(self, undo: contextlib.ExitStack) -> None:
        add_namespace(self.switch, undo)
        command(f"ip -n {self.switch} link add name bridge type bridge")
        command(f"ip -n {self.switch} link set bridge up")
        for i, (host, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            add_namespace(host, undo)
            # gloo looks up the host's name and must find the slow link.
            etc = Path("/etc/netns") / host
            etc.mkdir(parents=True, exist_ok=True)
            undo.callback(shutil.rmtree, etc, ignore_errors=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            command(f"ip -n {self.switch} link add name port{i} type veth peer name eth0 netns {host}")
            command(f"ip -n {self.switch} link set port{i} master bridge up")
            command(f"ip -n {host} addr add {address}/24 dev eth0")
            command(f"ip -n {host} link set eth0 up")
            command(f"ip -n {host} link set lo up")

    def shape(self, rate: float | Sequence[float] | None = None, delay: float = 0.0) -> None:
        """Gives every link a rate in bit/s (None: no limit; several: by host) and a delay in seconds, each way."""
        rates = list(rate) if isinstance(rate, Sequence) else [rate] * len(self.names)
        ends = [(host, "eth0", rates[i]) for i, host in enumerate(self.names)]
        ends += [(self.switch, f"port{i}", each) for i, each in enumerate(rates)]
        for namespace, device, rate in ends:  # of every link
            piece = AT_ONCE_BYTES if rate is None else round(rate / 8 * AT_ONCE_SECONDS)
            piece = min(max(piece, FRAME_BYTES), AT_ONCE_BYTES)
            command(f"ip -n {namespace} link set {device} gso_max_size {piece}")
            qdisc = f"tc -n {namespace} qdisc"
            if self.shaped:
                command(f"{qdisc} del dev {device} root")
            parent = "root"
            if rate is not None:
                least = WHOLE_BYTES if rate >= WHOLE_FROM else FRAME_BYTES
                bucket = f"rate {round(rate)}bit burst {max(least, round(rate / 8 * BURST_SECONDS))}"
                command(f"{qdisc} add dev {device} root handle 1: tbf {bucket} limit {QUEUE_BYTES}")
                parent = "parent 1:1"
            if delay:
                try:
                    netem = f"handle 10: netem delay {round(1e6 * delay)}us limit 1000000"
                    command(f"{qdisc} add dev {device} {parent} {netem}")
                except UserError as error:
                    if "unknown" in str(error):
                        raise UserError("this kernel has no netem (CONFIG_NET_SCH_NETEM), which delays need") from None
                    raise
        self.shaped = any(each is not None for each in rates) or bool(delay)

    def counters(self) -> list[Link]:
        """What passed each link so far, counted at the switch."""
        found = json.loads(command(f"ip -n {self.switch} -json -statistics link show"))
        stats = {device["ifname"]: device["stats64"] for device in found}
        ports = [stats[f"port{i}"] for i in range(len(self.names))]
        return [Link(*(port[way][what] for way in ("rx", "tx") for what in ("bytes", "packets"))) for port in ports]


@contextlib.contextmanager
def laboratory(hosts: int, rate: float | None = None, delay: float = 0.0) -> Iterator[Lab]:
    """A switch and its hosts, for as long as the context lasts.

    hosts: at most 250. rate, delay: of each link, each way, in bit/s (None: no limit) and seconds.
    """
    reason = missing()
    if reason:
        raise UserError(f"a network laboratory needs {reason}")
    lab = Lab(f"{NAME}-{os.getpid()}-{next(number)}", hosts)  # another run has its own
    remove_leftovers(mine=lab.switch)
    undo = contextlib.ExitStack()

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    with handling(stop, signal.SIGTERM, signal.SIGHUP):  # as an exception, so that what was made is removed
        try:
            try:
                lab.build(undo)
            except UserError as error:
                if "not permitted" in str(error) or "denied" in str(error):
                    raise UserError(f"network namespaces are not permitted here ({error})") from None
                raise
            lab.shape(rate, delay)
            yield lab
        finally:
            # A second Ctrl-C does not interrupt the removal.
            with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                undo.close()


def add_namespace(name: str, undo: contextlib.ExitStack) -> None:
    undo.callback(remove_namespace, name)  # before: an interrupt may come between the two
    command(f"ip netns add {name}")


def remove_namespace(name: str) -> None:
    """With all that still runs in it."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for process in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def remove_leftovers(mine: str) -> None:
    """Removes what killed runs left behind: their process is gone, or its number has come to us."""
    for path in sorted(path for place in PLACES for path in place.glob(f"{NAME}-*-*")):
        found = re.match(rf"{NAME}-(\d+)-\d+-", path.name)
        if found and (not Path(f"/proc/{found[1]}").exists() or mine.startswith(found[0])):
            remove_namespace(path.name)
            shutil.rmtree(Path("/etc/netns") / path.name, ignore_errors=True)
