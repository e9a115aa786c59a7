"""`POST /v1/chat/completions`: its prompt, and the shape of its answers."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sluice.errors import invalid
from sluice.gateway.api.openai.reply import (
    Choice,
    JsonObject,
    OpenAIReply,
    ReplyOptions,
    chat_logprobs,
    ending_fields,
)
from sluice.gateway.api.openai.requests import (
    parse_generation,
    parse_template_options,
    template_arguments,
    wants_beams,
)
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.api.openai.tool_schemas import ChatTurn
from sluice.gateway.api.openai.tools import parse_tools, parse_turn
from sluice.gateway.front.http.parsing import join_text
from sluice.gateway.front.http.sse import event_frame
from sluice.pipelines.text.types import ChatMessage, Conversation, TextEvent, TextLogprob, TextRequest

_TOOL_FIELDS = {"tools", "tool_choice", "functions", "function_call"}
_PLAIN_ROLES, _PLAIN_FIELDS = ("system", "developer", "user", "assistant"), {"role", "content"}
_PARAM_NAMES = {"query": "messages"}
_FUNCTION_NAMES = {"tools": "functions", "tool_choice": "function_call"}
_LENGTH_NAME = {"max_tokens": "max_completion_tokens"}
"""The client's names of fields that models name otherwise in their errors."""


def parse_chat_request(request: ChatCompletionRequest, base: TextRequest) -> tuple[list[TextRequest], ReplyOptions]:
    """Parse a conversation to answer. Raises INVALID for fields that contradict each other."""
    _check_best_of(request)
    messages = tuple([parse_message(turn, index) for index, turn in enumerate(request.messages)])
    template = parse_template_options(request, template_arguments(request))
    is_older = bool(request.functions)
    if not _TOOL_FIELDS.isdisjoint(request.model_fields_set):
        tools, choice = parse_tools(request)
        template = msgspec.structs.replace(template, tools=tools)
        base = msgspec.structs.replace(base, tool_choice=choice)
    if request.prediction is not None:
        base = msgspec.structs.replace(base, prediction=join_text(request.prediction.content), returns_metrics=True)
    if request.thinking_token_budget not in (None, -1):
        base = msgspec.structs.replace(base, thinking_token_budget=request.thinking_token_budget)
    requests, options = parse_generation(
        request,
        base,
        [Conversation(messages, template)],
        max_tokens=_max_tokens(request),
        logprobs=_logprobs(request),
        param_names=_PARAM_NAMES
        | (_FUNCTION_NAMES if is_older else {})
        | (_LENGTH_NAME if request.max_completion_tokens is not None else {}),
    )
    return requests, replace(options, has_functions=is_older, has_reasoning=request.include_reasoning is not False)


def parse_message(turn: ChatTurn, index: int) -> ChatMessage:
    """Return turn number `index` of a conversation. Raises INVALID for one that its role cannot have."""
    if turn.role in _PLAIN_ROLES and isinstance(turn.content, str) and turn.model_fields_set <= _PLAIN_FIELDS:
        return ChatMessage(turn.role, turn.content)
    return parse_turn(turn, index)


def _check_best_of(request: ChatCompletionRequest) -> None:
    if request.best_of not in (None, 1) and not wants_beams(request):
        raise invalid("best_of", f"best_of is not supported, got {request.best_of}; leave it out or send 1")


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """Return the newer field or the older one; None leaves the answer all of the context."""
    old, new = request.max_tokens, request.max_completion_tokens
    if None not in (old, new) and old != new:
        raise invalid(
            "max_completion_tokens",
            f"max_completion_tokens ({new}) and max_tokens ({old}) are the same limit under a new and an old name; "
            "send one of them",
        )
    return old if new is None else new


def _logprobs(request: ChatCompletionRequest) -> int | None:
    """Return how many alternatives the answer has; None for no log probabilities."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs", f"top_logprobs needs logprobs to be true, got {request.top_logprobs} without it")
    return None


class ChatReply(OpenAIReply):
    """Formats answers as messages."""

    protocol = "openai_chat"
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, first: TextEvent) -> bytes:
        fields = self.prompt_fields([first.detail]) if first.detail is not None else {}
        frames = [self._opening(0, first, fields), *(self._opening(i, first, {}) for i in range(1, self._options.n))]
        return b"".join(frames)

    def _opening(self, index: int, first: TextEvent, fields: JsonObject) -> bytes:
        delta = {"role": "assistant", "content": ""}
        piece = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **self.token_fields(None)}
        return event_frame({**self.chunk(piece, first.prompt_tokens), **fields})

    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "delta": {}, "logprobs": logprobs, **ending_fields(end)}

    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        fields = {"index": index, "message": message, "logprobs": logprobs, **ending_fields(choice.end)}
        return {**fields, **self.token_fields(choice.token_ids)}

    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        return chat_logprobs(entries, num_top)

    def extra_fields(self, choices: Sequence[Choice]) -> JsonObject:
        """Return what vLLM says of the prompt, which it has beside the choices here."""
        return self.prompt_fields(choices[0].details)
