"""The forms of turns that a chat template takes, and conversations in those forms."""

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
    has_short_ids: bool = False
    """Whether ids of calls must be nine letters and digits."""
    reasoning_name: str = "reasoning_content"
    system: SystemPlace = SystemPlace.ANYWHERE
    merges_turns: bool = False
    """Whether turns that one role has in a row must be one."""
    has_parts: bool = False
    """Whether all contents are arrays of parts."""
    takes_images: bool = False
    """Whether parts may be images. Elsewhere the text has placeholders for them."""


def shape_turns(turns: list[Turn], forms: TemplateForms) -> list[Turn]:
    """Return the same conversation in turns as the template takes them."""
    shaped = _with_system(turns, forms.system)
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


def _joined(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    """Return two contents as one."""
    if isinstance(first, str) and isinstance(second, str):
        return BETWEEN_TURNS.join(filter(None, (first, second)))
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], {"type": "text", "text": BETWEEN_TURNS}, *parts[1]]


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
