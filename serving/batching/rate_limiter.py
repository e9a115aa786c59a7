"""What instances may take together while they run (`--rate-limit`).

As in Triton, an instance runs when all its resources are free, a resource of which no count was given is as large as
the largest demand, and of those who wait the one with the smallest product of priority and executions comes first.
Unlike there, an instance that was idle or is new saves up no turns, and who waits holds up only those behind it who
want the same.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from operator import attrgetter

from serving.instance import Placement
from sluice.errors import ErrorCode, SluiceError

Key = tuple[str, int | None]
"""A resource by name and device; None: there is one for the whole server."""
Needs = Mapping[Key, int]


class Resources:
    """Where no count is given at all, there is as much of each as the largest demand, else nothing of what has none."""

    def __init__(self, given: Mapping[tuple[str, int | None], int]) -> None:
        """`given`: counts by name and device (None: on each, or in all for global ones)."""
        self._given = dict(given)
        self._totals: dict[Key, int] = {}
        self._held: dict[Key, int] = {}

    def check(self, needs: Needs) -> None:
        """Raises SluiceError INVALID, in Triton's words, for what could never be had."""
        for (name, device), needed in needs.items():
            given = self._given_of(name, device)
            if given is not None and given < needed:
                raise _invalid(
                    f'Resource count for "{name}" is limited to {given} which will prevent scheduling of one or more '
                    f"model instances, the minimum required count is {needed}"
                )
            known = {*needs, *self._totals}
            if (name, None) in known and any(other == name and at is not None for other, at in known):
                raise _invalid(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )

    def _given_of(self, name: str, device: int | None) -> int | None:
        """The count that was given for a resource; for a global one, whatever device it was given for."""
        counts = [
            count
            for (known, at), count in self._given.items()
            if known == name and (device is None or at in (device, None))
        ]
        # A name that is not among those given is a slip of the pen sooner than a resource without a limit.
        return max(counts, default=0 if self._given else None)

    def demand(self, needs: Iterable[Needs]) -> None:
        """What all that share them need now."""
        totals: dict[Key, int] = {}
        for each in needs:
            for key, needed in each.items():
                totals[key] = max(totals.get(key, 0), needed)
        for key in totals:
            given = self._given_of(*key)
            totals[key] = totals[key] if given is None else given
        self._totals = totals
        self._held = {key: held for key, held in self._held.items() if held or key in totals}

    @property
    def keys(self) -> Iterable[Key]:
        """Of all that somebody needs."""
        return self._totals.keys()

    def free(self, key: Key) -> int:
        """How much of one nobody holds. Below 0 after who needed most has gone."""
        return self._totals.get(key, 0) - self._held.get(key, 0)

    @property
    def are_free(self) -> bool:
        """Whether nobody holds anything."""
        return not any(self._held.values())

    def take(self, needs: Needs) -> None:
        for key, needed in needs.items():
            self._held[key] = self._held.get(key, 0) + needed

    def give_back(self, needs: Needs) -> None:
        for key, needed in needs.items():
            self._held[key] -= needed


def needs_of(placement: Placement) -> dict[Key, int]:
    """What an instance there takes. Like in Triton, one on the CPU takes what device 0 has."""
    device = placement.gpu or 0
    return {(each.name, None if each.is_global else device): each.count for each in placement.resources if each.count}


def parse_resource(text: str) -> tuple[tuple[str, int | None], int]:
    """`NAME:COUNT` or `NAME:COUNT:DEVICE` as a key and its count. Raises SluiceError INVALID in Triton's words."""
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(each.isdecimal() for each in numbers):
        raise _invalid(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {text}"
        )
    return (name, int(numbers[1]) if len(numbers) == 2 else None), int(numbers[0])


def parse_resources(texts: Iterable[str]) -> dict[tuple[str, int | None], int]:
    """All of a command line's; of equal keys the last one counts."""
    return dict(map(parse_resource, texts))


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)


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
