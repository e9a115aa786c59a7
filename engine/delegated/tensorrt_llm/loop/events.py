"""From TensorRT-LLM's RequestOutput to tokens, log probabilities and ends.

The object is one and the same at each response, changed in place; what it holds is all output so far. Versions differ
in whether a token that ends the sequence is among its tokens, in the form of log probabilities and in where they say
how much of the prompt was cached: all forms are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import EngineInfo, EventDetail, FinishReason, GenerateRequest, TokenLogprob
from sluice.errors import ErrorCode, SluiceError

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.CANCELLED}
TIMED_OUT = "timeout"


@dataclass(frozen=True, slots=True)
class News:
    """What one response brought. `finish_reason` is CANCELLED only where TensorRT-LLM says so."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    detail: EventDetail | None

    @property
    def is_empty(self) -> bool:
        return not self.token_ids and self.finish_reason is None and self.detail is None


class OutputReader:
    """Reads one request's output with a cursor of its own."""

    __slots__ = (
        "_block_size",
        "_eos",
        "_is_cache_told",
        "_is_prompt_told",
        "_last",
        "_replay",
        "_request",
        "_stops",
        "_taken",
    )

    def __init__(self, request: GenerateRequest, info: EngineInfo) -> None:
        params = request.sampling
        self._request = request
        self._block_size = info.block_size
        self._eos = () if params.ignore_eos else info.eos_token_ids
        self._stops = frozenset((*params.stop_token_ids, *self._eos))
        self._replay: Sequence[int] = request.resume_token_ids if is_replayed(request) else ()
        """Output that went out already and is generated again."""
        self._taken = 0
        self._last: int | None = None
        self._is_cache_told = self._is_prompt_told = False

    def read(self, output: Any) -> News:
        """What `output` has that was not there before.

        Raises SluiceError: DEADLINE where TensorRT-LLM gave the request up for its time, INTERNAL where an answer that
        is generated again takes another turn.
        """
        best = output.outputs[0]  # of a beam search; else it is the only one
        reason = _finish_reason(best.finish_reason)
        token_ids = self._with_end(list(best.token_ids[self._taken :]), best, reason)
        logprobs = self._logprobs(token_ids, best.logprobs)
        first, self._taken = self._taken, self._taken + len(token_ids)
        self._last = token_ids[-1] if token_ids else self._last
        num_dropped = self._check_replay(token_ids, first)
        token_ids, logprobs = token_ids[num_dropped:], logprobs[num_dropped:]
        return News(token_ids, reason, self._detail(output, best, logprobs, is_last=reason is not None))

    def _with_end(self, token_ids: list[int], best: Any, reason: FinishReason | None) -> list[int]:
        """`token_ids` with the token that ended the sequence, where this version leaves it out."""
        if reason is not FinishReason.STOP:
            return token_ids
        if (token_ids[-1] if token_ids else self._last) in self._stops:
            return token_ids
        if isinstance(best.stop_reason, int):
            return [*token_ids, best.stop_reason]
        return [*token_ids, *self._eos[:1]]  # the first is the end_id that it was given

    def _check_replay(self, token_ids: list[int], first: int) -> int:
        """How many of these tokens went out before."""
        expected = self._replay[first : first + len(token_ids)]
        if list(expected) != token_ids[: len(expected)]:
            message = "the answer could not be continued after a restart: generated again, it takes another turn"
            raise SluiceError(ErrorCode.INTERNAL, message)
        return len(expected)

    def _detail(self, output: Any, best: Any, logprobs: list[TokenLogprob], *, is_last: bool) -> EventDetail | None:
        num_cached = None if self._is_cache_told else self._num_cached(output, best, is_last=is_last)
        prompt = None if self._is_prompt_told else self._prompt_logprobs(best.prompt_logprobs)
        self._is_cache_told |= num_cached is not None
        self._is_prompt_told |= prompt is not None
        if num_cached is None and prompt is None and not logprobs:
            return None
        return EventDetail(num_cached, logprobs or None, prompt)

    def _num_cached(self, output: Any, best: Any, *, is_last: bool) -> int | None:
        """Prompt tokens found in the cache; None while it is not known. 0 may mean that this version does not count."""
        told = getattr(output, "cached_tokens", None) or getattr(best, "cached_tokens", None)
        if not told and is_last:
            told = self._num_reused(best)
        if not told and not is_last:
            return None
        return min(int(told or 0), len(self._request.prompt_token_ids))

    def _num_reused(self, best: Any) -> int:
        metrics = getattr(best, "request_perf_metrics", None)
        blocks = getattr(getattr(metrics, "kv_cache_metrics", None), "num_reused_blocks", None)
        return int(blocks or 0) * self._block_size

    # -- log probabilities

    def _logprobs(self, token_ids: list[int], entries: Sequence[Any] | None) -> list[TokenLogprob]:
        num_top = self._request.sampling.logprobs
        if num_top is None or not entries:
            return []
        fresh = entries[self._taken : self._taken + len(token_ids)]
        return [_logprob(token_id, entry, num_top) for token_id, entry in zip(token_ids, fresh, strict=False)]

    def _prompt_logprobs(self, entries: Sequence[Any] | None) -> list[TokenLogprob | None] | None:
        num_top = self._request.sampling.prompt_logprobs
        if num_top is None or not entries:
            return None
        return prompt_logprobs(self._request.prompt_token_ids, entries, num_top)


