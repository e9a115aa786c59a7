"""One copy of a model of arrays: a thread that runs batches."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

from serving.backends.arrays.batch import BatchForm
from serving.backends.arrays.session import ArrayRun, ArraySession
from serving.instance import HostPolicy, Instance, Placement
from serving.job import InferJob
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError


class _Batch:
    """Jobs that run together. Once nobody wants any of them, the run is ended."""

    def __init__(self, jobs: list[InferJob], run: ArrayRun, done: Callable[[], None]) -> None:
        self.jobs = jobs
        self.run = run
        self.done = done
        self.responses: list[InferResponse] = []
        for job in jobs:
            job.on_cancel = self._cancelled

    def _cancelled(self) -> None:
        if all(job.is_cancelled for job in self.jobs):
            self.run.stop()


class ArrayInstance(Instance):
    """Instances on one device share a session, and so its weights and its threads within an operator."""

    def __init__(
        self, placement: Placement, session: ArraySession, form: BatchForm, policy: HostPolicy | None = None
    ) -> None:
        """On the event loop. `policy`: what its thread keeps to."""
        self.name = placement.name
        self.placement = placement
        self._session = session
        self._session.hold()
        self._is_closed = False
        self._form = form
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix=self.name, initializer=None if policy is None else policy.bind
        )
        self._batch: _Batch | None = None

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self._batch = batch = _Batch(jobs, self._session.open_run(), done)
        self._thread.submit(self._run, batch)

    def _run(self, batch: _Batch) -> None:
        """On the thread."""
        batch.responses = self._responses(batch, batch.jobs)
        self._loop.call_soon_threadsafe(self._ended, batch)

    def _responses(self, batch: _Batch, jobs: Sequence[InferJob]) -> list[InferResponse]:
        """One a job. What fails a batch of several is run again one by one: it may be the fault of one of them."""
        try:
            return self._answered(batch, jobs)
        except Exception as error:
            if len(jobs) > 1 and self._form.may_be_repeated and not batch.run.is_stopped:
                return [response for job in jobs for response in self._responses(batch, [job])]
            failure = error if isinstance(error, SluiceError) else self._session.failure_of(error)
            return [InferResponse(error=failure) for _ in jobs]

    def _answered(self, batch: _Batch, jobs: Sequence[InferJob]) -> list[InferResponse]:
        requests = [job.request for job in jobs]
        outputs = self._form.outputs_of(requests)
        inputs = self._form.joined(requests)
        started = perf_counter_ns()
        arrays = batch.run.execute(inputs, outputs)
        ended = perf_counter_ns()
        for job in jobs:
            job.infer_started_ns, job.infer_ended_ns = started, ended
        return [InferResponse(tensors) for tensors in self._form.divided(requests, outputs, arrays)]

    def _ended(self, batch: _Batch) -> None:
        self._batch = None
        # First: the thread takes the next batch while this one's responses are written.
        batch.done()
        for job, response in zip(batch.jobs, batch.responses, strict=True):
            job.respond(response)

    async def close(self) -> None:
        """A run under way is ended at its next operator; its thread ends by itself."""
        if self._batch is not None:
            self._batch.run.stop()
            for job in self._batch.jobs:
                job.fail(SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is unloaded"))
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._session.release)
            self._thread.shutdown(wait=False)
