"""A model whose requests are tasks of the event loop: they wait for other parts of the server, and for no batch."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.inference.job import Job
from pipelines.inference.model import Model
from pipelines.inference.spec import spec_of
from pipelines.inference.types import InferRequest, InferResponse
from pipelines.tensors.tensor import Tensor

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, list[Tensor]]]
"""Makes the outputs of one request. Raises SluiceError. Not called for one that is cancelled before its turn."""

_CLIENTS_FAULT = frozenset({ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.FORBIDDEN, ErrorCode.TOO_LARGE})
"""Of whom the message speaks already; of other failures the client of a pipeline must hear which step they are of."""


class TaskModel(Model):
    """Runs what `_work` gives for each request, at once and side by side."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        super().__init__(config, spec_of(config, version))
        self._running: dict[asyncio.Task[None], Job] = {}

    @abstractmethod
    def _work(self, request: InferRequest) -> Work:
        """What makes the outputs of a checked request. Raises INVALID at once for one that makes no sense."""

    async def close(self) -> None:
        self.retire()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, job: Job) -> None:
        task = asyncio.create_task(self._run(job, self._work(job.request)), name=f"{self.name} {job.request.id}")
        self._running[task] = job
        task.add_done_callback(self._ended)

        def cancel() -> None:
            task.cancel()

        job.on_cancel = cancel

    async def _run(self, job: Job, work: Work) -> None:
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        try:
            outputs = await work()
        except SluiceError as error:
            job.fail(self._of_this_step(error))
        except Exception:
            log.exception("model %s failed on request %r", self.spec.label, job.request.id)
            job.fail(SluiceError(ErrorCode.INTERNAL, f"model '{self.name}' failed; the server's log has the details"))
        else:
            job.infer_ended_ns = perf_counter_ns()
            wanted = job.request.requested_outputs or self.spec.outputs
            job.respond(InferResponse([each for each in outputs if each.name in wanted]))

    def _of_this_step(self, error: SluiceError) -> SluiceError:
        if error.code in _CLIENTS_FAULT:
            return error
        message = f"model '{self.name}': {error.message}"
        return SluiceError(error.code, message, param=error.param, retry_after_s=error.retry_after_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """However it ended, even cancelled before it began: its job ends with it."""
        self._running.pop(task).fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
