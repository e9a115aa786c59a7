"""vLLM's responses: from a RequestOutput to tokens, log probabilities and finish reasons, and from exceptions to the
engine's end or the request's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from sluice.engine.delegated.interface import ResponseDelta, RuntimeFailure, internal_error
from sluice.engine.guidance.translate import reword_error
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest, TokenLogprob
from sluice.errors import ErrorCode, SluiceError

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
_FATAL = "EngineDeadError"
_REFUSALS = frozenset({"VLLMValidationError", "VLLMClientError", "ValueError", "TypeError"})
"""Classes of what vLLM raises where it checks a request."""


class VllmRequestHandle:
    """A request in vLLM, as `sluice.engine.delegated.interface.RequestHandle`. Its outputs hold only what is new."""

    def __init__(self, outputs: AsyncIterator[Any], request: GenerateRequest, abort: Callable[[], Awaitable[None]]):
        self._outputs = outputs
        self._request = request
        self._abort = abort
        self._aborting: asyncio.Task[None] | None = None
        self._has_cache_count = False
        self.is_finished = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._outputs

    def abort(self) -> None:
        if self._aborting is None:
            self._aborting = asyncio.ensure_future(self._abort())

    def read(self, response: Any) -> ResponseDelta:
        """Return what the RequestOutput brings. Raises INTERNAL for an end that has no meaning here."""
        [output] = response.outputs
        self.is_finished = bool(response.finished)
        reason = None
        if output.finish_reason is not None:
            reason = _FINISH_REASONS.get(output.finish_reason)
            if reason is None:
                raise SluiceError(ErrorCode.INTERNAL, f"vLLM ended the request with {output.finish_reason!r}")
        token_ids = list(output.token_ids)
        return ResponseDelta(token_ids, reason, self._detail(response, output, token_ids))

    def _detail(self, response: Any, output: Any, token_ids: list[int]) -> EventDetail | None:
        sampling = self._request.sampling
        logprobs = prompt_logprobs = num_cached = None
        if sampling.logprobs is not None and output.logprobs:
            pairs = zip(token_ids, output.logprobs, strict=False)
            logprobs = [token_logprob(token_id, entry, sampling.logprobs) for token_id, entry in pairs]
        if sampling.prompt_logprobs is not None and response.prompt_logprobs and not self._has_cache_count:
            prompt = self._request.prompt_token_ids
            prompt_logprobs = read_prompt_logprobs(prompt, response.prompt_logprobs, sampling.prompt_logprobs)
        if not self._has_cache_count and response.num_cached_tokens is not None:
            num_cached = min(int(response.num_cached_tokens), len(self._request.prompt_token_ids))
            self._has_cache_count = True
        if num_cached is None and not logprobs and prompt_logprobs is None:
            return None
        return EventDetail(num_cached, logprobs, prompt_logprobs)


def token_logprob(token_id: int, entry: Mapping[int, Any], num_top: int) -> TokenLogprob:
    """`entry` has a Logprob by token id: the token's own, and the likeliest ones."""
    best = sorted(((each, float(found.logprob)) for each, found in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token_id, float(entry[token_id].logprob), best[:num_top])


def read_prompt_logprobs(
    prompt: Sequence[int], entries: Sequence[Mapping[int, Any] | None], num_top: int
) -> list[TokenLogprob | None]:
    """Return one for each token of the prompt, None for the first. Entries beyond are those of resumed output."""
    pairs = zip(prompt, entries, strict=False)
    return [token_logprob(token_id, entry, num_top) if entry else None for token_id, entry in pairs]


def classify(error: Exception) -> RuntimeFailure:
    """Explain an exception of `generate` or of what it yields: vLLM checks a request when its first output is awaited.
    What it refuses never reached the engine."""
    names = {base.__name__ for base in type(error).__mro__}
    if isinstance(error, SluiceError):
        return RuntimeFailure(error)
    if _FATAL in names:
        return RuntimeFailure(internal_error(), is_fatal=True)
    if names & _REFUSALS:
        message = str(error)
        for prefix in ("Grammar error: ", "Invalid grammar specification: "):
            if message.startswith(prefix):
                words = reword_error(message.removeprefix(prefix))
                refusal = SluiceError(ErrorCode.INVALID, f"the grammar cannot be used: {words}", param="grammar")
                return RuntimeFailure(refusal, is_response=True)
        param = getattr(error, "parameter", None)
        refusal = SluiceError(ErrorCode.INVALID, f"vLLM refuses the request: {message}", param=param)
        return RuntimeFailure(refusal, is_response=True)
    return RuntimeFailure(internal_error())
