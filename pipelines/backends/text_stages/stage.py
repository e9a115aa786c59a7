"""A stage that answers each request by itself: at once where that is quick, else on a thread."""

import asyncio
from abc import abstractmethod
from functools import partial
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.backends.request_tasks import RequestTasks
from pipelines.inference.job import Job
from pipelines.inference.model import Model
from pipelines.inference.spec import spec_of
from pipelines.inference.types import InferRequest, InferResponse
from pipelines.tensors.tensor import Array, Tensor
from pipelines.text.tokenizer import INLINE_CHARS

Outputs = dict[str, Array]
"""By name, each [rows, ...]."""


class StageModel(Model):
    """Takes requests of any number of rows. A batch of several would save nothing: no step is shared by rows."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        super().__init__(config, spec_of(config, version))
        self._tasks = RequestTasks(self.spec)

    @property
    def _is_batched(self) -> bool:
        return self.spec.max_batch_size > 0

    @abstractmethod
    def _size(self, request: InferRequest) -> int:
        """Bytes of text in the request, or tokens: as long as it takes."""

    @abstractmethod
    def _outputs(self, request: InferRequest) -> Outputs:
        """Of a checked request; also called on a thread. Raises SluiceError INVALID."""

    def _start(self, job: Job) -> None:
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        if self._size(job.request) <= INLINE_CHARS:
            self._respond(job, self._outputs(job.request))
        else:
            self._tasks.start(job, partial(self._on_thread, job))

    async def _on_thread(self, job: Job) -> None:
        self._respond(job, await asyncio.to_thread(self._outputs, job.request))

    def _respond(self, job: Job, outputs: Outputs) -> None:
        job.infer_ended_ns = perf_counter_ns()
        wanted = job.request.requested_outputs or tuple(self.spec.outputs)
        job.respond(InferResponse([self._tensor(name, outputs[name]) for name in wanted if name in outputs]))

    def _tensor(self, name: str, rows: Array) -> Tensor:
        return Tensor.of(name, rows if self._is_batched else rows[0])

    async def close(self) -> None:
        self.retire()
        await self._tasks.cancel_all()
