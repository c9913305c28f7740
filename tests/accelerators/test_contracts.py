"""`jc.expect` on programs for GPUs and TPUs: the wrong one breaks its promise, its mended form keeps it."""

import jax
import jax.numpy as jnp
import pytest
from accelerators.bounds import needs
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.targets import described, mesh_on, shapes_on


@pytest.fixture(params=["h100", "h100:2x2", "v5e:2x2"])
def mesh(request):
    needs(request.param)
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    yield mesh_on(described(request.param), {"data": 2, "model": 2})
    jax.config.update("jax_enable_compilation_cache", before)


def shaped(mesh, spec, *shape):
    return shapes_on(mesh, jax.ShapeDtypeStruct(shape, jnp.float32), spec)


def test_a_parameter_that_is_made_whole(mesh):
    args = shaped(mesh, P(None, "model"), 512, 1024), shaped(mesh, P("data"), 64, 512)
    whole = lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
    out = NamedSharding(mesh, P("data", "model"))
    jc.expect(jax.jit(lambda w, x: x @ w, out_shardings=out), *args, model="none", data="none")
    with pytest.raises(AssertionError, match=r"(?s)model was promised 'none'.*test_contracts.py:\d+"):
        jc.expect(jax.jit(lambda w, x: jnp.sin(whole(w)) + jnp.sum(x)), *args, model="none")


@pytest.mark.parametrize("is_summed_once", [True, False])
def test_micro_batches_that_are_exchanged_one_by_one(mesh, is_summed_once):
    """For the sake of a clip: without it these compilers move the sum out of the loop by themselves."""
    clip = lambda g: jnp.clip(g, -1, 1)

    def grads(w, x):
        part = lambda i: jax.grad(lambda w: jnp.mean((x[i] @ w) ** 2))(lax.pcast(w, "data", to="varying"))
        if is_summed_once:
            mine = lax.fori_loop(0, 4, lambda i, total: total + clip(part(i)), lax.pcast(w * 0, "data", to="varying"))
            return lax.psum(mine, "data")
        return lax.fori_loop(0, 4, lambda i, total: total + clip(lax.psum(part(i), "data")), w * 0)

    step = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P()))
    args = shaped(mesh, P(), 512, 256), shaped(mesh, P(None, "data"), 4, 32, 512)
    if is_summed_once:
        jc.expect(step, *args, data="<= 512 KiB", rest="none")
    else:
        with pytest.raises(AssertionError, match=r"(?s)data was promised '<= 512 KiB', and .*, 4 times"):
            jc.expect(step, *args, data="<= 512 KiB")
