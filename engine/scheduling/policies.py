"""Capacity policies: which sequences may hold KV blocks in the next step. Names and meaning are TensorRT-LLM's
(`CapacitySchedulerPolicy`). A new policy is one more `Policy` here, and one more name in `SchedulerPolicy`; planner,
admission, forecast and the help of `--scheduler-policy` follow."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from sluice.engine.config import SchedulerPolicy


class Schedulable(Protocol):
    """The properties of a sequence that policies and the planner read."""

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def num_allocated_blocks(self) -> int: ...

    @property
    def priority(self) -> int:
        """Whose context is computed first: lower goes before higher."""
        ...

    @property
    def num_tokens_left(self) -> int:
        """Tokens of its context to compute before the next one is sampled: 1 during decode."""
        ...

    def max_step_tokens(self, num_tokens_left: int) -> int:
        """Return how many of its last `num_tokens_left` context tokens may run in one step."""
        ...

    @property
    def num_drafts(self) -> int:
        """Draft tokens for the next step to check."""
        ...

    @property
    def num_next_blocks(self) -> int:
        """Blocks beyond the allocated ones that it needs to sample its next token, drafts included."""
        ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class AdmissionCandidate(Generic[S]):
    """A waiting sequence and what the prefix cache has of it."""

    sequence: S
    num_tokens_left: int
    """Tokens to compute before its first one is sampled."""
    cached_blocks: tuple[int, ...]
    """Blocks of its prefix that it can share."""
    num_unreferenced: int
    """How many of `cached_blocks` nobody references, so that sharing them takes them from the free blocks."""
    is_delayed: bool
    """Whether its next block is being computed for another sequence, so that it can share that one a step later."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_free_blocks: int
    """Blocks without references, including those in the prefix index."""
    max_prefill_tokens: int | None = None
    """Most tokens of prompts in a step in which others decode; None for no limit of their own."""
    max_tokens_alone: int | None = None
    """Most tokens of prompts in a step in which nothing decodes; None for no limit of their own."""
    may_have_drafts: bool = True
    """Whether running sequences can have draft tokens."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """The sequences that start, and those that must release their blocks."""

    admitted: tuple[AdmissionCandidate[S], ...] = ()
    preempted: tuple[S, ...] = ()


class DecideFunction(Protocol):
    """Decides, without side effects, which sequences hold blocks in the next step. `running` and `waiting` are in order
    of admission; `num_private_blocks` counts the blocks that only the given sequence references."""

    def __call__(
        self,
        running: Sequence[S],
        waiting: Iterable[AdmissionCandidate[S]],
        limits: StepLimits,
        num_private_blocks: Callable[[S], int],
        /,
    ) -> Decision[S]: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A capacity policy, with everything that other modules need to know about it."""

    name: SchedulerPolicy
    summary: str
    """When it admits a sequence, after the policy's name in the help of `--scheduler-policy`."""
    decide: DecideFunction
    reserves_worst_case: bool
    """Whether admission reserves every block that a sequence may ever need, so that no running sequence is
    preempted. Otherwise only the blocks of the next step count."""
    is_in_flight: bool = True
    """Whether sequences may join a running batch. Otherwise a new batch starts when the last one has finished."""


def _startable(
    waiting: Iterable[AdmissionCandidate[S]], limits: StepLimits, num_running: int
) -> Iterator[AdmissionCandidate[S]]:
    """Yield the candidates that need not wait for a prefix, one for each free place. A delayed one takes no place from
    those behind it. After `max_num_seqs` of them the search ends, as each costs a look at the prefix index."""
    num_places = limits.max_num_seqs - num_running
    for candidate in islice(waiting, num_places + limits.max_num_seqs if num_places > 0 else 0):
        if candidate.is_delayed:
            continue
        yield candidate
        num_places -= 1
        if num_places == 0:
            return


def _guaranteed_no_evict(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    num_private_blocks: Callable[[S], int],
) -> Decision[S]:
    """Admit, in order, the sequences whose worst case fits beside what is reserved; never preempt.

    Guarantee: the blocks that running and admitted sequences may still need are free, so no later step can run out.
    A shared block is allocated once, however many sequences count on it. The first misfit ends the search, so that
    later sequences cannot starve it.
    """
    spare: int | None = None
    admitted: list[AdmissionCandidate[S]] = []
    for candidate in _startable(waiting, limits, len(running)):
        if spare is None:  # most steps have no candidate
            reserved = sum(sequence.worst_case_blocks - sequence.num_allocated_blocks for sequence in running)
            spare = limits.num_free_blocks - reserved
        needed = candidate.sequence.worst_case_blocks - len(candidate.cached_blocks) + candidate.num_unreferenced
        if needed > spare:
            break
        spare -= needed
        admitted.append(candidate)
    return Decision(tuple(admitted))


def _static_batch(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    num_private_blocks: Callable[[S], int],
) -> Decision[S]:
    """Admit as `guaranteed_no_evict` does, but only when the whole last batch has finished."""
    return Decision() if running else _guaranteed_no_evict(running, waiting, limits, num_private_blocks)


def _max_utilization(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    num_private_blocks: Callable[[S], int],
) -> Decision[S]:
    """Admit on what the next token needs; if blocks run out, preempt the youngest, and admit none. Admission leaves a
    free block for each running sequence: one admitted into the last block would be preempted at once."""
    kept, preempted, free = list(running), [], limits.num_free_blocks
    served = 0
    while served < len(kept):
        needed = kept[served].num_next_blocks
        if needed <= free:
            free -= needed
            served += 1
        else:
            preempted.append(kept.pop())
            free += num_private_blocks(preempted[-1])
    if preempted:
        return Decision(preempted=tuple(preempted))
    admitted: list[AdmissionCandidate[S]] = []
    for candidate in _startable(waiting, limits, len(running)):
        needed = candidate.sequence.num_next_blocks - len(candidate.cached_blocks) + candidate.num_unreferenced
        if needed + len(running) + len(admitted) > free:
            break
        free -= needed
        admitted.append(candidate)
    return Decision(tuple(admitted))


POLICIES: Mapping[SchedulerPolicy, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(
                SchedulerPolicy.GUARANTEED_NO_EVICT,
                "admits a request when all it could ever need is free, and never pauses it",
                _guaranteed_no_evict,
                reserves_worst_case=True,
            ),
            Policy(
                SchedulerPolicy.MAX_UTILIZATION,
                "admits on what is needed now, so more run at once, and pauses the youngest when blocks run out, to "
                "compute it again later",
                _max_utilization,
                reserves_worst_case=False,
            ),
            Policy(
                SchedulerPolicy.STATIC_BATCH,
                "begins a batch when the last one is over",
                _static_batch,
                reserves_worst_case=True,
                is_in_flight=False,
            ),
        )
    }
)
"""All policies by name."""


def find_policy(name: str) -> Policy:
    """Return the policy called `name`, a member of `SchedulerPolicy` or its value."""
    return POLICIES[SchedulerPolicy(name)]
