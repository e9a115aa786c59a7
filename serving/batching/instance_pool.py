"""The instances of a model version, and the choice of the one that runs the next batch."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from time import perf_counter_ns

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.rate_limiter import Claim, RateLimiter
from sluice.serving.batching.warm_up import WarmUpBatch, gather_runs
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob

_log = logging.getLogger(__name__)

OnDone = Callable[[list[InferJob]], None]
"""Called with the jobs of a batch when its instance is free again."""


class PooledInstance:
    """An instance with the batch that it runs."""

    __slots__ = ("_done", "_on_done", "_pool", "idle_queue", "instance", "jobs")

    def __init__(
        self, instance: Instance, pool: "InstancePool", on_done: OnDone, idle_queue: "deque[PooledInstance]"
    ) -> None:
        """`idle_queue`: the queue that the instance is in while it is free."""
        self.instance = instance
        self.jobs: list[InferJob] | None = None
        self.idle_queue = idle_queue
        self._pool = pool
        self._on_done = on_done
        self._done = self.done

    def run(self, jobs: list[InferJob]) -> None:
        """Run a batch. Where the instance raises, which is a bug, the batch fails and the instance is free again."""
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
        """Note the end of its batch. Harmless while it runs none."""
        jobs = self.jobs
        if jobs is None:
            return
        self.jobs = None
        self._pool.put_back(self)
        self._on_done(jobs)


class InstancePool:
    """The instances of a model version. The one idle for longest runs next; spill-over instances come last."""

    is_limited = False
    """Whether a free instance may have to wait for resources."""

    def __init__(self, instances: Sequence[Instance], on_done: OnDone) -> None:
        self._idle: deque[PooledInstance] = deque()
        self._spillover: deque[PooledInstance] = deque()
        self._all: list[PooledInstance] = []
        self._on_done = on_done
        self.add(instances)

    def add(self, instances: Iterable[Instance]) -> None:
        added = [PooledInstance(each, self, self._on_done, self._idle_queue(each)) for each in instances]
        self._all += added
        for each in added:
            each.idle_queue.append(each)

    def retire(self, instances: Collection[Instance]) -> None:
        """Give these instances no more batches; those that they run go on. The caller closes them."""
        for each in [each for each in self._all if each.instance in instances]:
            self._all.remove(each)
            self._move(each, deque())

    def sort_idle(self) -> None:
        """Sort its instances into those that come first and those that come last, after their placements changed."""
        for each in self._all:
            self._move(each, self._idle_queue(each.instance))

    def _move(self, pooled: PooledInstance, queue: deque[PooledInstance]) -> None:
        if pooled.idle_queue is queue:
            return
        if pooled in pooled.idle_queue:
            pooled.idle_queue.remove(pooled)
            queue.append(pooled)
        pooled.idle_queue = queue

    def _idle_queue(self, instance: Instance) -> deque[PooledInstance]:
        is_spillover = instance.placement is not None and instance.placement.is_spillover
        return self._spillover if is_spillover else self._idle

    @property
    def instances(self) -> list[Instance]:
        return [each.instance for each in self._all]

    @property
    def has_idle(self) -> bool:
        """Whether any instance is free, ready or not."""
        return bool(self._idle or self._spillover)

    @property
    def wants_first(self) -> bool:
        """Whether the next request is better run now than with others of the event loop's turn."""
        return bool(self._idle) and self._idle[0].instance.wants_first

    @property
    def is_ready(self) -> bool:
        return any(each.instance.is_ready for each in self._all)

    def choose(self) -> PooledInstance | None:
        """Return a free instance, which stays free until it is taken; None where the batch should wait for a busy one.

        An instance that is being restarted is chosen only if all are: it runs the batch once it is back, or fails it.
        """
        for each in chain(self._idle, self._spillover):
            if each.instance.is_ready:
                return each
        idle = self._idle or self._spillover
        return idle[0] if idle and not self.is_ready else None

    def take(self, chosen: PooledInstance) -> PooledInstance | None:
        """Take `chosen` or an equal instance out of the pool for a batch; None where all must wait."""
        idle = chosen.idle_queue
        if idle[0] is chosen:
            idle.popleft()
        else:
            idle.remove(chosen)
        return chosen

    def put_back(self, pooled: PooledInstance) -> None:
        pooled.idle_queue.append(pooled)

    def claim_resources(self) -> None:
        """Register with the rate limiter, before anything runs. Raises INVALID for too few resources."""

    def withdraw(self) -> None:
        """Wait for resources no more: there is no batch to run."""

    async def warm_up(self, new_batch: Callable[[], WarmUpBatch]) -> None:
        """Run a batch on every instance, once on those that share a worker. Raises the first SluiceError."""
        await gather_runs([self._warm_up(each, new_batch()) for each in self._distinct()])

    async def _warm_up(self, pooled: PooledInstance, batch: WarmUpBatch) -> None:
        await batch.run_on(pooled.instance)

    def _distinct(self) -> Iterator[PooledInstance]:
        """Yield one instance for each worker: those with one placement object share a worker."""
        seen: set[int] = set()
        for each in self._all:
            placement = each.instance.placement
            if placement is None or id(placement) not in seen:
                seen.add(id(placement))
                yield each

    def close(self) -> None:
        """Release the claims of its instances, which are closed."""


