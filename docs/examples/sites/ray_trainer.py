"""diloco.py on workers of Ray: `python ray_trainer.py`. Ray starts them, and starts all anew when one has failed."""

import jax
import ray
from diloco import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

import jaxcomp as jc

WORKERS = 2


def loop(config):
    context = ray.train.get_context()
    if not jax.distributed.is_initialized():  # with use_tpu or use_gpu the trainer has done so
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(config["address"], context.get_world_size(), context.get_world_rank())
    with jc.transports.coordination(seconds=60.0) as link:
        train(link)


if __name__ == "__main__":
    trainer = JaxTrainer(
        loop,
        train_loop_config={"address": "127.0.0.1:8476"},  # on CPUs of several hosts: of the host of rank 0
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()
