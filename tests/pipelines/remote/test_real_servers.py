"""Sluice behind Sluice, over real sockets; as a step of an ensemble; and as a chat model."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode
from sluice.pipelines.text.model import text_model_of
from sluice.pipelines.text.types import ChatMessage, Conversation, SamplingOverrides, TextRequest
from sluice.serving.tensors.tensor import Array
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.pipelines.remote.models import USER, Load, ask, plain, refusal, stream
from tests.pipelines.remote.models import request as request_to
from tests.pipelines.remote.remote_api import Exchange, RemoteApi, chunk, usage
from tests.pulled import collected
from tests.serving.backends.builders import Lookup, infer_stream
from tests.serving.backends.ensemble.parts import FunctionModel, config_of, request, simple_config
from tests.serving.backends.ensemble.parts import load as load_ensemble
from tests.waiting import PATIENCE_S

WHOLE = """
    name: "whole" platform: "ensemble"
    input { name: "query" data_type: TYPE_STRING dims: [1] }
    output { name: "response" data_type: TYPE_STRING dims: [-1] }
    ensemble_scheduling {
      step {
        model_name: "prompter" model_version: -1
        input_map { key: "X" value: "query" } output_map { key: "Y" value: "conversation" }
      }
      step {
        model_name: "hosted" model_version: -1
        input_map { key: "messages" value: "conversation" } output_map { key: "text_output" value: "response" }
      }
    }
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def direct(gateway: LiveServer, num_tokens: int) -> dict[str, Any]:
    body = {"model": MODEL, "messages": json.loads(USER), "max_tokens": num_tokens, "temperature": 0}
    answer: dict[str, Any] = gateway.post("/v1/chat/completions", body).json()
    return answer


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
async def test_the_answer_is_that_of_the_other_gateway(gateway: LiveServer, load: Load, dialect: str) -> None:
    expected = await asyncio.to_thread(direct, gateway, 12)
    model = await load(base_url=f"{gateway.url}/v1", model=MODEL, dialect=dialect, check_on_load="true")
    fields = {"messages": USER, "max_tokens": 12, "temperature": 0.0}
    answer = await ask(model, fields)
    assert answer["text_output"] == expected["choices"][0]["message"]["content"]
    assert answer["finish_reason"] == "length"
    assert answer["num_input_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["num_output_tokens"] == 12
    pieces = await stream(model, fields)
    assert len(pieces) > 2
    assert "".join(each["text_output"] for each in pieces) == answer["text_output"]
    assert pieces[-1]["num_output_tokens"] == 12


async def test_a_disconnect_frees_the_other_gateway(gateway: LiveServer, load: Load) -> None:
    model = await load(base_url=f"{gateway.url}/v1", model=MODEL)
    gateway.runner.hold_after(3)
    try:
        fields = {"messages": USER, "max_tokens": 400}
        async with aclosing(infer_stream(model, request_to(model, fields, streams_by_default=True))) as responses:
            assert plain(await anext(responses))["text_output"]
    finally:
        gateway.runner.release()
    await asyncio.to_thread(gateway.wait_idle)


async def test_what_the_other_gateway_refuses(gateway: LiveServer, load: Load) -> None:
    model = await load(base_url=f"{gateway.url}/v1", model=MODEL)
    error = await refusal(model, {"messages": USER, "temperature": 9.0})
    assert error.code is ErrorCode.INVALID
    assert "temperature" in error.message and error.param == "temperature"
    other = await load(base_url=f"{gateway.url}/v1", model="other", max_retries=0)
    missing = await refusal(other, {"messages": USER})
    assert missing.code is ErrorCode.UNAVAILABLE
    assert "'other'" in missing.message


def _conversation(X: Array) -> dict[str, Array]:
    messages = [{"role": "user", "content": each.decode().upper()} for each in X.ravel()]
    return {"Y": np.array([json.dumps(messages).encode()], object)}


async def test_a_step_of_an_ensemble_streams(api: RemoteApi, load: Load) -> None:
    first_is_out = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(chunk("one "))
        await first_is_out.wait()
        await exchange.event(chunk("two", "stop"))
        await exchange.event(usage(3, 2))
        await exchange.end()

    api.answer = answer
    prompter = FunctionModel(simple_config("prompter", data_type="TYPE_STRING"), _conversation)
    whole = await load_ensemble(config_of(WHOLE), Lookup(prompter, await load()))
    sent = request({"query": np.array([b"why"], object)}, parameters={"stream": True})
    async with asyncio.timeout(PATIENCE_S), aclosing(infer_stream(whole, sent)) as responses:
        pieces = [plain(await anext(responses)).get("response", "")]
        first_is_out.set()  # the remote says no more before the first piece is with the client
        pieces += [plain(each).get("response", "") async for each in responses]
    assert [each for each in pieces if each] == ["one ", "two"]
    assert api.bodies[0]["messages"] == [{"role": "user", "content": "WHY"}]


async def test_it_is_a_chat_model(api: RemoteApi, load: Load) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.stream(chunk("one "), chunk("two", "length"), usage(3, 2, cached=1))

    api.answer = answer
    chat = text_model_of(await load())
    assert chat is not None
    sent = TextRequest(
        request_id="r",
        prompt=Conversation((ChatMessage("system", "be brief"), ChatMessage("user", "why"))),
        sampling=SamplingOverrides(max_tokens=5, temperature=0.5),
        stop=("x",),
    )
    found = await collected(chat.generate, sent)
    assert "".join(event.text for event in found) == "one two"
    assert found[-1].finish_reason is FinishReason.LENGTH
    assert (found[-1].prompt_tokens, found[-1].completion_tokens, found[-1].cached_tokens) == (3, 2, 1)
    sent = api.bodies[0]
    assert [each["role"] for each in sent["messages"]] == ["system", "user"]
    assert (sent["max_completion_tokens"], sent["temperature"], sent["stop"]) == (5, 0.5, ["x"])
