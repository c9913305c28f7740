"""Times that processes agree on."""

import time

import jax.numpy as jnp
import numpy as np
from worlds import mesh_of

from jaxcomp.plan.clock import MeshClock


def test_times_are_agreed_and_texts_are_sent():
    clock = MeshClock(mesh_of(4), 1e5)
    np.testing.assert_allclose(clock.agreed([1.5, -2.0]), [1.5, -2.0])
    assert clock.broadcast("plan \N{GREEK SMALL LETTER ALPHA}") == "plan \N{GREEK SMALL LETTER ALPHA}"
    assert clock.broadcast(None) is None
    assert 0 < clock.left() <= 1e5
    middle, error = clock.median(lambda: jnp.zeros(()), rounds=3)
    assert middle > 0
    assert error >= 0


def test_programs_are_timed_in_turn():
    """Each round all of them, in the next one backwards; `before` begins each run; a long one is run less often."""
    said = []
    quick, slow = lambda: said.append("q"), lambda: (said.append("s"), time.sleep(0.06))[:0]
    times = MeshClock(mesh_of(2), 1e5).times([quick, slow], 3, 1e5, before=lambda i: said.append(f"{i}"))
    assert times.shape == (2, 3)
    assert (times[1] >= 0.06).all()
    few, many = "1s" * 2, "0q" * 16
    assert "".join(said) == "0q1s" * 2 + few + many + many + few + few + many
