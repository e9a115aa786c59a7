"""A stage that answers each request by itself: at once where that is quick, else on a thread."""

import asyncio
from abc import abstractmethod
from functools import partial
from time import perf_counter_ns

from pipelines.text.tokenizer import INLINE_CHARS
from serving.job import InferJob
from serving.request import InferRequest, InferResponse
from serving.task_model import MakeOutputs, TaskModel
from serving.tensors.tensor import Array, Tensor

Outputs = dict[str, Array]
"""By name, each [rows, ...]."""


class StageModel(TaskModel):
    """Takes requests of any number of rows. A batch of several would save nothing: no step is shared by rows."""

    @abstractmethod
    def _size(self, request: InferRequest) -> int:
        """Bytes of text in the request, or tokens: as long as it takes."""

    @abstractmethod
    def _outputs(self, request: InferRequest) -> Outputs:
        """Of a checked request; also called on a thread. Raises SluiceError INVALID."""

    def _start(self, job: InferJob) -> None:
        if self._size(job.request) > INLINE_CHARS:
            super()._start(job)
            return
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        outputs = self._tensors(job.request)
        job.infer_ended_ns = perf_counter_ns()
        job.respond(InferResponse(outputs))

    def _work(self, request: InferRequest) -> MakeOutputs:
        return partial(asyncio.to_thread, self._tensors, request)

    def _tensors(self, request: InferRequest) -> list[Tensor]:
        outputs = self._outputs(request)
        wanted = request.requested_outputs or tuple(self.spec.outputs)
        return [self._tensor(name, outputs[name]) for name in wanted if name in outputs]

    def _tensor(self, name: str, rows: Array) -> Tensor:
        return Tensor.of(name, rows if self._is_batched else rows[0])
