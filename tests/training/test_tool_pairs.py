"""The tool calls that rill learns are answered from the question alone, and none of the evaluation's."""

import json
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from training.rill.conversation import Conversation
from training.rill.pairs_tools import NEW_NOUNS, NEW_VERBS, ToolExamples, ToolRequests, report
from training.rill.persona import NO_TOOL
from training.rill.tool_families import FAMILIES, HELD_OUT_FAMILIES
from training.rill.tool_values import ENUMS

SEEDS = st.integers(0, 10**6)
MEANT = {True, False, *(value for values in ENUMS.values() for value in values)}
"""Values that a question may word otherwise: "with details", "in Celsius"."""


@given(SEEDS, st.booleans())
def test_a_call_is_of_a_given_tool_with_arguments_out_of_the_question(seed: int, is_new: bool) -> None:
    requests = ToolRequests(Random(seed), new=is_new)
    tools = requests.tools(3)
    question, [call] = requests.call(tools)
    content = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    [schema] = [tool.schema["function"] for tool in tools if tool.name == content["name"]]
    assert set(schema["parameters"]["required"]) <= set(content["arguments"]) <= set(schema["parameters"]["properties"])
    for value in content["arguments"].values():
        assert str(value) in question or str(value).lower() in question or value in MEANT


@given(SEEDS)
def test_every_result_is_reported_and_calls_follow_questions(seed: int) -> None:
    conversation = ToolExamples(Random(seed), lambda: None).draw()
    before = ""
    for asked, answer in conversation.turns if conversation else ():
        assert asked.startswith("<tool_response>") == before.startswith("<tool_call>")
        assert answer.startswith("<tool_call>") or asked.startswith("<tool_response>") or answer.endswith((".", "?"))
        before = answer


def test_a_report_has_each_value_of_the_result() -> None:
    assert report('{"city": "Oslo", "wind_speed": 3.5, "rain": false}') == (
        "The city is Oslo, the wind speed is 3.5 and the rain is false."
    )
    assert [report("12"), report("It rains.")] == ["The result is 12.", "It rains."]


def test_training_never_shows_the_names_of_the_evaluation() -> None:
    new = {*NEW_VERBS, *NEW_NOUNS}
    trained, held_out = (ToolRequests(Random(1), composed_share=1.0, new=is_new) for is_new in (False, True))
    for _ in range(100):
        assert not any(new & set(tool.family.topic.split()) for tool in trained.tools(3))
        assert all(new & set(tool.family.topic.split()) for tool in held_out.tools(3))
    known = {name for family in FAMILIES for name in family.names}
    assert not known & {name for family in HELD_OUT_FAMILIES for name in family.names}


def test_some_requests_fit_no_tool() -> None:
    drawn = [ToolExamples(Random(seed), lambda: None).draw() or Conversation((("", ""),)) for seed in range(300)]
    declined = sum(conversation.turns[0][1] == NO_TOOL for conversation in drawn)
    assert 0.05 < declined / len(drawn) < 0.3
