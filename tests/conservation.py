"""Members of a federation: a round of theirs, what was used of them, and what they remember, as exact fractions."""

from fractions import Fraction

import numpy as np

from jaxcomp.federated import Server, parted

__all__ = ["Watched", "answered", "exact", "remembered"]


def exact(x):
    return np.array([Fraction(float(value)) for value in x])


def answered(server, members, here=None, away=lambda name, point: point):
    """A round of everyone: `away` says where a member's own steps lead."""
    for name, task in server.open(members if here is None else here).items():
        point = members[name].take(task)
        assert server.receive(name, members[name].answer(task, away(name, point))) == ""
    return server.close()


class Watched(Server):
    """Keeps what was used of each member, as exact fractions."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.delivered = {name: exact(np.zeros(self.point.size)) for name in self.counts}

    def _moved(self, parts):
        self._parts = parts
        return super()._moved(parts)

    def close(self):
        self._parts = []
        result = super().close()
        for name, message in () if result.skipped else self._parts:
            self.delivered[name][message.indices] += exact(message.values)
        return result


def remembered(server, name, member):
    """What the member remembers once it is told all that is decided."""
    pending = member._pending
    if pending is None:
        return exact(member.memory if member.memory.size else np.zeros(server.point.size))
    memory = exact(pending.rest)
    share = server._entries[name].fates.get(pending.answer.round, 0.0)
    memory[pending.indices] += exact(parted(pending.values, share)[1])
    return memory
