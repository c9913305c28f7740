"""Shared by the tests of the planner: a small model, facts that are made up."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from worlds import mesh_of

import jaxcomp as jc
from jaxcomp.exchange.links import KINDS
from jaxcomp.plan.candidates import Limits, default_candidates, traced
from jaxcomp.plan.facts import Facts, Line, Work
from jaxcomp.plan.links import Fit
from jaxcomp.plan.predict import rows_of

NAMED = {each.name: each for each in default_candidates()}
F32, SPARSE = NAMED["f32"], jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))
PARAMS = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}
LIKE = {"w": jax.ShapeDtypeStruct((300, 100), jnp.float32), "b": jax.ShapeDtypeStruct((100,), jnp.float32)}


def loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"]))


def batch(workers=2):
    return np.random.default_rng(0).standard_normal((4 * workers, 64)).astype(np.float32)


def plan_of(candidates, **options):
    return jc.plan(loss, PARAMS, batch(), **{"mesh": mesh_of(2), "candidates": candidates, "tried": 0, **options})


def edited(path, change):
    """Changes the file of a plan as a user may."""
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))


def work(seconds, error=0.0, entries=2080):
    """Work of which all is decoding."""
    return Work(Line(0.0, 0.0), Line(0.0, seconds / entries), error)


def facts_of(per_byte, named=tuple(NAMED), overlap=0.0):
    """Facts of four workers with gradients like LIKE; codes take a millisecond, what is dense nothing."""
    fits = {"data": {kind: Fit(kind, 1e-4, per_byte) for kind in KINDS}}
    each_work = {name: work(0.0) if NAMED[name].dense else work(1e-3, 0.1, 30_100) for name in named}
    return Facts({}, {"data": 4}, fits, each_work, 0.01, 0.4, overlap)


def rows(candidates, facts, like=LIKE, **limits):
    sent = traced(candidates, like, "data", facts.sizes)
    return rows_of(candidates, facts, like, "data", sent, Limits(**limits))
