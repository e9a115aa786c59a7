"""A model whose requests are tasks of the event loop: they wait for other parts of the server, and for no batch."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec, build_spec
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]
"""Answers a job. Raises SluiceError. Not called for a job that is cancelled before its turn."""


class RequestTasks:
    """Those under way in one model. However a task ends, even before it began, its job ends with it."""

    def __init__(self, spec: ModelSpec) -> None:
        """`spec` is the model's. It holds no model: that shall not have to wait for the garbage collector."""
        self._spec = spec
        self._running: dict[InferJob, asyncio.Task[None]] = {}

    @property
    def jobs(self) -> Collection[InferJob]:
        """Those under way: a view."""
        return self._running.keys()

    def start(self, job: InferJob, work: Work) -> None:
        """Answer the job, and stop where it is cancelled."""
        task = asyncio.create_task(self._run(job, work), name=f"{self._spec.name} {job.request.id}")
        self._running[job] = task
        task.add_done_callback(partial(self._ended, job))

        def cancel() -> None:
            task.cancel()

        job.on_cancel = cancel

    def end(self, job: InferJob, error: SluiceError) -> None:
        """Its client is told `error`, and its task cancelled."""
        task = self._running[job]
        job.fail(error)
        task.cancel()

    async def cancel_all(self) -> None:
        """Until the last has ended."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: InferJob, work: Work) -> None:
        try:
            await work()
        except SluiceError as error:
            job.fail(error)
        except Exception:
            log.exception("model %s failed on request %r", self._spec.label, job.request.id)
            message = f"model '{self._spec.name}' failed; the server's log has the details"
            job.fail(SluiceError(ErrorCode.INTERNAL, message))

    def _ended(self, job: InferJob, _: object) -> None:
        del self._running[job]
        job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))


def count_queued(jobs: Collection[InferJob]) -> int:
    """How many of them have not begun to be computed."""
    return sum(not job.compute_started_ns for job in jobs)


async def gather_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure ends the others, and is raised when they have ended."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


MakeOutputs = Callable[[], Coroutine[Any, Any, list[Tensor]]]
"""Makes the outputs of one request. Raises SluiceError. Not called for one that is cancelled before its turn."""

_CLIENTS_FAULT = frozenset({ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.FORBIDDEN, ErrorCode.TOO_LARGE})
"""Of whom the message speaks already; of other failures the client of a pipeline must hear which step they are of."""


class TaskModel(Model):
    """Runs what `_work` gives for each request, at once and side by side."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        super().__init__(config, build_spec(config, version))
        self._tasks = RequestTasks(self.spec)

    @property
    def _is_batched(self) -> bool:
        return self.spec.max_batch_size > 0

    @abstractmethod
    def _work(self, request: InferRequest) -> MakeOutputs:
        """What makes the outputs of a checked request. Raises INVALID at once for one that makes no sense."""

    async def close(self) -> None:
        self.retire()
        await self._tasks.cancel_all()

    def _start(self, job: InferJob) -> None:
        self._tasks.start(job, partial(self._run, job, self._work(job.request)))

    async def _run(self, job: InferJob, work: MakeOutputs) -> None:
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
