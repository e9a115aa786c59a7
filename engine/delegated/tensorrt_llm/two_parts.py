"""Requests that TensorRT-LLM gets in two parts: until `min_tokens` with every end banned, and from there on.

TensorRT-LLM's own min_tokens bans one token, the end_id. Models such as Llama 3 have several ends, and requests have
stop tokens of their own: a bias bans them all, but for a whole request only.
"""

import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.responses import LlmRequestHandle
from sluice.engine.types import FinishReason, GenerateRequest, SamplingParams
from sluice.errors import invalid


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
    """Both parts as one request, as `sluice.engine.delegated.interface.RequestHandle`."""

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
