"""Who is handed to TensorRT-LLM: those that would start there, and a few more, so that its batch is never short."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from engine.config import SchedulerPolicy

LOOK_AHEAD_SHARE = 1 / 16
"""Requests in TensorRT-LLM beyond those that can run, as a share of `max_num_seqs`. They take the places of those who
end without a way to us and back in between; but their order among each other is settled, so they are few."""


class Holder(Protocol):
    """What is read of a sequence."""

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def num_allocated_blocks(self) -> int: ...


H = TypeVar("H", bound=Holder)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of TensorRT-LLM: its places and its blocks."""

    max_num_seqs: int
    num_blocks: int
    policy: SchedulerPolicy

    @property
    def look_ahead(self) -> int:
        return max(1, int(self.max_num_seqs * LOOK_AHEAD_SHARE))

    def blocks_of(self, holder: Holder) -> int:
        """What it must find free to start: all that it may come to need, or under MAX_UTILIZATION its next step's."""
        if self.policy is SchedulerPolicy.MAX_UTILIZATION:
            return holder.num_allocated_blocks + 1
        return holder.worst_case_blocks


def num_started(inside: Iterable[Holder], capacity: Capacity) -> int:
    """How many of those inside, which came in this order, have places and blocks; the rest waits in there."""
    count, free = 0, capacity.num_blocks
    for each in inside:
        needed = capacity.blocks_of(each)
        if count == capacity.max_num_seqs or needed > free:
            break
        count, free = count + 1, free - needed
    return count


def to_hand_over(waiting: Iterable[H], inside: Collection[Holder], capacity: Capacity) -> list[H]:
    """Those of `waiting`, in order, that are to go to TensorRT-LLM now.

    Under STATIC_BATCH nobody goes before the last batch has ended: in there it would only stand in the way.
    """
    is_static = capacity.policy is SchedulerPolicy.STATIC_BATCH
    if is_static and inside:
        return []
    started = num_started(inside, capacity)
    ahead = len(inside) - started
    free = capacity.num_blocks - sum(capacity.blocks_of(each) for each in islice(inside, started))
    chosen: list[H] = []
    for each in waiting:
        needed = capacity.blocks_of(each)
        if ahead == 0 and started < capacity.max_num_seqs and needed <= free:
            started, free = started + 1, free - needed
        elif is_static or ahead == capacity.look_ahead:
            break
        else:
            ahead += 1
        chosen.append(each)
    return chosen
