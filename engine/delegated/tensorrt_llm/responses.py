"""TensorRT-LLM's responses: from a RequestOutput to tokens, log probabilities and finish reasons, and from exceptions
to the engine's end or the request's.

A RequestOutput is one and the same object at each response, changed in place; it holds all output so far. Versions
differ in whether a token that ends the sequence is among its tokens, in the form of log probabilities and in where they
say how much of the prompt was cached: all forms are read.
"""

import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from sluice.engine.delegated.interface import ResponseDelta, RuntimeFailure, internal_error
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from sluice.errors import ErrorCode, SluiceError, invalid

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.CANCELLED}
_TIMED_OUT = "timeout"


class LlmRequestHandle:
    """A request in TensorRT-LLM, as `sluice.engine.delegated.interface.RequestHandle`. It reads with a cursor of its
    own."""

    def __init__(
        self,
        output: Any,
        request: GenerateRequest,
        eos_token_ids: tuple[int, ...],
        block_size: int,
        *,
        tells_cached: bool = True,
    ) -> None:
        """`output` is the RequestOutput of `request`. `tells_cached`: whether its prompt counts, and not for another
        handle already."""
        params = request.sampling
        self._output = output
        self._request = request
        self._block_size = block_size
        self._eos = () if params.ignore_eos else eos_token_ids
        self._stops = frozenset((*params.stop_token_ids, *self._eos))
        self._num_read = 0
        self._last: int | None = None
        self._has_cache_count, self._has_prompt_logprobs = not tells_cached, False

    def __aiter__(self) -> AsyncIterator[Any]:
        responses: AsyncIterator[Any] = self._output.__aiter__()
        return responses

    @property
    def is_finished(self) -> bool:
        return bool(self._output.finished)

    def abort(self) -> None:
        self._output.abort()

    def read(self, response: Any) -> ResponseDelta:
        """Return what `response`, which is the RequestOutput, has that was not there before. Raises DEADLINE where
        TensorRT-LLM gave the request up for its time."""
        best = response.outputs[0]  # of a beam search; else it is the only one
        # A context server says so of a request that another one goes on with.
        is_over = best.finish_reason == "not_finished" and self._request.hands_over
        reason = FinishReason.LENGTH if is_over else _finish_reason(best.finish_reason)
        token_ids = self._with_end(list(best.token_ids[self._num_read :]), best, reason)
        logprobs = self._logprobs(token_ids, best.logprobs)
        self._num_read += len(token_ids)
        self._last = token_ids[-1] if token_ids else self._last
        if reason is FinishReason.LENGTH and self._last in self._stops:
            reason = FinishReason.STOP  # TensorRT-LLM counts the tokens before it looks for stop tokens
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
    """Return one for each token of the prompt, None where its own is missing, as for the first. An entry belongs to the
    token at its place, or (computed from the logits behind each token) to the next one: the tokens say which."""
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


# -- exceptions

_FATAL_NAMES = frozenset({"EngineLost", "EngineDeadError", "BrokenExecutor", "BrokenProcessPool"})
_FATAL = re.compile(
    r"shutting down|is shut ?down|executor has failed|worker (process )?(died|is dead|terminated)"
    r"|rank \d+ (died|is gone)",
    re.I,
)
_REQUEST_ERROR = "RequestError"
"""TensorRT-LLM's class for what fails one request. When it is the engine that failed, its health says so."""
_AT_FAULT = re.compile(
    r"should not exceed|cannot exceed|exceeds? (the )?max|larger than (the )?max|(prompt|sequence) is too long"
    r"|must be (less|greater|between|at (most|least)|smaller|larger)|token ids? .*out of range"
    r"|exceeds the limit value|not supported|unsupported|(?<!beam search )does not support|require 'enable_penalty"
    r"|guided decoding error(?!: internal)",
    re.I,
)
"""Texts of its checks of a request's arguments, which come as a response. Those about log probabilities of beams are no
part: such requests are refused before, so that such a text was meant for another request of the batch."""


def classify(error: Exception, *, at_submit: bool) -> RuntimeFailure:
    """Explain an exception of `generate_async` (`at_submit`) or of reading a RequestOutput."""
    is_fatal = any(map(_is_fatal, _chain(error)))
    return RuntimeFailure(_answer(error, at_submit=at_submit, is_fatal=is_fatal), is_fatal, _is_response(error))


def refused_arguments(error: ValueError, version: object) -> SluiceError | None:
    """Explain what pydantic says of the arguments of the LLM class; None for another error. It names the first that is
    wrong: its whole text quotes all of them."""
    told = getattr(error, "errors", None)
    if told is None:
        return None
    first = told()[0]
    name = ".".join(map(str, first["loc"])) or "llm_arguments"
    got = f", got {first['input']!r}" if isinstance(first["input"], str | int | float) else ""
    return invalid(name, f"TensorRT-LLM {version} refuses {name}: {first['msg']}{got}")


