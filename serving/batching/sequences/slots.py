"""The batchers of one instance of a sequence model, with slots for as many sequences as it runs at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.batcher import Batcher, ResponseOrder
from sluice.serving.batching.instance_pool import InstancePool, open_pool
from sluice.serving.batching.plan import BatchKeys
from sluice.serving.batching.queue import Wakeup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.sequences.inputs import ControlInputs
from sluice.serving.batching.warm_up import WarmUpBatch
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor

Admit = Callable[[InferJob], bool]
"""Returns whether a job may run now. Where it may not, the job has been failed."""
Incarnation = tuple[int, int]
"""Tells an instance's processes apart: its number of starts, where it reports them, and of crashes that were seen."""
_NS_PER_US = 1000
_RETRY_NS = 50_000_000
"""Interval of checks whether the instance can run, while something other than a batch keeps it from that."""


class SlotNumbers:
    """The numbers from 0 to `count` - 1, lowest free one first: batches stay small, and instances fill up evenly."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_touched = 0
        self._returned: list[int] = []

    @property
    def lowest(self) -> int | None:
        """The lowest free number; None where all are taken."""
        if self._returned:
            return self._returned[0]
        return self._num_touched if self._num_touched < self._count else None

    @property
    def num_taken(self) -> int:
        return self._num_touched - len(self._returned)

    def take(self) -> int:
        if self._returned:
            return heappop(self._returned)
        self._num_touched += 1
        return self._num_touched - 1

    def release(self, number: int) -> None:
        heappush(self._returned, number)


class SlotBatcher(ABC):
    """Queues the requests of sequences with a slot, and runs them on its instance by one of Triton's strategies."""

    def __init__(self, instance: Instance, num_slots: int, runs_on: Batcher | InstancePool) -> None:
        """`runs_on` runs the batches on `instance`."""
        self.instance = instance
        self._runs_on = runs_on
        self.slots = SlotNumbers(num_slots)
        self._num_crashes = 0

    @property
    def is_ready(self) -> bool:
        return self.instance.is_ready

    @property
    def is_spillover(self) -> bool:
        """Whether it only takes sequences for which the others have no slot."""
        placement = self.instance.placement
        return placement is not None and placement.is_spillover

    @property
    def incarnation(self) -> Incarnation:
        """The instance's present process. State of sequences is lost with its process."""
        return self.instance.num_starts, self._num_crashes

    def record_crash(self) -> None:
        """Note that a request ended with the process that ran it."""
        self._num_crashes += 1

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Number of jobs that wait for the instance."""

    def claim_resources(self) -> None:
        self._runs_on.claim_resources()

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        await self._runs_on.warm_up(new_batch)

    @abstractmethod
    def start(self, job: InferJob, slot: int) -> None:
        """Queue or run a request of the sequence in `slot`, which has no other request here."""

    def finished(self, job: InferJob) -> None:  # noqa: B027 - a hook that most leave empty
        """Note the end of a request that was started here."""

    @abstractmethod
    async def close(self, error: SluiceError) -> None:
        """End queued jobs in `error`, and running ones with the instance."""


@dataclass(frozen=True, slots=True)
class SlotPolicy:
    """A batch waits until `minimum_utilization` of the `num_slots` have a request, at most `delay_ns`."""

    num_slots: int
    delay_ns: int = 0
    minimum_utilization: float = 0.0

    def due_ns(self, num_ready: int, oldest_ns: int) -> int:
        """Return when a batch of `num_ready` requests is due, the oldest waiting since `oldest_ns`; 0 is at once."""
        if num_ready / self.num_slots >= self.minimum_utilization:
            return 0
        return oldest_ns + self.delay_ns if self.delay_ns else 0


def read_direct_policy(config: ModelConfig) -> SlotPolicy:
    given = config.sequence_batching.direct
    return SlotPolicy(
        max(config.max_batch_size, 1), given.max_queue_delay_microseconds * _NS_PER_US, given.minimum_slot_utilization
    )


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits in its slot."""

    job: InferJob
    key: object
    since_ns: int


