"""vLLM's `POST /inference/v1/generate`: token ids in, token ids out. What renders prompts and reads answers stands
before and behind it: `rendering.py` and `derendering.py`, or another server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import Field

from sluice.engine.sampling_fields import MAX_LOGPROBS
from sluice.errors import invalid
from sluice.gateway.api.openai.reply import Choice, chat_logprobs, finite, prompt_logprobs, usage
from sluice.gateway.api.openai.requests import OpenAITranslator, can_reason
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, GenerationRequest, StreamOptions, TokenIds
from sluice.gateway.api.openai.turns import ParsedTools, ToolFields, parse_tools
from sluice.gateway.api.translators import Reply
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.parsing import MAX_LIST, RequestObject, WholeNumber
from sluice.gateway.front.http.sse import DONE, event_frame
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import (
    ChatMessage,
    ChatReader,
    Conversation,
    EncodedPrompt,
    Prompt,
    TemplateOptions,
    TextDetail,
    TextEvent,
    TextLogprob,
    TextRequest,
    ToolCall,
    ToolChoice,
)

JsonObject = dict[str, Any]
TOKENS, TEXT = "tokens", "text"
_UNUSED = "Accepted and not used."
_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
"""Fields of engines that hand KV blocks to each other by the request. Sluice's do so by themselves."""
_MEDIA = ("features", "content_parts")


class ChatExtras(ToolFields):
    """The tools to which an answer is held, beside vLLM's fields. `/v1/chat/completions/render` writes it."""

    called_functions: list[str] | None = Field(
        None, max_length=MAX_LIST, fail_fast=True, description="Functions that earlier turns called, without tools."
    )


class TokenSampling(GenerationRequest):
    """vLLM's SamplingParams, as JSON."""

    model: str = ""
    logprobs: WholeNumber | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Of each token and this many of the likeliest."
    )
    thinking_token_budget: WholeNumber | None = Field(None, ge=-1, lt=2**31, description="As in chats.")
    extra_args: ChatExtras | None = Field(None, description="As a rendered chat has them.")
    detokenize: bool | None = Field(None, description=_UNUSED)
    output_kind: int | None = Field(None, description=_UNUSED)
    flat_logprobs: bool | None = Field(None, description=_UNUSED)
    skip_clone: bool | None = Field(None, description=_UNUSED)
    output_text_buffer_length: int | None = Field(None, description=_UNUSED)
    skip_reading_prefix_cache: bool | None = Field(None, description=_UNUSED)


class ReasoningArguments(RequestObject):
    """How the prompt of a model that reasons was rendered."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Its prompt says the same.")


class GenerateTokensRequest(RequestObject):
    """`POST /inference/v1/generate`."""

    example = '{"model": "rill", "token_ids": [100, 200, 300], "sampling_params": {"max_tokens": 20}}'
    token_ids: TokenIds
    sampling_params: TokenSampling
    model: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Absent: the only language model.")
    request_id: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Comes back with the answer.")
    token_offsets: list[Any] | None = Field(None, description=_UNUSED)
    features: dict[str, Any] | None = Field(None, description="Refused: prompts of tokens have no images.")
    content_parts: list[Any] | None = Field(None, description="Refused: prompts of tokens have no images.")
    reasoning_ended: bool | None = Field(
        None, description="true: a grammar holds from the first token, also where the prompt leaves reasoning open."
    )
    reasoning_parser_kwargs: ReasoningArguments | None = Field(None, description="As a rendered chat has them.")
    return_token_ids: bool | None = Field(None, description="Whether the answer has the ids of the prompt.")
    output_mode: Literal["tokens", "text"] | None = Field(None, description="text: the answer has its text too.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=256, description="As in chats.")
    priority: WholeNumber | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs earlier.")
    kv_transfer_params: dict[str, Any] | None = Field(None, description="Without effect: a warning.")
    ec_transfer_params: dict[str, Any] | None = Field(None, description="Without effect: a warning.")


_OWN_NAMES = {"prompt": "token_ids", "messages": "token_ids", "tools": "sampling_params.extra_args.tools"} | {
    name: f"sampling_params.{name}" for name in TokenSampling.model_fields if name not in ("model", "stream")
}
"""The client's names of fields that models name otherwise in their errors."""


