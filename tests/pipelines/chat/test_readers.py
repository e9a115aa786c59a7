"""Answers of every family: their parts, however the text is split, and which family a chat template is of."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.types import FinishReason
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.chat.registry import find_formats, reasoning_formats, tool_formats
from sluice.pipelines.text.types import (
    AnswerText,
    CallArguments,
    CallStart,
    ChatReader,
    Part,
    ReasoningText,
    TextDetail,
    TextEvent,
)
from tests.errors import error_of
from tests.paths import ROOT
from tests.pipelines.chat.samples import CANONICAL, ONE_CALL, OTHERS, TOOLS, Answer, Sample

SAMPLES = [*CANONICAL, *OTHERS]


def joined(parts: list[Part]) -> Answer:
    answer, names, arguments = Answer(), list[str](), list[list[str]]()
    for part in parts:
        match part:
            case AnswerText(text):
                answer.text += text
            case ReasoningText(text):
                answer.reasoning += text
            case CallStart(index, _, name):
                assert index == len(names)
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                assert index == len(names) - 1
                arguments[index].append(text)
    answer.calls = [(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return answer


def reader_of(sample: Sample) -> ChatReader:
    formats = find_formats("", sample.tools, sample.reasoning)
    reader = formats.reader(parse_tools(TOOLS) if formats.tools is not None else ())
    assert reader is not None
    assert reader.read(TextEvent("", 0, 1, 0, detail=TextDetail(prompt_end=sample.prompt_end))) == []
    return reader


def read(sample: Sample, *pieces: str) -> Answer:
    reader = reader_of(sample)
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish())


def test_a_call_that_is_left_out_leaves_no_mark_where_it_is_cut_off() -> None:
    reader = find_formats("", "hermes", "none").reader((), called=["get_weather"])
    assert joined(reader.feed('Well.\n<tool_call>\n{"na') + reader.finish()) == Answer("Well.")


def parsed(answer: Answer) -> Answer:
    def value(arguments: str) -> Any:
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments

    return Answer(answer.text, answer.reasoning, [(name, value(text)) for name, text in answer.calls])


@pytest.mark.parametrize("sample", CANONICAL, ids=lambda sample: f"{sample.tools} {sample.reasoning}")
def test_calls_of_earlier_functions_are_left_out_without_tools(sample: Sample) -> None:
    formats = find_formats("", sample.tools, sample.reasoning)
    shown = Answer(sample.answer.text, sample.answer.reasoning)
    reader = formats.reader((), called=[name for name, _ in sample.answer.calls])
    reader.read(TextEvent("", 0, 1, 0, detail=TextDetail(prompt_end=sample.prompt_end)))
    found = joined(reader.feed(sample.text) + reader.finish())
    assert found == shown


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.tools} {sample.reasoning}")
def test_parts_are_the_same_however_the_text_is_split(sample: Sample) -> None:
    text = sample.text
    whole = read(sample, text)
    assert parsed(whole) == sample.answer
    for at in range(len(text)):
        assert read(sample, text[:at], text[at:]) == whole
    assert read(sample, *text) == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.tools} {sample.reasoning}")
@pytest.mark.parametrize(("num_chars", "merged"), [(1, 1), (3, 4), (3, 1000)])
def test_reasoning_tokens_are_counted_however_they_are_merged(sample: Sample, num_chars: int, merged: int) -> None:
    text, reasoning = sample.text, sample.answer.reasoning
    starts, size = range(0, len(text), num_chars), num_chars * merged
    reader = reader_of(sample)
    for at in range(0, len(text), size):
        reader.read(TextEvent(text[at : at + size], 1, 1, 1))
    reader.read(TextEvent("", 0, 1, 1, FinishReason.STOP, detail=TextDetail(token_starts=starts)))
    at = text.find(reasoning)
    assert at >= 0
    expected = sum(start < at + len(reasoning) and start + num_chars > at for start in starts) if reasoning else 0
    assert reader.num_reasoning_tokens == expected


def test_every_format_has_samples() -> None:
    assert {each.name for each in tool_formats()} == {sample.tools for sample in CANONICAL}
    names = {sample.reasoning for sample in SAMPLES} - {"none"}
    assert {each.name for each in reasoning_formats()} == {_reasoning(name) for name in names}


def _reasoning(name: str) -> str:
    format = find_formats("", "none", name).reasoning
    assert format is not None
    return format.name


@pytest.mark.parametrize("sample", CANONICAL, ids=lambda sample: sample.tools)
def test_a_long_argument_costs_the_same_for_each_character(sample: Sample) -> None:
    """Counted in calls of functions, and in the text that is kept until the next piece arrives."""
    short, long = (_count_calls(sample.tools, sample.text.replace('"x', '"x' + n * " é[{", 1)) for n in (300, 3_000))
    assert 300 < short < long < 10 * short


def _count_calls(name: str, text: str) -> int:
    format = find_formats("", name).tools
    assert format is not None
    reader = format.reader(parse_tools(TOOLS))
    num_calls, most_kept = 0, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    for at in range(0, len(text), 4):
        sys.setprofile(count)
        try:
            reader.feed(text[at : at + 4])
        finally:
            sys.setprofile(None)
        most_kept = max(most_kept, reader.source.num_unread)
    assert reader.num_calls > 0
    assert most_kept < 40
    return num_calls


def test_malformed_calls_are_read_once() -> None:
    text = 2_000 * '<tool_call>{"a": [' + 2_000 * "<tool_call>{"
    assert read(Sample("hermes", "", Answer()), text) == Answer(text)
    assert _count_calls("hermes", text.replace("[", "1") + CANONICAL[0].text) < 20 * len(text)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "\\ud800"}',
        '{"\\udfff": 1, "name": "f", "arguments": {}}',
        '{"name": ' + "[" * 3000 + "]" * 3000 + ', "arguments": {}}',
    ],
)
def test_what_is_no_text_is_no_call(call: str) -> None:
    """JSON can spell half a surrogate pair, which no answer can have, and nest deeper than its reader goes."""
    text = f"<tool_call>{call}</tool_call>"
    assert read(Sample("hermes", "", Answer()), text) == Answer(text)


TEMPLATES = {
    "<|channel|>commentary<|message|>": ("openai", "openai_gptoss"),
    "<tool_call>\n<function=name>\n<parameter=a>": ("qwen3_coder", None),
    "<tool_call>{name}\n<arg_key>{key}</arg_key> <think></think>": ("glm45", "think"),
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call.id }}<think></think>": ("kimi_k2", "think"),
    "<｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}\\n```json": ("deepseek_v3", None),
    "</think><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>": ("deepseek_v31", "think"),
    "[TOOL_CALLS][": ("mistral", None),
    "[THINK]..[/THINK][TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}": ("mistral_v11", "magistral"),
    "all calls in one list: functools[{..}]": ("phi4_mini_json", None),
    "<|tool|>{{ tools }}<|/tool|>": ("phi4", None),
    "respond with <|tool_call|> and a list. Write 'Here is my response:'": ("granite", "granite"),
    'return a json object within <tool_call></tool_call>: {\\"name\\": .., \\"arguments\\": ..}': ("hermes", None),
    "a list: [func_name1(params_name1=params_value1, ...), func_name2(params)]": ("pythonic", None),
    'answer with {\\"name\\": function name, \\"parameters\\": dictionary': ("llama3_json", None),
    "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}": (None, "think"),
    "{{ messages[0].content }}": (None, None),
}
"""Extracts of chat templates, and the formats that they speak."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_found_from_the_template(template: str) -> None:
    found = find_formats(template)
    names = tuple(each.name if each is not None else None for each in (found.tools, found.reasoning))
    assert names == TEMPLATES[template]


