"""The forms of turns that a chat template takes, and conversations in those forms."""

import json
import re
from collections.abc import Iterator
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec

Turn = dict[str, Any]
"""A message as a chat template reads it."""
BETWEEN_TURNS = "\n\n"
"""Joins the texts of turns that become one."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class SystemPlace(Enum):
    """The places where a template takes turns of the system."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    NOWHERE = "nowhere"


class TemplateForms(msgspec.Struct, frozen=True, kw_only=True):
    """The forms of turns that a chat template takes; `sluice.pipelines.text.template_probe` finds them."""

    has_text_arguments: bool = False
    """Whether the arguments of a call are JSON text, not an object."""
    takes_any_arguments: bool = False
    """Whether arguments that are no JSON object are written as the text that they are."""
    has_null_content: bool = False
    """Whether a turn of calls alone has a content of null, not an empty one."""
    splits_content: bool = False
    """Whether the text beside calls must be a turn of its own."""
    splits_calls: bool = False
    """Whether each call must be a turn of its own, in front of its result."""
    joins_thinking: bool = False
    """Whether the text beside calls must be part of the reasoning, where there is any."""
    hides_calls: bool = False
    """Whether the template shows no calls, so that they are part of the text."""
    hides_results: bool = False
    """Whether the template has no results of calls, so that they are the user's text."""
    has_short_ids: bool = False
    """Whether ids of calls must be nine letters and digits."""
    reasoning_name: str = "reasoning_content"
    system: SystemPlace = SystemPlace.ANYWHERE
    merges_turns: bool = False
    """Whether turns that one role has in a row must be one."""
    has_empty_tools: bool = False
    """Whether a conversation without tools has an empty array of them."""
    has_parts: bool = False
    """Whether all contents are arrays of parts."""
    takes_images: bool = False
    """Whether parts may be images. Elsewhere the text has placeholders for them."""


def shape_turns(turns: list[Turn], forms: TemplateForms) -> list[Turn]:
    """Return the same conversation in turns as the template takes them."""
    shaped = _with_system(turns, forms.system)
    if forms.hides_calls or forms.hides_results:
        shaped = [_as_text(turn, forms) for turn in shaped]
    shaped = [_renamed(turn, forms) for turn in shaped]
    if forms.splits_calls:
        shaped = list(_with_single_calls(shaped))
    shaped = [part for turn in shaped for part in _call_turns(turn, forms)]
    return _merged(shaped) if forms.merges_turns else shaped


def _with_system(turns: list[Turn], place: SystemPlace) -> list[Turn]:
    """Return the turns with what the system says at the beginning, where the template takes it at no other place."""
    found = [turn for turn in turns if turn["role"] == "system"]
    if place is SystemPlace.ANYWHERE or not found or (found == turns[:1] and place is SystemPlace.FIRST):
        return turns
    rest = [turn for turn in turns if turn["role"] != "system"]
    text = BETWEEN_TURNS.join(turn["content"] for turn in found if turn["content"])
    first = next((place for place, turn in enumerate(rest) if turn["role"] == "user"), None)
    if place is SystemPlace.FIRST or first is None:
        return [{"role": "system" if place is SystemPlace.FIRST else "user", "content": text}, *rest]
    rest[first] = {**rest[first], "content": _joined(text, rest[first]["content"])}
    return rest


