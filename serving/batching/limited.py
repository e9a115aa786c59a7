"""Instances that share resources with those of other models."""

from collections.abc import Callable, Iterable, Sequence

from serving.batching.instances import InstancePool, InstanceSlot, OnDone
from serving.batching.rate_limiter import Claim, RateLimiter
from serving.batching.warming import WarmUpBatch
from serving.instance import Instance
from serving.job import Job


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

    def _ran(self, jobs: list[Job]) -> None:
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
