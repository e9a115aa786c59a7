"""Which waiting requests the runtime gets: those that would start there, and a few more to keep its batch full."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic

from sluice.engine.delegated.sharing import BlockSharing, H, SharedBlocks
from sluice.engine.scheduling.policies import Policy

LOOK_AHEAD_SHARE = 1 / 16
"""Requests in the runtime beyond those that can run, as a share of `max_num_seqs`. They take the places of those that
end, without a way to us and back in between. They are few because their order among each other is settled."""


@dataclass(frozen=True, slots=True)
class RuntimeCapacity:
    """How many requests and blocks the runtime has room for, and how it counts them."""

    max_num_seqs: int
    num_blocks: int
    policy: Policy
    takes_early: bool = True
    """Whether it may get requests before there is room for them (`DelegatedRuntime.takes_early`)."""
    sharing: BlockSharing = BlockSharing.NONE

    @property
    def look_ahead(self) -> int:
        """Return how many more requests it may have than those that can run."""
        return max(1, int(self.max_num_seqs * LOOK_AHEAD_SHARE)) if self.takes_early else 0


class RuntimeGate(Generic[H]):
    """Decides which waiting requests are handed to the runtime, by the blocks of those that it has. Methods take these
    in order of arrival; the gate is told of each that is handed over, begins and ends."""

    def __init__(self, capacity: RuntimeCapacity) -> None:
        self._capacity = capacity
        self.shared: SharedBlocks[H] = SharedBlocks(capacity.sharing)

    def choose(self, waiting: Iterable[H], in_flight: Collection[H]) -> list[H]:
        """Return the waiting requests, in order, that are handed over now; `shared` counts them from here on. Under a
        policy that is not in flight none is before the last batch has ended: in the runtime it would only stand in the
        way."""
        capacity = self._capacity
        if in_flight and not capacity.policy.is_in_flight:
            return []
        started = self.num_started(in_flight)
        ahead = len(in_flight) - started
        free = capacity.num_blocks - self.reserved_blocks(islice(in_flight, started))
        chosen: list[H] = []
        for each in waiting:
            needed = self._needed(each)
            if ahead == 0 and started < capacity.max_num_seqs and needed <= free:
                started, free = started + 1, free - needed
            elif not capacity.policy.is_in_flight or ahead == capacity.look_ahead:
                break
            else:
                ahead += 1
            self.shared.add(each)
            chosen.append(each)
        return chosen

    def num_started(self, in_flight: Iterable[H]) -> int:
        """Return how many requests have places and blocks; the rest waits in the runtime."""
        count, free = 0, self._capacity.num_blocks
        for each in in_flight:
            needed = self._needed(each)
            if count == self._capacity.max_num_seqs or needed > free:
                break
            count, free = count + 1, free - needed
        return count

    def num_starting(self, in_flight: Collection[H], queue: Iterable[H]) -> int:
        """Return how many of a queue would start now. What only they share among each other counts for each."""
        if in_flight and not self._capacity.policy.is_in_flight:
            return 0
        return self.num_started(chain(in_flight, queue)) - self.num_started(in_flight)

    def reserved_blocks(self, in_flight: Iterable[H]) -> int:
        """Return the blocks that are promised to these requests."""
        return sum(map(self._needed, in_flight))

    def _needed(self, holder: H) -> int:
        """Return the blocks that must be free for a request to start."""
        reserves_all = self._capacity.policy.reserves_worst_case
        needed = holder.worst_case_blocks if reserves_all else holder.num_allocated_blocks + 1
        return needed - self.shared.num_shared(holder)