def only_model(plane: Plane) -> str:
    """Return the name of the only language model. Raises INVALID where there are others, or none."""
    names = [model.name for model in plane.llms()]
    if len(names) != 1:
        raise invalid("model", f"model is required: this server has {', '.join(names) or 'no language model'}")
    return names[0]


def language_model(model: TextModel) -> LlmText:
    """Return the language model that is one by itself or with an adapter. Raises INVALID for others."""
    found = model.base if isinstance(model, AdapterText) else model
    if not isinstance(found, LlmText):
        raise invalid("model", f"model {model.name!r} has no tokenizer of its own; name a language model")
    return found


class TokensTranslator(OpenAITranslator[TokenSampling]):
    """A prompt of token ids to continue."""

    protocol = "vllm_generate"
    names: ClassVar[Mapping[str, str]] = _OWN_NAMES

    def __init__(self, fields: GenerateTokensRequest, request: Request, *, plane: Plane) -> None:
        told = {name: getattr(fields, name) for name in ("stream", "stream_options", "cache_salt", "priority")}
        named = {"model": fields.model or only_model(plane), "return_token_ids": True}
        super().__init__(fields.sampling_params.model_copy(update={**told, **named}), request)
        self.sent = fields

    async def prepare(self, model: TextModel) -> Response | None:
        language_model(model)
        for name in _MEDIA:
            if getattr(self.sent, name):
                message = f"{name} is not supported: a prompt of tokens has no images; POST /v1/chat/completions"
                raise invalid(name, message)
        return None

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields = self.fields
        with client_names(_OWN_NAMES):
            prompt, choice = self._prompt()
            base = msgspec.structs.replace(base, tool_choice=choice)
            if fields.thinking_token_budget not in (None, -1) and isinstance(prompt, EncodedPrompt):
                base = msgspec.structs.replace(base, thinking_token_budget=fields.thinking_token_budget)
            requests = self.parse_generation(base, [prompt], fields.max_tokens, fields.logprobs)
        if "grammar" in self.param_names:
            self.param_names = {**self.param_names, "grammar": f"sampling_params.{self.param_names['grammar']}"}
        if self._mode == TEXT:
            return requests
        # The token that ends the text is shown, for which there is a log probability only then.
        form = msgspec.structs.replace(requests[0].form, include_stop_str_in_output=True)
        return [msgspec.structs.replace(each, form=form) for each in requests]

    def _prompt(self) -> tuple[Prompt, ToolChoice]:
        """Return the prompt, as a conversation's where the answer must keep to more than the fields of a text: it then
        reasons first, and calls tools."""
        sent, extras = self.sent, self.fields.extra_args
        tools, choice, _ = parse_tools(extras) if extras is not None else ParsedTools((), ToolChoice())
        called = [] if extras is None else extras.called_functions or []
        is_chat = bool(tools or called)
        is_limited = self.fields.structured_outputs is not None or self.fields.thinking_token_budget is not None
        if not is_chat and (sent.reasoning_ended or not (is_limited or sent.reasoning_parser_kwargs)):
            return sent.token_ids, choice
        calls = tuple(ToolCall("", name, "{}") for name in called)
        past = (ChatMessage("assistant", "", tool_calls=calls),) if calls else ()
        return EncodedPrompt(Conversation(past, TemplateOptions(tools=tools)), sent.token_ids), choice

    @property
    def _mode(self) -> str:
        return self.sent.output_mode or TOKENS

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        names = [name for name in _TRANSFER if getattr(self.sent, name)]
        if self.fields.thinking_token_budget in (None, -1) or can_reason(model, request):
            return names
        return [*names, "sampling_params.thinking_token_budget"]

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        options = self.options
        return TokensReply(
            {"request_id": self.sent.request_id or self.request_id, "output_mode": self._mode},
            {"created": int(self.began_at), "model": model.name},
            options.n,
            num_top=options.top_logprobs,
            num_prompt_top=options.prompt_logprobs,
            returns_prompt=bool(self.sent.return_token_ids),
            counts=(options.include_usage, options.continuous_usage),
        )


