"""The planner's bytes, by axis, are those of the compiled program: of hierarchies, hosts, slices, a GPT on pods."""

import math

import jax
import jax.numpy as jnp
import pytest
from accelerators.bounds import needs
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments import pods
from experiments.lib import targets
from jaxcomp.exchange.links import KINDS
from jaxcomp.plan.candidates import Candidate, collectives_of

LIKE = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32), "b": jax.ShapeDtypeStruct((4096,), jnp.float32)}
SPARSE = jc.error_feedback(jc.sidco(0.01))
HIERARCHY = {"ici": jc.direct(jc.identity()), "dcn": SPARSE}


@pytest.mark.skipif(bool(targets.lacks("h100")), reason="needs the compiler of GPUs")
@pytest.mark.parametrize(
    ("target", "sizes", "algorithm"),
    [("h100:1x8", {"data": 8}, SPARSE), ("h100:2x4", {"dcn": 2, "ici": 4}, HIERARCHY)],
)
def test_bytes_of_each_axis_are_those_of_the_compiled_program(target, sizes, algorithm):
    mesh = targets.mesh_on(targets.described(target), sizes)
    tx = jc.compressed_mean(*((None, algorithm) if algorithm is HIERARCHY else (algorithm, "data")))
    axis = algorithm if algorithm is HIERARCHY else "data"
    state, specs = targets.state_on(mesh, tx, LIKE, axis)
    step = lambda grads, state: tx.update(jc.per_worker(grads, tuple(sizes)), state)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs))
    program = targets.compiled(jax.jit(mapped), targets.shapes_on(mesh, LIKE), state)
    names = tuple(sizes) if len(sizes) > 1 else "data"
    planned = dict.fromkeys([(name,) for name in sizes], 0.0)
    for one in collectives_of(Candidate("one", algorithm), LIKE, names, sizes):
        workers = math.prod(sizes[name] for name in one.axis.split(","))
        planned[tuple(one.axis.split(","))] += one.times * KINDS[one.kind].sent(one.operand_bytes, workers)
    assert program.ledger.by_axes(mesh) == pytest.approx(planned)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("2xv5e:2x2", "sidco(0.001) + error feedback"),
        ("v5e:2x2", "f32"),
        ("4xh100", "bf16"),
        ("h100", "int4 + error feedback"),
        ("2xh100", "f32 inside, int4 + error feedback"),
    ],
)
def test_the_planner_counts_what_a_gpt_on_pods_sends(text, name):
    each = pods.pods_of(text)
    needs(each.target)
    row = pods.tried(each, pods.Size(2, 256, 1024, 128), name)
    assert "error" not in row
    assert (row["planned"], row["planned_ici"]) == (row["dcn"], row["ici"])
    assert bool(row["ici"]) == ("inside" in name)
    assert row["unknown"] == 0
    assert row["fits"]
