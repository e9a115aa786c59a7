"""From the items of a conversation to the messages that they stand for, in words that every model's template takes.

Models know messages, reasoning, and calls of functions with their results. An item of another type is read as one of
those where it has a text; else it is left out and named, so that one odd item never ends a session.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sluice.errors import invalid
from sluice.gateway.api.fields import json_text
from sluice.gateway.api.openai.responses.client_tools import CLIENT_CALLS, CLIENT_TOOLS
from sluice.gateway.api.openai.responses.items import JsonObject, is_sealed, unseal_text
from sluice.gateway.api.openai.responses.tools import custom_arguments, function_name
from sluice.pipelines.text.types import ChatMessage, ImagePart, ToolCall

Content = list[str | ImagePart]
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Types of the item that stands for what was said before it. OpenAI's is the first; older clients write the others."""
SUMMARY = "Summary of the conversation so far:\n"
_ROLES = ("system", "developer", "user", "assistant")
_KEPT_ROLES = ("system", "developer", "user")
"""Roles of the messages that a compaction leaves as they are."""
_SERVER_CALLS = {"code_interpreter_call": ("code",), "file_search_call": ("queries",), "mcp_call": ()}
"""Calls that a server ran, whose items have the results: the fields of each that are its arguments."""
_SILENT = ("additional_tools", "compaction_trigger", "reasoning")
"""Types of items without a text that are not left out: they are read elsewhere."""
_OTHER_CALLS = {"computer_call": ("action", "actions"), "program": ("code",)}


class History(NamedTuple):
    """The messages that items stand for, and the items that none stands for, as their path and type."""

    messages: list[ChatMessage]
    left_out: list[str]


def read_history(items: Sequence[JsonObject], num_earlier: int = 0, *, has_result_images: bool = True) -> History:
    """Return the messages of stored items: what the model said in a row, thought and called is one turn. The first
    `num_earlier` are not in this request. Without `has_result_images` the images that tools returned are left out.
    Raises INVALID for images in turns that are not the user's."""
    reader = _HistoryReader(has_result_images)
    start = _last_summary(items)
    for index, item in enumerate(items):
        if index >= start or is_kept(item):
            number = index - num_earlier
            reader.add(item, f"input[{number}]" if number >= 0 else "previous_response_id")
    return reader.finish()


def is_kept(item: JsonObject) -> bool:
    """Whether an item that a compaction follows is still read: the messages of users and instructions are."""
    return item["type"] == "message" and item["role"] in _KEPT_ROLES


def _last_summary(items: Sequence[JsonObject]) -> int:
    """Return the place of the last compaction of this server; 0 where there is none."""
    return next((place for place in range(len(items) - 1, -1, -1) if is_summary(items[place])), 0)


def is_summary(item: JsonObject) -> bool:
    """Whether an item is a compaction of this server."""
    return item["type"] in COMPACTIONS and is_sealed("compaction", item.get("encrypted_content"))


def read_summary(item: JsonObject) -> str | None:
    """Return the text of a compaction of this server; None for any other item."""
    return unseal_text("compaction", item.get("encrypted_content")) if item["type"] in COMPACTIONS else None


