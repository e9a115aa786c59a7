"""Models whose requests are tasks of the event loop: they wait for other parts of the server, and for no batch."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, build_spec
from sluice.serving.tensors.tensor import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]
"""Answers a job. Raises SluiceError. Not called for a job that is cancelled before its task runs."""
MakeOutputs = Callable[[], Coroutine[Any, Any, list[Tensor]]]
"""Makes the outputs of one request. Raises SluiceError. Not called for a job that is cancelled before its task runs."""

_CLIENT_ERRORS = frozenset({ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.FORBIDDEN, ErrorCode.TOO_LARGE})
"""Errors whose messages name the client's mistake. The messages of others are given the step of the pipeline."""


class RequestTasks:
    """The tasks in flight in one model. A job ends with its task, also where the task never ran."""

    def __init__(self, spec: ModelSpec) -> None:
        """Take the model's spec, not the model: a cycle would keep the model until the garbage collector runs."""
        self._spec = spec
        self._running: dict[InferJob, asyncio.Task[None]] = {}

    @property
    def jobs(self) -> Collection[InferJob]:
        """A view of the jobs in flight."""
        return self._running.keys()

    def start(self, job: InferJob, work: Work) -> None:
        """Start a task that answers the job. Cancelling the job cancels the task."""
        task = asyncio.create_task(self._run(job, work), name=f"{self._spec.name} {job.request.id}")
        self._running[job] = task
        task.add_done_callback(partial(self._ended, job))

        def cancel() -> None:
            task.cancel()

        job.on_cancel = cancel

    def cancel(self, job: InferJob) -> None:
        """Cancel the task of a job. One without a response yet ends in CANCELLED."""
        self._running[job].cancel()

    async def cancel_all(self, grace_s: float = 0.0) -> None:
        """Cancel all tasks, those that end by themselves within `grace_s` excepted."""
        tasks = list(self._running.values())
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
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


class TaskModel(Model):
    """Runs each request at once, concurrently with the others."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        super().__init__(config, build_spec(config, version))
        self._tasks = RequestTasks(self.spec)

    @property
    def _is_batched(self) -> bool:
        return self.spec.max_batch_size > 0

    @abstractmethod
    def _work(self, request: InferRequest) -> MakeOutputs:
        """Return the function that makes the outputs of a checked request. Raises INVALID for an invalid one."""

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
            raise self._with_step(error) from error
        job.infer_ended_ns = perf_counter_ns()
        requested = job.request.requested_outputs or self.spec.outputs
        job.respond(InferResponse([each for each in outputs if each.name in requested]))

    def _with_step(self, error: SluiceError) -> SluiceError:
        if error.code in _CLIENT_ERRORS:
            return error
        message = f"model '{self.name}': {error.message}"
        return error.reworded(message)


def count_queued(jobs: Collection[InferJob]) -> int:
    """Return the number of jobs whose computation has not started."""
    return sum(not job.compute_started_ns for job in jobs)


async def gather_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return the results in order. The first failure cancels the others and is then raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
