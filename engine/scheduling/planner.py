"""What the next step does, decided from values alone: no I/O, clock, logging or mutation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from engine.scheduling.policies import Candidate, Limits, Policy, S


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """A piece of a context to prefill."""

    sequence: S
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """Who starts, who stops for now, who decodes, which pieces of contexts run; a batch is decode, then prefill."""

    admitted: tuple[Candidate[S], ...]
    paused: tuple[S, ...]
    decode: tuple[S, ...]
    num_drafts: tuple[int, ...]
    """How many draft tokens each of `decode` has checked; empty where nobody has any."""
    prefill: tuple[Chunk[S], ...]

    @property
    def is_empty(self) -> bool:
        """Whether no token runs."""
        return not self.decode and not self.prefill


def plan_step(
    running: Sequence[S],
    waiting: Iterable[Candidate[S]],
    limits: Limits,
    policy: Policy[S],
    private_blocks: Callable[[S], int],
) -> StepPlan[S]:
    """Decide one step: first who may hold blocks (capacity), then which tokens run (batch).

    Decode comes first, so that a long prompt never holds up streams that are under way; contexts share
    what is left of `max_num_batched_tokens`, oldest first. `max_num_batched_tokens >= max_num_seqs`
    (checked with the config) makes decode always fit.
    """
    decision = policy(running, waiting, limits, private_blocks)
    kept = _without(running, decision.paused)
    decode = [sequence for sequence in kept if sequence.num_tokens_left == 1]
    long = [] if len(decode) == len(kept) else [_rest(s, s.num_tokens_left) for s in kept if s.num_tokens_left > 1]
    for candidate in decision.admitted:
        if candidate.num_tokens_left == 1:
            decode.append(candidate.sequence)
        else:
            long.append(_rest(candidate.sequence, candidate.num_tokens_left))
    tokens_left = limits.max_num_batched_tokens - len(decode)
    num_drafts = _drafts(decode, tokens_left)
    prefill = _chunks(long, tokens_left - sum(num_drafts))
    return StepPlan(decision.admitted, decision.paused, tuple(decode), num_drafts, prefill)


def _rest(sequence: S, num_tokens_left: int) -> Chunk[S]:
    return Chunk(sequence, sequence.most_at_once(num_tokens_left))


def _without(running: Sequence[S], paused: tuple[S, ...]) -> Sequence[S]:
    """Policies pause from the end."""
    return running[: len(running) - len(paused)]


def _drafts(decode: list[S], tokens_left: int) -> tuple[int, ...]:
    wanted = [sequence.num_drafts for sequence in decode]
    if not any(wanted):
        return ()
    granted = []
    for num_drafts in wanted:
        granted.append(min(num_drafts, tokens_left))
        tokens_left -= granted[-1]
    return tuple(granted)


def _chunks(whole: list[Chunk[S]], tokens_left: int) -> tuple[Chunk[S], ...]:
    chunks: list[Chunk[S]] = []
    for chunk in whole:
        if tokens_left <= 0:
            break
        chunks.append(Chunk(chunk.sequence, min(chunk.num_tokens, tokens_left)))
        tokens_left -= chunks[-1].num_tokens
    return tuple(chunks)
