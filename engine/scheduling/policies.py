"""Capacity policies: which sequences may hold KV blocks in the next step.

Names and meaning are TensorRT-LLM's (`CapacitySchedulerPolicy`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from engine.config import SchedulerPolicy


class Schedulable(Protocol):
    """What the planner reads of a sequence."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens of its context still to run before the next one is sampled: 1 while it decodes."""
        ...

    def most_at_once(self, num_tokens_left: int) -> int:
        """How many of its last `num_tokens_left` context tokens may run in one step."""
        ...

    @property
    def num_drafts(self) -> int:
        """Draft tokens that it would like to have checked in the next step."""
        ...

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def num_held_blocks(self) -> int: ...

    @property
    def num_next_blocks(self) -> int:
        """Blocks beyond those held that it needs to sample its next token, drafts included."""
        ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[S]):
    """A waiting sequence with what the cache holds of it."""

    sequence: S
    num_tokens_left: int
    """Tokens that it would have to run before its first one is sampled."""
    cached_blocks: tuple[int, ...]
    """Blocks of its prefix that it can share."""
    num_revived: int
    """How many of these nobody holds now, so that they come out of the free blocks."""
    is_delayed: bool
    """Its next block is just being computed for another sequence: in a step or two it can share that one too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_free_blocks: int
    """Blocks that nobody holds, those in the prefix index included."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """Who starts and who must give its blocks back."""

    admitted: tuple[Candidate[S], ...] = ()
    paused: tuple[S, ...] = ()


Policy = Callable[[Sequence[S], Iterable[Candidate[S]], Limits, Callable[[S], int]], Decision[S]]
"""(running in order of admission, waiting in order, limits, blocks that only this sequence holds) -> decision."""


def guaranteed_no_evict(
    running: Sequence[S], waiting: Iterable[Candidate[S]], limits: Limits, private_blocks: Callable[[S], int]
) -> Decision[S]:
    """Admit, in order, whose worst case fits beside what is reserved; never pause.

    Guarantee: blocks that running and admitted sequences may yet come to need are free, so no later step can run
    out. A shared block is held once, however many count on it. The first misfit ends the search: whoever comes
    later must not starve it.
    """
    promised = sum(sequence.worst_case_blocks - sequence.num_held_blocks for sequence in running)
    spare = limits.num_free_blocks - promised
    admitted: list[Candidate[S]] = []
    for candidate in islice(waiting, limits.max_num_seqs - len(running)):
        if candidate.is_delayed:
            continue
        needed = candidate.sequence.worst_case_blocks - len(candidate.cached_blocks) + candidate.num_revived
        if needed > spare:
            break
        spare -= needed
        admitted.append(candidate)
    return Decision(tuple(admitted))


def static_batch(
    running: Sequence[S], waiting: Iterable[Candidate[S]], limits: Limits, private_blocks: Callable[[S], int]
) -> Decision[S]:
    """As `guaranteed_no_evict`, but nobody starts before the whole last batch has finished."""
    return Decision() if running else guaranteed_no_evict(running, waiting, limits, private_blocks)


def max_utilization(
    running: Sequence[S], waiting: Iterable[Candidate[S]], limits: Limits, private_blocks: Callable[[S], int]
) -> Decision[S]:
    """Admit on what the next token needs; where blocks run out, pause the youngest.

    Only a step that pauses nobody admits, and it leaves a block for each running sequence: what is admitted into
    the last block is paused in the next step.
    """
    kept, paused, free = list(running), [], limits.num_free_blocks
    served = 0
    while served < len(kept):
        needed = kept[served].num_next_blocks
        if needed <= free:
            free -= needed
            served += 1
        else:
            paused.append(kept.pop())
            free += private_blocks(paused[-1])
    if paused:
        return Decision(paused=tuple(paused))
    admitted: list[Candidate[S]] = []
    for candidate in islice(waiting, limits.max_num_seqs - len(running)):
        if candidate.is_delayed:
            continue
        needed = candidate.sequence.num_next_blocks - len(candidate.cached_blocks) + candidate.num_revived
        if needed + len(running) + len(admitted) > free:
            break
        free -= needed
        admitted.append(candidate)
    return Decision(tuple(admitted))


def policy_of(name: SchedulerPolicy) -> "Policy[S]":
    """The policy called `name`."""
    match name:
        case SchedulerPolicy.GUARANTEED_NO_EVICT:
            return guaranteed_no_evict
        case SchedulerPolicy.MAX_UTILIZATION:
            return max_utilization
        case SchedulerPolicy.STATIC_BATCH:
            return static_batch
