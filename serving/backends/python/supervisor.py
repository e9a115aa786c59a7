"""One copy of a Python model: the batches that its worker process has, and another process when it is lost."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter, perf_counter_ns

from serving.backend import BackendContext
from serving.backends.python.frames import Batch, Cancel, Execution, Load, Reply, Report, WireRequest
from serving.backends.python.held import HeldBatches, WorkerBatch
from serving.backends.python.launch import Launch
from serving.backends.python.process import WorkerMessage, WorkerProcess, describe_exit, not_healthy
from serving.backends.python.services import WorkerServices
from serving.backends.python.wire import response_of, wire_request
from serving.job import InferJob
from sluice.backoff import STABLE_S, RestartBudget
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

FINALIZE_LIMIT_S = 10.0
"""How long a model may take to finalize when it is unloaded."""
BUSY_LIMIT_S = 1.0
"""How long a model has to end that was working when it was closed."""
LOOKAHEAD_NS = 1_000_000
"""Work that a process may be given ahead: more than it takes to hand it a batch and to get it back."""
MAX_LOOKAHEAD = 15
"""Batches given ahead."""
_SMOOTHING = 0.1


class SupervisedWorker:
    """Runs batches in a worker process, one after the other, and starts another one when it ends by itself.

    What the lost process had begun is failed, since the model may have done its work already. What it had not, and what
    comes meanwhile, is held.
    """

    def __init__(
        self,
        load: Load,
        launch: Launch,
        context: BackendContext,
        held: HeldBatches,
        finalize_limit_s: float = FINALIZE_LIMIT_S,
    ) -> None:
        """`held` may be shared with other workers of the model."""
        self.name = load.args["model_instance_name"]
        self._launch = launch
        self._context = context
        self._load = load
        self._held = held
        held.join(self._take_held)
        self._finalize_limit_s = finalize_limit_s
        self._process: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._jobs: dict[int, InferJob] = {}
        self._running: deque[WorkerBatch] = deque()
        self._num_executed = 0
        """Batches that the present process has reported."""
        self._budget = RestartBudget()
        self._is_up = False
        self.num_starts = 0
        """Of processes that came up with the model loaded."""
        self._is_closing = False
        self._loaded_s = 0.0
        self._execution_ns = float(LOOKAHEAD_NS * 2)

    @property
    def is_ready(self) -> bool:
        """Whether it runs a batch now or after those that it has."""
        return self._is_up and not self._is_closing

    @property
    def num_batches(self) -> int:
        """Of which it runs one, and the others wait in its process."""
        return len(self._running)

    @property
    def depth(self) -> int:
        """How many batches it should have, so that it need not wait for the next one, and none waits long."""
        return 1 + int(min(LOOKAHEAD_NS / self._execution_ns, MAX_LOOKAHEAD))

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Load the model in its first process. Raises SluiceError with the model's reason."""
        await self._start_process()
        self._supervisor = asyncio.create_task(self._supervise())

    async def _start_process(self) -> None:
        process = WorkerProcess(self.name, self._launch, self._take)
        self._process = process
        self._services = WorkerServices(self._load.args["model_name"], self._context, process.connection)
        self._num_executed = 0
        try:
            await process.ask(self._load)
        except BaseException:
            process.kill()
            await process.close(self._finalize_limit_s)
            self._services.close()
            raise
        self._services.is_loading = False
        self._is_up = True
        self.num_starts += 1
        self._loaded_s = perf_counter()

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        """As `Instance.execute`; while one batch runs, others may follow."""
        batch = WorkerBatch(jobs, done)
        if self.is_ready:
            self._send(batch)
        else:
            self._held.add(batch)

    def _send(self, batch: WorkerBatch) -> None:
        requests = [each for job in batch.jobs if (each := self._open(job)) is not None]
        if not requests:
            batch.done()
            return
        batch.numbers = [each.number for each in requests]
        assert self._process is not None
        # While it is busy there is no hurry: what comes in the same turn of the event loop is written together.
        self._process.connection.send(Batch(requests), is_urgent=not self._running)
        self._running.append(batch)

    def _take_held(self) -> None:
        """What nobody was there for, one batch at a time: others may be up soon, too."""
        while self._held and self.is_ready and not self._running:
            self._send(self._held.take())

    def _open(self, job: InferJob) -> WireRequest | None:
        """The job in the form in which it is sent; None where it is not to be sent, and has ended."""
        assert self._process is not None
        if job.is_cancelled:
            job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
            return None
        number = next(self._numbers)
        try:
            request = wire_request(number, job.request, self._process.connection)
        except Exception as error:
            log.exception("a request to %s cannot be sent", self.name)
            job.fail(SluiceError(ErrorCode.INTERNAL, f"the request cannot be passed to the model: {error}"))
            return None
        self._jobs[number] = job
        job.on_cancel = partial(self._cancel, number)
        job.infer_started_ns = perf_counter_ns()
        return request

    def _cancel(self, number: int) -> None:
        if self._process is not None:
            self._process.connection.send(Cancel([number]))

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        else:
            self._services.take(message)

    def _take_report(self, report: Report) -> None:
        for batch, execution in zip(self._running, report.executions, strict=False):
            self._record(batch, execution)
        for reply in report.replies:
            job = self._jobs.pop(reply.number, None) if reply.is_final else self._jobs.get(reply.number)
            if job is not None:
                self._respond(job, reply)
        for _ in report.executions:
            if self._running:  # none are left of a closed instance
                self._budget.refill()
                self._num_executed += 1
                self._running.popleft().done()
        if self._held:
            self._take_held()

    def _respond(self, job: InferJob, reply: Reply) -> None:
        assert self._process is not None
        if reply.is_final and not job.infer_ended_ns:  # a decoupled model's, which ends before its execution does
            job.infer_ended_ns = perf_counter_ns()
        try:
            if reply.is_rescheduled:
                job.on_cancel, job.infer_ended_ns = None, 0
                job.reschedule()
            else:
                job.respond(response_of(reply, self._process.connection))
        except Exception:  # one request's receiver must not keep the others from their answers
            log.exception("a response of %s could not be passed on", self.name)

    def _record(self, batch: WorkerBatch, execution: Execution) -> None:
        elapsed_ns = max(execution.ended_ns - execution.taken_ns, 1)
        self._execution_ns += _SMOOTHING * (elapsed_ns - self._execution_ns)
        for job in batch.jobs:
            # It may have waited in the process behind another one, which is queueing and not computing.
            job.compute_started_ns = execution.taken_ns
            job.infer_started_ns = execution.started_ns
            job.infer_ended_ns = execution.ended_ns

    async def _supervise(self) -> None:
        """Replace each worker that ends, until that is in vain."""
        assert self._process is not None
        while True:
            await asyncio.wait((self._process.exited,))
            code = self._process.exited.result()
            had_culprit = self._lose()
            if perf_counter() - self._loaded_s > STABLE_S:
                self._budget.refill()
            log.error("%s ended with %s; starting another", self.name, describe_exit(code))
            self._budget.spend(has_culprit=had_culprit)
            if not await self._restart():
                return

    def _lose(self) -> bool:
        """Fail what the worker had begun, which may have killed it, and hold the rest. Tells whether there was any."""
        self._is_up = False
        assert self._process is not None
        num_begun = self._process.num_begun - self._num_executed
        batches = list(self._running)
        self._running = deque(batches[:num_begun])
        for number in (number for batch in batches[num_begun:] for number in batch.numbers):
            self._jobs.pop(number, None)
        was_running = bool(self._jobs)
        self._fail_all(SluiceError(ErrorCode.INTERNAL, not_healthy(self.name)))
        self._services.close()
        self._held.give_back(batches[num_begun:])
        return was_running

    def _fail_all(self, error: SluiceError) -> None:
        jobs, self._jobs = self._jobs, {}
        running, self._running = self._running, deque()
        for job in jobs.values():
            job.fail(error)
        for batch in running:
            batch.done()

    async def _restart(self) -> bool:
        """False where it is given up."""
        reason = not_healthy(self.name)
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
            self._take_held()
            return True
        log.critical("%s is given up", self.name)
        message = f"{self.name} is given up after too many crashes: {reason}"
        self._held.leave(self._take_held, SluiceError(ErrorCode.UNAVAILABLE, message))
        return False

    async def close(self) -> None:
        """Fail what is under way and end the process. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            if self._running or self._jobs:
                # Who closes a model in the midst of its work has waited long enough for it.
                self._finalize_limit_s = min(self._finalize_limit_s, BUSY_LIMIT_S)
            error = SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is being unloaded")
            if self._supervisor is not None:
                self._supervisor.cancel()
                self._services.end_calls()
                self._fail_all(error)
            self._held.close(error)
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,))
        if self._process is not None:
            await self._process.close(self._finalize_limit_s)
            self._services.close()
