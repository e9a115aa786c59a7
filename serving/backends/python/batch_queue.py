"""Queue of batches that wait while no worker is up."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob

MAX_WAIT_S = 30.0
"""Seconds that a batch waits for a worker that is being restarted."""


@dataclass(slots=True, eq=False)
class WorkerBatch:
    """Batch of jobs. `numbers` are those of its requests, as far as they have been sent."""

    jobs: list[InferJob]
    done: Callable[[], None]
    numbers: list[int] = field(default_factory=list)

    def fail(self, error: SluiceError) -> None:
        for job in self.jobs:
            job.fail(error)
        self.done()


class WorkerBatchQueue:
    """Batches of one worker, or of all of a model's: the first one that is up takes them. Event loop only."""

    def __init__(self, name: str, limit_s: float = MAX_WAIT_S) -> None:
        """`name` is that of the worker or the model."""
        self._name = name
        self._limit_s = limit_s
        self._workers: list[Callable[[], None]] = []
        self._batches: deque[tuple[WorkerBatch, asyncio.TimerHandle]] = deque()
        self._closing_error: SluiceError | None = None

    def add_worker(self, notify: Callable[[], None]) -> None:
        """Add a worker. `notify` is called when there may be something to take."""
        self._workers.append(notify)

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, batch: WorkerBatch) -> None:
        """Append a batch. It fails after too long a wait, and at once where no worker will come up any more."""
        if self._closing_error is not None:
            batch.fail(self._closing_error)
        else:
            self._batches.append(self._timed(batch))
            self._notify_workers()

    def put_back(self, batches: list[WorkerBatch]) -> None:
        """Put batches that a lost worker had not begun ahead of the others."""
        if self._closing_error is not None:
            for batch in batches:
                batch.fail(self._closing_error)
            return
        self._batches.extendleft(self._timed(batch) for batch in reversed(batches))
        self._notify_workers()

    def _notify_workers(self) -> None:
        for notify in self._workers:
            notify()

    def _timed(self, batch: WorkerBatch) -> tuple[WorkerBatch, asyncio.TimerHandle]:
        return batch, asyncio.get_running_loop().call_later(self._limit_s, self._time_out, batch)

    def take(self) -> WorkerBatch:
        """Remove and return the first batch. The queue must not be empty."""
        batch, time_limit = self._batches.popleft()
        time_limit.cancel()
        return batch

    def _time_out(self, late: WorkerBatch) -> None:
        self._batches = deque(each for each in self._batches if each[0] is not late)
        message = f"{self._name} was not restarted within {self._limit_s:g} s"
        late.fail(SluiceError(ErrorCode.UNAVAILABLE, message))

    def remove_worker(self, notify: Callable[[], None], error: SluiceError) -> None:
        """Remove a worker that will not come back. Without any worker, all batches fail. Idempotent."""
        if notify in self._workers:
            self._workers.remove(notify)
        if not self._workers:
            self.close(error)

    def close(self, error: SluiceError) -> None:
        """Fail all batches, and those that come later. Idempotent."""
        self._closing_error = self._closing_error or error
        while self._batches:
            self.take().fail(self._closing_error)