def _joined(*contents: str | list[Any], between: str = BETWEEN_TURNS) -> str | list[Any]:
    """Return contents as one."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return between.join(filter(None, texts))
    joined: list[Any] = []
    for each in filter(None, contents):
        joined += [{"type": "text", "text": between}] * bool(joined)
        joined += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return joined


def _as_text(turn: Turn, forms: TemplateForms) -> Turn:
    """Return a turn whose calls, or result, are text, in the words that most models are trained with."""
    if forms.hides_results and turn["role"] == "tool":
        return {
            "role": "user",
            "content": _joined("<tool_response>", turn["content"], "</tool_response>", between="\n"),
        }
    if not forms.hides_calls or "tool_calls" not in turn:
        return turn
    calls = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in turn["tool_calls"]]
    rest = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**rest, "content": _joined(turn["content"], *calls, between="\n")}


def _call_text(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {text}}}'


def _renamed(turn: Turn, forms: TemplateForms) -> Turn:
    """Return a turn with the reasoning and the ids of calls as the template takes them."""
    if forms.reasoning_name not in turn and "reasoning_content" in turn:
        turn = {**turn, forms.reasoning_name: turn["reasoning_content"]}
        del turn["reasoning_content"]
    if not forms.has_short_ids:
        return turn
    if "tool_calls" in turn:
        turn = {**turn, "tool_calls": [{**call, "id": _short_id(call["id"])} for call in turn["tool_calls"]]}
    return turn if turn["role"] != "tool" else {**turn, "tool_call_id": _short_id(turn.get("tool_call_id", ""))}


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def _with_single_calls(turns: list[Turn]) -> Iterator[Turn]:
    """Yield the turns, of those with several calls one for each, with its result behind it."""
    place = 0
    while place < len(turns):
        turn, place = turns[place], place + 1
        if len(turn.get("tool_calls", ())) < 2:
            yield turn
            continue
        results = []
        while place < len(turns) and turns[place]["role"] == "tool":
            results.append(turns[place])
            place += 1
        for number, call in enumerate(turn["tool_calls"]):
            own = [each for each in results if each.get("tool_call_id", "") == call["id"]]
            results = [each for each in results if each not in own]
            head = turn if number == 0 else {"role": turn["role"], "content": ""}
            yield {**head, "tool_calls": [call]}
            yield from own
        yield from results


def _call_turns(turn: Turn, forms: TemplateForms) -> Iterator[Turn]:
    """Yield a turn; of one with calls, what the template takes in its place."""
    if "tool_calls" not in turn:
        yield turn
        return
    name = forms.reasoning_name
    if turn["content"] and forms.joins_thinking and turn.get(name):
        turn = {**turn, name: f"{turn[name]}{BETWEEN_TURNS}{turn['content']}", "content": ""}
    elif turn["content"] and forms.splits_content:
        yield {"role": turn["role"], "content": turn["content"]}
        turn = {**turn, "content": ""}
    yield {**turn, "content": None} if forms.has_null_content and not turn["content"] else turn


def _merged(turns: list[Turn]) -> list[Turn]:
    """Return the turns, as one those that the user or the assistant has in a row."""
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else {}
        if last.keys() == turn.keys() == {"role", "content"} and turn["role"] == last["role"] != "tool":
            merged[-1] = {**last, "content": _joined(last["content"], turn["content"])}
        else:
            merged.append(turn)
    return merged


def in_parts(turns: list[Turn]) -> list[Turn]:
    """Return turns whose contents are all arrays of parts."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]


_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "items")
_KEYWORD_TYPES: dict[str, tuple[type, ...]] = {
    "type": (str, list),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (dict,)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "required"), (list,)),
    **dict.fromkeys(("description", "title", "format", "pattern", "$ref"), (str,)),
    "items": (dict, bool, list),
    "additionalProperties": (dict, bool),
}
"""Types of the keywords that chat templates write out."""


def with_usual_keywords(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools whose schemas have no keywords of types that no draft of JSON Schema has."""
    if not tools:
        return tools
    return [
        {**tool, "function": {**tool["function"], "parameters": _usual(tool["function"]["parameters"])}}
        if "parameters" in tool["function"]
        else tool
        for tool in tools
    ]


def _usual(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else {}
    kept = {key: value for key, value in schema.items() if isinstance(value, _KEYWORD_TYPES.get(key, object))}
    for key in _OF_SCHEMAS:
        if isinstance(inner := kept.get(key), dict):
            kept[key] = _usual(inner) if key == "items" else {name: _usual(each) for name, each in inner.items()}
        elif isinstance(inner, list):
            kept[key] = [_usual(each) for each in inner]
    return kept
