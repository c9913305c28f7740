"""Steps of a GPT's tree on a mesh: time, temporary memory, bytes sent, seconds to compile, and where the time goes."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

import jaxcomp as jc
from experiments.accelerator.times import memory_of
from experiments.bench.step import Step, gradients_of
from experiments.bench.timing import time_all
from experiments.bench.trees import gpt_like, methods, num_entries, temporary

__all__ = ["EXCHANGES", "METHODS", "Tree", "default_tree", "device_seconds"]

# Of `methods` in bench/trees.py; "pmean" is a plain mean.
METHODS = ["pmean", "direct(identity)", "direct(cast bf16)", "error_feedback(sidco)", "error_feedback(top_k)"]
METHODS += ["error_feedback(int4)", "power_sgd(4)", "direct(dithering)"]
EXCHANGES = ["pmean", "direct(cast bf16)", "error_feedback(sidco)", "power_sgd(4)", "direct(dithering)"]
TREES = 14  # so many fit: gradients, two states of which one is being written, directions, a copy, temporary memory
WIDTH, LAYERS = 1024, 24  # 310.7 M entries in 290 leaves, where these fit
ON_CPU = (64, 2)
TRACED = 3  # steps of which kernels are counted


def default_tree(device: Any) -> tuple[int, int]:
    """Width and layers of a GPT of which TREES fit in the device's memory."""
    if device.platform == "cpu":
        return ON_CPU
    layers, limit = LAYERS, memory_of(device)
    while layers > 1 and limit is not None and 4 * TREES * num_entries(gpt_like(layers, WIDTH)) > limit:
        layers //= 2
    return WIDTH, layers


class Tree:
    """A GPT's tree on a mesh of some devices, one worker each, with gradients that all methods share."""

    def __init__(self, width: int, layers: int, devices: list[Any]):
        self.like = gpt_like(layers, width)
        self.mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
        self.gradients = gradients_of(self.like, self.mesh)
        self.copy = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))

    def measure(self, method: str, repeats: int, kernels: bool = False) -> dict[str, Any]:
        """The row of a method; kernels: with milliseconds of a step by the names of kernels."""
        step = Step(methods(self.mesh.size).get(method), self.like, self.mesh, self.gradients)
        calls: dict[str, Callable[[], Any]] = {"copy": lambda: self.copy(self.gradients[0]), "step": step}
        seconds = time_all(calls, repeats, quiet=True)
        row = {
            "method": method,
            "ms": 1e3 * seconds["step"],
            "copies": seconds["step"] / seconds["copy"],
            "copy_ms": 1e3 * seconds["copy"],
            "temporary": temporary(step.program, self.like),
            "sent_bytes": float(jc.ledger(step.program).total_bytes),
            "compile_seconds": step.compile_seconds,
        }
        if kernels:
            found = device_seconds(step, TRACED)
            row["kernels"] = [{"kernel": name, "ms": 1e3 * each, "times": n} for name, each, n in found]
        return row


def device_seconds(call: Callable[[], Any], times: int) -> list[tuple[str, float, float]]:
    """Names of kernels, seconds and launches of each in one call, longest first; nothing on backends without any.

    The call is traced so many times, and has run before.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(str(file)).planes]
        return summed(planes, times)


def summed(planes: list[Any], times: int) -> list[tuple[str, float, float]]:
    """The kernels in planes of a profile, of the first device that has one."""
    devices = sorted((plane for plane in planes if plane.name.startswith("/device:")), key=lambda plane: plane.name)
    for plane in devices:
        nanoseconds, launches = defaultdict[str, float](float), Counter[str]()
        for line in plane.lines:
            # A GPU has a line for each stream. A TPU has one for whole programs, too, and one for their operations.
            if line.name.startswith("Stream") or line.name == "XLA Ops":
                for name, own in own_times(line.events):
                    nanoseconds[name] += own
                    launches[name] += 1
        if nanoseconds:
            longest = sorted(nanoseconds.items(), key=lambda item: -item[1])
            return [(name, 1e-9 * ns / times, launches[name] / times) for name, ns in longest]
    return []


def own_times(events: Iterable[Any]) -> Iterator[tuple[str, float]]:
    """Name and nanoseconds of each event of a line, without the events inside it: on TPUs a loop is an event around
    all operations of its body."""
    around: list[list[Any]] = []  # name, end and own nanoseconds of events that may have others inside
    for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
        end = event.start_ns + event.duration_ns
        while around and around[-1][1] < end:
            name, _, own = around.pop()
            yield name, own
        if around:
            around[-1][2] -= event.duration_ns
        around.append([event.name, end, event.duration_ns])
    yield from ((name, own) for name, _, own in around)