def _answer(error: Exception, *, at_submit: bool, is_fatal: bool) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    # A check of arguments shows as a ValueError at once, or as text alone: among the responses, or at once too where
    # the worker is in this process.
    has_text = bool(_AT_FAULT.search(str(error))) and not is_fatal
    is_at_fault = isinstance(error, ValueError) or (_is_response(error) and has_text) if at_submit else has_text
    if is_at_fault:
        return SluiceError(ErrorCode.INVALID, f"TensorRT-LLM refuses the request: {error}")
    return internal_error()


def _is_fatal(error: BaseException) -> bool:
    if _is_response(error):  # its text may quote the request: a client could put any words into it
        return False
    return bool(_FATAL_NAMES & _names(error)) or (isinstance(error, RuntimeError) and bool(_FATAL.search(str(error))))


def _is_response(error: BaseException) -> bool:
    return _REQUEST_ERROR in _names(error)


def _names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    return chain


def first_part(request: GenerateRequest, folder: LlmFolder, *, has_images: bool = False) -> GenerateRequest | None:
    """Return the part of a request that nothing may end; None where TensorRT-LLM keeps to `min_tokens` by itself.
    Raises INVALID for a request that cannot be divided."""
    params = request.sampling
    ends = () if params.ignore_eos else folder.eos_token_ids
    others = {*ends[1:], *params.stop_token_ids} - {*ends[:1]}
    is_early = params.min_tokens > len(request.resume_token_ids)
    _check_choice(params, {*ends, *others} if is_early else set())
    if not others or not is_early:
        return None
    kinds = {"a grammar": params.grammar is not None, "a beam search": params.beam_width > 1, "images": has_images}
    what = next((name for name, is_so in kinds.items() if is_so), None)
    if what is not None:
        raise invalid(
            "min_tokens",
            f"min_tokens must be 0 with {what} where several tokens can end the output, got {params.min_tokens}: "
            "TensorRT-LLM bans one of them",
        )
    banned = {each: -math.inf for each in (*ends, *others) if each < folder.vocab_size}  # a file may name any
    first = msgspec.structs.replace(
        params,
        max_tokens=params.min_tokens,
        min_tokens=0,
        ignore_eos=True,
        stop_token_ids=(),
        logit_bias={**params.logit_bias, **banned},
    )
    return msgspec.structs.replace(request, sampling=first)


def _check_choice(params: SamplingParams, ends: set[int]) -> None:
    """Raise INVALID where no token is left to choose: a row of logits that are all banned has no probabilities, which
    fails a whole batch on the GPU. `ends` are those that are banned."""
    banned = ends | {word[0] for word in params.bad_words if len(word) == 1}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        others = "min_tokens bans what ends the output, and bad_words the rest" if ends else "bad_words bans them all"
        raise invalid("allowed_token_ids", f"allowed_token_ids must leave a token to choose, but {others}")


class TwoPartHandle:
    """A request that TensorRT-LLM gets in two parts, as `sluice.engine.delegated.interface.RequestHandle`: until
    `min_tokens` with every end banned, and from there on.

    TensorRT-LLM's own min_tokens bans one token, the end_id. Models such as Llama 3 have several ends, and requests
    have stop tokens of their own: a bias bans them all, but for a whole request only.
    """

    def __init__(
        self, first: LlmRequestHandle, request: GenerateRequest, submit_rest: Callable[[GenerateRequest], Any]
    ) -> None:
        """`request` is the whole one. `submit_rest` hands it over with the output of the first part to resume after,
        and returns the handle of that."""
        self._part = first
        self._request = request
        self._submit_rest = submit_rest
        self._token_ids = list(request.resume_token_ids)
        self._has_more = request.sampling.min_tokens < request.sampling.max_tokens
        """Whether a second part is to come."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for response in self._part:
            yield response
        if self._has_more:
            self._has_more = False
            self._part = self._submit_rest(msgspec.structs.replace(self._request, resume_token_ids=self._token_ids))
            async for response in self._part:
                yield response

    @property
    def is_finished(self) -> bool:
        return self._part.is_finished and not self._has_more

    def read(self, response: Any) -> ResponseDelta:
        delta = self._part.read(response)
        if not self._has_more:
            return delta
        self._token_ids += delta.token_ids
        if delta.finish_reason is FinishReason.LENGTH:
            return delta._replace(finish_reason=None)
        self._has_more = delta.finish_reason is None
        return delta

    def abort(self) -> None:
        self._has_more = False
        self._part.abort()
