"""The copies of a model, and which of them takes the next batch."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import Instance
from pipelines.inference.job import Job

_log = logging.getLogger(__name__)

OnDone = Callable[[list[Job]], None]


class InstanceSlot:
    """An instance, and the batch that it runs."""

    __slots__ = ("_done", "_on_done", "_pool", "instance", "jobs")

    def __init__(self, instance: Instance, pool: "InstancePool", on_done: OnDone) -> None:
        self.instance = instance
        self.jobs: list[Job] | None = None
        self._pool = pool
        self._on_done = on_done
        self._done = self.done

    def run(self, jobs: list[Job]) -> None:
        """Hand it a batch. Where that raises, which is our fault, the batch fails and the instance is free again."""
        self.jobs = jobs
        now = perf_counter_ns()
        rows = jobs[0].request.batch_size if len(jobs) == 1 else sum(job.request.batch_size for job in jobs)
        for job in jobs:
            job.compute_started_ns = now
            job.executed_batch_size = rows
            job.on_cancel = None
        try:
            self.instance.execute(jobs, self._done)
        except Exception:
            _log.exception("instance %s failed to take a batch", self.instance.name)
            for job in jobs:
                job.fail(SluiceError(ErrorCode.INTERNAL, f"{self.instance.name} failed to take the request"))
            self.done()

    def done(self) -> None:
        """It takes the next batch. Harmless while it runs none."""
        jobs = self.jobs
        if jobs is None:
            return
        self.jobs = None
        self._pool.give_back(self)
        self._on_done(jobs)


class InstancePool:
    """All instances of a model version. The one that is free for longest comes first."""

    def __init__(self, instances: Sequence[Instance], on_done: OnDone) -> None:
        self._all = [InstanceSlot(instance, self, on_done) for instance in instances]
        self._idle = deque(self._all)

    @property
    def instances(self) -> list[Instance]:
        return [slot.instance for slot in self._all]

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    @property
    def is_ready(self) -> bool:
        """Whether any instance is."""
        return any(slot.instance.is_ready for slot in self._all)

    def choose(self) -> InstanceSlot | None:
        """A free instance, which stays free until it is taken; None where it is better to wait for a busy one.

        One that is being restarted is chosen only if all are: it then runs the batch once it is back, or fails it.
        """
        for slot in self._idle:
            if slot.instance.is_ready:
                return slot
        return self._idle[0] if self._idle and not self.is_ready else None

    def take(self, slot: InstanceSlot) -> None:
        """It is about to run a batch."""
        if self._idle[0] is slot:
            self._idle.popleft()
        else:
            self._idle.remove(slot)

    def give_back(self, slot: InstanceSlot) -> None:
        self._idle.append(slot)
