"""A queue before instances: who waits, what becomes a batch, and when it runs."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from serving.batching.instance_pool import open_pool
from serving.batching.plan import BatchKeys, BatchPolicy, plan_batch
from serving.batching.queue import JobQueue, QueuedJob, Wakeup
from serving.batching.rate_limiter import RateLimiter
from serving.batching.warm_up import WarmUpBatch
from serving.instance import Instance
from serving.job import InferJob, ReceiveResponse
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError

_RETRY_NS = 50_000_000
"""How often to look whether an instance that is being restarted is back, while requests wait for a busy one."""


class Batcher:
    """Gives its instances batches as `policy` says."""

    def __init__(
        self,
        policy: BatchPolicy,
        keys: BatchKeys,
        instances: Sequence[Instance],
        on_executed: Callable[[list[InferJob]], None],
        limiter: RateLimiter | None = None,
    ) -> None:
        """At least one of `instances`. `on_executed` is told of each batch that has run."""
        self._policy = policy
        self._keys = keys
        self._queue = JobQueue(policy)
        self._pool = open_pool(instances, self._executed, limiter, self._pump)
        self._on_executed = on_executed
        self._wakeup = Wakeup(self._pump)
        self._is_pumping = False

    def claim_resources(self) -> None:
        """Before anything runs. Raises SluiceError INVALID for what there is too little of."""
        self._pool.claim_resources()

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        """Run a batch on every instance. Raises SluiceError with what one says."""
        await self._pool.warm_up(new_batch)

    @property
    def is_ready(self) -> bool:
        """Whether any instance is."""
        return self._pool.is_ready

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def start(self, job: InferJob) -> None:
        """Run or queue it. Raises SluiceError UNAVAILABLE where the queue is full."""
        is_dynamic, is_quiet = self._policy.is_dynamic, not self._is_pumping
        if not is_dynamic and is_quiet and not self._queue and self._run_now(job):
            return
        self._enqueue(job, self._keys.of(job.request) if is_dynamic else None)
        if is_quiet and self._pool.has_idle:
            self._look_soon(is_dynamic)

    def _look_soon(self, is_dynamic: bool) -> None:
        if is_dynamic:
            # Not at once: what arrives in the same turn of the event loop shall share the batch.
            self._wakeup.soon()
        else:
            self._wakeup.at(perf_counter_ns() + _RETRY_NS)

    def _run_now(self, job: InferJob) -> bool:
        slot = self._pool.choose()
        if slot is None or (slot := self._pool.take(slot)) is None:
            return False
        self._is_pumping = True
        try:
            slot.run([job])
        finally:
            self._is_pumping = False
        if self._queue:
            self._pump()
        elif self._pool.is_limited:
            self._pool.withdraw()
        return True

    def _enqueue(self, job: InferJob, key: object) -> None:
        queued = self._queue.add(job, key, perf_counter_ns())
        job.on_cancel = lambda: self._drop(queued)
        if queued.deadline_ns:
            self._wakeup.at(queued.deadline_ns)

    def _drop(self, queued: QueuedJob) -> None:
        self._queue.remove(queued)
        if not self._queue:
            self._pool.withdraw()
        queued.job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))

    def _executed(self, jobs: list[InferJob]) -> None:
        self._on_executed(jobs)
        if self._queue:
            self._pump()

    def _pump(self) -> None:
        """Refuse who has waited too long, and give free instances what there is to run."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            self._expire()
            while self._queue and self._run_next():
                pass
        finally:
            self._is_pumping = False
        if deadline_ns := self._queue.next_deadline_ns():
            self._wakeup.at(deadline_ns)
        if not self._queue and self._pool.is_limited:
            self._pool.withdraw()

    def _expire(self) -> None:
        for job in self._queue.expire(perf_counter_ns()):
            job.on_cancel = None
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, "Request timeout expired"))

    def _run_next(self) -> bool:
        """Start one batch; False where none can start now."""
        slot = self._pool.choose()
        if slot is None:
            if self._pool.has_idle:
                self._wakeup.at(perf_counter_ns() + _RETRY_NS)
            return False
        size = 1
        if self._policy.is_dynamic:
            plan = plan_batch(self._queue, self._policy, perf_counter_ns())
            if plan.size == 0:
                self._wakeup.at(plan.look_again_ns)
                self._pool.withdraw()
                return False
            size = plan.size
        if (slot := self._pool.take(slot)) is None:
            return False
        slot.run(self._queue.take(size))
        return True

    async def close(self, error: SluiceError) -> None:
        """End what is queued in `error`, and what is running with its instance."""
        self._wakeup.cancel()
        for job in self._queue.take(len(self._queue)):
            job.on_cancel = None
            job.fail(error)
        await asyncio.gather(*(instance.close() for instance in self._pool.instances))
        self._pool.close()


class OrderedReceiver:
    """Stands before one request's `receive`, and keeps back what comes before its turn."""

    __slots__ = ("_held", "_is_over", "_order", "_receive", "job")

    def __init__(self, receive: ReceiveResponse, order: "ResponseOrder") -> None:
        self._receive = receive
        self._order = order
        self._held: list[InferResponse] = []
        self._is_over = False
        self.job: InferJob | None = None
        """None until it was submitted, and once all has passed: the job knows its receiver."""

    def follow(self, job: InferJob) -> None:
        """It was submitted, and may be over already."""
        if job.is_finished:
            self._is_over = True
            self._order.advance()
        else:
            self.job = job

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def is_passed(self) -> bool:
        """Whether all that will come was passed on. A cancelled request gets no final response."""
        return not self._held and (self._is_over or (self.job is not None and self.job.is_finished))

    def receive(self, response: InferResponse) -> None:
        """Take a response, and pass it on now or in its turn. One that the queue gives, as time is up, has no turn."""
        self._is_over = self._is_over or response.is_final
        if response.error is not None and self.job is not None and not self.job.executed_batch_size:
            self._receive(response)
        else:
            self._held.append(response)
        self._order.advance()

    def release(self) -> None:
        """Pass on what was kept back."""
        held, self._held = self._held, []
        for response in held:
            self._receive(response)


class ResponseOrder:
    """Whose turn it is. A request's responses pass once all requests before it are over."""

    def __init__(self) -> None:
        self._line: deque[OrderedReceiver] = deque()
        self._is_advancing = False

    def open(self, receive: ReceiveResponse) -> OrderedReceiver:
        """The next request's place in the line."""
        receiver = OrderedReceiver(receive, self)
        self._line.append(receiver)
        return receiver

    def discard(self, receiver: OrderedReceiver) -> None:
        """Its request was refused."""
        self._line.remove(receiver)
        self.advance()

    def advance(self) -> None:
        """Release whatever may go. What a receiver does in turn (submit, cancel) is seen by the same loop."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._line:
                first = self._line[0]
                first.release()
                if first.is_passed:
                    first.job = None
                    self._line.popleft()
                elif not first.has_held:
                    return
        finally:
            self._is_advancing = False
