"""Sessions of several turns: what each turn carries, when it is sent, and how a session ends."""

import asyncio
import json
from typing import Any

import pytest

from sluice.load.config import ApiKind, LoadConfigError, SecondsRange, TurnRange, Workload
from sluice.load.run import Run, run_load
from tests.load.scripted_server import ManualClock, Script, Wire, load_config, serving
from tests.load.test_driver import EagerClock


def chat_answer(text: str) -> Script:
    async def script(wire: Wire) -> None:
        wire.start_stream()
        for letter in f"{text}{wire.index}":
            wire.event({"choices": [{"delta": {"content": letter}, "finish_reason": None}]})
        wire.finish(3)

    return script


def run_sessions(script: Script, clock: ManualClock | None = None, **settings: Any) -> tuple[Run, list[dict[str, Any]]]:
    async def scenario() -> tuple[Run, list[dict[str, Any]]]:
        async with serving(script) as server:
            defaults = {"api": ApiKind.CHAT, "turns": TurnRange(3, 3)}
            run = await run_load(load_config(server.url, **defaults | settings), clock=clock)
            return run, [wire.body for wire in server.wires]

    return asyncio.run(scenario())


def test_each_turn_carries_the_turns_before_it_with_the_servers_answers() -> None:
    run, bodies = run_sessions(chat_answer("ok"))
    messages = bodies[2]["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [each["content"] for each in messages[1::2]] == ["ok0", "ok1"]
    assert messages[:1] == bodies[0]["messages"]
    assert len({each["content"] for each in messages[::2]}) == 3
    assert [result.planned.turn for result in run.results] == [1, 2, 3]
    assert [(each.turn, each.num_served) for each in run.summary.turns] == [(1, 1), (2, 1), (3, 1)]


def test_a_turn_is_due_its_think_time_after_the_answer_before_it() -> None:
    run, _ = run_sessions(chat_answer("ok"), EagerClock(), turns=TurnRange(2, 2), think_s=SecondsRange(2.5, 2.5))
    first, second = run.results
    assert second.intended_s == first.ended_s + 2.5
    assert second.client_wait_s == 0.0


def test_sessions_are_the_same_for_the_same_seed() -> None:
    settings: dict[str, Any] = {"turns": TurnRange(1, 4), "num_requests": 5}
    assert run_sessions(chat_answer("a"), **settings)[1] == run_sessions(chat_answer("a"), **settings)[1]
    assert run_sessions(chat_answer("a"), **settings)[1] != run_sessions(chat_answer("a"), **settings, seed=1)[1]


def test_a_failed_turn_ends_its_session() -> None:
    async def fails_second(wire: Wire) -> None:
        await (wire.whole("500 Oops", b"") if wire.index == 1 else chat_answer("ok")(wire))

    run, bodies = run_sessions(fails_second, num_requests=2)
    assert [len(each["messages"]) for each in bodies] == [1, 3, 1, 3, 5]
    assert (run.summary.num_served, run.summary.num_failed) == (4, 1)
    assert [(each.num_served, each.num_failed) for each in run.summary.turns] == [(2, 0), (1, 1), (1, 0)]


async def response(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"type": "response.output_text.delta", "delta": "abc"})
    usage = {"input_tokens": 1, "output_tokens": 3}
    wire.event({"type": "response.completed", "response": {"id": f"resp_{wire.index}", "usage": usage}})
    wire.end_stream()


@pytest.mark.parametrize("stores_turns", [True, False])
def test_responses_name_the_response_before_or_send_all(stores_turns: bool) -> None:
    _, bodies = run_sessions(response, api=ApiKind.RESPONSES, turns=TurnRange(2, 2), stores_turns=stores_turns)
    assert [body["store"] for body in bodies] == [stores_turns] * 2
    assert bodies[1].get("previous_response_id") == ("resp_0" if stores_turns else None)
    if not stores_turns:
        assert [each["content"] for each in bodies[1]["input"]][:2] == [bodies[0]["input"], "abc"]


async def messages(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "abc"}})
    wire.event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}})
    wire.event({"type": "message_stop"})
    wire.end_stream()


async def ollama(wire: Wire) -> None:
    wire.start_stream()
    wire.send(json.dumps({"message": {"content": "abc"}, "done": False}).encode() + b"\n")
    wire.send(json.dumps({"message": {"content": ""}, "done": True, "eval_count": 3}).encode() + b"\n")
    wire.end_stream()


@pytest.mark.parametrize(("api", "script"), [(ApiKind.MESSAGES, messages), (ApiKind.OLLAMA_CHAT, ollama)])
def test_other_conversations_carry_the_answers_too(api: ApiKind, script: Script) -> None:
    run, bodies = run_sessions(script, api=api, turns=TurnRange(2, 2))
    assert run.summary.failures == {}
    assert [(each["role"], each["content"]) for each in bodies[1]["messages"]][1] == ("assistant", "abc")


async def rag(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"id": "x", "sources": [{"id": 1}], "dropped": []})
    wire.event({"text": "abc"})
    wire.event({"citations": []})
    wire.event({"finish_reason": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    wire.event(b"[DONE]")
    wire.end_stream()


def test_questions_to_documents_have_the_time_of_the_retrieval() -> None:
    run, bodies = run_sessions(rag, api=ApiKind.RAG, model=None, turns=TurnRange(2, 2), collection="docs")
    assert run.summary.failures == {}
    assert bodies[0]["model"] == "rag_pipeline"
    assert bodies[1]["history"] == [
        {"role": "user", "content": bodies[0]["question"]},
        {"role": "assistant", "content": "abc"},
    ]
    assert run.summary.retrieval_ms.num_samples == 2
    for result in run.results:
        assert result.retrieval_s is not None and result.ttft_s is not None
        assert 0 < result.retrieval_s <= result.ttft_s
        assert (result.prompt_tokens, result.output_tokens) == (9, 2)


def test_apis_without_conversations_refuse_turns() -> None:
    with pytest.raises(LoadConfigError, match="--turns: requests of --api completions cannot have it; those of chat"):
        run_sessions(response, api=ApiKind.COMPLETIONS)


def test_a_range_of_turns_says_what_it_counts() -> None:
    with pytest.raises(LoadConfigError, match=r"turn range 3\.\.1"):
        TurnRange.parse("3..1")
    with pytest.raises(LoadConfigError, match="write a number of turns"):
        TurnRange.parse("x")
    assert Workload().turns == TurnRange(1, 1)
