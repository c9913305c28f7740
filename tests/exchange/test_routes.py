"""Every route on the level of `Route.reduce`: the right mean, of the right type, wherever workers run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import route_worlds as rw
from jax import lax
from route_worlds import LIKES, bits, messages, on_mesh, on_replicas, on_shards, on_vmap, uneven
from variants import variants

from jaxcomp.base import wide_like
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.parts import lift
from jaxcomp.compressors.quantize import dithering
from jaxcomp.exchange import collectives
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.routes import ROUTES, VIAS, route_of
from jaxcomp.layout import Layout

N = 4
PLAIN = [via for via in VIAS if via != "two_shot"]
COMPRESSORS = {
    "identity": identity(),
    "natural": natural(),
    "uneven": uneven((40, 3, 11, 60)),
}
SLOW = Link(latency=0, bandwidth=1e6)


@pytest.fixture(autouse=True)
def _ragged_everywhere(monkeypatch):
    monkeypatch.setattr(collectives, "has_ragged", lambda: True)
    monkeypatch.setattr(lax, "ragged_all_to_all", rw.ragged_by_definition)


def compressor_of(via, workers):
    return identity() if via == "sum" else uneven((40, 3, 11, 60)[:workers])


def like_of(via, small, workers):
    if via == "two_shot":
        return rw.shape(workers, 96)
    return LIKES["small" if small else "none"]


def step_of(via, compressor, like, **options):
    def step(message, call):
        result, _ = rw.send(via, compressor, like, message, call._replace(**options))
        return result.mean

    return step


def mean_of_decoded(compressor, like, given, weights=None):
    """In float64, of what each of the workers on the leading axis sent."""
    workers, lifted = len(jax.tree.leaves(given)[0]), lift(compressor)
    state = lifted.init(jax.random.key(0), like)
    shared = lambda i: state.shared if lifted.for_worker is None else lifted.for_worker(state.shared, i, workers)

    def one(i):
        mine = state._replace(shared=shared(i))
        payload, _ = lifted.compress(jax.random.key(1), jax.tree.map(lambda a: a[i], given), mine)
        return lifted.decompress(payload, mine.shared, wide_like(like))

    return jax.tree.map(lambda *x: np.average(np.float64(x), axis=0, weights=weights), *map(one, range(workers)))


def assert_near(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Sharded parameters and hierarchies crashed with gather, ladder, concat and ring where no leaf was small.
CASES = [(via, world, small) for via in VIAS for world in ("mesh", "shards", "replicas") for small in (True, False)]


@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize(("via", "world", "small"), CASES)
def test_every_route_on_every_mesh(via, world, small, seed):
    """The mean is right, and typed as the out specs ask for under check_vma=True."""
    compressor = identity() if via in ("sum", "two_shot") else uneven((40, 3))
    like = like_of(via, small, 2)
    step = step_of(via, compressor, like, link=SLOW)
    if world == "shards":
        given = messages(seed, like, (2, 2))
        got = on_shards(step, given)
        for shard in range(2):
            own = jax.tree.map(lambda a: a[:, shard], given)  # noqa: B023
            assert_near(jax.tree.map(lambda a: a[shard], got), mean_of_decoded(compressor, like, own))  # noqa: B023
        return
    given = messages(seed, like, (2,))
    got = (on_mesh if world == "mesh" else on_replicas)(step, given)
    assert_near(got, mean_of_decoded(compressor, like, given))
