"""Processes that were started with other options find that out before the first round, and say what differs.

Each process builds its own exchange. Where options differ, the programs differ, and gradients or shared points go apart
without a word. So a state knows which options the transformation was built with (`Description.options`), and these are
compared once where states are made: on the host where that is possible (`check_state`), and in the program that makes
the state where it is traced by the user (`check_inside`). Workers that exchange bytes send a greeting (`greeting`).
"""

import json
import math
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomp  # for its version, which is known once this is called
from jaxcomp.arrays import constants
from jaxcomp.exchange.axes import Placement, axis_names, is_bound, varying
from jaxcomp.exchange.collectives import gather_tree
from jaxcomp.exchange.state import is_mean, means_in
from jaxcomp.factories import described, options_in
from jaxcomp.groups import Groups
from jaxcomp.wire.frame import VERSION as WIRE

__all__ = [
    "Differs",
    "Options",
    "check_equal",
    "check_inside",
    "check_options",
    "check_state",
    "differences",
    "greeting",
    "greeting_of",
    "merged",
    "options_of",
    "probe",
    "warn_of_order",
]

SHOWN = 3  # options that an error names
GREETING = b"jaxcomp options "
CURE = "Build the exchange with the same options in every process"

OPTIMIZER = "optimizer state"

Options = Mapping[str, str]
_compared: set[str] = set()


class Differs(ValueError):
    """Processes or workers were built with other options."""


def options_of(name: str, algorithm: Any, groups: Groups, **others: Any) -> str:
    """JSON of all that must be equal on all workers. name: of the outer form; others: further options, by name."""
    leaves = [f"{dtype}{list(shape)}" for dtype, shape in zip(groups.dtypes, groups.shapes, strict=True)]
    layout = [
        f"{x.dtype}{list(x.shape)} of leaves {group.leaves}"
        for x, group in zip(groups.like, groups.groups, strict=True)
    ]
    options = {"jaxcomp": jaxcomp.__version__, "wire format": str(WIRE), "transformation": name}
    options |= options_in("algorithm", algorithm)
    options |= {key: _option(value) for key, value in others.items()}
    options |= {
        "parameters": _listed([*leaves, str(groups.structure)], len(leaves)),
        "layout": _listed(layout, len(layout)),
    }
    return json.dumps(options)


def _option(value: Any) -> str:
    if isinstance(value, str):
        return value
    return probe(value) if hasattr(value, "init") and hasattr(value, "update") else described(value)


def _listed(texts: list[str], size: int) -> str:
    """The first few of some texts, and a checksum of all."""
    first = ", ".join(_short(text, 60) for text in texts[: min(size, 3)])
    return f"{first}{', ...' if size > 3 else ''} ({size} in all, checksum {zlib.crc32(repr(texts).encode()):08x})"


def differences(each: Sequence[Options], who: Sequence[str]) -> str | None:
    """Says what differs and where; None where all are equal.

    Args:
        each: the options of each process. who: how each is called.

    >>> differences([{"levels": "7"}, {"levels": "5"}, {"levels": "7"}], ["worker 0", "worker 1", "worker 2"])
    'levels is 5 on worker 1, and 7 on worker 0'
    """
    keys = dict.fromkeys(key for options in each for key in options)
    keys = [key for key in keys if len({options.get(key) for options in each}) > 1]
    # Of an algorithm that is another one, its options are no news; nor is a layout that follows from something else.
    inside = lambda key, other: key != other and key.startswith((f"{other}.", f"{other}["))
    keys = [key for key in keys if not any(inside(key, other) for other in keys)]
    keys = [key for key in keys if key not in ("layout", OPTIMIZER) or len(keys) == 1]
    found = []
    for key in keys[:SHOWN]:
        values = [options.get(key, "not given") for options in each]
        common = max(values, key=values.count)
        odd = next(i for i, value in enumerate(values) if value != common)
        found.append(
            f"{key} is {_short(values[odd])} on {who[odd]}, and {_short(common)} on {who[values.index(common)]}"
        )
    more = f"; and {len(keys) - SHOWN} options more" if len(keys) > SHOWN else ""
    return "; ".join(found) + more if keys else None


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text)} characters)"


def check_equal(name: str, each: Sequence[Options], who: Sequence[str]) -> None:
    """Raises Differs where options differ."""
    found = differences(each, who)
    if found is not None:
        raise Differs(f"{name}: {found}. {CURE}")


# ------------------------------------------------------------------------------------------------
# Processes of one mesh


SLOW = ("devices of one process", "several processes", "several slices")  # of TPUs; each slower than the one before