def is_replayed(request: GenerateRequest) -> bool:
    """Whether an answer that goes on after a crash is generated anew from its prompt: a grammar is matched from the
    first token of the output, and what went out is no part of the prompt to it."""
    return bool(request.resume_token_ids) and request.sampling.grammar is not None


def _finish_reason(told: str | None) -> FinishReason | None:
    if told is None:
        return None
    if told == TIMED_OUT:
        raise SluiceError(ErrorCode.DEADLINE, "TensorRT-LLM ended the request for its time")
    try:
        return _FINISH_REASONS[told]
    except KeyError:
        raise SluiceError(ErrorCode.INTERNAL, f"TensorRT-LLM ended the request with {told!r}") from None


def _logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    """`entry` is a number, or by token id a Logprob: the likeliest and the token itself."""
    if not isinstance(entry, dict):
        return TokenLogprob(token_id, float(entry))
    best = sorted(((each, value(told)) for each, told in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token_id, value(entry[token_id]), best[:num_top])


def value(told: Any) -> float:
    """Of a Logprob, or of the number that some versions have in its place."""
    return float(getattr(told, "logprob", told))


def prompt_logprobs(prompt: Sequence[int], entries: Sequence[Any], num_top: int) -> list[TokenLogprob | None]:
    """One for each token of the prompt; None for the first, and for those whose own is not told.

    An entry belongs either to the token at its place, or (computed from the logits behind each token) to the next one.
    Which it is, the tokens say.
    """
    here = sum(_has(entry, token_id) for entry, token_id in zip(entries, prompt, strict=False))
    ahead = sum(_has(entry, token_id) for entry, token_id in zip(entries, prompt[1:], strict=False))
    is_in_place = not entries[0] or (len(entries) >= len(prompt) and here > ahead)
    told = [*(entries[1:] if is_in_place else entries)][: len(prompt) - 1]
    told += [None] * (len(prompt) - 1 - len(told))
    return [None, *(_or_none(token_id, entry, num_top) for token_id, entry in zip(prompt[1:], told, strict=True))]


def _has(entry: Any, token_id: int) -> bool:
    return isinstance(entry, dict) and token_id in entry


def _or_none(token_id: int, entry: Any, num_top: int) -> TokenLogprob | None:
    if entry is None or (isinstance(entry, dict) and token_id not in entry):
        return None
    return _logprob(token_id, entry, num_top)
