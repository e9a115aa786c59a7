"""One copy of a Python model: the batches that its worker process has, and another process when it is lost."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, perf_counter_ns

from engine.client.supervision import STABLE_S, Patience
from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import ModelLookup
from pipelines.backends.python.calls import ModelCalls
from pipelines.backends.python.frames import Batch, Call, Cancel, EndCall, Execution, Load, Reply, Report, WireRequest
from pipelines.backends.python.process import WorkerProcess, describe_exit, not_healthy
from pipelines.backends.python.wire import response_of, wire_request
from pipelines.inference.job import Job

log = logging.getLogger(__name__)

FINALIZE_LIMIT_S = 10.0
"""How long a model may take to finish its batch and to finalize when it is unloaded."""
HOLD_LIMIT_S = 30.0
"""How long a batch waits for a worker that is being restarted."""
LOOKAHEAD_NS = 1_000_000
"""Work that a process may be given ahead: more than it takes to hand it a batch and to get it back."""
MAX_LOOKAHEAD = 15
"""Batches given ahead."""
_SMOOTHING = 0.1


@dataclass(slots=True)
class _Batch:
    jobs: list[Job]
    done: Callable[[], None]
    time_limit: asyncio.TimerHandle | None = None
    """Of one that is held."""


class SupervisedWorker:
    """Runs batches in a worker process, one after the other, and starts another one when it ends by itself.

    What the lost process had is failed, since the model may have done its work already. What comes meanwhile is held.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        models: ModelLookup,
        finalize_limit_s: float = FINALIZE_LIMIT_S,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        """`models` are those that this one may ask."""
        self.name = name
        self._models = models
        self._load = load
        self._finalize_limit_s = finalize_limit_s
        self._hold_limit_s = hold_limit_s
        self._process: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._running: deque[_Batch] = deque()
        self._held: deque[_Batch] = deque()
        self._patience = Patience()
        self._lost: SluiceError | None = None
        self._is_up = False
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
        process = WorkerProcess(self.name, self._take)
        self._process = process
        self._calls = ModelCalls(self._models, process)
        try:
            await process.ask(self._load)
        except BaseException:
            process.kill()
            await process.close(self._finalize_limit_s)
            raise
        self._is_up = True
        self._loaded_s = perf_counter()

    def execute(self, jobs: list[Job], done: Callable[[], None]) -> None:
        """As `Instance.execute`; while one batch runs, others may follow."""
        batch = _Batch(jobs, done)
        if self._lost is not None:
            self._fail(batch, self._lost)
        elif self.is_ready:
            self._send(batch)
        else:
            self._hold(batch)

    def _send(self, batch: _Batch) -> None:
        requests = [each for job in batch.jobs if (each := self._open(job)) is not None]
        if not requests:
            batch.done()
            return
        assert self._process is not None
        # While it is busy there is no hurry: what comes in the same turn of the event loop is written together.
        self._process.send(Batch(requests), is_urgent=not self._running)
        self._running.append(batch)

    def _open(self, job: Job) -> WireRequest | None:
        """The job in the form in which it is sent; None where it is not to be sent, and has ended."""
        assert self._process is not None
        if job.is_cancelled:
            job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
            return None
        number = next(self._numbers)
        try:
            request = wire_request(number, job.request, self._process)
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
            self._process.send(Cancel([number]))

    def _take(self, message: Report | Call | EndCall) -> None:
        match message:
            case Report():
                self._take_report(message)
            case Call():
                self._calls.begin(message)
            case EndCall(number):
                self._calls.end(number)

    def _take_report(self, report: Report) -> None:
        for batch, execution in zip(self._running, report.executions, strict=False):
            self._record(batch, execution)
        for reply in report.replies:
            job = self._jobs.pop(reply.number, None) if reply.is_final else self._jobs.get(reply.number)
            if job is not None:
                self._respond(job, reply)
        for _ in report.executions:
            if self._running:  # none are left of a closed instance
                self._patience.served()
                self._running.popleft().done()

    def _respond(self, job: Job, reply: Reply) -> None:
        assert self._process is not None
        if reply.is_final and not job.infer_ended_ns:  # a decoupled model's, which ends before its execution does
            job.infer_ended_ns = perf_counter_ns()
        try:
            job.respond(response_of(reply, self._process))
        except Exception:  # one request's receiver must not keep the others from their answers
            log.exception("a response of %s could not be passed on", self.name)

    def _record(self, batch: _Batch, execution: Execution) -> None:
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
                self._patience.served()
            log.error("%s ended with %s; starting another", self.name, describe_exit(code))
            self._patience.failed(has_culprit=had_culprit)
            if not await self._restart():
                return

    def _lose(self) -> bool:
        """Fail what the worker had. Returns whether it was running something, which may have killed it."""
        self._is_up = False
        error = SluiceError(ErrorCode.INTERNAL, not_healthy(self.name))
        was_running = bool(self._jobs)
        self._fail_all(error)
        return was_running

    def _fail_all(self, error: SluiceError) -> None:
        self._calls.close()
        jobs, self._jobs = self._jobs, {}
        running, self._running = self._running, deque()
        for job in jobs.values():
            job.fail(error)
        for batch in running:
            batch.done()

    async def _restart(self) -> bool:
        """False where it is given up."""
        reason = not_healthy(self.name)
        while not self._patience.is_over:
            await asyncio.sleep(self._patience.delay_s())
            try:
                await self._start_process()
            except (SluiceError, OSError) as error:
                reason = str(error)
                log.error("%s could not be started again: %s", self.name, reason)
                self._patience.failed()
                continue
            log.warning("%s is back", self.name)
            self._release()
            return True
        log.critical("%s is given up", self.name)
        self._lost = SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is given up after too many crashes: {reason}")
        self._fail_held(self._lost)
        return False

    def _hold(self, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()
        batch.time_limit = loop.call_later(self._hold_limit_s, self._refuse, batch)
        self._held.append(batch)

    def _refuse(self, batch: _Batch) -> None:
        self._held.remove(batch)
        message = f"{self.name} was not restarted within {self._hold_limit_s:g} s"
        self._fail(batch, SluiceError(ErrorCode.UNAVAILABLE, message))

    def _release(self) -> None:
        held, self._held = self._held, deque()
        for batch in held:
            if batch.time_limit is not None:
                batch.time_limit.cancel()
            self._send(batch)

    def _fail_held(self, error: SluiceError) -> None:
        held, self._held = self._held, deque()
        for batch in held:
            if batch.time_limit is not None:
                batch.time_limit.cancel()
            self._fail(batch, error)

    def _fail(self, batch: _Batch, error: SluiceError) -> None:
        for job in batch.jobs:
            job.fail(error)
        batch.done()

    async def close(self) -> None:
        """Fail what is under way and end the process. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._lost = SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} is being unloaded")
            if self._supervisor is not None:
                self._supervisor.cancel()
            self._fail_all(self._lost)
            self._fail_held(self._lost)
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,))
        if self._process is not None:
            await self._process.close(self._finalize_limit_s)
