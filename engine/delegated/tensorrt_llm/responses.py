"""From TensorRT-LLM's RequestOutput to tokens, log probabilities and finish reasons.

The object is one and the same at each response, changed in place; it holds all output so far. Versions differ in
whether a token that ends the sequence is among its tokens, in the form of log probabilities and in where they say how
much of the prompt was cached: all forms are read.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.delegated.interface import ResponseDelta
from engine.types import EventDetail, FinishReason, GenerateRequest, TokenLogprob
from sluice.errors import ErrorCode, SluiceError

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.CANCELLED}
_TIMED_OUT = "timeout"


class LlmRequestHandle:
    """A request in TensorRT-LLM, as `engine.delegated.interface.RequestHandle`. It reads with a cursor of its own."""

    __slots__ = (
        "_block_size",
        "_eos",
        "_has_cache_count",
        "_has_prompt_logprobs",
        "_last",
        "_num_read",
        "_output",
        "_replay",
        "_request",
        "_stops",
    )

    def __init__(self, output: Any, request: GenerateRequest, eos_token_ids: tuple[int, ...], block_size: int) -> None:
        """`output` is the RequestOutput of `request`."""
        params = request.sampling
        self._output = output
        self._request = request
        self._block_size = block_size
        self._eos = () if params.ignore_eos else eos_token_ids
        self._stops = frozenset((*params.stop_token_ids, *self._eos))
        self._replay: Sequence[int] = request.resume_token_ids if is_replayed(request) else ()
        """Output that was sent already and is generated again."""
        self._num_read = 0
        self._last: int | None = None
        self._has_cache_count = self._has_prompt_logprobs = False

    def __aiter__(self) -> AsyncIterator[Any]:
        responses: AsyncIterator[Any] = self._output.__aiter__()
        return responses

    @property
    def is_finished(self) -> bool:
        return bool(self._output.finished)

    def abort(self) -> None:
        self._output.abort()

    def read(self, response: Any) -> ResponseDelta:
        """Return what `response`, which is the RequestOutput, has that was not there before.

        Raises SluiceError: DEADLINE where TensorRT-LLM gave the request up for its time, INTERNAL where an answer that
        is generated again differs from what was sent.
        """
        best = response.outputs[0]  # of a beam search; else it is the only one
        reason = _finish_reason(best.finish_reason)
        token_ids = self._with_end(list(best.token_ids[self._num_read :]), best, reason)
        logprobs = self._logprobs(token_ids, best.logprobs)
        first, self._num_read = self._num_read, self._num_read + len(token_ids)
        self._last = token_ids[-1] if token_ids else self._last
        num_dropped = self._check_replay(token_ids, first)
        token_ids, logprobs = token_ids[num_dropped:], logprobs[num_dropped:]
        return ResponseDelta(token_ids, reason, self._detail(response, best, logprobs, is_last=reason is not None))

    def _with_end(self, token_ids: list[int], best: Any, reason: FinishReason | None) -> list[int]:
        """Add the token that ended the sequence, where this version leaves it out."""
        if reason is not FinishReason.STOP:
            return token_ids
        if (token_ids[-1] if token_ids else self._last) in self._stops:
            return token_ids
        if isinstance(best.stop_reason, int):
            return [*token_ids, best.stop_reason]
        return [*token_ids, *self._eos[:1]]  # the first is the end_id that it was given

    def _check_replay(self, token_ids: list[int], first: int) -> int:
        """Return how many of these tokens were sent before."""
        expected = self._replay[first : first + len(token_ids)]
        if list(expected) != token_ids[: len(expected)]:
            message = "the answer could not be continued after a restart: generated again, it takes another turn"
            raise SluiceError(ErrorCode.INTERNAL, message)
        return len(expected)

    def _detail(self, output: Any, best: Any, logprobs: list[TokenLogprob], *, is_last: bool) -> EventDetail | None:
        num_cached = None if self._has_cache_count else self._num_cached(output, best, is_last=is_last)
        prompt = None if self._has_prompt_logprobs else self._prompt_logprobs(best.prompt_logprobs)
        self._has_cache_count |= num_cached is not None
        self._has_prompt_logprobs |= prompt is not None
        if num_cached is None and prompt is None and not logprobs:
            return None
        return EventDetail(num_cached, logprobs or None, prompt)

    def _num_cached(self, output: Any, best: Any, *, is_last: bool) -> int | None:
        """Return the prompt tokens found in the cache; None while that is unknown. Some versions do not count: 0."""
        count = getattr(output, "cached_tokens", None) or getattr(best, "cached_tokens", None)
        if not count and is_last:
            metrics = getattr(best, "request_perf_metrics", None)
            blocks = getattr(getattr(metrics, "kv_cache_metrics", None), "num_reused_blocks", None)
            count = int(blocks or 0) * self._block_size
        if not count and not is_last:
            return None
        return min(int(count or 0), len(self._request.prompt_token_ids))

    # -- log probabilities

    def _logprobs(self, token_ids: list[int], entries: Sequence[Any] | None) -> list[TokenLogprob]:
        num_top = self._request.sampling.logprobs
        if num_top is None or not entries:
            return []
        fresh = entries[self._num_read : self._num_read + len(token_ids)]
        return [_token_logprob(token_id, entry, num_top) for token_id, entry in zip(token_ids, fresh, strict=False)]

    def _prompt_logprobs(self, entries: Sequence[Any] | None) -> list[TokenLogprob | None] | None:
        num_top = self._request.sampling.prompt_logprobs
        if num_top is None or not entries:
            return None
        return read_prompt_logprobs(self._request.prompt_token_ids, entries, num_top)


def is_replayed(request: GenerateRequest) -> bool:
    """Return whether an answer that goes on after a crash is generated anew from its prompt: a grammar is matched from
    the first token of the output, so that what was sent cannot be part of the prompt."""
    return bool(request.resume_token_ids) and request.sampling.grammar is not None


def _finish_reason(name: str | None) -> FinishReason | None:
    if name is None:
        return None
    if name == _TIMED_OUT:
        raise SluiceError(ErrorCode.DEADLINE, "TensorRT-LLM ended the request for its time")
    try:
        return _FINISH_REASONS[name]
    except KeyError:
        raise SluiceError(ErrorCode.INTERNAL, f"TensorRT-LLM ended the request with {name!r}") from None


def _token_logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    """`entry` is a number, or has a Logprob by token id: the likeliest and the token itself."""
    if not isinstance(entry, dict):
        return TokenLogprob(token_id, float(entry))
    best = sorted(((each, _number(logprob)) for each, logprob in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token_id, _number(entry[token_id]), best[:num_top])


def _number(logprob: Any) -> float:
    """Some versions have a number in place of a Logprob."""
    return float(getattr(logprob, "logprob", logprob))


def read_prompt_logprobs(prompt: Sequence[int], entries: Sequence[Any], num_top: int) -> list[TokenLogprob | None]:
    """Return one for each token of the prompt; None for the first, and for those whose own is missing.

    An entry belongs either to the token at its place, or (computed from the logits behind each token) to the next one.
    Which it is, the tokens say.
    """
    here = sum(_has(entry, token_id) for entry, token_id in zip(entries, prompt, strict=False))
    ahead = sum(_has(entry, token_id) for entry, token_id in zip(entries, prompt[1:], strict=False))
    is_in_place = not entries[0] or (len(entries) >= len(prompt) and here > ahead)
    own = [*(entries[1:] if is_in_place else entries)][: len(prompt) - 1]
    own += [None] * (len(prompt) - 1 - len(own))
    pairs = zip(prompt[1:], own, strict=True)
    return [None, *(_token_logprob(*pair, num_top) if _is_own(*pair) else None for pair in pairs)]


def _has(entry: Any, token_id: int) -> bool:
    return isinstance(entry, dict) and token_id in entry


def _is_own(token_id: int, entry: Any) -> bool:
    return entry is not None and (not isinstance(entry, dict) or token_id in entry)
