"""The dynamic batcher: it queues requests, forms batches, runs them on instances, and orders the responses."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.instance_pool import open_pool
from sluice.serving.batching.plan import BatchKeys, BatchPolicy, plan_batch
from sluice.serving.batching.queue import JobQueue, QueuedJob, Wakeup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.warm_up import WarmUpBatch
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.request import InferResponse

_RETRY_NS = 50_000_000
"""Interval of checks whether an instance that is being restarted is back."""


class Batcher:
    """Queues jobs and runs them on its instances, in batches according to `policy`."""

    def __init__(
        self,
        policy: BatchPolicy,
        keys: BatchKeys,
        instances: Sequence[Instance],
        on_executed: Callable[[list[InferJob]], None],
        limiter: RateLimiter | None = None,
    ) -> None:
        """Take at least one instance. `on_executed` is called with each batch that has run."""
        self._policy = policy
        self._keys = keys
        self._queue = JobQueue(policy)
        self._pool = open_pool(instances, self._executed, limiter, self._dispatch)
        self._on_executed = on_executed
        self._wakeup = Wakeup(self._dispatch)
        self._is_dispatching = False

    def claim_resources(self) -> None:
        self._pool.claim_resources()

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        await self._pool.warm_up(new_batch)

    def change_instances(self, added: Sequence[Instance], removed: Collection[Instance]) -> None:
        """Run later batches on other instances. The caller closes those that are removed, once they are idle."""
        self._pool.retire(removed)
        self._pool.add(added)
        self._pool.sort_idle()
        self._dispatch()

    @property
    def is_ready(self) -> bool:
        return self._pool.is_ready

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def start(self, job: InferJob) -> None:
        """Run or queue a job. Raises UNAVAILABLE where the queue is full."""
        is_dynamic, is_free_to_run = self._policy.is_dynamic, not self._is_dispatching
        if is_free_to_run and not self._queue and (not is_dynamic or self._wants_first) and self._run_now(job):
            return
        self._enqueue(job, self._keys.of(job.request) if is_dynamic else None)
        if not is_free_to_run or not self._pool.has_idle:
            return
        if is_dynamic:
            # Not at once: requests that arrive in the same turn of the event loop share the batch.
            self._wakeup.soon()
        else:
            self._wakeup.at(perf_counter_ns() + _RETRY_NS)

    @property
    def _wants_first(self) -> bool:
        """Whether a request is to run alone, now; never where the model's operator has chosen sizes or a delay."""
        policy = self._policy
        is_plain = not policy.delay_ns and policy.preferred_rows == {policy.max_rows}
        return is_plain and self._pool.wants_first

    def _run_now(self, job: InferJob) -> bool:
        instance = self._pool.choose()
        if instance is None or (instance := self._pool.take(instance)) is None:
            return False
        self._is_dispatching = True
        try:
            instance.run([job])
        finally:
            self._is_dispatching = False
        if self._queue:
            self._dispatch()
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
            self._dispatch()

    def _dispatch(self) -> None:
        """Fail expired jobs, and start batches while instances are free."""
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            for job in self._queue.expire(perf_counter_ns()):
                job.on_cancel = None
                job.fail(SluiceError(ErrorCode.UNAVAILABLE, "Request timeout expired"))
            while self._queue and self._run_next():
                pass
        finally:
            self._is_dispatching = False
        if deadline_ns := self._queue.next_deadline_ns():
            self._wakeup.at(deadline_ns)
        if not self._queue and self._pool.is_limited:
            self._pool.withdraw()

    def _run_next(self) -> bool:
        """Start one batch. False where none can start now."""
        instance = self._pool.choose()
        if instance is None:
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
        if (instance := self._pool.take(instance)) is None:
            return False
        instance.run(self._queue.take(size))
        return True

    async def close(self, error: SluiceError) -> None:
        """End queued jobs in `error`, and running ones with their instances."""
        self._wakeup.cancel()
        for job in self._queue.take(len(self._queue)):
            job.on_cancel = None
            job.fail(error)
        await asyncio.gather(*(each.close() for each in self._pool.instances))
        self._pool.close()


class OrderedReceiver:
    """Holds one request's responses back until all earlier requests have ended."""

    __slots__ = ("_has_ended", "_order", "_receive", "held", "job")

    def __init__(self, receive: ReceiveResponse, order: "ResponseOrder") -> None:
        self._receive = receive
        self._order = order
        self.held: list[InferResponse] = []
        self._has_ended = False
        self.job: InferJob | None = None
        """None until the request is submitted, and again after its last response: the job refers to its receiver."""

    def attach(self, job: InferJob) -> None:
        """Take the job of the submitted request. It may have ended already."""
        if job.is_finished:
            self._has_ended = True
            self._order.advance()
        else:
            self.job = job

    @property
    def is_done(self) -> bool:
        """Whether all its responses were passed on. A cancelled request gets no final response."""
        return not self.held and (self._has_ended or (self.job is not None and self.job.is_finished))

    def receive(self, response: InferResponse) -> None:
        """Take a response, and pass it on in its turn. An error of the queue, such as a timeout, does not wait."""
        self._has_ended = self._has_ended or response.is_final
        if response.error is not None and self.job is not None and not self.job.executed_batch_size:
            self._receive(response)
        else:
            self.held.append(response)
        self._order.advance()

    def release(self) -> None:
        """Pass on the responses that were held back."""
        held, self.held = self.held, []
        for response in held:
            self._receive(response)


class ResponseOrder:
    """Passes responses on in the order of their requests (`preserve_ordering`)."""

    def __init__(self) -> None:
        self._receivers: deque[OrderedReceiver] = deque()
        self._is_advancing = False

    def add(self, receive: ReceiveResponse) -> OrderedReceiver:
        """Return the receiver of the next request."""
        receiver = OrderedReceiver(receive, self)
        self._receivers.append(receiver)
        return receiver

    def discard(self, receiver: OrderedReceiver) -> None:
        """Remove the receiver of a request that was rejected."""
        self._receivers.remove(receiver)
        self.advance()

    def advance(self) -> None:
        """Pass on what is next in order. The loop also sees the requests that receivers submit or cancel meanwhile."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._receivers:
                first = self._receivers[0]
                first.release()
                if first.is_done:
                    first.job = None
                    self._receivers.popleft()
                elif not first.held:
                    return
        finally:
            self._is_advancing = False