def warn_of_order(placements: Sequence[Placement], mesh: Mesh) -> None:
    """Warns where a hierarchy exchanges over slower links first, from what the devices say of themselves.

    Then each device of a fast group sends a message of its own over the slow links. With the fast axis first the
    devices of a group share out one message. placements: of the means of one transformation.
    """

    def kind(axes: tuple[str, ...]) -> int:
        rows = _devices_along(mesh, axes)
        along = lambda of: any(len({of(device) for device in rows[:, j]}) > 1 for j in range(rows.shape[1]))
        if along(lambda device: getattr(device, "slice_index", None)):
            return 2
        return int(along(lambda device: device.process_index))

    for placement in placements:
        levels = [placement.names, *placement.later]
        if len(levels) == 1:
            continue
        kinds = [kind(axes) for axes in levels]
        faster = [j for j in range(1, len(levels)) if kinds[j] < kinds[0]]
        if faster:
            fast = levels[faster[0]]
            number = math.prod(mesh.shape[name] for name in fast)
            shown = lambda axes: repr(axes[0] if len(axes) == 1 else axes)
            warnings.warn(
                f"the exchange over {shown(levels[0])}, between {SLOW[kinds[0]]}, comes before that over "
                f"{shown(fast)}, between {SLOW[kinds[faster[0]]]}, so that each of {number} devices sends a message of "
                f"its own over the slower links. Begin with {shown(fast)}: then they share out one message",
                stacklevel=3,
            )
            return


def check_state(name: str, state: Any, mesh: Any, axis: Any) -> None:
    """`check_options` for the function `name`, once for each set of options. Of what is no mesh of devices, and of a
    single process, nothing is compared. Warns of a hierarchy that begins with the slower links of the mesh.
    """
    if isinstance(mesh, Mesh):
        warn_of_order([mean.about.placement for mean in means_in(state)], mesh)
    if not isinstance(mesh, Mesh) or jax.process_count() == 1 or isinstance(jnp.zeros(()) + 0, Tracer):
        return
    processes = sorted({device.process_index for device in mesh.devices.flat})
    options = merged([json.loads(mean.about.options) for mean in means_in(state) if mean.about.options])
    options = {**options, **_of_optimizer(state)}
    text = json.dumps(options).encode()
    if len(processes) > 1 and jax.process_index() in processes:
        sizes = _from_each(mesh, processes, np.array([len(text)], np.uint32))
        rows = _from_each(mesh, processes, np.frombuffer(text.ljust(int(np.max(sizes))), np.uint8))
        each = [json.loads(row.tobytes()) for row in rows]
        check_equal(name, each, [_called(mesh, axis, process) for process in processes])
        _compared.update(mean.about.options for mean in means_in(state))


