"""Forms that users put into their training loop. All run the same `exchange.driver`."""

from jaxcomp.state.moments import LocalMomentsState
from jaxcomp.transforms.check_loss import LossCheck, check_loss
from jaxcomp.transforms.compressed_mean import compressed_mean
from jaxcomp.transforms.demo import demo
from jaxcomp.transforms.local_process import LocalProcess, local_process
from jaxcomp.transforms.local_steps import LocalSteps, LocalStepsState, local_steps
from jaxcomp.transforms.local_updates import LocalUpdatesState, local_updates
from jaxcomp.transforms.loss_scale import DynamicScale, LossScale
from jaxcomp.transforms.onebit import onebit_adam, zero_one_adam
from jaxcomp.transforms.rounds import RoundFunctions, rounds
from jaxcomp.transforms.rows import WorkerGradients
from jaxcomp.transforms.value_and_grad import GradientState, ValueAndGrad, value_and_grad, worker_value_and_grad
from jaxcomp.transforms.worker_gradients import mean_over

__all__ = [
    "DynamicScale",
    "GradientState",
    "LocalMomentsState",
    "LocalProcess",
    "LocalSteps",
    "LocalStepsState",
    "LocalUpdatesState",
    "LossCheck",
    "LossScale",
    "RoundFunctions",
    "ValueAndGrad",
    "WorkerGradients",
    "check_loss",
    "compressed_mean",
    "demo",
    "local_process",
    "local_steps",
    "local_updates",
    "mean_over",
    "onebit_adam",
    "rounds",
    "value_and_grad",
    "worker_value_and_grad",
    "zero_one_adam",
]
