"""What the next step does, decided from values alone: no I/O, clock, logging or mutation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from engine.policies import Limits, S, guaranteed_no_evict


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """A piece of a prompt to prefill."""

    sequence: S
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """Who starts, which prompt pieces run and who decodes, in the order of the batch: decode, then prefill."""

    admitted: tuple[S, ...]
    decode: tuple[S, ...]
    prefill: tuple[Chunk[S], ...]

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


def plan_step(running: Iterable[S], waiting: Iterable[S], limits: Limits) -> StepPlan[S]:
    """Decide one step: first who may hold blocks (capacity), then which tokens run (batch).

    Decode comes first, so that a long prompt never holds up streams that are under way; prompts share
    what is left of `max_num_batched_tokens`, oldest first. `max_num_batched_tokens >= max_num_seqs`
    (checked with the config) makes decode always fit.
    """
    running = tuple(running)
    admitted = guaranteed_no_evict(running, waiting, limits)
    decode = tuple(sequence for sequence in running if not sequence.num_prompt_left)
    prefilling = [sequence for sequence in running if sequence.num_prompt_left]
    prefill = _chunks([*prefilling, *admitted], limits.max_num_batched_tokens - len(decode))
    return StepPlan(admitted, decode, prefill)


def _chunks(sequences: list[S], tokens_left: int) -> tuple[Chunk[S], ...]:
    chunks: list[Chunk[S]] = []
    for sequence in sequences:
        if tokens_left <= 0:
            break
        num_tokens = min(sequence.num_prompt_left, tokens_left)
        chunks.append(Chunk(sequence, num_tokens))
        tokens_left -= num_tokens
    return tuple(chunks)
