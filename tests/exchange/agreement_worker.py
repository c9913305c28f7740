"""Two processes, joined by gloo, that build exchanges of other options; started by test_agreement.py.

Prints one line of JSON for each case: what was raised, and after how many seconds.
"""

import json
import os
import sys
import time


def cases(number):
    """Name -> a function that makes a state, with other options in process 1."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomp as jc

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    here = lambda *options: options[number]
    params = {"w": jnp.ones((40, 50)), "b": jnp.zeros(7)}
    placed = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(mesh, P())), params)

    def mean(algorithm, axis="data", **options):
        tx = optax.chain(jc.compressed_mean(algorithm, axis, **options), optax.sgd(1.0))
        return lambda: jc.init_state(tx, params, mesh, "data")

    def optimizer(last, on_request=False):
        tx = optax.chain(jc.compressed_mean(jc.direct(jc.identity()), "data"), last)
        make = lambda: jc.init_state(tx, params, mesh, "data")[0]
        return (lambda: jc.replicas.check_options(make(), mesh, "data")) if on_request else make

    def local(**options):
        outer = optax.sgd(options.pop("rate", 0.5), momentum=0.9)
        tx = jc.local_updates(optax.sgd(0.1), outer, jc.direct(jc.identity()), "data", **{"every": 4} | options)
        return lambda: jc.init_state(tx, params, mesh, "data")

    def grads(algorithm):
        return lambda: jc.value_and_grad(lambda p, x: jnp.sum(p["w"]) * jnp.mean(x), algorithm).init(placed)

    def own_program(algorithm):
        tx = jc.compressed_mean(algorithm, "data")
        specs = jc.state_specs(jax.eval_shape(tx.init, params), "data")
        make = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))
        return lambda: jax.block_until_ready(make(placed))

    ratio, top = (0.01, 0.02), jc.error_feedback(jc.top_k(0.1))
    return {
        "equal": mean(top),
        "levels": mean(jc.direct(jc.dithering(here(7, 5)))),
        "block": mean(jc.direct(jc.dithering(7, block_size=here(128, 256)))),
        "ratio": mean(jc.error_feedback(jc.top_k(here(*ratio)))),
        "decay": mean(jc.error_feedback(jc.top_k(0.1), decay=here(1.0, 0.9))),
        "compressor": mean(jc.error_feedback(here(jc.top_k(0.1), jc.sidco(0.1)))),
        "algorithm": mean(here(jc.error_feedback, jc.ef21)(jc.top_k(0.1))),
        "parts": mean(jc.by_path({"b": jc.identity(), here("w", "."): top})),
        "seed": mean(top, seed=here(0, 1)),
        "via": mean(top, via=here("auto", "gather")),
        "weights": mean(top, weights=here([1.0] * jax.device_count(), [2.0] + [1.0] * (jax.device_count() - 1))),
        "buckets": mean(jc.direct(jc.identity()), bucket_bytes=here(2**10, 2**20)),
        "layout": mean(jc.direct(here(jc.flat, jc.per_leaf)(jc.dithering(7)))),
        "every": local(every=here(4, 5)),
        "outer": local(rate=here(0.5, 0.7)),
        "value_and_grad": grads(jc.direct(jc.dithering(here(7, 5)))),
        "optimizer": optimizer(here(optax.sgd(0.1), optax.adam(0.1))),
        "rate": optimizer(optax.inject_hyperparams(optax.sgd)(here(0.1, 0.2)), on_request=True),
        "version": mean(top),
        "equal again": mean(top),
        "inside": own_program(jc.direct(jc.dithering(here(7, 5)))),
    }


def report(number):
    """Process 0 alone prints what a state says, after a round of all."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import jaxcomp as jc

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), "data")
    state, specs = jc.init_state(tx, jnp.ones(2000), mesh, "data")
    one = lambda grads, state: tx.update(jc.per_worker(grads, "data"), state)
    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)))
    _, state = jax.block_until_ready(step(jnp.ones(2000), state))
    multihost_utils.sync_global_devices("after a round")
    if number == 0:
        began = time.perf_counter()
        said = [str(jc.info(state)), jc.info(state, each=True).lane_bytes.tolist(), jc.metrics(state), len(repr(state))]
        said.append(jc.state.by_leaf(state, state.local.algorithm.memory).shape)
        print(json.dumps({"case": "report", "said": said, "seconds": time.perf_counter() - began}), flush=True)
    multihost_utils.sync_global_devices("after the report")


def work(address, number):
    import jax

    import jaxcomp as jc

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number)
    for name, make in cases(number).items():
        version, began, said = jc.__version__, time.perf_counter(), None
        jc.__version__ = "0.1.9" if name == "version" and number == 1 else version
        try:
            make()
        except Exception as error:
            said = str(error)
        print(json.dumps({"case": name, "said": said, "seconds": time.perf_counter() - began}), flush=True)
        jc.__version__ = version
        if name == "equal again":
            report(number)
    # After an error in a callback the runtime takes no leave: process 1 waits for what process 0 has to say.
    time.sleep(number)
    os._exit(0)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
