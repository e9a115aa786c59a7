"""Decides whether another replica computes a prompt, from values alone: no I/O, clock, logging or mutation."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from sluice.engine.types import GenerateRequest, SamplingParams

MIN_TOKENS = 512
"""Fewest tokens of a prompt, without those that are cached, for which it pays: what one step takes by default. Fewer
delay the streams beside them by one step, and the way over another replica takes about as long."""
PATIENCE = 4.0
"""The way over a prefill replica may take this many times as long as computing the prompt where it is needed, which
the streams there would feel."""
SLACK_S = 1.0
"""How much longer than predicted a prefill replica may take."""
FIRST_LIMIT_S = 30.0
"""How long it may take while it is unknown what computing the prompt where it is needed takes."""


class SplitReason(StrEnum):
    """Why a prompt is computed by a prefill replica, or is not."""

    SPLIT = "split"
    SHORT = "short"
    """The replica that generates has too little to compute."""
    WHOLE = "whole"
    """The replica that generates must compute the prompt: the request needs its logits or has images, or its runtime
    cannot go on as if it had computed the first token itself."""
    NOBODY = "nobody"
    """No prefill replica serves that has the adapter and computes the same blocks."""
    BUSY = "busy"
    """All prefill replicas would take too long."""


class SplitChoice(NamedTuple):
    """The decision, and the seconds after which a prefill replica is waited for no more."""

    reason: SplitReason
    limit_s: float = 0.0


def needs_whole_prompt(request: GenerateRequest) -> bool:
    """Return whether blocks from elsewhere are of no use to the request."""
    has_logits = request.sampling.prompt_logprobs is not None or request.returns_context_logits
    return bool(has_logits or request.images or request.resume_token_ids)


_UNSET = SamplingParams()


def may_change_engines(request: GenerateRequest, fields: Sequence[str]) -> bool:
    """Return whether one engine may choose the first token and another those after it, where the runtime's sampler can
    go on so with these `fields` of the sampling parameters alone."""
    allowed = {name: getattr(_UNSET, name) for name in fields}
    if request.sampling.temperature == 0.0:
        allowed["seed"] = None
    is_allowed = msgspec.structs.replace(request.sampling, **allowed) == _UNSET
    return is_allowed and request.sampling.max_tokens > 1 and not request.adapter


def choose_split(
    num_prompt: int,
    num_cached: int,
    *,
    block_size: int,
    min_tokens: int = MIN_TOKENS,
    is_whole: bool = False,
    compute_s: float | None = None,
    prefill_s: float | None = None,
) -> SplitChoice:
    """Decide about a prompt, of which the replica that generates has `num_cached` tokens and would compute the others
    in `compute_s`, None where that is unknown. `prefill_s` is what the best prefill replica takes with its waiting;
    None where there is none."""
    num_shareable = (num_prompt - 1) // block_size * block_size
    if num_shareable - num_cached < max(min_tokens, block_size):
        return SplitChoice(SplitReason.SHORT)
    if is_whole:
        return SplitChoice(SplitReason.WHOLE)
    if prefill_s is None:
        return SplitChoice(SplitReason.NOBODY)
    limit_s = FIRST_LIMIT_S if compute_s is None else PATIENCE * compute_s + SLACK_S
    if prefill_s > limit_s:
        return SplitChoice(SplitReason.BUSY)
    return SplitChoice(SplitReason.SPLIT, limit_s)
