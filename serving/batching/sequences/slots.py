"""The batcher of one instance of a sequence model, with slots for as many sequences as the instance runs at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush

from sluice.errors import SluiceError
from sluice.serving.batching.batcher import Batcher
from sluice.serving.batching.instance_pool import InstancePool
from sluice.serving.batching.warm_up import WarmUpBatch
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob

Admit = Callable[[InferJob], bool]
"""Returns whether a job may run now. Where it may not, the job has been failed."""
Incarnation = tuple[int, int]
"""Tells an instance's processes apart: its number of starts, where it reports them, and of crashes that were seen."""


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