class RateLimitedPool(InstancePool):
    """A pool whose instances run a batch once the rate limiter grants their resources.

    Of several instances that share a worker only the first is used: a batch that waits in a process would hold
    resources that others could use.
    """

    is_limited = True

    def __init__(
        self, instances: Sequence[Instance], on_done: OnDone, limiter: RateLimiter, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when an instance that waited for resources may try again."""
        super().__init__(instances, self._ran)
        self._on_batch_done = on_done
        self._limiter = limiter
        self._wake = wake
        self._claims: dict[PooledInstance, Claim] = {}
        for each in set(self._all).difference(self._distinct()):
            each.idle_queue.remove(each)

    def claim_resources(self) -> None:
        for each in self._distinct():
            placement = each.instance.placement
            if placement is not None and placement.resources:
                self._claims[each] = self._limiter.claim(placement, self._wake)

    @property
    def has_idle(self) -> bool:
        """Whether any free instance does not wait for resources. One that does will be woken."""
        return any(not self._is_waiting(each) for idle in (self._idle, self._spillover) for each in idle)

    def _is_waiting(self, pooled: PooledInstance) -> bool:
        claim = self._claims.get(pooled)
        return claim is not None and claim.is_waiting

    def take(self, chosen: PooledInstance) -> PooledInstance | None:
        for each in [*self._by_turn(self._idle), *self._by_turn(self._spillover)] or [chosen]:
            claim = self._claims.get(each)
            if claim is None or claim.take():
                return super().take(each)
        return None

    def _by_turn(self, idle: Iterable[PooledInstance]) -> list[PooledInstance]:
        def turn(pooled: PooledInstance) -> int:
            claim = self._claims.get(pooled)
            return claim.turn if claim is not None else 0

        return sorted((each for each in idle if each.instance.is_ready), key=turn)

    def put_back(self, pooled: PooledInstance) -> None:
        claim = self._claims.get(pooled)
        if claim is not None:
            claim.release()
        super().put_back(pooled)

    def _ran(self, jobs: list[InferJob]) -> None:
        # The model's own queue first: its turn may be next, and only a claim that waits is granted.
        self._on_batch_done(jobs)
        self._limiter.grant_waiting()

    def withdraw(self) -> None:
        for claim in self._claims.values():
            claim.withdraw()

    async def _warm_up(self, pooled: PooledInstance, batch: WarmUpBatch) -> None:
        claim = self._claims.get(pooled)
        if claim is None:
            await super()._warm_up(pooled, batch)
            return
        await claim.acquire()
        try:
            await super()._warm_up(pooled, batch)
        finally:
            claim.release()
            self._limiter.grant_waiting()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()


def open_pool(
    instances: Sequence[Instance], on_done: OnDone, limiter: RateLimiter | None, wake: Callable[[], None]
) -> InstancePool:
    """Return a pool, rate-limited where an instance needs resources; `wake` is called when one may try again."""
    if limiter is None or not any(each.placement is not None and each.placement.resources for each in instances):
        return InstancePool(instances, on_done)
    return RateLimitedPool(instances, on_done, limiter, wake)