class DirectBatcher(SlotBatcher):
    """Gives each sequence the same row of every batch, for models that keep a state for each row.

    A batch has a row for every slot up to the last one with a request. A slot in between that has no request, or one
    whose tensors cannot be stacked on the others', gets a null request.
    """

    def __init__(
        self,
        instance: Instance,
        policy: SlotPolicy,
        keys: BatchKeys,
        controls: ControlInputs,
        admit: Admit,
        on_executed: Callable[[list[InferJob]], None],
        limiter: RateLimiter | None,
    ) -> None:
        """`on_executed` is called with each batch that has run."""
        self._pool = open_pool([instance], self._executed, limiter, self._dispatch)
        super().__init__(instance, policy.num_slots, self._pool)
        self._policy = policy
        self._keys = keys
        self._controls = controls
        self._admit = admit
        self._on_executed = on_executed
        self._wakeup = Wakeup(self._dispatch)
        self._waiting: dict[int, _Waiting] = {}

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    def start(self, job: InferJob, slot: int) -> None:
        self._waiting[slot] = _Waiting(job, self._keys.of(job.request), perf_counter_ns())
        job.on_cancel = lambda: self._drop(slot)
        # Not at once: requests that arrive in the same turn of the event loop share the batch.
        self._wakeup.soon()

    def _drop(self, slot: int) -> None:
        dropped = self._waiting.pop(slot)
        if not self._waiting:
            self._pool.withdraw()
        dropped.job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))

    def _executed(self, jobs: list[InferJob]) -> None:
        self._on_executed(jobs)
        # Not at once either: sequences that were answered just now may have queued their next requests.
        self._wakeup.soon()

    def _dispatch(self) -> None:
        """Run the next batch, if one is due."""
        if not self._waiting:
            return
        instance = self._pool.choose()
        if instance is None:
            if self._pool.has_idle:
                self._wakeup.at(perf_counter_ns() + _RETRY_NS)
            return
        self._fail_lost()
        rows = self._due_rows()
        if not rows:
            self._pool.withdraw()
        elif (instance := self._pool.take(instance)) is not None:
            instance.run(self._take_batch(rows))

    def _fail_lost(self) -> None:
        for number, waiting in list(self._waiting.items()):
            # A failed request leaves its slot, which may at once have the first request of another sequence.
            if not self._admit(waiting.job) and self._waiting.get(number) is waiting:
                del self._waiting[number]

    def _due_rows(self) -> dict[int, InferJob]:
        """Return the jobs that run now, by slot. Where they should wait for more, set the timer and return none."""
        if not self._waiting:
            return {}
        oldest = min(self._waiting.values(), key=lambda each: each.since_ns)
        due_ns = self._policy.due_ns(len(self._waiting), oldest.since_ns)
        if due_ns > perf_counter_ns():
            self._wakeup.at(due_ns)
            return {}
        # The oldest request determines what can be stacked, so that no shape waits for ever.
        return {number: each.job for number, each in self._waiting.items() if each.key == oldest.key}

    def _take_batch(self, rows: dict[int, InferJob]) -> list[InferJob]:
        """Remove the jobs of `rows` from their slots, and return a batch with one job for each row."""
        for number in rows:
            del self._waiting[number]
        num_rows = max(rows) + 1
        if num_rows == len(rows):
            return [rows[number] for number in range(num_rows)]
        first = next(iter(rows.values()))
        null_request = build_null_request(first.request, self._controls)
        return [rows.get(number) or NullRequestJob(first, null_request) for number in range(num_rows)]

    async def close(self, error: SluiceError) -> None:
        self._wakeup.cancel()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.job.on_cancel = None
            each.job.fail(error)
        await self.instance.close()
        self._pool.close()


class NullRequestJob(InferJob):
    """The job of a null request. Its responses are dropped, and it is not counted in the statistics."""

    __slots__ = ()

    def __init__(self, beside: InferJob, request: InferRequest) -> None:
        """Belong to the model of `beside`, a job of the same batch."""
        super().__init__(beside._model, request, lambda _: None)

    def respond(self, response: InferResponse) -> None:
        self.is_finished = self.is_finished or response.is_final


def build_null_request(like: InferRequest, controls: ControlInputs) -> InferRequest:
    """Return a request of zeros with the types and shapes of `like`, and with controls that mark it as not ready."""
    inputs = {name: Tensor.zeros(name, tensor.data_type, tensor.shape) for name, tensor in like.inputs.items()}
    return InferRequest(inputs | controls.of_null_request(), requested_outputs=like.requested_outputs)


class GuardedInstance(Instance):
    """Runs on the instance behind it those jobs that `admit` still allows when their batch is formed."""

    def __init__(self, inner: Instance, admit: Admit) -> None:
        self.name = inner.name
        self.placement = inner.placement
        self._inner = inner
        self._admit = admit

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        admitted = [job for job in jobs if self._admit(job)]
        if admitted:
            self._inner.execute(admitted, done)
        else:
            done()

    async def close(self) -> None:
        await self._inner.close()


class OldestBatcher(SlotBatcher):
    """Queues the requests of all candidate sequences in one dynamic batcher, which runs the oldest first."""

    def __init__(self, instance: Instance, num_slots: int, batcher: Batcher, *, preserves_order: bool) -> None:
        """`batcher` is that of a guarded `instance`. `preserves_order`: responses come in the order of requests."""
        super().__init__(instance, num_slots, batcher)
        self._batcher = batcher
        self._order = ResponseOrder() if preserves_order else None

    @property
    def num_pending(self) -> int:
        return self._batcher.num_pending

    def start(self, job: InferJob, slot: int) -> None:
        if self._order is not None and not job.executed_batch_size:  # a job that runs again is in the order already
            receiver = self._order.add(job._receive)
            receiver.job = job
            job._receive = receiver.receive
        self._batcher.start(job)

    def finished(self, job: InferJob) -> None:
        if self._order is not None:
            self._order.advance()

    async def close(self, error: SluiceError) -> None:
        await self._batcher.close(error)
