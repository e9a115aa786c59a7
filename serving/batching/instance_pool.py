"""The copies of a model, and which of them takes the next batch."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns

from serving.batching.rate_limiter import Claim, RateLimiter
from serving.batching.warm_up import WarmUpBatch, gather_runs
from serving.instance import Instance
from serving.job import InferJob
from sluice.errors import ErrorCode, SluiceError

_log = logging.getLogger(__name__)

OnDone = Callable[[list[InferJob]], None]


class InstanceSlot:
    """An instance, and the batch that it runs."""

    __slots__ = ("_done", "_on_done", "_pool", "instance", "jobs", "line")

    def __init__(self, instance: Instance, pool: "InstancePool", on_done: OnDone, line: "deque[InstanceSlot]") -> None:
        """`line` is where it waits while it is free."""
        self.instance = instance
        self.jobs: list[InferJob] | None = None
        self.line = line
        self._pool = pool
        self._on_done = on_done
        self._done = self.done

    def run(self, jobs: list[InferJob]) -> None:
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
    """All instances of a model version. The one that is free for longest comes first, spill-over after all others."""

    is_limited = False
    """Whether a free instance may have to wait for resources."""

    def __init__(self, instances: Sequence[Instance], on_done: OnDone) -> None:
        self._idle: deque[InstanceSlot] = deque()
        self._spillover: deque[InstanceSlot] = deque()
        self._all = [InstanceSlot(each, self, on_done, self._line_of(each)) for each in instances]
        for slot in self._all:
            slot.line.append(slot)

    def _line_of(self, instance: Instance) -> deque[InstanceSlot]:
        is_spillover = instance.placement is not None and instance.placement.is_spillover
        return self._spillover if is_spillover else self._idle

    @property
    def instances(self) -> list[Instance]:
        return [slot.instance for slot in self._all]

    @property
    def has_idle(self) -> bool:
        """Whether any is free, but perhaps not ready."""
        return bool(self._idle or self._spillover)

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
        for slot in self._spillover:
            if slot.instance.is_ready:
                return slot
        line = self._idle or self._spillover
        return line[0] if line and not self.is_ready else None

    def take(self, slot: InstanceSlot) -> InstanceSlot | None:
        """The instance that runs the batch now: `slot` or one that is as good. None where all must wait."""
        line = slot.line
        if line[0] is slot:
            line.popleft()
        else:
            line.remove(slot)
        return slot

    def give_back(self, slot: InstanceSlot) -> None:
        slot.line.append(slot)

    def claim_resources(self) -> None:
        """Before anything runs. Raises SluiceError INVALID for what there is too little of."""

    def withdraw(self) -> None:
        """There is no batch to run: wait for resources no more."""

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        """Run a batch on every instance, once on those that share a worker. Raises SluiceError with what one says."""
        await gather_runs([self._warm_up(slot, new_batch()) for slot in self._distinct()])

    async def _warm_up(self, slot: InstanceSlot, batch: WarmUpBatch) -> None:
        await batch.run_on(slot.instance)

    def _distinct(self) -> Iterator[InstanceSlot]:
        """Those of a placement of their own: the others are more places with the same worker."""
        seen: set[int] = set()
        for slot in self._all:
            placement = slot.instance.placement
            if placement is None or id(placement) not in seen:
                seen.add(id(placement))
                yield slot

    def close(self) -> None:
        """Its instances have gone."""


class LimitedPool(InstancePool):
    """A free instance runs a batch when the limiter gives it what it needs.

    Of several places with one worker only the first is used: what waits in a process ahead of its turn would hold
    what others could run with.
    """

    is_limited = True

    def __init__(
        self, instances: Sequence[Instance], on_done: OnDone, limiter: RateLimiter, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when an instance that had to wait may run."""
        super().__init__(instances, self._ran)
        self._tell = on_done
        self._limiter = limiter
        self._wake = wake
        self._claims: dict[InstanceSlot, Claim] = {}
        for slot in set(self._all).difference(self._distinct()):
            slot.line.remove(slot)

    def claim_resources(self) -> None:
        for slot in self._distinct():
            placement = slot.instance.placement
            if placement is not None and placement.resources:
                self._claims[slot] = self._limiter.claim(placement, self._wake)

    @property
    def has_idle(self) -> bool:
        """Whether any is free that does not wait for resources: those are heard of."""
        return any(not self._is_waiting(slot) for line in (self._idle, self._spillover) for slot in line)

    def _is_waiting(self, slot: InstanceSlot) -> bool:
        claim = self._claims.get(slot)
        return claim is not None and claim.is_waiting

    def take(self, slot: InstanceSlot) -> InstanceSlot | None:
        for each in self._candidates(slot):
            claim = self._claims.get(each)
            if claim is None or claim.take():
                return super().take(each)
        return None

    def _candidates(self, chosen: InstanceSlot) -> list[InstanceSlot]:
        """All that could run the batch, by turn; spill-over last."""
        found = [*self._in_order(self._idle), *self._in_order(self._spillover)]
        return found or [chosen]

    def _in_order(self, line: Iterable[InstanceSlot]) -> list[InstanceSlot]:
        return sorted((slot for slot in line if slot.instance.is_ready), key=self._turn)

    def _turn(self, slot: InstanceSlot) -> int:
        claim = self._claims.get(slot)
        return claim.turn if claim is not None else 0

    def give_back(self, slot: InstanceSlot) -> None:
        self._release(slot)
        super().give_back(slot)

    def _release(self, slot: InstanceSlot) -> None:
        claim = self._claims.get(slot)
        if claim is not None:
            claim.release()

    def _ran(self, jobs: list[InferJob]) -> None:
        # First those who wait for this model: their turn may be the next, and only who stands in line can have it.
        self._tell(jobs)
        self._limiter.hand_out()

    def withdraw(self) -> None:
        for claim in self._claims.values():
            claim.withdraw()

    async def _warm_up(self, slot: InstanceSlot, batch: WarmUpBatch) -> None:
        claim = self._claims.get(slot)
        if claim is None:
            await super()._warm_up(slot, batch)
            return
        await claim.acquire()
        try:
            await super()._warm_up(slot, batch)
        finally:
            claim.release()
            self._limiter.hand_out()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()


def open_pool(
    instances: Sequence[Instance], on_done: OnDone, limiter: RateLimiter | None, wake: Callable[[], None]
) -> InstancePool:
    """`wake` is called when one that had to wait for resources may try again.

    Without resources an instance never waits for any, and the plain pool is the faster one.
    """
    if limiter is None or not any(each.placement is not None and each.placement.resources for each in instances):
        return InstancePool(instances, on_done)
    return LimitedPool(instances, on_done, limiter, wake)
