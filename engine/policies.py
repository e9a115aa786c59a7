"""Capacity policies: which waiting sequences may start to hold blocks.

Names and meaning are TensorRT-LLM's (`CapacitySchedulerPolicy`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Schedulable(Protocol):
    """What the planner reads of a sequence."""

    @property
    def num_prompt_left(self) -> int: ...

    @property
    def worst_case_blocks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    usable_blocks: int


S = TypeVar("S", bound=Schedulable)


def guaranteed_no_evict(running: Iterable[S], waiting: Iterable[S], limits: Limits) -> tuple[S, ...]:
    """The waiting sequences, oldest first, whose worst case fits beside what is reserved.

    Guarantee: blocks reserved by running + admitted <= limits.usable_blocks, so no later step can run
    out and nothing is ever evicted. The first misfit ends the search: whoever comes later must not
    starve it.
    """
    reserved = num_running = 0
    for sequence in running:
        reserved += sequence.worst_case_blocks
        num_running += 1
    admitted: list[S] = []
    for sequence in waiting:
        reserved += sequence.worst_case_blocks
        if reserved > limits.usable_blocks or num_running + len(admitted) >= limits.max_num_seqs:
            break
        admitted.append(sequence)
    return tuple(admitted)
