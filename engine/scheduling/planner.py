"""Plans the next step from values alone: no I/O, clock, logging or mutation.

Capacity policies decide which sequences may hold KV blocks. Names and meaning are TensorRT-LLM's
(`CapacitySchedulerPolicy`). A new policy is one more `Policy` here, and one more name in `SchedulerPolicy`; planner,
admission, forecast and the help of `--scheduler-policy` follow.

`choose_chunk` decides how many tokens of prompts a step takes, by what they cost on this model and machine, and by
whether streams wait for the step. A large chunk reads the weights once for many tokens; a small one ends soon.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from sluice.engine.config import SchedulerPolicy


class Schedulable(Protocol):
    """The properties of a sequence that policies and the planner read."""

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def num_allocated_blocks(self) -> int: ...

    @property
    def priority(self) -> int:
        """Its place among the contexts to compute: lower goes before higher."""
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
class CapacityDecision(Generic[S]):
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
    ) -> CapacityDecision[S]: ...


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
) -> CapacityDecision[S]:
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
    return CapacityDecision(tuple(admitted))


def _static_batch(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    num_private_blocks: Callable[[S], int],
) -> CapacityDecision[S]:
    """Admit as `guaranteed_no_evict` does, but only when the whole last batch has finished."""
    return CapacityDecision() if running else _guaranteed_no_evict(running, waiting, limits, num_private_blocks)


def _max_utilization(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    num_private_blocks: Callable[[S], int],
) -> CapacityDecision[S]:
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
        return CapacityDecision(preempted=tuple(preempted))
    admitted: list[AdmissionCandidate[S]] = []
    for candidate in _startable(waiting, limits, len(running)):
        needed = candidate.sequence.num_next_blocks - len(candidate.cached_blocks) + candidate.num_unreferenced
        if needed + len(running) + len(admitted) > free:
            break
        free -= needed
        admitted.append(candidate)
    return CapacityDecision(tuple(admitted))


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


TARGET_STEP_S = 0.04
"""Time of a step that streams are not to notice."""
MAX_RATIO = 3.0
"""Prompts may take so many times what decode takes alone, even past the target. A large model reaches no target, and
chunks that are too small would read its weights for little."""
LONGEST_STEP_S = 0.25
"""Time of a step in which nothing decodes: no stream waits for its end, but whoever comes meanwhile does."""

FIRST_CHUNK = 512
"""Tokens of a step while it is unknown what they take: large models take a second for them, small ones milliseconds."""
LARGEST_CHUNK = 2048
"""Beyond it a token is no cheaper, and the memory for the step's intermediate values grows on."""


class StepTimes(NamedTuple):
    """The durations of recent steps, in seconds."""

    decode_s: float = 0.0
    """A step that only decodes; 0 before the first."""
    prompt_token_s: float = 0.0
    """The time that one prompt token adds to a step; 0 before the first."""


class ChunkLimits(NamedTuple):
    """Bounds of a step's tokens of prompts."""

    least: int
    most: int
    is_chosen_by_load: bool = False
    """Whether `most` is only the most that is ever chosen. Otherwise steps without decode take as many."""


def choose_chunk(costs: StepTimes, limits: ChunkLimits, *, is_decoding: bool) -> int:
    """Return the most tokens of prompts for a step, in which others decode or not."""
    if not is_decoding and not limits.is_chosen_by_load:
        return limits.most
    if not costs.prompt_token_s:
        return min(FIRST_CHUNK, limits.most) if limits.is_chosen_by_load else limits.most
    allowed_s = max(TARGET_STEP_S - costs.decode_s, MAX_RATIO * costs.decode_s) if is_decoding else LONGEST_STEP_S
    return min(max(int(allowed_s / costs.prompt_token_s), limits.least), limits.most)


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[S]):
    """A piece of a context to prefill."""

    sequence: S
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """The sequences that start, are preempted, decode and prefill. A batch is decode first, then prefill."""

    admitted: tuple[AdmissionCandidate[S], ...]
    preempted: tuple[S, ...]
    decode: tuple[S, ...]
    num_drafts: tuple[int, ...]
    """How many draft tokens are checked of each of `decode`; empty if no sequence has any."""
    prefill: tuple[PrefillChunk[S], ...]

    @property
    def is_empty(self) -> bool:
        """Whether no token runs."""
        return not self.decode and not self.prefill


def plan_step(
    running: Sequence[S],
    waiting: Iterable[AdmissionCandidate[S]],
    limits: StepLimits,
    policy: Policy,
    num_private_blocks: Callable[[S], int],
) -> StepPlan[S]:
    """Plan one step: first which sequences hold blocks (capacity), then which tokens run (batch).

    Decode comes first, so that a long prompt never delays streams that are under way. Contexts share the rest of
    `max_num_batched_tokens`, by priority, then oldest first; beside decode they get no more than `max_prefill_tokens`,
    and without it no more than `max_tokens_alone`.
    Decode always fits, because the configuration is checked for `max_num_batched_tokens >= max_num_seqs`.
    """
    decision = policy.decide(running, waiting, limits, num_private_blocks)
    kept = running[: len(running) - len(decision.preempted)]  # policies preempt from the end
    decode = [sequence for sequence in kept if sequence.num_tokens_left == 1]
    long = [] if len(decode) == len(kept) else [_whole(s, s.num_tokens_left) for s in kept if s.num_tokens_left > 1]
    for candidate in decision.admitted:
        if candidate.num_tokens_left == 1:
            decode.append(candidate.sequence)
        else:
            long.append(_whole(candidate.sequence, candidate.num_tokens_left))
    if len(long) > 1:
        long.sort(key=lambda chunk: chunk.sequence.priority)
    tokens_left = limits.max_num_batched_tokens - len(decode)
    num_drafts = _grant_drafts(decode, tokens_left) if limits.may_have_drafts else ()
    tokens_left -= sum(num_drafts)
    most_prefill = limits.max_prefill_tokens if decode else limits.max_tokens_alone
    if most_prefill is not None:
        tokens_left = min(tokens_left, most_prefill)
    prefill = _cut_chunks(long, tokens_left)
    return StepPlan(decision.admitted, decision.preempted, tuple(decode), num_drafts, prefill)


def _whole(sequence: S, num_tokens_left: int) -> PrefillChunk[S]:
    return PrefillChunk(sequence, sequence.max_step_tokens(num_tokens_left))


def _grant_drafts(decode: list[S], tokens_left: int) -> tuple[int, ...]:
    requested = [sequence.num_drafts for sequence in decode]
    if not any(requested):
        return ()
    granted = []
    for num_drafts in requested:
        granted.append(min(num_drafts, tokens_left))
        tokens_left -= granted[-1]
    return tuple(granted)


def _cut_chunks(whole: list[PrefillChunk[S]], tokens_left: int) -> tuple[PrefillChunk[S], ...]:
    """Return the chunks that fit, the last one perhaps cut."""
    chunks: list[PrefillChunk[S]] = []
    for chunk in whole:
        if tokens_left <= 0:
            break
        chunks.append(PrefillChunk(chunk.sequence, min(chunk.num_tokens, tokens_left)))
        tokens_left -= chunks[-1].num_tokens
    return tuple(chunks)
