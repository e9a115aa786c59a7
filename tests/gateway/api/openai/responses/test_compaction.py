"""Compaction: at the client's request, as an item, and of a prompt that is too long."""

from typing import Any

import openai
import pytest
from openai.types.responses import CompactedResponse

from sluice.gateway.api.openai.responses.items import seal_text, unseal_text
from sluice.pipelines.text.stream import salted_form
from sluice.pipelines.text.types import ChatMessage, TextRequest
from tests.gateway.api.openai.responses.test_agents import stream
from tests.gateway.api.openai.responses.test_create import IMAGE, PATH
from tests.gateway.api.openai.responses.test_tools import ANSWER, TOOL, ScriptedModel, calling, scripted
from tests.gateway.front.http.live import MODEL, LiveServer

__all__ = ["scripted"]
RULES = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Light up the hall!"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "light", "arguments": '{"room": "hall"}'}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "The lamp is on. " * 8}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is on."}]}
ITEMS: list[Any] = [RULES, QUESTION, CALL, RESULT, SAID]
SHOWN: Any = {"role": "user", "content": [IMAGE]}
SUMMARY = "The hall is lit."


def say(scripted: ScriptedModel, text: str) -> None:
    scripted.pieces = [text[start : start + 3] for start in range(0, len(text), 3)]


def summary_of(item: dict[str, Any]) -> str | None:
    assert item["type"] == "compaction"
    return unseal_text("compaction", item["encrypted_content"])


