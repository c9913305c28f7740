"""MaxText's DiLoCo, compressed: run this in place of maxtext.trainers.pre_train.train, with the same arguments.

With compile_topology= in place of maxtext.trainers.pre_train.train_compile.
"""

import os
from types import SimpleNamespace

import jax
import optax
from absl import app
from maxtext.trainers.diloco import diloco, utils
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import train_utils

import jaxcomp as jc

ALGORITHM = jc.from_config(os.environ.get("JAXCOMP", "error_feedback(block_scaled('int4'))"))
sync, saved = utils.spmd_diloco_sync, utils.spmd_diloco_checkpointing
drjax, means, now = sync.drjax, [], {}  # a mean for each fragment; the fragment that is exchanged, with its state


class DrJAX:
    __getattr__ = lambda self, name: getattr(drjax, name)

    def reduce_mean(self, rows):
        mean, now["state"] = means[now["i"]].update(jax.tree.map(jc.WorkerGradients, rows), now["state"])
        return mean


def init(params):
    """State of the outer optimizer: its momentum, and the exchange of each fragment."""
    parts, leaf = [params], jax.tree.leaves(params)[0]
    if isinstance(leaf, jax.core.Tracer):  # of shapes alone, without their shardings: see `abstract`
        return optax.TraceState(params), ()
    if config.enable_streaming_diloco:
        cut = utils.FragmentedTreeManipulator.create(params, config)
        parts = [cut.get_flat_fragment(params, i) for i in range(config.num_diloco_fragments)]
    specs = [jax.tree.map(lambda x: x.sharding.spec, part) for part in parts]
    means[:] = [jc.compressed_mean(ALGORITHM, "diloco", sharded=each) for each in specs]
    states = map(lambda *each: jc.init_state(*each[:2], leaf.sharding.mesh, "diloco", each[2])[0], means, parts, specs)
    shapes = isinstance(leaf, jax.ShapeDtypeStruct)  # of what is to be restored
    return optax.TraceState(params if shapes else jax.tree.map(jax.numpy.zeros_like, params)), tuple(states)


def with_state(synchronize):
    def run(state, *args, **kwargs):
        (_, states), i = state.outer_opt_state, args[1] if len(args) > 2 else 0
        now.update(i=i, state=states[i])
        state = synchronize(state, *args, **kwargs)
        states = (*states[:i], now["state"], *states[i + 1 :])
        return state.replace(outer_opt_state=(state.outer_opt_state[0], states))

    return run


def abstract(options, *args, build=diloco.build_abstract_diloco_state):
    """What is compiled ahead of time: shapes of the state, and their shardings."""
    global config
    config = options
    state, placed, inner = build(options, *args)
    where = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    outer = init(jax.tree.map(where, state.params, placed.params))
    placed = placed.replace(outer_opt_state=jax.tree.map(lambda x: x.sharding, outer))
    return state.replace(outer_opt_state=outer), placed, inner


def jit(config, model, state, shardings, *args, jit=train_utils.jit_train_step, **kwargs):
    outer = jax.tree.map(lambda x: x.sharding, state.outer_opt_state)
    return jit(config, model, state, shardings.replace(outer_opt_state=outer), *args, **kwargs)


sgd = lambda *args, **kwargs: optax.sgd(*args, **kwargs)._replace(init=init)
diloco.optax = sync.optax = saved.optax = SimpleNamespace(**{**vars(optax), "sgd": sgd})
sync.drjax, train_utils.jit_train_step, diloco.build_abstract_diloco_state = DrJAX(), jit, abstract
utils.synchronize_full_state = with_state(utils.synchronize_full_state)
utils.synchronize_fragment_state = with_state(utils.synchronize_fragment_state)


def main(argv):
    global config
    if any(word.startswith("compile_topology=") for word in argv):
        return train_compile.main(argv)
    config, recorder = train.initialize(argv)
    train.get_train_func(config, recorder, argv)()


if __name__ == "__main__":
    app.run(main)
