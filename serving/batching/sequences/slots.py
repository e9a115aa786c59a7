"""What sequences run on: an instance each, with slots for as many sequences as it has at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush

from serving.batching.warm_up import WarmUpBatch
from serving.instance import Instance
from serving.job import InferJob
from sluice.errors import SluiceError

Admit = Callable[[InferJob], bool]
"""Whether a job may run now; where not, it has been failed."""


Incarnation = tuple[int, int]
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


class SlotBatcher(ABC):
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
    def life(self) -> Incarnation:
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
    def start(self, job: InferJob, slot: int) -> None:
        """Run or queue a request of the sequence in `slot`, which has no other one here."""

    def finished(self, job: InferJob) -> None:  # noqa: B027 - a hook that most leave empty
        """A request that was started here is over."""

    @abstractmethod
    async def close(self, error: SluiceError) -> None:
        """End what is queued in `error`, and what is running with the instance."""
