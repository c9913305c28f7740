"""Predictions against cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_worlds import F32, SPARSE, facts_of, rows

from jaxcomp.plan.candidates import ErrorBound
from jaxcomp.plan.predict import Advice, StepParts, overlap_of, step_seconds, with_expected


@pytest.mark.parametrize(
    ("exchange", "shares", "options", "total"),
    [
        ((0.1, 1.0, 0.2), (1.0,), {}, 3.3),
        ((0.1, 1.0, 0.2), (1.0,), {"overlap": 1.0}, 3.3),  # one bucket waits for all of it
        ((0.1, 1.0, 0.2), (1.0,), {"every": 4}, 2 + 1.3 / 4),
        # Two buckets: computing 1 + .5 = 1.5 | 2.0; exchanging 1.5 .. 2.5 | 2.5 .. 3.5.
        ((0.0, 2.0, 0.0), (0.5, 0.5), {"overlap": 1.0}, 3.5),
        ((0.0, 2.0, 0.0), (0.5, 0.5), {"overlap": 0.5}, 3.75),
        # Encoding delays the backward pass: 1 + .5 + .25 | + .75 = 2.5; exchanging 1.75 .. 1.85 | 2.5 .. 2.6; then 1.
        ((0.5, 0.2, 1.0), (0.5, 0.5), {"overlap": 1.0}, 3.6),
    ],
)
def test_steps_by_hand(exchange, shares, options, total):
    found = step_seconds(2.0, 0.5, exchange, shares, **options)
    assert found.total == pytest.approx(total)
    exchanged = found.encode + found.network + found.decode - found.hidden
    assert found.total == pytest.approx(found.gradient + exchanged / options.get("every", 1))
    assert overlap_of(0.0, 1.0, 1.0) == 0


def step(network, rest, measured=None):
    parts = StepParts(rest, 0.0, network, 0.0, 0.0, network + rest, 0.0)
    return Advice(F32, parts, 0.0, ErrorBound(0.0, True, False, "none"), measured=measured)


def test_steps_that_were_run_say_what_the_others_take():
    """Links that take twice what they took alone, and work half as much again; one factor alone, where one was run."""
    rng = np.random.default_rng(0)
    ran = [step(*x, measured=2 * x[0] + 1.5 * x[1]) for x in rng.uniform(0.1, 10, (2000, 2))]
    *others, last = with_expected([*ran, step(3.0, 4.0)])
    assert last.seconds == last.expected == pytest.approx(12, rel=1e-2)
    assert {row.expected for row in others} == {None}
    expected = lambda times, *x: with_expected([step(5.0, 0.001, 10.0)] * times + [step(*x)])[-1].expected
    assert expected(1, 1.0, 0.0) == pytest.approx(1.2, rel=0.01)  # (a / 2 - 1)^2 + (a - 1)^2 is least there
    assert expected(1, 0.0, 1.0) == pytest.approx(1, rel=0.01)  # nothing is known of it
    assert expected(40, 1.0, 0.0) == pytest.approx(2, rel=0.1)
    assert with_expected([step(3.0, 4.0)])[0].expected is None  # none of these was run


def test_buckets_hide_exchanges_where_the_machine_overlaps():
    like = [jax.ShapeDtypeStruct((50_000,), jnp.float32)] * 4
    at = lambda e, size: rows([F32, F32.in_buckets(size)], facts_of(1e-8, overlap=e), like)[1]
    assert at(0.0, 200_000).parts.hidden == 0
    found = at(1.0, 200_000)
    assert 0 < found.parts.hidden < found.parts.network
    assert found.parts.network == pytest.approx(4 * 6e-4 + 1.5 * 800_000 * 1e-8)
    assert found.refused is None
    assert at(1.0, 2**24).refused == "the same as f32: all leaves are one bucket"


def test_what_is_not_eligible():
    found = rows([F32, SPARSE, SPARSE.with_every(4)], facts_of(1e-8), max_error=0.98, max_every=3)
    why = [row.refused for row in found]
    assert why[:1] == [None]
    assert why[1:] == [
        "a message loses 0.99 of |x|^2, more than allowed",
        "an exchange every 4 steps, and max_every is 3",
    ]
    assert [row.bound for row in found] == [False, True, True]  # of these no work was measured
