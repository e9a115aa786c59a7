"""The rate limiter: it limits the resources that instances use together while they run (`--rate-limit`).

As in Triton, an instance runs when all its resources are free, a resource without a given count is as large as the
largest need, and of the waiting instances the one with the smallest product of priority and executions comes first.
Unlike in Triton, an instance that was idle or is new saves up no turns, and a waiting one holds up only later ones that
need the same resources.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from operator import attrgetter

from sluice.errors import invalid_argument
from sluice.serving.instance import Placement

ResourceKey = tuple[str, int | None]
"""A resource by name and device; device None: one for the whole server."""
ResourceNeeds = Mapping[ResourceKey, int]
"""The amount of each resource that an instance holds while it runs."""


class Claim:
    """One instance's claim to resources, and its turn among the waiting ones. Event loop's thread only."""

    __slots__ = ("_limiter", "is_granted", "needs", "priority", "since", "turn", "wake")

    def __init__(self, limiter: "RateLimiter", needs: ResourceNeeds, priority: int, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self.needs = needs
        self.priority = priority
        self.wake = wake
        self.turn = 0
        """Product of executions and priority; the smallest comes first."""
        self.since = 0
        """Number of its arrival, which orders equal turns; 0 while it does not wait."""
        self.is_granted = False

    @property
    def order(self) -> tuple[int, int]:
        return self.turn, self.since

    @property
    def is_waiting(self) -> bool:
        return self in self._limiter.waiting

    def take(self) -> bool:
        """Take all resources. Where that fails, it waits: `wake` is called when trying again will succeed."""
        return self._limiter.take(self)

    async def acquire(self) -> None:
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
            self._limiter.grant_waiting()
            raise
        finally:
            self.wake = before

    def release(self) -> None:
        """Release all resources. Others get them at the next `RateLimiter.grant_waiting`. Idempotent."""
        self._limiter.release(self)

    def withdraw(self) -> None:
        """Stop waiting. Idempotent."""
        self._limiter.withdraw(self)

    def close(self) -> None:
        """Remove the claim of an instance that is closed. Idempotent."""
        self._limiter.remove(self)


class RateLimiter:
    """Grants resources to the instances of one server. Event loop's thread only."""

    def __init__(self, resources: Mapping[tuple[str, int | None], int] | None = None) -> None:
        """`resources`: counts by name and device. Device None: on each device, or in all for a global resource."""
        self._resources = Resources(resources or {})
        self._claims: list[Claim] = []
        self._turns: dict[ResourceKey, int] = {}
        """The latest turn that was granted a resource, by resource. A new claim starts there."""
        self.waiting: list[Claim] = []
        """Waiting claims, in order."""
        self._arrivals = count(1)
        self._is_granting = False

    def claim(self, placement: Placement, wake: Callable[[], None]) -> Claim:
        """Return an instance's claim, to be closed with it. Raises INVALID for needs that could never be met."""
        needs = instance_needs(placement)
        self._resources.check(needs)
        claim = Claim(self, needs, max(placement.priority, 1), wake)
        self._claims.append(claim)
        self._update_needs()
        self.grant_waiting()
        return claim

    def _update_needs(self) -> None:
        self._resources.set_needs(claim.needs for claim in self._claims)
        self._turns = {key: turn for key, turn in self._turns.items() if key in self._resources.keys}

    def free(self, key: ResourceKey) -> int:
        """Return the free amount of a resource. It is negative after the instance with the largest need was closed."""
        return self._resources.free(key)

    @property
    def is_idle(self) -> bool:
        """Whether no resource is held and no claim waits."""
        return self._resources.are_free and not self.waiting

    def take(self, claim: Claim) -> bool:
        assert not claim.is_granted, "an instance runs one batch at a time"
        if claim not in self.waiting:
            self._join(claim)
        if not any(each is claim for each in self._runnable()):
            return False
        self.waiting.remove(claim)
        self._resources.take(claim.needs)
        for key in claim.needs:
            self._turns[key] = max(self._turns.get(key, 0), claim.turn)
        claim.is_granted, claim.since = True, 0
        claim.turn += claim.priority
        return True

    def _join(self, claim: Claim) -> None:
        if not claim.since:
            claim.since = next(self._arrivals)
            claim.turn = max(claim.turn, max((self._turns.get(key, 0) for key in claim.needs), default=0))
        insort(self.waiting, claim, key=attrgetter("order"))

    def _runnable(self) -> Iterator[Claim]:
        """Yield the waiting claims that can be granted, in order, after the needs of those before them."""
        left = {key: self._resources.free(key) for key in self._resources.keys}
        for claim in list(self.waiting):
            if all(left[key] >= needed for key, needed in claim.needs.items()):
                yield claim
            for key, needed in claim.needs.items():
                left[key] -= needed

    def release(self, claim: Claim) -> None:
        if claim.is_granted:
            claim.is_granted = False
            self._resources.release(claim.needs)

    def withdraw(self, claim: Claim) -> None:
        claim.since = 0
        if claim in self.waiting:
            self.waiting.remove(claim)
            self.grant_waiting()

    def remove(self, claim: Claim) -> None:
        if claim not in self._claims:
            return
        self.release(claim)
        self._claims.remove(claim)
        if claim in self.waiting:
            self.waiting.remove(claim)
        self._update_needs()
        self.grant_waiting()

    def grant_waiting(self) -> None:
        """Wake the claims that can be granted now, in order. Each takes its resources at once or has nothing to run."""
        if self._is_granting:
            return
        self._is_granting = True
        try:
            while (claim := next(self._runnable(), None)) is not None:
                self.waiting.remove(claim)
                claim.wake()
        finally:
            self._is_granting = False


