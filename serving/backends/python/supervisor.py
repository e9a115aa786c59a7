"""Supervises the worker of one instance: its batches, its process, and the next process when that is lost."""

import asyncio
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter, perf_counter_ns

from sluice.backoff import STABLE_S, RestartBudget
from sluice.errors import ErrorCode, SluiceError
from sluice.record.spans import Span
from sluice.serving.backend import BackendContext
from sluice.serving.backends.python import frames
from sluice.serving.backends.python.batch_queue import WorkerBatch, WorkerBatchQueue
from sluice.serving.backends.python.connection import from_wire_response, to_wire_request
from sluice.serving.backends.python.environments import WorkerLaunch
from sluice.serving.backends.python.process import PythonWorkerProcess, WorkerMessage, describe_exit, unhealthy_message
from sluice.serving.backends.python.services import WorkerServices
from sluice.serving.job import InferJob

log = logging.getLogger(__name__)

FINALIZE_TIMEOUT_S = 10.0
"""Seconds that a model may take to finalize when it is unloaded."""
BUSY_TIMEOUT_S = 1.0
"""Seconds that a model has to end if it was working when it was closed."""
LOOKAHEAD_NS = 1_000_000
"""Work that a process may get ahead: more than it takes to send it a batch and to get the responses."""
QUICK_NS = 100_000
"""Time of a batch below which one more of them costs less than waiting for further requests."""
MAX_LOOKAHEAD = 15
"""Most batches that a process may get ahead."""
_SMOOTHING = 0.1


