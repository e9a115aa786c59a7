"""Generation with token ids as output, and token sequences as stop words."""

from collections.abc import Sequence

from sluice.engine.types import FinishReason, TokenEvent
from sluice.pipelines.text.types import TextDetail, TextEvent

TokenSequences = tuple[tuple[int, ...], ...]
"""Words as token ids."""


class TokenPiece(TextEvent, frozen=True, gc=False):
    """Some tokens of a generation. `text` is empty; the counts are those of any text event. The token that ended the
    sequence (end of sequence) is counted but not in `token_ids`, as in TensorRT-LLM. `log_probs` belong to `token_ids`;
    they are empty where the request did not ask for them."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()


class StopSequences:
    """Finds where a stop sequence is complete. One that ends within the first `min_tokens` tokens does not count."""

    def __init__(self, sequences: TokenSequences, min_tokens: int) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._longest = max(map(len, sequences), default=0)
        self._min_tokens = min_tokens
        self._num_seen = 0
        self._tail: list[int] = []

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of `token_ids` complete a sequence, or None. They follow those of earlier calls."""
        if not self._sequences:
            return None
        for index, token_id in enumerate(token_ids):
            self._num_seen += 1
            self._tail.append(token_id)
            is_counted = self._num_seen > self._min_tokens
            if is_counted and any(self._tail[-len(sequence) :] == sequence for sequence in self._sequences):
                return index + 1
        del self._tail[: -self._longest]
        return None


class TokenPieces:
    """Makes pieces of one generation's token events, up to and including the first stop sequence."""

    def __init__(self, num_prompt_tokens: int, stops: StopSequences) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._stops = stops
        self._num_tokens = 0
        self._num_cached = 0
        self._total_log_prob: float | None = None

    def feed(self, event: TokenEvent) -> TokenPiece:
        """Return the piece of an event. Nothing follows the one with a finish reason."""
        token_ids, reason = event.token_ids, event.finish_reason
        num_shown = len(token_ids) - (reason is FinishReason.STOP)
        end = self._stops.find(token_ids[:num_shown])
        if end is not None:
            token_ids, num_shown, reason = token_ids[:end], end, FinishReason.STOP
        log_probs = self._log_probs(event, len(token_ids))
        self._num_tokens += len(token_ids)
        return TokenPiece(
            text="",
            num_tokens=len(token_ids),
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            finish_reason=reason,
            cached_tokens=self._num_cached,
            detail=None if self._total_log_prob is None else TextDetail(total_logprob=self._total_log_prob),
            token_ids=token_ids[:num_shown],
            log_probs=log_probs[:num_shown],
        )

    def _log_probs(self, event: TokenEvent, num_tokens: int) -> list[float]:
        detail = event.detail
        if detail is None:
            return []
        if detail.num_cached_tokens is not None:
            self._num_cached = detail.num_cached_tokens
        if detail.logprobs is None:
            return []
        log_probs = [entry.logprob for entry in detail.logprobs[:num_tokens]]
        self._total_log_prob = (self._total_log_prob or 0.0) + sum(log_probs)
        return log_probs
