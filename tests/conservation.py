"""What members of a federation remember, as exact fractions."""

from fractions import Fraction

import numpy as np

from jaxcomp.federated import parted

__all__ = ["exact", "remembered"]


def exact(x):
    return np.array([Fraction(float(value)) for value in x])


def remembered(server, name, member):
    """What the member remembers once it is told all that is decided."""
    pending = member._pending
    if pending is None:
        return exact(member.memory if member.memory.size else np.zeros(server.point.size))
    memory = exact(pending.rest)
    share = server._entries[name].fates.get(pending.answer.round, 0.0)
    memory[pending.indices] += exact(parted(pending.values, share)[1])
    return memory
