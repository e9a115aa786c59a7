"""The bodies of vLLM's `/derender` routes: answers in tokens, whole or in chunks, and the requests that were sent."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StrictFloat, StrictInt, Tag

from sluice.gateway.api.openai.schemas import (
    MAX_CHOICES,
    MAX_MODEL_CHARS,
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    SomeTokenIds,
    TokenIds,
)
from sluice.gateway.front.http.parsing import REQUEST_LIMITS, RequestObject, WholeNumber, union_error

_MOST = 2**31
_Count = Annotated[WholeNumber, Field(ge=0, lt=_MOST)]
_Integer = Annotated[StrictInt, Field(ge=-_MOST, lt=_MOST)]
_OBJECTS = ConfigDict(strict=False, allow_inf_nan=False)
"""A strict dataclass would take instances alone."""


@dataclass(frozen=True, slots=True)
class GeneratedLogprob:
    """The log probability of a token that could have come. There may be 100,000 in a body."""

    __pydantic_config__ = _OBJECTS
    token_id: _Integer
    logprob: StrictFloat
    rank: _Integer | None = None


@dataclass(frozen=True, slots=True)
class GeneratedToken(GeneratedLogprob):
    """The log probability of a token that was generated, and those of the likeliest ones."""

    __pydantic_config__ = _OBJECTS
    top_logprobs: list[GeneratedLogprob] | None = None


class GeneratedLogprobs(RequestObject):
    """The log probabilities of an answer's tokens."""

    content: list[GeneratedToken] | None = Field(None, fail_fast=True)


def _reason_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<id>" if isinstance(value, int) else None


StopReason = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_Integer, Tag("<id>")],
    Discriminator(_reason_kind, **union_error("a stop string or a token id")),
]


class GeneratedChoice(RequestObject):
    """An answer in tokens, or a piece of one."""

    index: WholeNumber | None = Field(None, ge=0, lt=MAX_CHOICES, description="Absent: 0.")
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: StopReason | None = None
    token_ids: SomeTokenIds | None = None
    logprobs: GeneratedLogprobs | None = None


class GeneratedTokens(RequestObject):
    """An answer of `/inference/v1/generate`, or a chunk of one."""

    choices: list[GeneratedChoice] = Field(max_length=MAX_CHOICES, fail_fast=True)
    request_id: str | None = Field(None, max_length=MAX_MODEL_CHARS)
    model: str | None = None
    created: _Count | None = None
    usage: dict[str, Any] | None = None
    output_mode: Literal["tokens"] | None = Field(None, description="A text is none that could be read again.")
    prompt_logprobs: list[Any] | None = Field(None, fail_fast=True)
    prompt_token_ids: TokenIds | None = None
    kv_transfer_params: dict[str, Any] | None = None


class StreamState(RequestObject):
    """All that came of a streamed answer so far, as the last chunk brought it."""

    role_sent: bool | None = None
    output_token_ids: SomeTokenIds | None = None
    output_chunk_lens: list[int] | None = Field(None, fail_fast=True, description="Tokens of each chunk.")
    output_logprobs: list[GeneratedToken] | None = Field(None, fail_fast=True)


class DerenderFields(RequestObject):
    """The fields of both routes."""

    document_limits = replace(REQUEST_LIMITS, members=1 << 18, strings=1 << 18)
    """Enough for 3,000 tokens with 20 log probabilities each, or 26,000 with one."""
    model: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Absent: that of the rendered request.")
    stream: bool | None = Field(None, description="Whether this is a chunk of a stream.")
    generate_chunk: GeneratedTokens | None = Field(None, description="With stream; of one choice at most.")
    stream_state: StreamState | None = Field(None, description="That of the chunk before it; of each choice its own.")


class DerenderChatRequest(DerenderFields):
    """`POST /v1/chat/completions/derender`."""

    example = (
        '{"model": "rill", "generate_response": {"choices": [{"token_ids": [100, 200], "finish_reason": "stop"}]}}'
    )
    generate_response: GeneratedTokens | None = Field(None, description="Without stream.")
    prompt_tokens: _Count | None = Field(None, description="How many the prompt has, for the counts.")
    prompt_token_ids: TokenIds | None = Field(None, description="Absent: the request is rendered again.")
    chat_request: ChatCompletionRequest | None = Field(None, description="The request that was rendered.")


def _number_or_list(value: Any) -> str | None:
    if isinstance(value, list):
        return "<list>"
    return "<number>" if isinstance(value, int) else None


def _ids_or_lists(value: Any) -> str | None:
    if not isinstance(value, list):
        return None
    return "<ids>" if value and isinstance(value[0], int) else "<id lists>"


PromptCounts = Annotated[
    Annotated[list[_Count], Tag("<list>")] | Annotated[_Count, Tag("<number>")],
    Discriminator(_number_or_list, **union_error("an array of integers, or with stream an integer")),
]
PromptIds = Annotated[
    Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds | None], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(
        _ids_or_lists, **union_error("an array of arrays of token ids, or with stream an array of token ids")
    ),
]


class DerenderCompletionRequest(DerenderFields):
    """`POST /v1/completions/derender`."""

    example = (
        '{"model": "rill", "generate_responses": [{"choices": [{"token_ids": [100, 200], "finish_reason": "stop"}]}]}'
    )
    generate_responses: list[GeneratedTokens] | None = Field(
        None, min_length=1, max_length=MAX_PROMPTS, fail_fast=True, description="Without stream; one of each prompt."
    )
    prompt_tokens: PromptCounts | None = Field(None, description="How many each prompt has; with stream one number.")
    prompt_token_ids: PromptIds | None = Field(None, description="Of each prompt; with stream of the one.")
    completion_request: CompletionRequest | None = Field(None, description="The request that was rendered.")


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """The tokens of one prompt's answers, in the field `path`, and what is known of the prompt."""

    path: str
    tokens: GeneratedTokens
    prompt_token_ids: list[int] | None = None
    num_prompt: int | None = None

    @property
    def prompt(self) -> list[int] | None:
        return self.prompt_token_ids or self.tokens.prompt_token_ids

    @property
    def counts(self) -> tuple[int | None, int]:
        """The numbers of tokens of the prompt, None where nobody says it, and of those that were cached."""
        usage = self.tokens.usage or {}
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        sent = usage.get("prompt_tokens") if self.num_prompt is None else self.num_prompt
        return _count(sent), _count(cached) or 0


def _count(sent: object) -> int | None:
    return sent if isinstance(sent, int) and 0 <= sent < _MOST else None
