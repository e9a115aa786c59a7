"""Anthropic's messages."""

from typing import Any, ClassVar

import msgspec

from sluice.load.apis.base import (
    TOKEN,
    Api,
    AskedRequest,
    CallPart,
    Extra,
    ParsedEvent,
    content_parts,
    conversation,
    error_message,
)
from sluice.load.config import ToolUse


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Delta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Block(msgspec.Struct):
    type: str = ""
    name: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: Any = None


class MessagesApi(Api):
    """`POST /v1/messages`. The stream ends with `message_stop`."""

    takes: ClassVar = frozenset(Extra)
    route: ClassVar = "/v1/messages"
    event: ClassVar = _Event

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("anthropic-version", "2023-06-01"),)

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": asked.model, "max_tokens": asked.max_tokens, "stream": True}
        fields["messages"] = conversation(asked.prompt, asked.context, _content)
        if asked.workload.tool_use is not None:
            fields |= _tools(asked.workload.tool_use)
        if asked.workload.json_schema is not None:
            fields["output_config"] = {"format": {"type": "json_schema", "schema": asked.workload.json_schema}}
        return fields | asked.sampling

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        match event.type:
            case "content_block_delta" if event.delta is not None:
                return self._token(event.delta, event.index)
            case "content_block_start" if event.content_block is not None and event.content_block.type == "tool_use":
                return ParsedEvent(calls=(CallPart(event.index, event.content_block.name, ""),))
            case "message_start" if event.message is not None and event.message.usage is not None:
                return ParsedEvent(prompt_tokens=_prompt_tokens(event.message.usage))
            case "message_delta":
                usage, delta = event.usage or _Usage(), event.delta or _Delta()
                return ParsedEvent(completion_tokens=usage.output_tokens, finish_reason=delta.stop_reason)
            case "message_stop":
                return ParsedEvent(is_last=True)
            case "error":
                return ParsedEvent(error=error_message(event.error), is_last=True)
        return ParsedEvent()

    def _token(self, delta: _Delta, place: int) -> ParsedEvent:
        if not (delta.text or delta.thinking or delta.partial_json):
            return ParsedEvent()
        if not self.keeps_answers:
            return TOKEN
        calls = (CallPart(place, None, delta.partial_json),) if delta.partial_json else ()
        return ParsedEvent(has_text=True, text=delta.text, calls=calls)


def _picture(image: str) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}


_content = content_parts(_picture)


def _tools(use: ToolUse) -> dict[str, Any]:
    tools = [
        {
            "name": each["name"],
            "description": each.get("description", ""),
            "input_schema": each.get("parameters", {"type": "object"}),
        }
        for each in use.functions
    ]
    choice = {"type": "tool", "name": use.choice} if use.names_tool else {"type": _CHOICES[use.choice]}
    return {"tools": tools, "tool_choice": choice}


_CHOICES = {"auto": "auto", "required": "any", "none": "none"}


def _prompt_tokens(usage: _Usage) -> int | None:
    """Return all tokens of the prompt: `input_tokens` leaves out those that a cache had."""
    if usage.input_tokens is None:
        return None
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