def _of_optimizer(state: Any) -> Options:
    """Lists the arrays of a state that are of no mean, and the values of scalars where they are known."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_mean)
    others = [(jax.tree_util.keystr(path), x) for path, x in leaves if not is_mean(x) and hasattr(x, "dtype")]
    if not others:
        return {OPTIMIZER: "without arrays"}
    texts = [f"{x.dtype}{list(x.shape)} at {path}" for path, x in others]
    options = {OPTIMIZER: _listed(texts, len(texts))}
    known = lambda x: isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_replicated
    scalars = [(path, x) for path, x in others if not x.shape and known(x)]
    for path, x in scalars:
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        options[f"{OPTIMIZER} at {path}"] = str(np.asarray(data.addressable_data(0)))
    return options


def check_options(state: Any, mesh: Mesh, axis_name: Any) -> None:
    """Compares the options with which the processes of a mesh have built an exchange.

    So are the shapes of the optimizer's state, and its scalars: counts of steps, and rates that
    `optax.inject_hyperparams` keeps there.

    `init_state` and the `init` of `value_and_grad` and `local_steps` do so themselves. Call it, in every process, where
    a state is used that none of these has made, say one that was restored from a checkpoint.

    Args:
        state: of the optimizer, or its shapes, as the transformation of this process makes them.
        mesh: of the workers, with devices of all processes.
        axis_name: their axis, a tuple of axes, or the mapping given to `compressed_mean`.

    Raises:
        ValueError: in every process, naming up to three options that differ and the workers on which they do.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> state, specs = jc.init_state(jc.compressed_mean(jc.direct(jc.natural()), "data"), jnp.zeros(3), mesh, "data")
    >>> jc.replicas.check_options(state, mesh, "data")
    """
    check_state("check_options", state, mesh, axis_name)


def merged(each: Sequence[dict[str, str]]) -> Options:
    """Options of several means as one: those of the first, and what differs in the others under their numbers."""
    merged = dict(each[0]) if each else {}
    for i, options in enumerate(each[1:], 1):
        merged |= {f"exchange {i}: {key}": value for key, value in options.items() if merged.get(key) != value}
    return merged


def _from_each(mesh: Mesh, processes: list[int], mine: np.ndarray) -> np.ndarray:
    """Arrays of one length from each process, [processes, ...]: by one device of each."""
    first = {device.process_index: device for device in reversed(list(mesh.devices.flat))}
    small = Mesh(np.array([first[process] for process in processes]), ("process",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(small, PartitionSpec("process"))
    given = jax.make_array_from_callback((len(processes), *mine.shape), rows, lambda _: mine[None])
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(small, PartitionSpec()))
    return np.asarray(everywhere(given).addressable_data(0))


def _devices_along(mesh: Mesh, names: Sequence[str]) -> np.ndarray:
    """The devices of a mesh: [along the axes of these names, along all others]."""
    places = [mesh.axis_names.index(name) for name in names]
    first = np.moveaxis(mesh.devices, places, range(len(places)))
    return first.reshape(math.prod(first.shape[: len(places)]), -1)


def _called(mesh: Mesh, axis: Any, process: int) -> str:
    """A process, by the numbers of its workers."""
    axis = tuple(name for key in axis for name in axis_names(key)) if isinstance(axis, Mapping) else axis
    devices = _devices_along(mesh, [name for name in axis_names(axis) if name in mesh.shape])
    here = [i for i, row in enumerate(devices) if any(device.process_index == process for device in row)]
    workers = f"worker {here[0]}" if len(here) == 1 else f"workers {', '.join(map(str, here))}"
    return f"{workers} (process {process})"


# ------------------------------------------------------------------------------------------------
# Programs of the user's


PARTS = ("jaxcomp", "wire format", "algorithm", "parameters", "layout")
OTHERS = "options"


def check_inside(name: str, options: str, placement: Placement) -> None:
    """In a program of several processes that makes a state: compares a word for each part, and raises in a callback.

    Nothing is added where the options were compared on the host, or where there are none: in a single process.
    """
    if not options or options in _compared or not is_bound(placement.every):
        return
    texts: dict[str, dict[str, str]] = {part: {} for part in (*PARTS, OTHERS)}
    for key, value in json.loads(options).items():
        texts[next((part for part in PARTS if re.match(rf"{part}\b", key)), OTHERS)][key] = value
    words = np.array([zlib.crc32(json.dumps(text).encode()) for text in texts.values()], np.uint32)
    every = gather_tree(varying(jnp.asarray(words), placement.every), placement.every)

    def compare(found: Any) -> None:
        rows = np.asarray(found).reshape(-1, words.size)
        for i, (what, mine) in enumerate(texts.items()):
            others = np.flatnonzero(rows[:, i] != words[i])
            if others.size:
                raise Differs(
                    f"{name}: {what} on worker {others[0]} differs from process {jax.process_index()}, which has "
                    f"{', '.join(f'{key}: {_short(value)}' for key, value in mine.items())}. {CURE}"
                )

    jax.debug.callback(compare, every)


# ------------------------------------------------------------------------------------------------
# Workers that exchange bytes


def greeting(options: Options) -> bytes:
    """The first message of a worker: its options."""
    return GREETING + json.dumps(dict(options)).encode()


def greeting_of(name: str, worker: int, data: Any) -> Options:
    """The options in a first message; Differs where it is none."""
    try:
        if not bytes(data).startswith(GREETING):
            raise ValueError("no greeting")
        found = json.loads(bytes(data)[len(GREETING) :])
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("no options")
    except (ValueError, TypeError, RecursionError):
        raise Differs(
            f"{name}: the first message of worker {worker} does not say its options: it runs another version of "
            f"jaxcomp than {jaxcomp.__version__}, or has begun before the others"
        ) from None
    return found


def probe(optimizer: Any) -> str:
    """The first steps of an optimizer with a vector of its own, to four digits: functions of others have no options."""
    found = []
    try:
        with constants():
            x = jnp.full((2,), 0.5, jnp.float32)
            state = optimizer.init(x)
            for gradient in (0.25, 0.5, 0.75):
                updates, state = optimizer.update(jnp.full_like(x, gradient), state, x)
                found.append(float(f"{float(updates[0]):.4g}"))
    except Exception:  # one that takes only its own parameters
        return "not comparable"
    return f"an optimizer with the first steps {found}"
