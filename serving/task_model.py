"""A model whose requests are tasks of the event loop: they wait for other parts of the server, and for no batch."""

from abc import abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter_ns
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.job import Job
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.request_tasks import RequestTasks
from serving.spec import spec_of
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

Work = Callable[[], Coroutine[Any, Any, list[Tensor]]]
"""Makes the outputs of one request. Raises SluiceError. Not called for one that is cancelled before its turn."""

_CLIENTS_FAULT = frozenset({ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.FORBIDDEN, ErrorCode.TOO_LARGE})
"""Of whom the message speaks already; of other failures the client of a pipeline must hear which step they are of."""


class TaskModel(Model):
    """Runs what `_work` gives for each request, at once and side by side."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        super().__init__(config, spec_of(config, version))
        self._tasks = RequestTasks(self.spec)

    @property
    def _is_batched(self) -> bool:
        return self.spec.max_batch_size > 0

    @abstractmethod
    def _work(self, request: InferRequest) -> Work:
        """What makes the outputs of a checked request. Raises INVALID at once for one that makes no sense."""

    async def close(self) -> None:
        self.retire()
        await self._tasks.cancel_all()

    def _start(self, job: Job) -> None:
        self._tasks.start(job, partial(self._run, job, self._work(job.request)))

    async def _run(self, job: Job, work: Work) -> None:
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        try:
            outputs = await work()
        except SluiceError as error:
            raise self._of_this_step(error) from error
        job.infer_ended_ns = perf_counter_ns()
        wanted = job.request.requested_outputs or self.spec.outputs
        job.respond(InferResponse([each for each in outputs if each.name in wanted]))

    def _of_this_step(self, error: SluiceError) -> SluiceError:
        if error.code in _CLIENTS_FAULT:
            return error
        message = f"model '{self.name}': {error.message}"
        return SluiceError(error.code, message, param=error.param, retry_after_s=error.retry_after_s)
