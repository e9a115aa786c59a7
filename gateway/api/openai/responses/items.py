"""The items of responses and conversations: their ids, their stored form, the messages they stand for, and pages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Query

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.responses.schemas import (
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImagePart,
    InputItem,
    ItemContent,
    ItemReference,
    MessageContent,
    MessageItem,
    ReasoningItem,
)
from sluice.gateway.api.openai.responses.tools import custom_arguments, function_name
from sluice.pipelines.text.types import ChatMessage, ImagePart, ToolCall
from sluice.repetition import random_hex

JsonObject = dict[str, Any]
Parts = tuple[str | ImagePart, ...]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
"""Parameters of lists, in a query."""
CALLS, CALL_OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
"""Types of the items of calls, and of what they returned."""
_PREFIXES = dict(zip((*CALLS, *CALL_OUTPUTS), ("fc", "ctc", "fco", "ctco"), strict=True))
_MARK_CHARS = 32


class ItemIds:
    """Makes the ids of the items of one response or conversation. They have its mark in them, so that a reference to an
    item leads to the response."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._count = 0

    def make(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}_{self._mark}{self._count:04x}"


def make_mark() -> str:
    """Return the part of an id that is one of a kind."""
    return random_hex(_MARK_CHARS // 2)


def mark_of(item_id: str) -> str:
    """Return the mark of the response that an item's id was made for; any text for an id of another maker."""
    return item_id.partition("_")[2][:_MARK_CHARS]


def store_item(item: InputItem, ids: ItemIds) -> JsonObject:
    """Return an item in its stored form, which is OpenAI's with every field, an id among them."""
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            turn: JsonObject = {"role": item.role, "content": _stored_parts(item.content, kind)}
            return {"id": item.id or ids.make("msg"), "type": "message", "status": "completed", **turn}
        case FunctionCallItem() | CustomToolCallItem():
            text = {"arguments": item.arguments} if isinstance(item, FunctionCallItem) else {"input": item.input}
            call = {"call_id": item.call_id, "name": item.name, **text}
            if item.namespace:
                call["namespace"] = item.namespace
            return {"id": item.id or ids.make(_PREFIXES[item.type]), "type": item.type, "status": "completed", **call}
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            output = item.output if isinstance(item.output, str) else _stored_parts(item.output, "input_text")
            fields = {"call_id": item.call_id, "output": output}
            return {"id": item.id or ids.make(_PREFIXES[item.type]), "type": item.type, "status": "completed", **fields}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            fields = {"summary": summary, "content": content}
            return {"id": item.id or ids.make("rs"), "type": "reasoning", "status": "completed", **fields}
        case ItemReference():
            raise AssertionError("references are resolved before items are stored")


def _stored_parts(content: ItemContent | MessageContent, kind: str) -> list[JsonObject]:
    extra: JsonObject = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    if isinstance(content, str):
        return [{"type": kind, "text": content, **extra}]
    return [
        {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}
        if isinstance(part, InputImagePart)
        else {"type": kind, "text": part.text, **extra}
        for part in content
    ]


def to_messages(items: Iterable[JsonObject], num_earlier: int = 0) -> list[ChatMessage]:
    """Return the turns that stored items stand for: what the model said in a row, thought and called is one turn. The
    first `num_earlier` are not in this request. Raises INVALID for images in turns that are not the user's."""
    turns: list[ChatMessage] = []
    names: dict[str, str] = {}
    answer = _Answer()
    for index, item in enumerate(items, -num_earlier):
        if item["type"] in CALLS:
            names[item["call_id"]] = function_name(item["name"], item.get("namespace") or "")
        path = f"input[{index}]" if index >= 0 else "previous_response_id"
        parts = _image_parts(item, path) if item["type"] == "message" else ()
        if answer.takes(item):
            continue
        turns += answer.finish()
        answer = _Answer()
        if not answer.takes(item):
            turns.append(_message(item, names, parts))
    return turns + answer.finish()


def _message(item: JsonObject, names: Mapping[str, str], parts: Parts) -> ChatMessage:
    if item["type"] == "message":
        return ChatMessage(item["role"], _join(item["content"]), parts=parts)
    call_id, output = item["call_id"], item["output"]
    content = output if isinstance(output, str) else _join(output)
    return ChatMessage("tool", content, tool_call_id=call_id, name=names.get(call_id, ""))


def _image_parts(item: JsonObject, path: str) -> Parts:
    """Return the parts of a turn with images, none of one without. Raises INVALID for a turn that is not the user's."""
    parts = [
        part["text"] if "text" in part else ImagePart(part["image_url"], f"{path}.content[{number}].image_url")
        for number, part in enumerate(item["content"])
    ]
    image = next((part for part in parts if isinstance(part, ImagePart)), None)
    if image is not None and item["role"] != "user":
        raise invalid(image.path, f"{image.path} needs the role user, got {item['role']}")
    return () if image is None else tuple(parts)


class _Answer:
    """Collects the items of one turn of the model: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def takes(self, item: JsonObject) -> bool:
        """Add an item that belongs to this turn; False for one that begins another turn."""
        kind = item["type"]
        has_begun = self._text is not None or bool(self._calls)
        if kind in CALLS:
            name = function_name(item["name"], item.get("namespace") or "")
            arguments = item["arguments"] if kind == "function_call" else custom_arguments(item["input"])
            self._calls.append(ToolCall(item["call_id"], name, arguments))
        elif kind == "reasoning" and not has_begun:
            self._reasoning.append(_join(item["content"] or item["summary"]))
        elif kind == "message" and item["role"] == "assistant" and not has_begun:
            self._text = _join(item["content"])
        else:
            return False
        return True

    def finish(self) -> list[ChatMessage]:
        if self._text is None and not self._calls:
            return []  # reasoning without what followed it says nothing
        reasoning = "\n".join(self._reasoning)
        return [ChatMessage("assistant", self._text or "", reasoning=reasoning, tool_calls=tuple(self._calls))]


def _join(parts: Iterable[JsonObject]) -> str:
    return "".join([part.get("text", "") for part in parts])


class PageQuery(NamedTuple):
    """Which items to list."""

    after: str | None
    limit: int
    order: str


def list_page(items: Sequence[JsonObject], query: PageQuery) -> JsonObject:
    """Return a page of items in OpenAI's form. Raises NOT_FOUND for an `after` that is none of them."""
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    start = 0
    if query.after is not None:
        place = next((place for place, item in enumerate(ordered) if item["id"] == query.after), None)
        if place is None:
            raise SluiceError(
                ErrorCode.NOT_FOUND, f"there is no item {query.after[:60]!r} to list after", param="after"
            )
        start = place + 1
    page = ordered[start : start + query.limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": start + query.limit < len(ordered)}