class Resources:
    """Counts of resources, and what is held. Ungiven counts are the largest need, or 0 where any other is given."""

    def __init__(self, given: Mapping[tuple[str, int | None], int]) -> None:
        """`given`: counts by name and device. Device None: on each device, or in all for a global resource."""
        self._given = dict(given)
        self._totals: dict[ResourceKey, int] = {}
        self._held: dict[ResourceKey, int] = {}

    def check(self, needs: ResourceNeeds) -> None:
        """Raise INVALID, in Triton's words, for needs that could never be met."""
        for (name, device), needed in needs.items():
            given = self._given_count(name, device)
            if given is not None and given < needed:
                raise invalid_argument(
                    f'Resource count for "{name}" is limited to {given} which will prevent scheduling of one or more '
                    f"model instances, the minimum required count is {needed}"
                )
            known = {*needs, *self._totals}
            if (name, None) in known and any(other == name and at is not None for other, at in known):
                raise invalid_argument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )

    def _given_count(self, name: str, device: int | None) -> int | None:
        """Return the count that was given for a resource; for a global one, whatever device it was given for."""
        counts = [
            count
            for (known, at), count in self._given.items()
            if known == name and (device is None or at in (device, None))
        ]
        # A name that is not among those given is more likely a typing error than a resource without a limit.
        return max(counts, default=0 if self._given else None)

    def set_needs(self, needs: Iterable[ResourceNeeds]) -> None:
        """Set the needs of all instances, which determine the counts that were not given."""
        totals: dict[ResourceKey, int] = {}
        for each in needs:
            for key, needed in each.items():
                totals[key] = max(totals.get(key, 0), needed)
        for key in totals:
            given = self._given_count(*key)
            totals[key] = totals[key] if given is None else given
        self._totals = totals
        self._held = {key: held for key, held in self._held.items() if held or key in totals}

    @property
    def keys(self) -> Iterable[ResourceKey]:
        """Resources that any instance needs."""
        return self._totals.keys()

    def free(self, key: ResourceKey) -> int:
        """Return the free amount, negative after the instance with the largest need was closed."""
        return self._totals.get(key, 0) - self._held.get(key, 0)

    @property
    def are_free(self) -> bool:
        """Whether none is held."""
        return not any(self._held.values())

    def take(self, needs: ResourceNeeds) -> None:
        for key, needed in needs.items():
            self._held[key] = self._held.get(key, 0) + needed

    def release(self, needs: ResourceNeeds) -> None:
        for key, needed in needs.items():
            self._held[key] -= needed


def instance_needs(placement: Placement) -> dict[ResourceKey, int]:
    """Return the needs of an instance. As in Triton, one on the CPU uses the resources of device 0."""
    device = placement.gpu or 0
    return {(each.name, None if each.is_global else device): each.count for each in placement.resources if each.count}


def parse_resource(text: str) -> tuple[tuple[str, int | None], int]:
    """Parse `NAME:COUNT` or `NAME:COUNT:DEVICE` into key and count. Raises INVALID in Triton's words."""
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(each.isdecimal() for each in numbers):
        raise invalid_argument(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {text}"
        )
    return (name, int(numbers[1]) if len(numbers) == 2 else None), int(numbers[0])


def parse_resources(texts: Iterable[str]) -> dict[tuple[str, int | None], int]:
    """Parse a command line's resources. Of equal keys the last one counts."""
    return dict(map(parse_resource, texts))