class SupervisedWorker:
    """Runs batches in a worker process, one after the other, and starts another process when it ends unexpectedly.

    Batches that the lost process had begun fail, because the model may have done their work. Batches that it had not
    begun, and those that arrive in the meantime, wait in the queue.
    """

    def __init__(
        self,
        command: frames.Initialize,
        launch: WorkerLaunch,
        context: BackendContext,
        queue: WorkerBatchQueue,
        finalize_timeout_s: float = FINALIZE_TIMEOUT_S,
    ) -> None:
        """`queue` may be shared with other workers of the model."""
        self.name = command.args["model_instance_name"]
        self._launch = launch
        self._context = context
        self._command = command
        self._queue = queue
        queue.add_worker(self._take_queued)
        self._finalize_timeout_s = finalize_timeout_s
        self._process: PythonWorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._jobs: dict[int, InferJob] = {}
        self._running: deque[WorkerBatch] = deque()
        self._num_executed = 0
        """Batches that the present process has reported."""
        self._budget = RestartBudget()
        self._is_up = False
        self.num_starts = 0
        """Number of processes that have loaded the model."""
        self.is_closing = False
        self._loaded_s = 0.0
        self._execution_ns = float(LOOKAHEAD_NS * 2)

    @property
    def is_ready(self) -> bool:
        """Whether it would run another batch, now or after those it has."""
        return self._is_up and not self.is_closing

    @property
    def is_idle(self) -> bool:
        """Whether it has neither a batch nor a request that is still answered."""
        return not self._running and not self._jobs

    @property
    def num_batches(self) -> int:
        """Batches that it has: it runs one, and the others wait in its process."""
        return len(self._running)

    @property
    def depth(self) -> int:
        """Number of batches that keep it busy without making any wait long."""
        return 1 + int(min(LOOKAHEAD_NS / self._execution_ns, MAX_LOOKAHEAD))

    @property
    def is_quick(self) -> bool:
        """Whether it runs a batch in less time than the event loop takes to read a few requests."""
        return self._execution_ns < QUICK_NS

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Load the model in a first process. Raises SluiceError with the model's reason."""
        await self._start_process()
        # What it logs is not about the request that has loaded the model, whose id is in this context.
        self._supervisor = asyncio.create_task(self._supervise(), context=contextvars.Context())

    async def _start_process(self) -> None:
        process = PythonWorkerProcess(self.name, self._launch, self._receive)
        self._process = process
        self._services = WorkerServices(
            self._command.args["model_name"], self._context, process.connection, self._find_span
        )
        self._num_executed = 0
        try:
            await process.run(self._command)
        except BaseException:
            process.kill()
            await process.close(self._finalize_timeout_s)
            self._services.close()
            raise
        self._services.is_loading = False
        self._is_up = True
        self.num_starts += 1
        self._loaded_s = perf_counter()

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        """Run a batch as `Instance.execute` does. More batches may follow while one runs."""
        batch = WorkerBatch(jobs, done)
        if self.is_ready:
            self._send(batch)
        else:
            self._queue.put(batch)

    def _send(self, batch: WorkerBatch) -> None:
        requests = [each for job in batch.jobs if (each := self._prepare_request(job)) is not None]
        if not requests:
            batch.done()
            return
        batch.numbers = [each.number for each in requests]
        assert self._process is not None
        # A busy worker can wait, so that batches from the same turn of the event loop are written together.
        self._process.connection.send(frames.ExecuteBatch(requests), is_urgent=not self._running)
        self._running.append(batch)

    def _take_queued(self) -> None:
        """Take a waiting batch. It takes one at a time, because other workers may be up soon."""
        while self._queue and self.is_ready and not self._running:
            self._send(self._queue.take())

    def _prepare_request(self, job: InferJob) -> frames.WireRequest | None:
        """Convert a job into a request. Return None where it has been cancelled, or has failed here."""
        assert self._process is not None
        if job.is_cancelled:
            job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
            return None
        number = next(self._numbers)
        try:
            traceparent = "" if job.span is None else job.span.traceparent
            request = to_wire_request(number, job.request, self._process.connection, traceparent)
        except Exception as error:
            log.exception("a request to %s cannot be sent", self.name)
            job.fail(SluiceError(ErrorCode.INTERNAL, f"the request cannot be passed to the model: {error}"))
            return None
        self._jobs[number] = job
        job.on_cancel = partial(self._cancel, number)
        job.infer_started_ns = perf_counter_ns()
        return request

    def _find_span(self, number: int) -> Span | None:
        """Return where the time of the request `number` is noted, of the only one where 0 names none: it asks another
        model."""
        jobs = self._jobs
        first = next(iter(jobs.values()), None)
        if first is not None:
            first.calls_model()
        job = first if not number and len(jobs) == 1 else jobs.get(number)
        return None if job is None else job.span

    def _cancel(self, number: int) -> None:
        if self._process is not None:
            self._process.connection.send(frames.CancelRequests([number]))

    def _receive(self, message: WorkerMessage) -> None:
        if isinstance(message, frames.WorkerReport):
            self._receive_report(message)
        else:
            self._services.handle(message)

    def _receive_report(self, report: frames.WorkerReport) -> None:
        for batch, execution in zip(self._running, report.executions, strict=False):
            self._record(batch, execution)
        for response in report.responses:
            job = self._jobs.pop(response.number, None) if response.is_final else self._jobs.get(response.number)
            if job is not None:
                self._respond(job, response)
        for _ in report.executions:
            if self._running:  # a closed instance has none
                self._budget.refill()
                self._num_executed += 1
                self._running.popleft().done()
        if self._queue:
            self._take_queued()

    def _respond(self, job: InferJob, response: frames.WireResponse) -> None:
        assert self._process is not None
        if response.is_final and not job.infer_ended_ns:
            # The responses of a decoupled model may end before its `execute` does.
            job.infer_ended_ns = perf_counter_ns()
        try:
            if response.is_rescheduled:
                job.on_cancel, job.infer_ended_ns = None, 0
                job.reschedule()
            else:
                job.respond(from_wire_response(response, self._process.connection))
        except Exception:  # the receiver of one request must not keep the others from their responses
            log.exception("a response of %s could not be passed on", self.name)

    def _record(self, batch: WorkerBatch, execution: frames.Execution) -> None:
        elapsed_ns = max(execution.ended_ns - execution.received_ns, 1)
        self._execution_ns += _SMOOTHING * (elapsed_ns - self._execution_ns)
        for job in batch.jobs:
            # Waiting in the process behind another batch counts as queueing, not as computing.
            job.compute_started_ns = execution.received_ns
            job.infer_started_ns = execution.started_ns
            job.infer_ended_ns = execution.ended_ns

    async def _supervise(self) -> None:
        """Replace each process that ends, until the restart budget is exhausted."""
        assert self._process is not None
        while True:
            await asyncio.wait((self._process.exited,))
            code = self._process.exited.result()
            had_culprit = self._handle_loss()
            if perf_counter() - self._loaded_s > STABLE_S:
                self._budget.refill()
            log.error("%s ended with %s; starting another", self.name, describe_exit(code))
            self._budget.spend(has_culprit=had_culprit)
            if not await self._restart():
                return

    def _handle_loss(self) -> bool:
        """Fail what the lost process had begun, and queue the rest. Return whether anything may have killed it."""
        self._is_up = False
        assert self._process is not None
        num_begun = self._process.num_begun - self._num_executed
        batches = list(self._running)
        self._running = deque(batches[:num_begun])
        for number in (number for batch in batches[num_begun:] for number in batch.numbers):
            self._jobs.pop(number, None)
        was_running = bool(self._jobs)
        self._fail_all(SluiceError(ErrorCode.INTERNAL, unhealthy_message(self.name)))
        self._services.close()
        self._queue.put_back(batches[num_begun:])
        return was_running

    def _fail_all(self, error: SluiceError) -> None:
        jobs, self._jobs = self._jobs, {}
        running, self._running = self._running, deque()
        for job in jobs.values():
            job.fail(error)
        for batch in running:
            batch.done()

    async def _restart(self) -> bool:
        """Start another process. Return False where the restart budget is exhausted."""
        reason = unhealthy_message(self.name)
        while not self._budget.is_exhausted:
            await asyncio.sleep(self._budget.delay_s())
            try:
                await self._start_process()
            except (SluiceError, OSError) as error:
                reason = str(error)
                log.error("%s could not be started again: %s", self.name, reason)
                self._budget.spend()
                continue
            log.warning("%s is back", self.name)
            self._take_queued()
            return True
        log.critical("%s is given up", self.name)
        message = f"{self.name} is given up after too many crashes: {reason}"
        self._queue.remove_worker(self._take_queued, SluiceError(ErrorCode.UNAVAILABLE, message))
        return False

    async def close(self) -> None:
        """Fail what is in flight and end the process. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            if self._running or self._jobs:
                # Whoever closes a working model has already waited for it.
                self._finalize_timeout_s = min(self._finalize_timeout_s, BUSY_TIMEOUT_S)
            error = SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is being unloaded")
            if self._supervisor is not None:
                self._supervisor.cancel()
                self._services.end_calls()
                self._fail_all(error)
            self._queue.remove_worker(self._take_queued, error)
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,))
        if self._process is not None:
            await self._process.close(self._finalize_timeout_s)
            self._services.close()
