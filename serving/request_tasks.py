"""Requests of a model that are tasks of the event loop, each with its job."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from serving.job import Job
from serving.spec import ModelSpec
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
        self._running: dict[Job, asyncio.Task[None]] = {}

    @property
    def jobs(self) -> Collection[Job]:
        """Those under way: a view."""
        return self._running.keys()

    def start(self, job: Job, work: Work) -> None:
        """Answer the job, and stop where it is cancelled."""
        task = asyncio.create_task(self._run(job, work), name=f"{self._spec.name} {job.request.id}")
        self._running[job] = task
        task.add_done_callback(partial(self._ended, job))

        def cancel() -> None:
            task.cancel()

        job.on_cancel = cancel

    def end(self, job: Job, error: SluiceError) -> None:
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

    async def _run(self, job: Job, work: Work) -> None:
        try:
            await work()
        except SluiceError as error:
            job.fail(error)
        except Exception:
            log.exception("model %s failed on request %r", self._spec.label, job.request.id)
            message = f"model '{self._spec.name}' failed; the server's log has the details"
            job.fail(SluiceError(ErrorCode.INTERNAL, message))

    def _ended(self, job: Job, _: object) -> None:
        del self._running[job]
        job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))


def num_queued(jobs: Collection[Job]) -> int:
    """How many of them have not begun to be computed."""
    return sum(not job.compute_started_ns for job in jobs)


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
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
