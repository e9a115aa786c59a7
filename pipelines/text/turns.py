"""Conversations with tools in the form that chat templates read, and all that a client wrote in them."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from pydantic_core import from_json

from sluice.pipelines.text.template_forms import TemplateForms, Turn
from sluice.pipelines.text.types import ChatMessage, ImagePart, TemplateOptions

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells a half of a surrogate pair."""
_APART = "\n"
"""Stands between strings that a template does not write side by side, when they are searched for control tokens."""


def tool_turns(messages: Sequence[ChatMessage], roles: Sequence[str], forms: TemplateForms) -> list[Turn]:
    """Return messages of these roles with their reasoning, calls and results, with the arguments of calls as a template
    with these `forms` takes them. A result gets the name of the function that was called."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_turn(*each, forms, names) for each in zip(messages, roles, strict=True)]


def _turn(message: ChatMessage, role: str, forms: TemplateForms, names: dict[str, str]) -> Turn:
    turn: Turn = {"role": role, "content": _parts(message) if message.parts else message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, forms)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        turn["name"] = name
    return turn


def _parts(message: ChatMessage) -> list[dict[str, str]]:
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part} for part in message.parts
    ]


def with_whole_texts(turns: list[Turn], placeholders: Sequence[str]) -> list[Turn]:
    """Return turns whose contents are text, for a template that takes no parts: the placeholders of a turn's images,
    and then its text, on lines of their own, as vLLM does."""
    rest = iter(placeholders)

    def whole(content: str | list[dict[str, str]] | None) -> str | None:
        if not isinstance(content, list):
            return content
        images = [next(rest, "") for part in content if part["type"] == "image"]
        return _APART.join([*images, "".join(part.get("text", "") for part in content)])

    return [{**turn, "content": whole(turn["content"])} for turn in turns]


def _arguments(text: str, forms: TemplateForms) -> dict[str, Any] | str:
    """Return a call's arguments as a template takes them. Those of a call that was cut off, or that a model got wrong,
    are no JSON object: they are their text where the template takes one, else what the text has of an object."""
    parsed: Any = ...
    with suppress(ValueError, RecursionError):
        parsed = json.loads(text or "null", strict=False)
    if parsed is None:
        parsed, text = {}, "{}"
    if forms.has_text_arguments:
        return text
    if isinstance(parsed, dict):
        return _without_half_pairs(parsed) if _HALF_PAIR.search(text) else parsed
    return text if forms.takes_any_arguments else _begun_object(text)


def _without_half_pairs(parsed: dict[str, Any]) -> dict[str, Any]:
    """Return an object with a question mark for each half of a surrogate pair, which is no character."""
    text = json.dumps(parsed, ensure_ascii=False).encode(errors="replace")
    replaced: dict[str, Any] = json.loads(text)
    return replaced


def _begun_object(text: str) -> dict[str, Any]:
    """Return what there is of a JSON object that was cut off."""
    with suppress(ValueError):
        begun = from_json(text, allow_partial="trailing-strings")
        if isinstance(begun, dict):
            return begun
    return {}


def strings_in(turns: list[Turn], options: TemplateOptions) -> list[str]:
    """Return every string that the client wrote, in a fixed order: first the contents, which may stand side by side."""
    found = [turn["content"] if isinstance(turn["content"], str) else "" for turn in turns]
    others: list[str] = []
    for part in _others(turns, options):
        _add_strings(part, others)
    for string in others:
        found += (_APART, string)
    return found


def with_strings(
    turns: list[Turn], options: TemplateOptions, strings: Sequence[str]
) -> tuple[list[Turn], TemplateOptions]:
    """Return the same conversation with other strings, in the order of `strings_in`."""
    contents, others = strings[: len(turns)], iter(strings[len(turns) + 1 :: 2])
    replaced = [_replace(part, others) for part in _others(turns, options)]
    rests, (tools, documents, arguments) = replaced[: len(turns)], replaced[len(turns) :]
    rebuilt = [
        {"role": turn["role"], "content": content, **rest}
        for turn, content, rest in zip(turns, contents, rests, strict=True)
    ]
    return rebuilt, msgspec.structs.replace(
        options,
        tools=tuple(tools),
        documents=tuple(documents),
        arguments=dict(zip(options.arguments, arguments, strict=True)),
    )


def _others(turns: list[Turn], options: TemplateOptions) -> list[Any]:
    """Return what the client wrote besides roles and contents of text: of each turn, then the tools, the documents and
    the values of the arguments, whose names are the template's."""
    rests = [
        {
            key: value
            for key, value in turn.items()
            if key != "role" and (key != "content" or not isinstance(value, str))
        }
        for turn in turns
    ]
    return [*rests, list(options.tools), list(options.documents), list(options.arguments.values())]


def _add_strings(value: Any, found: list[str]) -> None:
    """Add the strings in a value, names of members too. Long lists of tools have tens of thousands."""
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for key, member in value.items():
            found.append(key)
            _add_strings(member, found)
    elif isinstance(value, list | tuple):
        for element in value:
            _add_strings(element, found)


def _replace(value: Any, strings: Iterator[str]) -> Any:
    """Return the value with each of its strings replaced by the next of `strings`."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, dict):
        return {next(strings): _replace(member, strings) for member in value.values()}
    if isinstance(value, list | tuple):
        return [_replace(element, strings) for element in value]
    return value
