"""Samples of each family's answers: their parts, however the text is split."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipelines.chat.registry import find_formats, reasoning_formats, tool_formats
from pipelines.text.parts import AnswerText, CallArguments, CallStart, ChatReader, Part, ReasoningText
from tests.errors import error_of

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "get_time": {},
    }.items()
)


@dataclass
class Answer:
    """The joined parts of an answer. Calls are (name, arguments)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def joined(parts: list[Part]) -> Answer:
    answer, names, arguments = Answer(), list[str](), list[str]()
    for part in parts:
        match part:
            case AnswerText(text):
                answer.text += text
            case ReasoningText(text):
                answer.reasoning += text
            case CallStart(index, _, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                assert index == len(names) - 1
                arguments[index] += text
    answer.calls = list(zip(names, arguments, strict=True))
    return answer


def read(reader: ChatReader, *pieces: str) -> Answer:
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish())


def parsed(answer: Answer) -> Answer:
    return Answer(answer.text, answer.reasoning, [(name, json.loads(text)) for name, text in answer.calls])


WEATHER = ("get_weather", {"city": 'O"slo} é', "days": 2})
TIME: tuple[str, dict[str, Any]] = ("get_time", {})
WEATHER_JSON = json.dumps(WEATHER[1])

SAMPLES = {
    "hermes": (
        f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        Answer("Let me look.", "", [WEATHER, TIME]),
    ),
}
"""By the format: an answer, and its parts."""


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_are_the_same_however_the_text_is_split(name: str) -> None:
    text, expected = SAMPLES[name]
    whole = read(reader_of(name), text)
    assert parsed(whole) == expected
    for at in range(len(text)):
        assert read(reader_of(name), text[:at], text[at:]) == whole
    assert read(reader_of(name), *text) == whole


def reader_of(tools: str, reasoning: str = "none") -> ChatReader:
    return find_formats("", tools, reasoning).reader(TOOLS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call < here <tool", Answer("no call < here <tool")),
        ("a <tool_call> is a tag", Answer("a <tool_call> is a tag")),
        ('<tool_call>{"name": 3}', Answer('<tool_call>{"name": 3}')),
        ('<tool_call>{"name": "f", "arguments": {"a": ', Answer("", "", [("f", '{"a": ')])),
        ('<tool_call>{"name": "f"}', Answer("", "", [("f", "{}")])),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', Answer("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"x": [1], "parameters": {"a": 1} , "name":"f"} x', Answer("x", "", [("f", '{"a": 1}')])),
    ],
)
def test_what_is_not_quite_a_call(text: str, expected: Answer) -> None:
    assert read(reader_of("hermes"), text) == expected
    assert read(reader_of("hermes"), *text) == expected


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("", "<think>\nwhy\n</think>\n\nso <think>", Answer("so <think>", "why\n")),
        ("", "  plain </think>", Answer("  plain </think>")),
        ("<think>\n", "why</thin</think>so", Answer("so", "why</thin")),
        ("<think>\n", "why", Answer("", "why")),
        ("<think>\n\n</think>\n\n", "so", Answer("so")),
    ],
)
def test_reasoning(prompt_end: str, text: str, expected: Answer) -> None:
    think = find_formats("", "none", "think").reasoning
    assert think is not None
    for pieces in ([text], list(text)):
        reader = think.reader(prompt_end)
        assert joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish()) == expected


def test_reasoning_is_before_the_calls() -> None:
    text = (
        '<think>a <tool_call>{"name": "g"}</tool_call></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    expected = Answer("", 'a <tool_call>{"name": "g"}</tool_call>', [("f", "{}")])
    assert read(reader_of("hermes", "think"), *text) == read(reader_of("hermes", "think"), text) == expected


TEMPLATES = {
    'return a json object within <tool_call></tool_call>: {"name": .., "arguments": ..}': ("hermes", None),
    "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}": (None, "think"),
    "{{ messages[0].content }}": (None, None),
}
"""Extracts of chat templates, and the formats that they speak."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_found_from_the_template(template: str) -> None:
    found = find_formats(template)
    names = tuple(each.name if each is not None else None for each in (found.tools, found.reasoning))
    assert names == TEMPLATES[template]


def test_every_format_has_a_sample() -> None:
    assert {each.name for each in tool_formats()} == SAMPLES.keys()
    assert {each.name for each in reasoning_formats()} == {"think"}


def test_models_without_a_format() -> None:
    formats = find_formats("", "none", "none")
    error = error_of(formats.reader, TOOLS)
    assert (error.param, "no tool calls in a known format" in error.message) == ("tools", True)
    error = error_of(find_formats, "", "x")
    assert (error.param, "hermes, got 'x'" in error.message) == ("tool_call_parser", True)
