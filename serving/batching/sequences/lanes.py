"""What sequences run on: an instance each, with slots for as many sequences as it has at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush

from serving.batching.batcher import Batcher
from serving.batching.ordering import ResponseOrder
from serving.batching.warming import WarmUpBatch
from serving.instance import Instance
from serving.job import Job
from sluice.errors import SluiceError

Admit = Callable[[Job], bool]
"""Whether a job may run now; where not, it has been failed."""


Life = tuple[int, int]
"""How often an instance's process was started, where it says so, and how often one was seen to die."""


class _Slots:
    """The numbers 0 to `count` - 1, lowest first: batches stay small, and lanes grow alike."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_touched = 0
        self._returned: list[int] = []

    @property
    def lowest(self) -> int | None:
        """None where all are taken."""
        if self._returned:
            return self._returned[0]
        return self._num_touched if self._num_touched < self._count else None

    def take(self) -> int:
        if self._returned:
            return heappop(self._returned)
        self._num_touched += 1
        return self._num_touched - 1

    def give_back(self, number: int) -> None:
        heappush(self._returned, number)


class Lane(ABC):
    """One instance's."""

    def __init__(self, instance: Instance, num_slots: int) -> None:
        self.instance = instance
        self.slots = _Slots(num_slots)
        self._num_deaths = 0

    @property
    def is_ready(self) -> bool:
        return self.instance.is_ready

    @property
    def is_spillover(self) -> bool:
        """Whether it is there for what others have no slot for."""
        placement = self.instance.placement
        return placement is not None and placement.is_spillover

    @property
    def life(self) -> Life:
        """Tells the instance's process from those before it, with which all they knew of sequences is gone."""
        return self.instance.num_starts, self._num_deaths

    def note_death(self) -> None:
        """A request has ended with the process that ran it."""
        self._num_deaths += 1

    @property
    @abstractmethod
    def num_pending(self) -> int: ...

    @abstractmethod
    def claim_resources(self) -> None:
        """Before anything runs. Raises SluiceError INVALID for what there is too little of."""

    @abstractmethod
    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        """Run a batch on the instance. Raises SluiceError with what that says."""

    @abstractmethod
    def start(self, job: Job, slot: int) -> None:
        """Run or queue a request of the sequence in `slot`, which has no other one here."""

    def finished(self, job: Job) -> None:  # noqa: B027 - a hook that most leave empty
        """A request that was started here is over."""

    @abstractmethod
    async def close(self, error: SluiceError) -> None:
        """End what is queued in `error`, and what is running with the instance."""


class GuardedInstance(Instance):
    """Stands before an instance, and keeps from it, at the last moment, whatever may not run any more."""

    def __init__(self, inner: Instance, admit: Admit) -> None:
        self.name = inner.name
        self.placement = inner.placement
        self._inner = inner
        self._admit = admit

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    def execute(self, jobs: list[Job], done: Callable[[], None]) -> None:
        admitted = [job for job in jobs if self._admit(job)]
        if admitted:
            self._inner.execute(admitted, done)
        else:
            done()

    async def close(self) -> None:
        await self._inner.close()


class OldestLane(Lane):
    """The `oldest` strategy: more sequences than a batch has rows, of which the requests that came first run first."""

    def __init__(self, instance: Instance, num_slots: int, batcher: Batcher, *, preserves_order: bool) -> None:
        """`batcher` is before a guarded `instance`. `preserves_order`: responses pass in the order of the requests."""
        super().__init__(instance, num_slots)
        self._batcher = batcher
        self._order = ResponseOrder() if preserves_order else None

    @property
    def num_pending(self) -> int:
        return self._batcher.num_pending

    def claim_resources(self) -> None:
        self._batcher.claim_resources()

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        await self._batcher.warm_up(new_batch)

    def start(self, job: Job, slot: int) -> None:
        if self._order is not None and not job.executed_batch_size:  # else it is run again, and has its turn
            receiver = self._order.open(job._receive)
            receiver.job = job
            job._receive = receiver.receive
        self._batcher.start(job)

    def finished(self, job: Job) -> None:
        if self._order is not None:
            self._order.advance()

    async def close(self, error: SluiceError) -> None:
        await self._batcher.close(error)