class _HistoryReader:
    """Collects messages. The images that tools returned follow the results of all calls of a turn, as the user's."""

    def __init__(self, has_result_images: bool) -> None:
        self._has_result_images = has_result_images
        self._turns: list[ChatMessage] = []
        self._left_out: list[str] = []
        self._names: dict[str, str] = {}
        self._call_ids: dict[str, str] = {}
        """Ids of calls by those of their items, which results of some tools have in place of them."""
        self._answer = _Answer()
        self._images: list[ImagePart] = []

    def add(self, item: JsonObject, path: str) -> None:
        kind = item["type"]
        if kind == "message":
            self._add_message(item, path)
        elif kind == "reasoning":
            self._take_reasoning(item)
        elif (summary := read_summary(item)) is not None:
            self._add_turn(ChatMessage("user", SUMMARY + summary))
        elif not self._add_call(item, path) and not self._add_text(item) and kind not in _SILENT:
            self._left_out.append(f"{path} ({kind})")

    def finish(self) -> History:
        self._end_turn()
        return History(self._turns, self._left_out)

    def _add_message(self, item: JsonObject, path: str) -> None:
        parts = _message_parts(item, path)
        if item["role"] == "assistant":
            self._begin_answer(has_ended=self._answer.has_begun)
            self._answer.text = _join(item["content"])
        else:
            self._add_turn(ChatMessage(item["role"], _join(item["content"]), parts=parts))

    def _take_reasoning(self, item: JsonObject) -> None:
        sealed = unseal_text("reasoning", item.get("encrypted_content"))
        text = _join(item.get("content") or ()) or sealed or _join(item.get("summary") or ())
        self._begin_answer(has_ended=self._answer.has_begun)
        self._answer.reasoning.append(text)

    def _add_call(self, item: JsonObject, path: str) -> bool:
        """Add a call or the result of one, or both; False for any other item."""
        call, result = read_call(item), _read_result(item, path)
        if item["type"] in _SERVER_CALLS and result is None:
            return False
        if call is not None:
            self._begin_answer(has_ended=False)
            self._answer.calls.append(call)
            self._names[call.id] = call.name
            self._call_ids[item["id"]] = call.id
        if result is not None:
            named = item.get("call_id") or self._call_ids.get(item["id"], item["id"])
            self._add_result(str(named) if call is None else call.id, result, path)
        return call is not None or result is not None

    def _add_result(self, call_id: str, result: Content, path: str) -> None:
        self._turns += self._answer.finish()
        self._answer = _Answer()
        images = [part for part in result if isinstance(part, ImagePart)]
        if images and not self._has_result_images:
            self._left_out.append(f"{path}.output (image)")
        text = "".join("[image]" if isinstance(part, ImagePart) else part for part in result)
        self._turns.append(ChatMessage("tool", text, tool_call_id=call_id, name=self._names.get(call_id, "")))
        self._images += images if self._has_result_images else ()

    def _add_text(self, item: JsonObject) -> bool:
        """Add the text of an item of an unknown type; False for one without a text."""
        if item["type"] in _SILENT or not (text := _text_of(item)):
            return False
        self._add_turn(ChatMessage(item["role"] if item.get("role") in _ROLES else "user", text))
        return True

    def _begin_answer(self, *, has_ended: bool) -> None:
        if has_ended or self._images:
            self._end_turn()

    def _add_turn(self, turn: ChatMessage) -> None:
        self._end_turn()
        self._turns.append(turn)

    def _end_turn(self) -> None:
        if not self._answer.is_empty:
            self._turns += self._answer.finish()
            self._answer = _Answer()
        if self._images:
            about = "Images of these results:"
            self._turns.append(ChatMessage("user", about, parts=(about, *self._images)))
            self._images = []


class _Answer:
    """Collects one turn of the model: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[ToolCall] = []

    @property
    def is_empty(self) -> bool:
        return self.text is None and not self.calls and not self.reasoning

    @property
    def has_begun(self) -> bool:
        """Whether it has more than reasoning."""
        return self.text is not None or bool(self.calls)

    def finish(self) -> list[ChatMessage]:
        if not self.has_begun:
            return []  # reasoning without what followed it says nothing
        reasoning = "\n".join(filter(None, self.reasoning))
        return [ChatMessage("assistant", self.text or "", reasoning=reasoning, tool_calls=tuple(self.calls))]


def _message_parts(item: JsonObject, path: str) -> tuple[str | ImagePart, ...]:
    """Return the parts of a turn with images, none of one without. Raises INVALID for a turn that is not the user's."""
    if all("text" in part for part in item["content"]):  # as a rule
        return ()
    parts = [
        part["text"] if "text" in part else ImagePart(part["image_url"], f"{path}.content[{number}].image_url")
        for number, part in enumerate(item["content"])
    ]
    image = next(part for part in parts if isinstance(part, ImagePart))
    if item["role"] != "user":
        raise invalid(image.path, f"{image.path} needs the role user, got {item['role']}")
    return tuple(parts)


