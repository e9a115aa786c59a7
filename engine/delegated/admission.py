"""Which waiting requests the runtime gets: those that would start there, and a few more to keep its batch full. Blocks
that several requests in flight share count once."""

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from sluice.engine.blocks import BlockHash
from sluice.engine.scheduling.planner import Policy

log = logging.getLogger(__name__)


class BlockSharing(Enum):
    """Which blocks of the prompts in flight a runtime is known to hold once. The values are for the log."""

    NONE = "each request's worst case counts in full"
    """Nothing is known of shared blocks, or there are none."""
    AWAITED = "a block that several prompts share counts once"
    """All that are shared: a request begins when the blocks of its prompt that another one computes are there."""
    RUNNING = "a block that several prompts share counts once, and that of a request that has not begun for itself"
    """As AWAITED, but a request that has no token yet is reckoned with in full."""
    COMPUTED = "a block of a prompt that is computed counts once"
    """Only what another request has computed by the hand-over: two may compute a block side by side, and have two."""


class Sharer(Protocol):
    """A request whose prompt may share blocks. It is compared and hashed by its identity."""

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def num_allocated_blocks(self) -> int: ...

    @property
    def prompt_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the whole blocks of its prompt that it may share, in order; empty for none."""
        ...


H = TypeVar("H", bound=Sharer)


class SharedBlocks(Generic[H]):
    """Counts, for each request in flight, the blocks of its prompt that another request counts already.

    For each block with such requests there is at least one that counts it: where that one ends, the oldest of the
    others counts it from then on. A change takes time in proportion to one prompt's blocks, a look at a prompt to the
    logarithm of their number.
    """

    def __init__(self, sharing: BlockSharing) -> None:
        self._sharing = sharing
        self._num_shared: dict[H, int] = {}
        """How many of its blocks each request in flight does not count, since others do."""
        self._sharers: dict[BlockHash, dict[H, None]] = {}
        """The requests that do not count a block, in the order in which they came to share it."""
        self._num_sources: dict[BlockHash, int] = {}
        """How many requests in flight have each block for others to share."""
        self._sources: set[H] = set()
        self._inherited: dict[H, set[BlockHash]] = {}
        """The blocks that each request counts in the place of one that has ended."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight, and nothing is left of what was."""
        return not (self._num_shared or self._sharers or self._num_sources or self._sources or self._inherited)

    def check_empty(self) -> None:
        """Nothing is in flight: what is left is a mistake of this class, which goes to the log and must not make later
        requests wait for room that there is."""
        if not self.is_empty:
            log.error("%d blocks are shared by requests that have ended; they are forgotten", len(self._num_sources))
            self._num_shared.clear()
            self._sharers.clear()
            self._num_sources.clear()
            self._sources.clear()
            self._inherited.clear()

    def num_shared(self, holder: H) -> int:
        """Return how many blocks of the request others count, or would count if it were handed over now."""
        known = self._num_shared.get(holder)
        if known is not None:
            return known
        return 0 if self._sharing is BlockSharing.RUNNING else self._num_found(holder)

    def add(self, holder: H) -> None:
        """The request is handed over."""
        self._num_shared[holder] = 0
        if self._sharing in (BlockSharing.AWAITED, BlockSharing.COMPUTED):
            self._share(holder)
        if self._sharing is BlockSharing.AWAITED:
            self._offer(holder)

    def begin(self, holder: H) -> None:
        """The request in flight has its first token: its prompt is computed."""
        if holder in self._sources or self._sharing is BlockSharing.NONE:
            return
        if self._sharing is BlockSharing.RUNNING:
            self._share(holder)
        self._offer(holder)

    def remove(self, holder: H) -> None:
        """The runtime holds nothing for the request any more."""
        is_source, inherited = holder in self._sources, self._inherited.pop(holder, set())
        if is_source or inherited or self._num_shared[holder]:
            for block_hash in holder.prompt_hashes:
                self._leave(holder, block_hash, is_source=is_source, is_counted=is_source or block_hash in inherited)
        self._sources.discard(holder)
        del self._num_shared[holder]

    def _num_found(self, holder: H) -> int:
        """Return how many of its blocks requests in flight have. Whoever has a block has all before it."""
        return bisect_left(holder.prompt_hashes, True, key=lambda block_hash: block_hash not in self._num_sources)

    def _share(self, holder: H) -> None:
        num_found = self._num_found(holder)
        for block_hash in holder.prompt_hashes[:num_found]:
            self._sharers.setdefault(block_hash, {})[holder] = None
        self._num_shared[holder] = num_found

    def _offer(self, holder: H) -> None:
        self._sources.add(holder)
        for block_hash in holder.prompt_hashes:
            self._num_sources[block_hash] = self._num_sources.get(block_hash, 0) + 1

    def _leave(self, holder: H, block_hash: BlockHash, *, is_source: bool, is_counted: bool) -> None:
        """Remove a request from those of a block. One that counted it and that others shared it of has an heir."""
        sharers = self._sharers.get(block_hash, {})
        if holder in sharers:
            del sharers[holder]
        elif is_counted and sharers:
            heir = next(iter(sharers))
            del sharers[heir]
            self._num_shared[heir] -= 1
            self._inherited.setdefault(heir, set()).add(block_hash)
        if not sharers:
            self._sharers.pop(block_hash, None)
        if is_source:
            self._num_sources[block_hash] -= 1
            if not self._num_sources[block_hash]:
                del self._num_sources[block_hash]


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
