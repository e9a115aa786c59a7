"""The `direct` strategy: a sequence keeps one row of its instance's batches from start to end."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.instance_pool import open_pool
from sluice.serving.batching.plan import BatchKeys
from sluice.serving.batching.queue import Wakeup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.sequences.inputs import ControlInputs
from sluice.serving.batching.sequences.slots import Admit, SlotBatcher
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor

_NS_PER_US = 1000
_RETRY_NS = 50_000_000
"""Interval of checks whether the instance can run, while something other than a batch keeps it from that."""


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
