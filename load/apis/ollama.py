"""Ollama's chats."""

from typing import Any, ClassVar

import msgspec

from sluice.load.apis.base import (
    TOKEN,
    Api,
    AskedRequest,
    CallPart,
    Extra,
    Framing,
    ParsedEvent,
    conversation,
)


class _Function(msgspec.Struct):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _ToolCall(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Line(msgspec.Struct):
    message: _Message | None = None
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: str | None = None


class OllamaChatApi(Api):
    """`POST /api/chat`. Events are lines of JSON; the last says `done`."""

    framing: ClassVar = Framing.JSON_LINES
    takes: ClassVar = frozenset(Extra)
    route: ClassVar = "/api/chat"
    event: ClassVar = _Line

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        context, workload = asked.context, asked.workload
        options = {"num_predict": asked.max_tokens, **asked.sampling}
        messages = conversation(asked.prompt, context, lambda text, _: text)
        # Ollama has the images of a message beside its text.
        images = (*(turn.images for turn in context.history), context.images)
        for message, pictures in zip(messages[::2], images, strict=True):
            message |= {"images": list(pictures)} if pictures else {}
        fields: dict[str, Any] = {"model": asked.model, "messages": messages, "stream": True, "options": options}
        if workload.tool_use is not None:
            fields["tools"] = [{"type": "function", "function": each} for each in workload.tool_use.functions]
        if workload.json_schema is not None:
            fields["format"] = workload.json_schema
        return fields

    def parse(self, data: bytes) -> ParsedEvent:
        line = self._decode(data)
        message = line.message or _Message()
        has_text = bool(message.content or message.thinking or message.tool_calls)
        if has_text and not line.done and line.error is None and not self.keeps_answers:
            return TOKEN
        return ParsedEvent(
            has_text=has_text,
            prompt_tokens=line.prompt_eval_count,
            completion_tokens=line.eval_count,
            finish_reason=line.done_reason,
            error=line.error,
            is_last=line.done,
            text=message.content if self.keeps_answers else None,
            calls=self._calls(message) if self.keeps_answers else (),
        )

    def _calls(self, message: _Message) -> tuple[CallPart, ...]:
        """Return the calls of a line, each of which is whole. Its place only tells it from those of other lines."""
        first, self._num_calls = self._num_calls, self._num_calls + len(message.tool_calls or ())
        return tuple(
            CallPart(first + number, each.function.name, bytes(each.function.arguments).decode())
            for number, each in enumerate(message.tool_calls or ())
        )
