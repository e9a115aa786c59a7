"""Which waiting requests the runtime gets: those that would start there, and a few more to keep its batch full."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from engine.scheduling.policies import BlockHolder, Policy

LOOK_AHEAD_SHARE = 1 / 16
"""Requests in the runtime beyond those that can run, as a share of `max_num_seqs`. They take the places of those that
end, without a way to us and back in between. They are few because their order among each other is settled."""


H = TypeVar("H", bound=BlockHolder)


@dataclass(frozen=True, slots=True)
class RuntimeCapacity:
    """How many requests and blocks the runtime has room for."""

    max_num_seqs: int
    num_blocks: int
    policy: Policy
    reserves: bool = True
    """Whether it starts a request only where the blocks of the policy are free (`DelegatedRuntime.reserves_blocks`)."""

    @property
    def look_ahead(self) -> int:
        """Return how many more requests it may have than those that can run. One that does not reserve has none: it
        would start them, and evict others for them."""
        return max(1, int(self.max_num_seqs * LOOK_AHEAD_SHARE)) if self.reserves else 0


def num_started(in_flight: Iterable[BlockHolder], capacity: RuntimeCapacity) -> int:
    """Return how many requests in flight, given in order of arrival, have places and blocks; the rest waits there."""
    count, free = 0, capacity.num_blocks
    for each in in_flight:
        needed = capacity.policy.start_blocks(each)
        if count == capacity.max_num_seqs or needed > free:
            break
        count, free = count + 1, free - needed
    return count


def choose_admitted(waiting: Iterable[H], in_flight: Collection[BlockHolder], capacity: RuntimeCapacity) -> list[H]:
    """Return the waiting requests, in order, that are handed to the runtime now. Under a policy that is not in flight
    none is before the last batch has ended: in the runtime it would only stand in the way."""
    if in_flight and not capacity.policy.is_in_flight:
        return []
    started = num_started(in_flight, capacity)
    ahead = len(in_flight) - started
    free = capacity.num_blocks - sum(capacity.policy.start_blocks(each) for each in islice(in_flight, started))
    chosen: list[H] = []
    for each in waiting:
        needed = capacity.policy.start_blocks(each)
        if ahead == 0 and started < capacity.max_num_seqs and needed <= free:
            started, free = started + 1, free - needed
        elif not capacity.policy.is_in_flight or ahead == capacity.look_ahead:
            break
        else:
            ahead += 1
        chosen.append(each)
    return chosen
