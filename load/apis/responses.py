"""OpenAI's responses."""

from typing import Any, ClassVar

import msgspec

from sluice.load.apis.base import (
    NO_CONTEXT,
    TOKEN,
    Api,
    ApiContext,
    AskedRequest,
    CallPart,
    Extra,
    ParsedEvent,
    Prompt,
    content_parts,
    conversation,
    error_message,
)
from sluice.load.config import ToolUse


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None
    error: Any = None
    incomplete_details: _Incomplete | None = None


class _Item(msgspec.Struct):
    type: str = ""
    name: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: Any = None
    output_index: int = 0
    item: _Item | None = None
    response: _Response | None = None
    message: str | None = None
    """The reason, in an event of the type `error`."""


_ENDS = ("response.completed", "response.incomplete", "response.failed")
_TEXT_DELTA = ".output_text.delta"
_TOKEN_DELTAS = (_TEXT_DELTA, ".reasoning_text.delta", ".function_call_arguments.delta")


class ResponsesApi(Api):
    """`POST /v1/responses`. The stream ends with `response.completed` or a like event.

    Later turns of a conversation name the response before them, or send the conversation anew: `stores_turns` of the
    workload says which.
    """

    takes: ClassVar = frozenset(Extra)
    route: ClassVar = "/v1/responses"
    event: ClassVar = _Event

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        workload = asked.workload
        is_stored = workload.stores_turns and workload.turns.high > 1
        length = {"max_output_tokens": asked.max_tokens, "stream": True, "store": is_stored}
        fields = {"model": asked.model, **length, **asked.sampling, **_input(asked.prompt, asked.context, is_stored)}
        if workload.tool_use is not None:
            fields |= _tools(workload.tool_use)
        if workload.json_schema is not None:
            schema = {"type": "json_schema", "name": "answer", "schema": workload.json_schema, "strict": True}
            fields["text"] = {"format": schema}
        return fields

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        if event.type.endswith(_TOKEN_DELTAS):
            return self._token(event) if event.delta else ParsedEvent()
        if event.type == "response.output_item.added" and self.keeps_answers:
            return _added(event)
        if event.type == "error":
            return ParsedEvent(error=event.message or "error", is_last=True)
        if event.type not in _ENDS:
            return ParsedEvent()
        return _end(event.response or _Response(), event.type)

    def _token(self, event: _Event) -> ParsedEvent:
        if not self.keeps_answers:
            return TOKEN
        if event.type.endswith(_TEXT_DELTA):
            return ParsedEvent(has_text=True, text=str(event.delta))
        if event.type.endswith(".function_call_arguments.delta"):
            return ParsedEvent(has_text=True, calls=(CallPart(event.output_index, None, str(event.delta)),))
        return TOKEN


def _input(prompt: Prompt, context: ApiContext, is_stored: bool) -> dict[str, Any]:
    """Return the input: the prompt alone, behind the response before it, or behind the whole conversation."""
    kept = context.history[-1].response_id if context.history and is_stored else None
    if kept is not None:
        return {"previous_response_id": kept, "input": _items(prompt, ApiContext(images=context.images))}
    return {"input": _items(prompt, context)}


def _items(prompt: Prompt, context: ApiContext) -> Any:
    return conversation(prompt, context, _content) if context != NO_CONTEXT else prompt


def _picture(image: str) -> Any:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{image}"}


_content = content_parts(_picture, "input_text")


def _tools(use: ToolUse) -> dict[str, Any]:
    choice: Any = {"type": "function", "name": use.choice} if use.names_tool else use.choice
    return {"tools": [{"type": "function", **each} for each in use.functions], "tool_choice": choice}


def _added(event: _Event) -> ParsedEvent:
    """Read the beginning of an item: a call's is no token yet."""
    if event.item is None or event.item.type != "function_call":
        return ParsedEvent()
    return ParsedEvent(calls=(CallPart(event.output_index, event.item.name, ""),))


def _end(response: _Response, kind: str) -> ParsedEvent:
    usage = response.usage or _Usage()
    error = error_message(response.error or "failed") if kind == "response.failed" else None
    is_cut = kind == "response.incomplete"
    return ParsedEvent(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        finish_reason="length" if is_cut else "stop",
        error=error,
        is_last=True,
        response_id=response.id,
    )
