"""A backend of another package. Its models multiply a tensor X by the factor in `scale.json`, and return it as Y."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import Backend, BackendContext, ModelFile
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.findings import Finding
from sluice.serving.instance import Instance, Placement, place_instances
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError


class ScalingBackend(Backend):
    """Serves models whose version folder has a `scale.json` such as {"factor": 2}."""

    name = "scaling"
    default_model_filename = "scale.json"
    model_files = (ModelFile("scale.json", platform="scaling_json"),)
    detection_order = 5
    # A product of elements does not depend on their layout.
    supported_fields = frozenset({"input.format"})
    ignored_fields = {"parameters": "the factor is in scale.json"}

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(
            source.config, [DeclaredTensor("X", "FP32", (-1,))], [DeclaredTensor("Y", "FP32", (-1,))]
        )

    async def load(self, source: ModelSource, context: BackendContext) -> ScheduledModel:
        factor = await asyncio.to_thread(read_factor, source)
        instances = [ScalingInstance(each, factor) for each in place_instances(source.config, num_gpus=0)]
        return ScheduledModel(source, instances, context=context)

    def check(self, source: ModelSource) -> None:
        read_factor(source)

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        for index, group in enumerate(config.instance_group):
            if group.count > (os.cpu_count() or 1):
                message = f"{group.count} instances share {os.cpu_count()} processors"
                yield Finding(message, f"instance_group[{index}].count")


class ScalingInstance(Instance):
    """Multiplies at once, on the event loop."""

    def __init__(self, placement: Placement, factor: float) -> None:
        self.name = placement.name
        self.placement = placement
        self._factor = factor

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        for job in jobs:
            product = job.request.inputs["X"].array * self._factor
            job.respond(InferResponse([Tensor.of("Y", product.astype("float32"))]))
        done()

    async def close(self) -> None:
        pass


def read_factor(source: ModelSource) -> float:
    """Return the factor of a version. Raises SluiceError INVALID where its file has none."""
    try:
        factor = json.loads(source.model_file.read_text())["factor"]
        return float(factor)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{source.model_file} has no factor: {type(error).__name__}: {error}"
        raise SluiceError(ErrorCode.INVALID, message) from None
