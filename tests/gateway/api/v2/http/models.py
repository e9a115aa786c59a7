"""Small models without a backend, for tests of the v2 routes."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor
from tests.gateway.api.v2.recorded_models import NAMES, RecordedModel

Compute = Callable[[InferRequest], list[Tensor]]


class Held(Model):
    """Keeps its jobs until the test answers them, and records cancelled ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, build_spec(config, 1))
        self.jobs: list[InferJob] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where the jobs belong, once there is one."""
        self.started = threading.Event()
        self.cancelled = threading.Event()

    def _start(self, job: InferJob) -> None:
        self.jobs.append(job)
        self.loop = asyncio.get_running_loop()
        job.on_cancel = lambda: self._on_cancel(job)
        self.started.set()

    def _on_cancel(self, job: InferJob) -> None:
        job.respond(InferResponse())
        self.cancelled.set()

    async def close(self) -> None:
        return None


class Computed(Model):
    """Answers each request by a function, in the next turn of the event loop."""

    def __init__(self, config: ModelConfig, compute: Compute) -> None:
        super().__init__(config, build_spec(config, 1))
        self.compute = compute

    def _start(self, job: InferJob) -> None:
        asyncio.get_running_loop().call_soon(lambda: job.respond(InferResponse(self.compute(job.request))))

    async def close(self) -> None:
        return None


def config_of(name: str, inputs: str, outputs: str, dims: str = "1", more: str = "") -> ModelConfig:
    """Make the configuration of a model with one input and one output; `inputs` and `outputs` are NAME TYPE."""
    text = f'name: "{name}" backend: "python" {more} '
    for kind, tensor in (("input", inputs), ("output", outputs)):
        text += f'{kind} {{ name: "{tensor.split()[0]}" data_type: {tensor.split()[1]} dims: [{dims}] }} '
    return text_format.Parse(text, ModelConfig())


def identity(name: str, data_type: str, dims: str = "-1, -1", max_batch_size: int = 0) -> Computed:
    """OUTPUT0 is INPUT0."""
    config = config_of(name, f"INPUT0 {data_type}", f"OUTPUT0 {data_type}", dims, f"max_batch_size: {max_batch_size}")
    return Computed(config, lambda request: [request.inputs["INPUT0"].renamed("OUTPUT0")])


def half() -> Computed:
    """Returns a tensor that JSON cannot carry."""

    def compute(request: InferRequest) -> list[Tensor]:
        return [Tensor.of("OUTPUT0", request.inputs["INPUT0"].array.astype(np.float16))]

    return Computed(config_of("half", "INPUT0 TYPE_FP32", "OUTPUT0 TYPE_FP16"), compute)


def held(is_decoupled: bool) -> Held:
    more = f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}"
    return Held(config_of("held", "INPUT0 TYPE_INT32", "OUTPUT0 TYPE_INT32", more=more))


def all_types() -> Computed:
    """OUT_FP32 is IN_FP32, and so on for every type; BYTES is called STRING. Triton's own has no BF16."""
    names = [each.config_name.removeprefix("TYPE_") for each in DATA_TYPES.values()]
    text = 'name: "alltypes" backend: "python" '
    for name in names:
        text += f'input {{ name: "IN_{name}" data_type: TYPE_{name} dims: [-1] optional: true }} '
        text += f'output {{ name: "OUT_{name}" data_type: TYPE_{name} dims: [-1] }} '

    def compute(request: InferRequest) -> list[Tensor]:
        given = request.inputs
        return [given[f"IN_{name}"].renamed(f"OUT_{name}") for name in names if f"IN_{name}" in given]

    return Computed(text_format.Parse(text, ModelConfig()), compute)


def text_once() -> Model:
    return RecordedModel("text_once")


def text_repeat() -> Model:
    return RecordedModel("text_repeat")


def all_models() -> list[Model]:
    """The recorded models that stand alone, and `half` in place of theirs."""
    recorded: list[Model] = [RecordedModel(name) for name in NAMES if name != "half"]
    return [*recorded, half(), *(RecordedModel("versioned", version) for version in (1, 2))]


IDENTITY, ADD_SUB, ECHO = "/v2/models/identity/infer", "/v2/models/add_sub/infer", "/v2/models/params_echo/infer"
STRINGS, TYPES = "/v2/models/identity_bytes/infer", "/v2/models/alltypes/infer"


def one(**changes: Any) -> dict[str, Any]:
    """Infer on `identity` with one input."""
    return {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]} | changes]}


def typed(datatype: str, *values: Any) -> dict[str, Any]:
    name = "STRING" if datatype == "BYTES" else datatype
    return {"inputs": [{"name": f"IN_{name}", "shape": [len(values)], "datatype": datatype, "data": list(values)}]}


def pair(**more: Any) -> dict[str, Any]:
    """Infer on `add_sub`."""
    inputs = [
        {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
        {"name": "INPUT1", "shape": [1, 4], "datatype": "FP32", "data": [10, 20, 30, 40]},
    ]
    return {"inputs": inputs, **more}
