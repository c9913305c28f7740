"""Filters of NVFlare that send weight differences as the bytes of `jc.wire`: top-k with error feedback at each client.

    job.to_clients(Compress(0.05), FilterType.TASK_RESULT, tasks=["train"])
    job.to_server(Decompress(), FilterType.TASK_RESULT, tasks=["train"])

`python nvflare_filter.py` runs two clients in NVFlare's simulator.
"""

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter

import jaxcomp as jc
from jaxcomp.federated import largest

KEY = "jaxcomp"


class Compress(DXOFilter):
    """At a client: the largest entries of the difference and of what was not sent before, as one message."""

    def __init__(self, ratio=0.05):
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])
        self.ratio, self.memory = ratio, None

    def process_dxo(self, dxo, shareable, fl_ctx):
        names = sorted(dxo.data)
        whole = np.concatenate([np.ravel(dxo.data[name]) for name in names]).astype(np.float32)
        whole = whole if self.memory is None else whole + self.memory
        sent = largest(whole, max(1, round(self.ratio * whole.size)))
        self.memory = whole.copy()
        self.memory[sent.indices] = 0
        message = jc.wire.encode(sent, code="best")
        shapes = [[name, list(np.shape(dxo.data[name]))] for name in names]
        self.log_info(fl_ctx, f"{4 * whole.size} bytes as {len(message)}")
        return DXO(DataKind.WEIGHT_DIFF, {KEY: np.frombuffer(message, np.uint8), "shapes": shapes}, dxo.meta)


class Decompress(DXOFilter):
    """At the server: the difference of before, with zeros where nothing was sent."""

    def __init__(self):
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])

    def process_dxo(self, dxo, shareable, fl_ctx):
        sent = jc.wire.decode(dxo.data[KEY].tobytes())  # WireError if it is damaged
        sizes = [int(np.prod(shape)) for _, shape in dxo.data["shapes"]]
        whole = np.zeros(sum(sizes), np.float32)
        whole[sent.indices] = sent.values
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        found = {name: part.reshape(shape) for (name, shape), part in zip(dxo.data["shapes"], parts, strict=True)}
        return DXO(DataKind.WEIGHT_DIFF, found, dxo.meta)


CLIENT = """
import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import ParamsType

flare.init()
while flare.is_running():
    model = flare.receive()
    w = np.asarray(model.params["numpy_key"])
    print("round", model.current_round, "distance", float(np.linalg.norm(w - np.arange(1000) / 1000)), flush=True)
    diff = {"numpy_key": (0.05 * (np.arange(1000) / 1000 - w)).astype(np.float32)}
    flare.send(flare.FLModel(params=diff, params_type=ParamsType.DIFF))
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    import nvflare_filter as filters  # this file, by the name by which NVFlare imports it
    from nvflare.app_common.np.np_model_persistor import NPModelPersistor
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.defs import FilterType
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "nvflare-run")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "client.py").write_text(CLIENT)
    job = FedJob("jaxcomp", min_clients=2)
    job.to_server(NPModelPersistor(model=[0.0] * 1000), id="persistor")
    job.to_server(FedAvg(num_clients=2, num_rounds=20))
    job.to_server(filters.Decompress(), filter_type=FilterType.TASK_RESULT, tasks=["train"])
    for name in ("site-1", "site-2"):
        options = {"framework": FrameworkType.NUMPY, "server_expected_format": "numpy", "params_transfer_type": "DIFF"}
        runner = ScriptRunner(str(folder / "client.py"), **options)
        job.to(runner, name)
        job.to(filters.Compress(0.05), name, filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.simulator_run(str(folder / "work"))
