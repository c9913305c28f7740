"""States for `flax.serialization`, which is imported when it is asked for."""

import dataclasses
import importlib
from typing import Any

from jaxcomp.exchange.state import KEPT

__all__ = ["register_flax"]


def register_flax() -> None:
    """Makes states of exchanges known to `flax.serialization`: `to_bytes` and `from_bytes` save and restore them then.

    Call it once, before a state (or a `TrainState` that has one) is saved or restored. The target of `from_bytes` is a
    state of the same transformation, as `init_state` makes it: what is not an array comes from there.

    Raises:
        ModuleNotFoundError: Flax is not installed.
    """
    serialization = importlib.import_module("flax.serialization")
    for kind in KEPT:
        names = [field.name for field in dataclasses.fields(kind) if not field.metadata.get("static")]

        def to_dict(state: Any, names: list[str] = names) -> dict[str, Any]:
            return {name: serialization.to_state_dict(getattr(state, name)) for name in names}

        def from_dict(target: Any, saved: dict[str, Any], names: list[str] = names) -> Any:
            read = lambda name: serialization.from_state_dict(getattr(target, name), saved[name], name=name)
            return dataclasses.replace(target, **{name: read(name) for name in names})

        serialization.register_serialization_state(kind, to_dict, from_dict, override=True)
