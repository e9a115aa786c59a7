"""What instances may take together while they run (`--rate-limit`).

As in Triton, an instance runs when all its resources are free, a resource of which no count was given is as large as
the largest demand, and of those who wait the one with the smallest product of priority and executions comes first.
Unlike there, an instance that was idle or is new saves up no turns, and who waits holds up only those behind it who
want the same.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from operator import attrgetter

from serving.batching.resources import Key, Needs, Resources, needs_of
from serving.instance import Placement


class Claim:
    """What one instance takes while it runs, and its turn among those who wait. Event loop's thread only."""

    __slots__ = ("_limiter", "is_held", "needs", "priority", "since", "turn", "wake")

    def __init__(self, limiter: "RateLimiter", needs: Needs, priority: int, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self.needs = needs
        self.priority = priority
        self.wake = wake
        self.turn = 0
        """Executions by priority: the smallest comes first."""
        self.since = 0
        """Orders those whose turn is equal; 0 while it does not wait."""
        self.is_held = False

    @property
    def order(self) -> tuple[int, int]:
        return self.turn, self.since

    @property
    def is_waiting(self) -> bool:
        return self._limiter.has_waiting(self)

    def take(self) -> bool:
        """Take everything, or wait in line: `wake` is called when trying again will do."""
        return self._limiter.take(self)

    async def acquire(self) -> None:
        """Wait in line, and take everything."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            if not taken.done() and self.take():
                taken.set_result(None)

        before, self.wake = self.wake, take
        try:
            take()
            await taken
        except BaseException:
            self.withdraw()
            self.release()
            self._limiter.hand_out()
            raise
        finally:
            self.wake = before

    def release(self) -> None:
        """Give everything back. Idempotent; others get it with the next `RateLimiter.hand_out`."""
        self._limiter.release(self)

    def withdraw(self) -> None:
        """Wait no more. Idempotent."""
        self._limiter.withdraw(self)

    def close(self) -> None:
        """Its instance has gone. Idempotent."""
        self._limiter.remove(self)


class RateLimiter:
    """One for a server. Event loop's thread only."""

    def __init__(self, resources: Mapping[tuple[str, int | None], int] | None = None) -> None:
        """`resources`: how much there is, by name and device (None: on each, or in all for global ones)."""
        self._resources = Resources(resources or {})
        self._claims: list[Claim] = []
        self._turns: dict[Key, int] = {}
        """The latest turn that got something of a resource: who comes anew begins there."""
        self._line: list[Claim] = []
        """Who waits, in order."""
        self._arrivals = count(1)
        self._is_handing_out = False

    def claim(self, placement: Placement, wake: Callable[[], None]) -> Claim:
        """What an instance there needs, to be closed with it.

        Raises SluiceError INVALID, in Triton's words, for what it could never get.
        """
        needs = needs_of(placement)
        self._resources.check(needs)
        claim = Claim(self, needs, max(placement.priority, 1), wake)
        self._claims.append(claim)
        self._count_demands()
        self.hand_out()
        return claim

    def _count_demands(self) -> None:
        self._resources.demand(claim.needs for claim in self._claims)
        self._turns = {key: turn for key, turn in self._turns.items() if key in self._resources.keys}

    def free(self, key: Key) -> int:
        """How much of a resource nobody holds. Below 0 after the one who needed most has gone."""
        return self._resources.free(key)

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds anything, and nobody waits."""
        return self._resources.are_free and not self._line

    def has_waiting(self, claim: Claim) -> bool:
        return claim in self._line

    def take(self, claim: Claim) -> bool:
        assert not claim.is_held, "an instance runs one batch at a time"
        if claim not in self._line:
            self._join(claim)
        if not any(each is claim for each in self._runnable()):
            return False
        self._line.remove(claim)
        self._resources.take(claim.needs)
        for key in claim.needs:
            self._turns[key] = max(self._turns.get(key, 0), claim.turn)
        claim.is_held, claim.since = True, 0
        claim.turn += claim.priority
        return True

    def _join(self, claim: Claim) -> None:
        if not claim.since:
            claim.since = next(self._arrivals)
            claim.turn = max(claim.turn, max((self._turns.get(key, 0) for key in claim.needs), default=0))
        insort(self._line, claim, key=attrgetter("order"))

    def _runnable(self) -> Iterator[Claim]:
        """Of those who wait, in order, who finds free what those before it leave."""
        left = {key: self._resources.free(key) for key in self._resources.keys}
        for claim in list(self._line):
            if all(left[key] >= needed for key, needed in claim.needs.items()):
                yield claim
            for key, needed in claim.needs.items():
                left[key] -= needed

    def release(self, claim: Claim) -> None:
        if claim.is_held:
            claim.is_held = False
            self._resources.give_back(claim.needs)

    def withdraw(self, claim: Claim) -> None:
        claim.since = 0
        if claim in self._line:
            self._line.remove(claim)
            self.hand_out()

    def remove(self, claim: Claim) -> None:
        if claim not in self._claims:
            return
        self.release(claim)
        self._claims.remove(claim)
        if claim in self._line:
            self._line.remove(claim)
        self._count_demands()
        self.hand_out()

    def hand_out(self) -> None:
        """Wake who may run now, in order. Who was woken takes what it needs at once, or wants nothing any more."""
        if self._is_handing_out:
            return
        self._is_handing_out = True
        try:
            while (claim := next(self._runnable(), None)) is not None:
                self._line.remove(claim)
                claim.wake()
        finally:
            self._is_handing_out = False
