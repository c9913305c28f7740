"""MaxText's DiLoCo, compressed: run this in place of maxtext.trainers.pre_train.train, with the same arguments.

With compile_topology= in place of maxtext.trainers.pre_train.train_compile.
"""

import functools
import os
import sys
from types import SimpleNamespace

import jax
import optax
from absl import app
from maxtext.configs import pyconfig
from maxtext.trainers.diloco import diloco, utils
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import train_utils

import jaxcomp as jc

ALGORITHM = jc.from_config(os.environ.get("JAXCOMP", "error_feedback(block_scaled('int4'))"))
# means: one for each fragment. now: the one that is exchanged, its state, and MaxText's configuration.
sync, saved, means, now = utils.spmd_diloco_sync, utils.spmd_diloco_checkpointing, [], {}
shardings_of = lambda tree: jax.tree.map(lambda x: x.sharding, tree)


class DrJAX:
    __getattr__ = lambda self, name, drjax=sync.drjax: getattr(drjax, name)

    def reduce_mean(self, rows):
        mean, now["state"] = means[now["i"]].update(jax.tree.map(jc.WorkerGradients, rows), now["state"])
        return mean


def init(params):
    """State of the outer optimizer: its momentum, and the exchange of each fragment."""
    parts, leaf = [params], jax.tree.leaves(params)[0]
    if isinstance(leaf, jax.core.Tracer):  # of shapes alone, without their shardings: see `abstract`
        return optax.TraceState(params), ()
    if now["config"].enable_streaming_diloco:
        cut = utils.FragmentedTreeManipulator.create(params, now["config"])
        parts = [cut.get_flat_fragment(params, i) for i in range(now["config"].num_diloco_fragments)]
    specs = [jax.tree.map(lambda x: x.sharding.spec, part) for part in parts]
    means[:] = [jc.compressed_mean(ALGORITHM, "diloco", sharded=each) for each in specs]
    states = map(lambda *each: jc.init_state(*each[:2], leaf.sharding.mesh, "diloco", each[2])[0], means, parts, specs)
    shapes = isinstance(leaf, jax.ShapeDtypeStruct)  # of what is to be restored
    return optax.TraceState(params if shapes else jax.tree.map(jax.numpy.zeros_like, params)), tuple(states)


def with_state(synchronize, state, *args, **kwargs):
    (_, states), i = state.outer_opt_state, args[1] if len(args) > 2 else 0
    now.update(i=i, state=states[i])
    state = synchronize(state, *args, **kwargs)
    return state.replace(outer_opt_state=(state.outer_opt_state[0], (*states[:i], now["state"], *states[i + 1 :])))


def abstract(*args, build=diloco.build_abstract_diloco_state):
    """What is compiled ahead of time: shapes of the state, and their shardings."""
    state, placed, inner = build(*args)
    outer = init(jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state.params, placed.params))
    return state.replace(outer_opt_state=outer), placed.replace(outer_opt_state=shardings_of(outer)), inner


def jit(config, model, state, shardings, *args, jit=train_utils.jit_train_step, **kwargs):
    shardings = shardings.replace(outer_opt_state=shardings_of(state.outer_opt_state))
    return jit(config, model, state, shardings, *args, **kwargs)


sgd = lambda *args, **kwargs: optax.sgd(*args, **kwargs)._replace(init=init)
diloco.optax = sync.optax = saved.optax = SimpleNamespace(**{**vars(optax), "sgd": sgd})
pyconfig.initialize = lambda argv, make=pyconfig.initialize: now.setdefault("config", make(argv))
train_utils.jit_train_step, diloco.build_abstract_diloco_state, sync.drjax = jit, abstract, DrJAX()
utils.synchronize_full_state = functools.partial(with_state, utils.synchronize_full_state)
utils.synchronize_fragment_state = functools.partial(with_state, utils.synchronize_fragment_state)

if __name__ == "__main__":
    app.run(train_compile.main if any(word.startswith("compile_topology=") for word in sys.argv) else train.main)
