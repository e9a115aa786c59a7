"""Batches that wait for a worker while none is up."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.job import InferJob
from sluice.errors import ErrorCode, SluiceError

HOLD_LIMIT_S = 30.0
"""How long a batch waits for a worker that is being restarted."""


@dataclass(slots=True, eq=False)
class WorkerBatch:
    """`numbers` are those that its requests were sent under, of those that were."""

    jobs: list[InferJob]
    done: Callable[[], None]
    numbers: list[int] = field(default_factory=list)

    def fail(self, error: SluiceError) -> None:
        for job in self.jobs:
            job.fail(error)
        self.done()


class HeldBatches:
    """Of one worker, or of all of a model: then whichever is up first takes them. Event loop's thread only."""

    def __init__(self, name: str, limit_s: float = HOLD_LIMIT_S) -> None:
        """`name` is the worker's or the model's."""
        self._name = name
        self._limit_s = limit_s
        self._offers: list[Callable[[], None]] = []
        self._batches: deque[tuple[WorkerBatch, asyncio.TimerHandle]] = deque()
        self._lost: SluiceError | None = None

    def join(self, offer: Callable[[], None]) -> None:
        """One more worker, which is told with `offer` when there is something to take."""
        self._offers.append(offer)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: WorkerBatch) -> None:
        """Behind the others. It fails where no worker will come any more, and when it has waited for too long."""
        if self._lost is not None:
            batch.fail(self._lost)
        else:
            self._batches.append(self._timed(batch))
            self._offer()

    def give_back(self, batches: list[WorkerBatch]) -> None:
        """Those that a worker had taken and not begun go ahead of the others."""
        if self._lost is not None:
            for batch in batches:
                batch.fail(self._lost)
            return
        self._batches.extendleft(self._timed(batch) for batch in reversed(batches))
        self._offer()

    def _offer(self) -> None:
        for offer in self._offers:
            offer()

    def _timed(self, batch: WorkerBatch) -> tuple[WorkerBatch, asyncio.TimerHandle]:
        return batch, asyncio.get_running_loop().call_later(self._limit_s, self._refuse, batch)

    def take(self) -> WorkerBatch:
        """The first of at least one."""
        batch, time_limit = self._batches.popleft()
        time_limit.cancel()
        return batch

    def _refuse(self, late: WorkerBatch) -> None:
        self._batches = deque(each for each in self._batches if each[0] is not late)
        message = f"{self._name} was not restarted within {self._limit_s:g} s"
        late.fail(SluiceError(ErrorCode.UNAVAILABLE, message))

    def leave(self, offer: Callable[[], None], error: SluiceError) -> None:
        """A worker will not come back. With the last one everything fails."""
        self._offers.remove(offer)
        if not self._offers:
            self.close(error)

    def close(self, error: SluiceError) -> None:
        """Fail everything, and what comes later. Idempotent."""
        self._lost = self._lost or error
        while self._batches:
            self.take().fail(self._lost)
