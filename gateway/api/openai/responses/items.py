"""The items of responses and conversations: their ids, their stored form, and pages of them."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import orjson
from fastapi import Query

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.responses.client_tools import CLIENT_TOOLS
from sluice.gateway.api.openai.responses.schemas import (
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImagePart,
    InputItem,
    ItemReference,
    MessageContent,
    MessageItem,
    OtherItem,
    OtherResultPart,
    ReasoningItem,
    ResultContent,
)
from sluice.repetition import random_hex

T = TypeVar("T")
JsonObject = dict[str, Any]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
"""Parameters of lists, in a query."""
CALLS = ("function_call", "custom_tool_call", "computer_call", *(tool.call for tool in CLIENT_TOOLS.values()))
CALL_OUTPUTS = (
    *("function_call_output", "custom_tool_call_output", "computer_call_output"),
    *(tool.result for tool in CLIENT_TOOLS.values()),
)
"""Types of the items of calls that clients run, and of what those returned."""
_PREFIXES = {
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
_SEAL = "sluice 1 "
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


def store_item(item: InputItem, ids: ItemIds, path: str) -> JsonObject:
    """Return an item in its stored form, which is OpenAI's with every field, an id among them. Raises INVALID, naming
    its `path`, for one that cannot be stored."""
    match item:
        case OtherItem():
            sent_id = item.sent.get("id")
            item_id = sent_id if isinstance(sent_id, str) and sent_id else ids.make("item")
            return repeatable(path, {**item.sent, "id": item_id})
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
            fields = repeatable(path, {"call_id": item.call_id, "output": output})
            return {"id": item.id or ids.make(_PREFIXES[item.type]), "type": item.type, "status": "completed", **fields}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            texts = {"summary": summary, "content": content}
            sealed = {} if item.encrypted_content is None else {"encrypted_content": item.encrypted_content}
            return {"id": item.id or ids.make("rs"), "type": "reasoning", "status": "completed", **texts, **sealed}
        case ItemReference():
            raise AssertionError("references are resolved before items are stored")


def _stored_parts(content: ResultContent | MessageContent, kind: str) -> list[JsonObject]:
    extra: JsonObject = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    if isinstance(content, str):
        return [{"type": kind, "text": content, **extra}]
    parts: list[JsonObject] = []
    for part in content:
        if isinstance(part, InputImagePart):
            parts.append({"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"})
        elif isinstance(part, OtherResultPart):
            parts.append(part.sent)
        else:
            parts.append({"type": kind, "text": part.text, **extra})
    return parts


def repeatable(param: str, value: T) -> T:
    """Return what the answer or a later one repeats. Raises INVALID for what it cannot: clients may send integers of
    any length."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise invalid(param, f"{param} cannot be repeated in the answer: {error}") from None
    return value


def seal_text(kind: str, text: str) -> str:
    """Return a text as the `encrypted_content` of an item of this `kind`. It is encoded, and no secret: what a client
    keeps for the next request is the client's own."""
    return b64encode(f"{_SEAL}{kind}\n{text}".encode()).decode()


def is_sealed(kind: str, sealed: object) -> bool:
    """Whether an `encrypted_content` begins as those that `seal_text` makes. It may be long, and is not decoded."""
    head = seal_text(kind, "")
    return isinstance(sealed, str) and sealed.startswith(head[: len(head) // 8 * 8])


def unseal_text(kind: str, sealed: object) -> str | None:
    """Return the text of an `encrypted_content` that `seal_text` made; None for one of another maker."""
    if not is_sealed(kind, sealed):
        return None
    with suppress(ValueError):
        text, head = b64decode(str(sealed), validate=True).decode(), f"{_SEAL}{kind}\n"
        return text.removeprefix(head) if text.startswith(head) else None
    return None


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