class TokensReply(Reply):
    """Formats answers as token ids, with their text too in the mode `text`."""

    def __init__(
        self,
        head: JsonObject,
        whole_head: JsonObject,
        n: int,
        *,
        num_top: int | None,
        num_prompt_top: int | None,
        returns_prompt: bool,
        counts: tuple[bool, bool],
    ) -> None:
        """`head` is part of each chunk, `whole_head` of a whole answer alone. `num_top` and `num_prompt_top` are the
        numbers of alternatives, None for no log probabilities. `counts`: whether a stream ends with the tokens' counts,
        and whether each chunk has them."""
        self._head = head
        self._whole_head = whole_head
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._returns_prompt = returns_prompt
        self._has_counts, self._has_chunk_counts = counts
        self._choices = [Choice() for _ in range(n)]
        self._ends: dict[int, TextEvent] = {}
        self._has_begun = False

    def frame(self, index: int, event: TextEvent) -> bytes:
        entries = event.detail.logprobs if event.detail is not None else None
        if self._num_top is None:
            token_ids = (event.detail.token_ids if event.detail is not None else None) or []
        else:  # each token comes with its log probability
            token_ids = [each.token.token_id for each in entries or ()]
        if event.finish_reason is not None:
            self._ends[index] = event
        elif not token_ids and not (event.text and self._is_text):
            return b""
        chunk = {**self._head, "choices": [self._choice(index, event, event.text, token_ids, entries)]}
        if self._has_chunk_counts:
            chunk["usage"] = _counts(event)
        if not self._has_begun and event.detail is not None:
            self._has_begun = True
            chunk |= self._prompt_fields([event.detail], is_whole=False)
        return event_frame(chunk)

    async def closing(self) -> bytes:
        if not self._has_counts:
            return DONE
        ends = [self._ends[index] for index in sorted(self._ends)]
        return event_frame({**self._head, "choices": [], "usage": usage(ends, 1)}) + DONE

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return self._choices[index].events.append

    async def whole(self) -> bytes:
        objects = [
            self._choice(index, each.end, each.text, each.token_ids, each.logprobs)
            for index, each in enumerate(self._choices)
        ]
        answer = {**self._head, **self._whole_head, "choices": objects, "usage": usage(self._all_ends, 1)}
        nothing = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", *_TRANSFER))
        return orjson.dumps({**answer, **nothing, **self._prompt_fields(self._choices[0].details, is_whole=True)})

    @property
    def _all_ends(self) -> list[TextEvent]:
        return [each.end for each in self._choices]

    @property
    def _is_text(self) -> bool:
        return bool(self._head["output_mode"] == TEXT)

    def _prompt_fields(self, details: Sequence[TextDetail], *, is_whole: bool) -> JsonObject:
        """Return what the first of an answer's details say of its prompt."""
        fields: JsonObject = {}
        for detail in details:
            if detail.prompt_token_ids is not None and self._returns_prompt:
                fields["prompt_token_ids"] = detail.prompt_token_ids
            if detail.prompt_logprobs is not None and self._num_prompt_top is not None and is_whole:
                fields["prompt_logprobs"] = prompt_logprobs(detail.prompt_logprobs, self._num_prompt_top)
        return fields

    def _choice(
        self, index: int, end: TextEvent, text: str, token_ids: list[int], entries: Sequence[TextLogprob] | None
    ) -> JsonObject:
        logprobs: JsonObject | None = None
        if self._num_top is not None:
            found, num_top = entries or (), self._num_top
            content = [token_logprobs(entry, num_top) for entry in found]
            logprobs = chat_logprobs(found, num_top) if self._is_text else {"content": content}
        fields = {"index": index, "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
        return {**fields, "token_ids": token_ids, "logprobs": logprobs, **({"text": text} if self._is_text else {})}


def token_logprobs(entry: TextLogprob, num_top: int) -> JsonObject:
    """Return vLLM's log probabilities of a token by ids: its own, and in `top_logprobs` its own first, then the other
    likeliest. `rank` counts from 1; null: not among the likeliest."""
    ranks = {token.token_id: rank for rank, (token, _) in enumerate(entry.top[:num_top], 1)}

    def by_id(token_id: int, logprob: float | None) -> JsonObject:
        return {"token_id": token_id, "logprob": finite(logprob), "rank": ranks.get(token_id)}

    chosen = by_id(entry.token.token_id, entry.logprob)
    others = [by_id(each.token_id, logprob) for each, logprob in entry.top[:num_top]]
    return {**chosen, "top_logprobs": [chosen, *(each for each in others if each["token_id"] != chosen["token_id"])]}


def _counts(event: TextEvent) -> JsonObject:
    prompt, output = event.prompt_tokens, event.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
