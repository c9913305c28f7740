"""What the tests of the planner share: a small model, facts that are made up, a machine that takes what a test says."""

import jax
import jax.numpy as jnp
import numpy as np
from worlds import mesh_of

import jaxcomp as jc
from jaxcomp.plan import planning
from jaxcomp.plan.candidates import Limits, default_candidates, dense_candidates, traced
from jaxcomp.plan.facts import Facts, Line, Work
from jaxcomp.plan.links import KINDS, Fit
from jaxcomp.plan.predict import rows_of

F32 = dense_candidates()[0]
SPARSE = jc.Candidate("top_k", jc.error_feedback(jc.top_k(0.01)))
PARAMS = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}
LIKE = {"w": jax.ShapeDtypeStruct((300, 100), jnp.float32), "b": jax.ShapeDtypeStruct((100,), jnp.float32)}


def loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"]))


def batch(seed, workers=2):
    return np.random.default_rng(seed).standard_normal((4 * workers, 64)).astype(np.float32)


def plan_of(candidates, **options):
    return jc.plan(loss, PARAMS, batch(0), **{"mesh": mesh_of(2), "candidates": candidates, "tried": 0, **options})


def work(seconds, error=0.0, entries=2080):
    """Work of which all is decoding."""
    return Work(Line(0.0, 0.0), Line(0.0, seconds / entries), error)


def machine(monkeypatch, per_byte, work):
    """A machine whose links and encoding take what a test says; returns what was measured on it."""
    measured = []
    fits = {"data": {kind: Fit(kind, 1e-6, per_byte) for kind in KINDS}}
    monkeypatch.setattr(planning, "links_of", lambda *_: fits)
    monkeypatch.setattr(planning, "work_of", lambda _, each, *__: measured.append(each.name) or work[each.name])
    return measured


def facts_of(per_byte, encode=1e-3, gradient=0.01, latency=1e-4, overlap=0.0):
    """Of four workers with gradients like LIKE; codes take `encode` seconds, what is dense none."""
    fits = {"data": {kind: Fit(kind, latency, per_byte) for kind in KINDS}}
    lossy, dense = work(encode, 0.1, 30_100), work(0.0)
    each_work = {each.name: dense if each.dense else lossy for each in default_candidates()}
    return Facts({}, {"data": 4}, fits, each_work, gradient, 0.4, overlap)


def rows(candidates, facts, like=LIKE, **limits):
    sent = traced(candidates, like, "data", facts.sizes)
    return rows_of(candidates, facts, like, "data", sent, Limits(**limits))
