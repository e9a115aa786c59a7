"""Answers in every format of tool calls and reasoning, good, damaged or made up: read alike in whatever pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.chat.registry import find_formats, reasoning_formats, tool_formats
from sluice.pipelines.text.types import ChatReader, TextDetail, TextEvent, ToolChoice
from tests.fuzz.running import fuzzed
from tests.pipelines.chat.samples import CANONICAL, OTHERS, TOOLS, Answer, Sample
from tests.pipelines.chat.test_readers import joined

SAMPLES = (*CANONICAL, *OTHERS)
MARKERS = sorted({marker for each in (*tool_formats(), *reasoning_formats()) for marker in each.markers})
SNIPPETS = (
    *MARKERS,
    *('{"name": "get_time", ', '"arguments": ', '"parameters": {', '{"a": [', "]}", '"', "\\", "\\u00", "'", '"""'),
    *('"\\ud800"', "[" * 1500, '{"a":' * 400, '"arguments": "{\\"a\\": ', "\\udfff"),
    *("get_weather", "get_time(", "city=", ")", "[", "]", "{", "}", ",", ";", ":", "\n", " ", "\t", "null", "-1e5"),
    *("functions.", " to=", "json", "```json\n", "\n```", "💥", "é", "\0", "<", "</", ">", "<function=", "=0x1f, "),
)
TOOL_NAMES = ("none", *(each.name for each in tool_formats()))
REASONING_NAMES = ("none", *(each.name for each in reasoning_formats()))
PROMPT_ENDS = ("", "<think>", "<think>\n", "</think>", "[THINK]")


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Cut pieces out of a text, repeat them, and put others between."""
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        snippet = draw(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4), st.just(text[start:end] * 2)))
        text = text[:start] + snippet + text[end:]
    return text


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """An answer of one format, read by that one or another."""
    sample = draw(st.sampled_from(SAMPLES))
    made_up = st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join)
    text = draw(st.one_of(damaged(sample.text), damaged(sample.text), made_up))
    if draw(st.integers(0, 3)):
        return sample._replace(text=text)
    tools, reasoning = draw(st.sampled_from(TOOL_NAMES)), draw(st.sampled_from(REASONING_NAMES))
    return Sample(tools, text, Answer(), reasoning, draw(st.sampled_from(PROMPT_ENDS)))


def open_reader(sample: Sample, choice: ToolChoice) -> ChatReader:
    formats = find_formats("", sample.tools, sample.reasoning)
    reader = formats.reader(parse_tools(TOOLS) if formats.tools is not None else (), choice=choice)
    reader.read(TextEvent("", 0, 1, 0, detail=TextDetail(prompt_end=sample.prompt_end)))
    return reader


def read(sample: Sample, choice: ToolChoice, cuts: list[int]) -> Answer:
    reader = open_reader(sample, choice)
    places = [0, *sorted(min(each, len(sample.text)) for each in cuts), len(sample.text)]
    pieces = [sample.text[start:end] for start, end in pairwise(places)]
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish())


@fuzzed(40)
@given(samples(), st.lists(st.integers(0, 400), max_size=8), st.booleans(), st.booleans())
def test_an_answer_is_the_same_in_whatever_pieces(
    sample: Sample, cuts: list[int], is_parallel: bool, is_required: bool
) -> None:
    choice = ToolChoice(is_parallel=is_parallel, is_required=is_required)
    whole = read(sample, choice, [])
    for text in (whole.text, whole.reasoning, *(text for call in whole.calls for text in call)):
        text.encode()
    assert read(sample, choice, cuts) == whole
    assert read(sample, choice, [*range(len(sample.text))]) == whole
