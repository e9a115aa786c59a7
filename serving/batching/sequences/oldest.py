"""The `oldest` strategy: an instance has more candidate sequences than rows, and batches their oldest requests."""

from collections.abc import Callable

from sluice.errors import SluiceError
from sluice.serving.batching.batcher import Batcher, ResponseOrder
from sluice.serving.batching.sequences.slots import Admit, SlotBatcher
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob


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
