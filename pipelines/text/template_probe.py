"""Finds the forms of turns that a chat template takes: renders small conversations and looks for what is in them."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import msgspec

from sluice.pipelines.text.template_forms import SystemPlace, TemplateForms, Turn, in_parts, shape_turns

Render = Callable[[list[Turn], list[dict[str, Any]] | None], str]
"""Returns the text of turns with tools. Raises any error where the template refuses them."""

_NAME = "probe_function"
_KEY = "probe_key"
_VALUES = ("probe_value", "probe_other")
_SAID, _THOUGHT, _SYSTEM, _LATER = "probe_said", "probe_thought", "probe_system", "probe_later"
_RESULT = "probe_result"
_IDS = ("call_0123456789abcdef", "call_fedcba9876543210")
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "Text."}}},
    },
}
_CUT_OFF = f'{{"{_KEY}": "{_VALUES[0]}'
_QUESTION: Turn = {"role": "user", "content": "probe_question"}
_ANSWER: Turn = {"role": "assistant", "content": "probe_answer"}
_NO_JSON = (f"{{'{_KEY}'", "'type'", '"type"')
"""Python's own text of arguments and of parts, and parts as JSON: a template that writes them takes another form."""


def probe_forms(render: Render) -> TemplateForms:
    """Return the forms of turns that the template behind `render` takes."""
    return _Probe(render).forms()


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._no_tools: list[dict[str, Any]] | None = None

    def forms(self) -> TemplateForms:
        if not self._text([_QUESTION]) and self._text([_QUESTION], []):
            self._no_tools = []
        forms = TemplateForms(
            has_empty_tools=self._no_tools is not None,
            system=self._system_place(),
            merges_turns=self._merges_turns(),
        )
        forms = msgspec.structs.replace(forms, **self._contents())
        for decide in (
            self._with_calls,
            self._with_results,
            self._with_any_arguments,
            self._with_reasoning,
            self._with_contents_apart,
        ):
            forms = decide(forms)
        return self._with_calls_apart(forms)

    def _text(self, turns: list[Turn], tools: list[dict[str, Any]] | None = None) -> str:
        """Return the text of a conversation, "" where the template refuses it."""
        try:
            return self._render(turns, self._no_tools if tools is None else tools)
        except Exception:  # a template can raise anything
            return ""

    def _shows(self, turns: list[Turn], *needles: str) -> bool:
        """Whether the text of turns without calls has all of the needles, and none in Python's own form."""
        text = self._text(turns)
        return all(each in text for each in needles) and not any(each in text for each in _NO_JSON)

    # --- turns without calls ---

    def _contents(self) -> dict[str, bool]:
        """Return whether contents must be parts, and whether those may be images."""
        part = {"type": "text", "text": _SAID}
        parts: Turn = {"role": "user", "content": [part]}
        images: Turn = {"role": "user", "content": [{"type": "image"}, part]}
        if not self._shows([parts], _SAID):
            return {}
        has_text = self._shows([{**parts, "content": _SAID}], _SAID)
        takes_images = self._shows([images], _SAID) and self._text([images]) != self._text([parts])
        return {"has_parts": not has_text, "takes_images": takes_images}

    def _system_place(self) -> SystemPlace:
        first: Turn = {"role": "system", "content": _SYSTEM}
        later: Turn = {"role": "system", "content": _LATER}
        in_the_middle = [_QUESTION, _ANSWER, later, _QUESTION]
        if not self._shows_plain([_QUESTION], "probe_question"):
            return SystemPlace.ANYWHERE  # nothing can be said of a template that takes not even this
        if not self._shows_plain([first, _QUESTION], _SYSTEM):
            return SystemPlace.NOWHERE
        places = ([first, *in_the_middle], in_the_middle, [_QUESTION, later], [_QUESTION, later, _QUESTION])
        is_free = all(
            self._shows_plain(turns, _LATER, *(each["content"] for each in turns if each is first)) for turns in places
        )
        return SystemPlace.ANYWHERE if is_free else SystemPlace.FIRST

    def _merges_turns(self) -> bool:
        """Whether the template refuses two turns of one role in a row."""
        rows = ([_QUESTION, _QUESTION], [_QUESTION, _ANSWER, _ANSWER, _QUESTION])
        is_taken = all(self._text(turns) or self._text(in_parts(turns)) for turns in rows)
        return not is_taken and self._shows_plain([_QUESTION, _ANSWER, _QUESTION], "probe_answer")

    def _shows_plain(self, turns: list[Turn], *needles: str) -> bool:
        """Whether the template shows contents, as a text or else as parts."""
        return self._shows(turns, *needles) or self._shows(in_parts(turns), *needles)

    # --- turns with calls ---

    def _takes(self, forms: TemplateForms, turn: Turn, *needles: str) -> bool:
        """Whether the template shows the needles of an assistant's turn, in these forms, with the results of its calls,
        and takes that as the history of another question."""
        results: list[Turn] = [
            {"role": "tool", "content": _RESULT, "tool_call_id": call["id"], "name": _NAME}
            for call in turn["tool_calls"]
        ]
        turns = [_QUESTION, turn, *results]
        text = self._shaped_text(turns, forms)
        is_written = _NO_JSON[0] not in text and text.count("None") <= self._num_nones
        is_shown = is_written and all(each in text for each in needles)
        return is_shown and bool(self._shaped_text([*turns, _ANSWER, _QUESTION], forms))

    def _shaped_text(self, turns: list[Turn], forms: TemplateForms) -> str:
        shaped = shape_turns(turns, forms)
        return self._text(in_parts(shaped) if forms.has_parts else shaped, [_TOOL])

    @cached_property
    def _num_nones(self) -> int:
        """How often the word is in a text without a content of null."""
        return self._text([_QUESTION], [_TOOL]).count("None")

    def _with_calls(self, forms: TemplateForms) -> TemplateForms:
        """Add the form of calls: the first that the template shows, from the usual to the unusual."""
        for has_short_ids, has_text, has_null in product((False, True), repeat=3):
            tried = msgspec.structs.replace(
                forms, has_text_arguments=has_text, has_null_content=has_null, has_short_ids=has_short_ids
            )
            if self._takes(tried, _calling(tried), _NAME, _VALUES[0]):
                return self._with_shorter_content(tried)
        as_text = msgspec.structs.replace(forms, hides_calls=True)
        for tried in (as_text, msgspec.structs.replace(as_text, hides_results=True)):
            if self._takes(tried, _calling(tried), _NAME, _VALUES[0]):
                return tried
        return forms

    def _with_shorter_content(self, forms: TemplateForms) -> TemplateForms:
        """Add whether a content of null makes the text of a call shorter: an empty one is then a turn of its own."""
        turn, as_null = _calling(forms), msgspec.structs.replace(forms, has_null_content=True)
        lengths = [len(self._shaped_text([_QUESTION, turn], each)) for each in (forms, as_null)]
        return as_null if lengths[1] < lengths[0] and self._takes(as_null, turn, _NAME, _VALUES[0]) else forms

    def _with_results(self, forms: TemplateForms) -> TemplateForms:
        """Add whether results are shown, or must be the user's text."""
        as_text = msgspec.structs.replace(forms, hides_results=True)
        is_hidden = not self._takes(forms, _calling(forms), _RESULT)
        return as_text if is_hidden and self._takes(as_text, _calling(as_text), _VALUES[0], _RESULT) else forms

    def _with_any_arguments(self, forms: TemplateForms) -> TemplateForms:
        call = _call(0, _CUT_OFF)
        takes_any = self._takes(forms, _calling(forms, calls=[call]), _NAME, _CUT_OFF)
        return msgspec.structs.replace(forms, takes_any_arguments=takes_any)

    def _with_reasoning(self, forms: TemplateForms) -> TemplateForms:
        """Add the name of the reasoning, and whether text cannot stand beside it."""
        for name in (forms.reasoning_name, "reasoning"):
            tried = msgspec.structs.replace(forms, reasoning_name=name)
            if self._takes(tried, _calling(tried, reasoning_content=_THOUGHT), _VALUES[0], _THOUGHT):
                break
        else:
            return forms
        both = _calling(tried, reasoning_content=_THOUGHT, content=_SAID)
        joins = msgspec.structs.replace(tried, joins_thinking=True)
        is_refused = not self._takes(tried, both, _VALUES[0])
        return joins if is_refused and self._takes(joins, both, _VALUES[0], _THOUGHT, _SAID) else tried

    def _with_contents_apart(self, forms: TemplateForms) -> TemplateForms:
        turn, apart = _calling(forms, content=_SAID), msgspec.structs.replace(forms, splits_content=True)
        is_lost = not self._takes(forms, turn, _VALUES[0])
        return apart if is_lost and self._takes(apart, turn, _VALUES[0], _SAID) else forms

    def _with_calls_apart(self, forms: TemplateForms) -> TemplateForms:
        calls = [_call(index, _arguments(forms, value)) for index, value in enumerate(_VALUES)]
        turn, apart = _calling(forms, calls=calls), msgspec.structs.replace(forms, splits_calls=True)
        is_lost = not self._takes(forms, turn, _NAME, *_VALUES)
        return apart if is_lost and self._takes(apart, turn, _NAME, *_VALUES) else forms


def _arguments(forms: TemplateForms, value: str) -> str | dict[str, str]:
    arguments = {_KEY: value}
    return json.dumps(arguments) if forms.has_text_arguments else arguments


def _call(index: int, arguments: str | dict[str, str]) -> dict[str, Any]:
    return {"id": _IDS[index], "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _calling(forms: TemplateForms, calls: Sequence[dict[str, Any]] = (), content: str = "", **fields: str) -> Turn:
    """Return a turn of the assistant with calls, by default with one."""
    made = list(calls) or [_call(0, _arguments(forms, _VALUES[0]))]
    return {"role": "assistant", "content": content, **fields, "tool_calls": made}