def read_call(item: JsonObject) -> ToolCall | None:
    """Return the call that an item is, as that of the function which stands for its tool; None for any other item."""
    kind, call_id = item["type"], str(item.get("call_id") or item["id"])
    name, space = item.get("name"), item.get("namespace") or item.get("server_label") or ""
    if kind in CLIENT_CALLS:
        tool = CLIENT_CALLS[kind]
        return ToolCall(call_id, tool, json_text(CLIENT_TOOLS[tool].write(item)))
    fields = _SERVER_CALLS.get(kind) or _OTHER_CALLS.get(kind)
    if fields is not None:
        given = {field: item[field] for field in fields if item.get(field) is not None}
        return ToolCall(call_id, kind.removesuffix("_call"), json_text(given))
    if not kind.endswith("_call") or not isinstance(name, str):
        return None
    if isinstance(item.get("input"), str):
        return ToolCall(call_id, function_name(name, str(space)), custom_arguments(item["input"]))
    arguments = item.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return ToolCall(call_id, function_name(name, str(space)), arguments)


def _read_result(item: JsonObject, path: str) -> Content | None:
    """Return what a call returned; None for an item that has no result."""
    kind = item["type"]
    if kind == "tool_search_output":
        return [json_text(_brief(item.get("tools")))]
    if kind in ("code_interpreter_call", "file_search_call"):
        found = [_text_of(each) for each in _objects(item.get("outputs") or item.get("results"))]
        return ["\n".join(filter(None, found))] if any(found) else None
    if kind == "mcp_call":
        error = item.get("error")
        output = item.get("output") or (error and json_text(error))
        return [str(output)] if output else None
    if not kind.endswith("_output"):
        return None
    output = item.get("output", item.get("result"))
    sent = output if isinstance(output, list) else [output]
    parts = [_result_part(part, f"{path}.output[{number}]") for number, part in enumerate(sent)]
    if kind == "apply_patch_call_output" and not any(parts):
        return [str(item.get("status") or "")]
    return parts


def _result_part(part: Any, path: str) -> str | ImagePart:
    if part is None or isinstance(part, str):
        return part or ""
    if not isinstance(part, dict):
        return json_text(part)
    if isinstance(part.get("image_url"), str):
        return ImagePart(part["image_url"], f"{path}.image_url")
    if "stdout" in part or "stderr" in part:
        exit_code = _object_of(part.get("outcome")).get("exit_code", "timeout")
        return f"{part.get('stdout') or ''}{part.get('stderr') or ''}\nexit code: {exit_code}\n"
    return _text_of(part) or (f"[{part['type']}]" if "type" in part else json_text(part))


def _brief(tools: Any) -> list[JsonObject]:
    """Return the names of tools that a search found, and what they are for. The prompt shows their schemas with those
    of all others."""
    found: list[JsonObject] = []
    for tool in _objects(tools):
        within = {"tools": _brief(tool["tools"])} if "tools" in tool else {}
        found.append({name: tool[name] for name in ("name", "description") if name in tool} | within)
    return found


def _text_of(value: JsonObject) -> str:
    """Return the text of an object with one, in one of its fields or in parts; "" for none."""
    for name in ("text", "logs", "content", "summary", "message"):
        found = value.get(name)
        if isinstance(found, list):
            found = _join(found)
        if isinstance(found, str) and found:
            return found
    return ""


def _join(parts: Iterable[Any]) -> str:
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in parts]
    return "".join([text for text in texts if isinstance(text, str)])


def _objects(value: Any) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _object_of(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