def test_compacted_items_are_the_users_and_a_summary(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    say(scripted, f"<think>\nWell.</think>\n\n{SUMMARY}")
    compacted = client.responses.compact(model=MODEL, input=ITEMS, instructions="Be kind.")
    assert isinstance(compacted, CompactedResponse) and compacted.object == "response.compaction"
    assert compacted.usage.output_tokens
    rules, question, compaction = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    assert (rules["content"], question["content"]) == (RULES["content"], QUESTION["content"])
    assert summary_of(compaction) == SUMMARY
    assert [turn.role for turn in scripted.prompt.messages][-2:] == ["assistant", "user"]
    assert scripted.prompt.options.tools == () and scripted.requests[-1].sampling["max_tokens"] <= 2048
    following: Any = [rules, question, compaction, {"role": "user", "content": "And the attic?"}]
    client.responses.create(model=MODEL, input=following)
    assert [(turn.role, turn.content) for turn in scripted.prompt.messages] == [
        ("developer", "Be brief."),
        ("user", "Light up the hall!"),
        ("user", f"Summary of the conversation so far:\n{SUMMARY}"),
        ("user", "And the attic?"),
    ]


def test_a_trigger_makes_the_answer_a_compaction(scripted: ScriptedModel, live: LiveServer) -> None:
    say(scripted, ANSWER)
    [reasoning, compaction] = stream(live, {"model": MODEL, "input": [*ITEMS, {"type": "compaction_trigger"}]})[
        "output"
    ]
    assert reasoning["type"] == "reasoning"
    assert (summary_of(compaction) or "").strip() == "At once."


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_a_compaction_follows_is_read_as_the_users_messages(
    scripted: ScriptedModel, live: LiveServer, is_stored: bool
) -> None:
    say(scripted, SUMMARY)
    first = stream(live, {"model": MODEL, "input": [*ITEMS, {"type": "compaction_trigger"}], "store": is_stored})
    following: Any = {
        "model": MODEL,
        "input": [{"role": "user", "content": "And?"}],
        "previous_response_id": first["id"],
    }
    if not is_stored:
        following = {"model": MODEL, "input": [*ITEMS, *first["output"], *following["input"]]}
    assert live.post(PATH, following).status_code == 200
    assert [turn.role for turn in scripted.prompt.messages] == ["developer", "user", "user", "user"]
    assert SUMMARY in scripted.prompt.messages[2].content


def test_a_prompt_past_its_threshold_is_compacted_first(live: LiveServer) -> None:
    live.say(SUMMARY)
    try:
        body: dict[str, Any] = {"model": MODEL, "input": ITEMS, "max_output_tokens": 20}
        short = stream(live, {**body, "context_management": [{"type": "compaction", "compact_threshold": 10**6}]})
        compacting: Any = {"context_management": [{"type": "compaction", "compact_threshold": 4}]}
        long = stream(live, {**body, **compacting})
        [compaction, message] = long["output"]
        assert [item["type"] for item in short["output"]] == [message["type"]] == ["message"]
        assert SUMMARY in (summary_of(compaction) or "")
        assert long["usage"]["input_tokens"] < short["usage"]["input_tokens"]
        again = stream(live, {**body, **compacting, "input": [*ITEMS, *long["output"], QUESTION]})
        assert [item["type"] for item in again["output"]] == ["compaction", "message"]
        messages: Any = {"input": [RULES, QUESTION, *long["output"][:1], QUESTION], **compacting}
        assert [item["type"] for item in stream(live, {**body, **messages})["output"]] == ["message"]
    finally:
        live.runner.script = None


def test_a_summary_is_generated_as_its_response_is(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, generate = [], live.model.generate

    async def note(request: TextRequest, consumer: Any, **more: Any) -> None:
        seen.append((request.cache_salt, salted_form(request).salt, live.server.plane.num_open))
        await generate(request, consumer, **more)

    monkeypatch.setattr(live.model, "generate", note)
    compacting: Any = {"context_management": [{"type": "compaction", "compact_threshold": 4}], "cache_salt": "mine"}
    assert live.post(PATH, {"model": MODEL, "input": ITEMS, "max_output_tokens": 9, **compacting}).status_code == 200
    assert seen == [("mine", "mine", 1)] * 2, "under its salt, and a drain waits for it"


def test_a_conversation_too_long_for_its_model_is_compacted_without_its_oldest_items(live: LiveServer) -> None:
    steps = [{**SAID, "content": [{"type": "output_text", "text": f"step {number} " * 30}]} for number in range(999)]
    body = {"model": MODEL, "input": [QUESTION, *steps], "max_output_tokens": 9}
    answer = live.post(f"{PATH}/compact", body)
    assert answer.status_code == 200, answer.text
    assert [item["type"] for item in answer.json()["output"]] == ["message", "compaction"]
    compacting: Any = {"context_management": [{"type": "compaction", "compact_threshold": 400}]}
    assert [item["type"] for item in stream(live, {**body, **compacting})["output"]] == ["compaction", "message"]


@pytest.mark.parametrize(
    ("path", "fields", "kinds"),
    [
        (f"{PATH}/compact", {}, ["message", "message", "message", "compaction"]),
        (PATH, {"context_management": [{"type": "compaction", "compact_threshold": 4}]}, ["compaction", "message"]),
        (PATH, {"context_management": [{"type": "compaction", "compact_threshold": 10**6}]}, ["message"]),
        (PATH, {"input": [SHOWN, QUESTION, CALL, {**RESULT, "output": [IMAGE]}]}, ["message"]),
    ],
)
def test_an_earlier_image_is_left_out_of_what_is_compacted(
    live: LiveServer, path: str, fields: dict[str, Any], kinds: list[str]
) -> None:
    body = {"model": MODEL, "input": [SHOWN, *ITEMS], "max_output_tokens": 9, **fields}
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    assert [item["type"] for item in answer.json()["output"]] == kinds


def test_calls_are_no_part_of_a_summary(scripted: ScriptedModel, live: LiveServer) -> None:
    scripted.pieces = [*SUMMARY, *calling("light", {"room": "hall"})]
    answer = live.post(f"{PATH}/compact", {"model": MODEL, "input": ITEMS, "tools": [TOOL], "background": True})
    assert [item["type"] for item in answer.json()["output"]] == ["message", "message", "compaction"]
    assert summary_of(answer.json()["output"][-1]) == SUMMARY


def test_only_the_last_summary_is_read(scripted: ScriptedModel, live: LiveServer) -> None:
    summaries = [{"type": "compaction", "encrypted_content": seal_text("compaction", text)} for text in ("old", "new")]
    assert live.post(PATH, {"model": MODEL, "input": [QUESTION, summaries[0], SAID, summaries[1]]}).status_code == 200
    assert scripted.prompt.messages[1:] == (ChatMessage("user", "Summary of the conversation so far:\nnew"),)


def test_a_compaction_without_a_summary_fails(scripted: ScriptedModel, live: LiveServer) -> None:
    scripted.pieces = calling("light", {"room": "hall"})
    assert live.post(f"{PATH}/compact", {"model": MODEL, "input": ITEMS}).status_code == 503
    failed = stream(live, {"model": MODEL, "input": [*ITEMS, {"type": "compaction_trigger"}]})
    assert failed["status"] == "failed" and "no summary" in failed["error"]["message"]


def test_images_that_a_model_does_not_see_cost_no_compaction(scripted: ScriptedModel, live: LiveServer) -> None:
    scripted.pieces = [*SUMMARY]
    shown = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See"}, IMAGE]}
    seen = {**RESULT, "output": [IMAGE]}
    body: dict[str, Any] = {"model": MODEL, "input": [shown, CALL, seen, SAID, QUESTION], "max_output_tokens": 20}
    high: Any = {"context_management": [{"type": "compaction", "compact_threshold": 10**6}]}
    for fields in ({}, {"truncation": "auto"}, high):
        assert [item["type"] for item in stream(live, {**body, **fields})["output"]] == ["message"]
    low: Any = {"context_management": [{"type": "compaction", "compact_threshold": 4}]}
    assert [item["type"] for item in stream(live, {**body, **low})["output"]] == ["compaction", "message"]
    answer = live.post(f"{PATH}/compact", body)
    assert answer.status_code == 200, answer.text
    assert [part["type"] for part in answer.json()["output"][0]["content"]] == ["input_text", "input_image"]
