"""Plans the next step from values alone: no I/O, clock, logging or mutation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from sluice.engine.scheduling.policies import AdmissionCandidate, Policy, S, StepLimits


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
