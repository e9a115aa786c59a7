"""`POST /v1/chat/completions`: its prompt, and the shape of its answers."""

from collections.abc import Sequence

import msgspec

from gateway.http.openai.reply import (
    Choice,
    JsonObject,
    OpenAIReply,
    ReplyOptions,
    chat_logprobs,
    ending_fields,
)
from gateway.http.openai.requests import parse_generation, template_arguments, wants_beams
from gateway.http.openai.schemas import ChatCompletionRequest
from gateway.http.sse import event_frame
from pipelines.text.types import ChatMessage, Conversation, TemplateOptions, TextEvent, TextLogprob, TextRequest
from sluice.errors import invalid


def parse_chat_request(request: ChatCompletionRequest, base: TextRequest) -> tuple[list[TextRequest], ReplyOptions]:
    """Parse a conversation to answer. Raises INVALID for fields that contradict each other."""
    _check_best_of(request)
    messages = tuple(ChatMessage(role=message.role, content=message.text()) for message in request.messages)
    is_newer = request.max_completion_tokens is not None
    return parse_generation(
        request,
        msgspec.structs.replace(base, max_tokens_name="max_completion_tokens" if is_newer else "max_tokens"),
        [Conversation(messages, TemplateOptions(arguments=template_arguments(request)))],
        max_tokens=_max_tokens(request),
        logprobs=_logprobs(request),
        param_names={"query": "messages"},
    )


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
