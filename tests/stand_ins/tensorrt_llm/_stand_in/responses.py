"""What the iterations tell the results."""

from dataclasses import dataclass, field
from typing import Any

Likeliest = list[tuple[int, float, int]]
"""(token id, log probability, rank), best first."""


@dataclass(frozen=True, slots=True)
class SequenceResponse:
    """What one sequence of a request got since the last response."""

    new_token_ids: list[int]
    all_token_ids: list[int]
    logprobs: list[Likeliest]
    """One entry for each of the new tokens, where they are asked for."""
    cumulative_logprob: float | None
    finish_reason: Any
    """A `bindings.executor.FinishReason`, None while it goes on."""


@dataclass(frozen=True, slots=True)
class Response:
    """What one iteration brought for one request."""

    sequences: list[SequenceResponse] = field(default_factory=list)
    is_final: bool = False
    error: str | None = None
    is_only_this_request: bool = True
    """Whether an error is this request's own; else the executor is gone."""
    iteration: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Likeliest] | None = None
    perf_metrics: Any = None