def test_every_format_is_found() -> None:
    assert {tools for tools, _ in TEMPLATES.values()} - {None} == {each.name for each in tool_formats()}
    assert {reasoning for _, reasoning in TEMPLATES.values()} - {None} == {each.name for each in reasoning_formats()}


def test_names_are_of_one_format() -> None:
    for formats in (tool_formats(), reasoning_formats()):
        names = [name for each in formats for name in (each.name, *each.aliases)]
        assert len(names) == len(set(names))


def test_every_format_is_in_the_documentation() -> None:
    page = (ROOT / "docs/models.md").read_text()
    names = [name for each in (*tool_formats(), *reasoning_formats()) for name in (each.name, *each.aliases)]
    assert [name for name in names if f"`{name}`" not in page] == []


MODULE = """
from sluice.pipelines.chat.json_lists import HermesFormat
from sluice.pipelines.chat.think import ThinkFormat

class Foreign(HermesFormat):
    name = "foreign"

class Musing(ThinkFormat):
    name, aliases, openings, closings = "musing", (), ("<muse>",), ("</muse>",)
"""
ENTRY_POINTS = """
[sluice.tool_formats]
a_broken = sluice_foreign_chat:Missing
b_odd = builtins:dict
foreign = sluice_foreign_chat:Foreign

[sluice.reasoning_formats]
musing = sluice_foreign_chat:Musing
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with formats, as importlib.metadata finds it: a folder on the path."""
    info = tmp_path / "sluice_foreign_chat-1.0.dist-info"
    info.mkdir()
    (tmp_path / "sluice_foreign_chat.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice-foreign-chat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for found in (tool_formats, reasoning_formats):
        found.cache_clear()
    yield
    for found in (tool_formats, reasoning_formats):
        found.cache_clear()


@pytest.mark.usefixtures("foreign")
def test_formats_of_other_packages_come_first(caplog: pytest.LogCaptureFixture) -> None:
    found = find_formats('<tool_call> "arguments" <muse></muse><think></think>')
    assert found.tools is not None and found.reasoning is not None
    assert (found.tools.name, found.reasoning.name) == ("foreign", "musing")
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" (")[0] for message in messages] == ["the chat format a_broken", "the chat format b_odd"]


def test_ids_of_calls() -> None:
    ids = {}
    for sample in CANONICAL:
        parts = reader_of(sample).feed(sample.text)
        ids[sample.tools] = [part.id for part in parts if isinstance(part, CallStart)]
        assert len(set(ids[sample.tools])) == len(sample.answer.calls)
    assert ids["kimi_k2"] == ["functions.get_weather:0", "functions.get_time:1", "functions.plan:2"]
    assert ids["mistral_v11"][0] == "abcDEF123"
    assert [len(each) for each in ids["mistral"]] == [9, 9, 9]
    text = ONE_CALL["kimi_k2"].replace(":0", ":1") * 3
    kimi = [part.id for part in reader_of(Sample("kimi_k2", text, Answer())).feed(text) if isinstance(part, CallStart)]
    assert kimi[0] == "functions.get_time:1" and kimi[2] == "functions.get_time:2" and len(set(kimi)) == 3


def test_models_without_a_format() -> None:
    formats = find_formats("", "none", "none")
    error = error_of(formats.reader, TOOLS)
    assert (error.param, "no tool calls in a known format" in error.message) == ("tools", True)
    error = error_of(find_formats, "", "x")
    assert (error.param, "llama3_json, got 'x'" in error.message) == ("tool_call_parser", True)
