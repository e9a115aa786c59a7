"""A remote that misbehaves, and who hears of it."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.remote.client import ApiErrors
from tests.pipelines.llm.calls import Record
from tests.pipelines.remote.models import USER, Load, ask, plain, refusal, request
from tests.pipelines.remote.remote_api import (
    Exchange,
    HeldAnswer,
    RemoteApi,
    UnfinishedAnswer,
    chunk,
    replying,
    streaming,
    usage,
    whole,
)
from tests.serving.backends.builders import infer_stream
from tests.waiting import PATIENCE_S, until

KEY = "sk-very-secret"
FIELDS = {"messages": USER}


def failing(message: str, code: str = "c") -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "code": code, "param": None}}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, ErrorCode.INVALID),
        (422, ErrorCode.INVALID),
        (401, ErrorCode.UNAVAILABLE),
        (403, ErrorCode.UNAVAILABLE),
        (404, ErrorCode.UNAVAILABLE),
        (429, ErrorCode.OVERLOADED),
        (500, ErrorCode.UNAVAILABLE),
        (503, ErrorCode.UNAVAILABLE),
        (504, ErrorCode.DEADLINE),
    ],
)
async def test_a_status(api: RemoteApi, load: Load, tmp_path: Path, status: int, code: ErrorCode) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    api.answer = replying(failing(f"no, not with {KEY}"), status)
    error = await refusal(await load(model="gpt-x", api_key_file="key", max_retries=0), FIELDS)
    assert error.code is code
    assert "gpt-x" in error.message and "127.0.0.1" in error.message
    assert KEY not in error.message
    assert ("no, not with" in error.message) == (status not in (401, 403)), "a refusal of our key may quote it"
    assert api.exchanges[0].headers["authorization"] == f"Bearer {KEY}"


async def test_too_many_requests_says_when_to_come_again(api: RemoteApi, load: Load) -> None:
    api.answer = replying(failing("slow down"), 429, {"retry-after": "7"})
    async with asyncio.timeout(PATIENCE_S):
        error = await refusal(await load(max_retries=50), FIELDS)
    assert error.retry_after_s == 7
    assert len(api.exchanges) == 1, "it is for the client to wait as long as that"


async def test_it_tries_again(api: RemoteApi, load: Load) -> None:
    async def answer(exchange: Exchange) -> None:
        if len(api.exchanges) == 1:
            await exchange.reply(failing("busy"), 503, {"retry-after-ms": "1"})
        else:
            await exchange.reply(whole("x"))

    api.answer = answer
    assert (await ask(await load(max_retries=1), FIELDS))["text_output"] == "x"
    assert len(api.exchanges) == 2


async def test_nobody_is_there(load: Load) -> None:
    error = await refusal(await load(base_url="http://127.0.0.1:9/v1", max_retries=0), FIELDS)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "127.0.0.1:9" in error.message


async def _dies(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(chunk("good "))


async def _ends_early(exchange: Exchange) -> None:
    await _dies(exchange)
    await exchange.end()


async def _says_so(exchange: Exchange) -> None:
    await exchange.stream(chunk("good "), failing("out of memory"))


async def _babbles(exchange: Exchange) -> None:
    await exchange.stream(chunk("good "), b"{not json")


async def _counts_wrong(exchange: Exchange) -> None:
    await exchange.stream(chunk("good "), {"choices": [], "usage": {"prompt_tokens": "many"}})


async def _ends_oddly(exchange: Exchange) -> None:
    await exchange.stream(chunk("good "), chunk(None, "tool_calls"))


@pytest.mark.parametrize("answer", [_dies, _ends_early, _says_so, _babbles, _counts_wrong, _ends_oddly])
async def test_a_stream_that_breaks(
    api: RemoteApi, load: Load, records: list[Record], answer: Callable[[Exchange], Any]
) -> None:
    api.answer = answer
    model = await load(model="gpt-x")
    responses = [each async for each in infer_stream(model, request(model, FIELDS, streams_by_default=True))]
    assert plain(responses[0]) == {"text_output": "good "}
    error = responses[-1].error
    assert error is not None and error.code is ErrorCode.UNAVAILABLE
    assert "gpt-x" in error.message and "127.0.0.1" in error.message
    assert responses[-1].is_final and len(responses) == 2
    assert isinstance(records[0].error, SluiceError) and records[0].is_closed


async def test_a_filter(api: RemoteApi, load: Load) -> None:
    api.answer = streaming(chunk("good "), chunk(None, "content_filter"))
    model = await load()
    responses = [each async for each in infer_stream(model, request(model, FIELDS, streams_by_default=True))]
    assert responses[-1].error is not None and responses[-1].error.code is ErrorCode.INVALID


@pytest.mark.parametrize("payload", [b"<html>", b"[1]", {"choices": 5}, {}, {"choices": [{"message": 1}]}])
async def test_an_answer_that_is_none(api: RemoteApi, load: Load, payload: Any) -> None:
    api.answer = replying(payload)
    error = await refusal(await load(), FIELDS)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "127.0.0.1" in error.message


def test_no_part_of_the_key_is_shown() -> None:
    """Not even of one that stands where a long message is cut."""
    key = "sk-0123456789"
    for num_before in range(480, 500):
        message = ApiErrors("m", "host", key).unreadable(ValueError("x" * num_before + key)).message
        assert "sk-" not in message


async def test_a_disconnect_closes_the_connection(api: RemoteApi, load: Load) -> None:
    api.answer = answer = UnfinishedAnswer(chunk("good "))
    model = await load()
    stream = request(model, FIELDS, streams_by_default=True)
    async with asyncio.timeout(PATIENCE_S):
        async with aclosing(infer_stream(model, stream)) as responses:
            assert plain(await anext(responses)) == {"text_output": "good "}
        await answer.disconnected.wait()
        await model.wait_idle()


async def test_a_disconnect_before_the_first_byte(api: RemoteApi, load: Load) -> None:
    api.answer = held = HeldAnswer(replying(whole("x")))
    model = await load()
    answer = asyncio.create_task(ask(model, FIELDS))
    await held.wait(come=1)
    answer.cancel()
    await held.wait(left=1)
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()
    assert model.statistics.infer.fail.count == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_clients_time_limit(api: RemoteApi, load: Load, streams: bool) -> None:
    api.answer = HeldAnswer(replying(whole("x")))
    error = await refusal(await load(), FIELDS, timeout_us=50_000, parameters={"stream": streams})
    assert error.code is ErrorCode.DEADLINE


async def test_a_time_limit_in_mid_stream(api: RemoteApi, load: Load, records: list[Record]) -> None:
    api.answer = answer = UnfinishedAnswer(chunk("good "))
    model = await load()
    stream = request(model, FIELDS, streams_by_default=True, timeout_us=1_000_000)
    responses = [each async for each in infer_stream(model, stream)]
    assert responses[-1].error is not None and responses[-1].error.code is ErrorCode.DEADLINE
    assert isinstance(records[-1].error, SluiceError) and records[-1].error.code is ErrorCode.DEADLINE
    async with asyncio.timeout(PATIENCE_S):
        await answer.disconnected.wait()


async def test_the_models_time_limit(api: RemoteApi, load: Load) -> None:
    api.answer = HeldAnswer(replying(whole("x")))
    assert (await refusal(await load(timeout_s=0.05), FIELDS)).code is ErrorCode.DEADLINE


async def test_a_bounded_line(api: RemoteApi, load: Load) -> None:
    api.answer = held = HeldAnswer(streaming(chunk("x", "stop"), usage(1, 1)))
    model = await load(max_concurrency=1, max_queue_size=1)
    first, second = (
        asyncio.create_task(ask(model, FIELDS, parameters={"stream": False}, queue_timeout_us=60_000_000)),
        asyncio.create_task(ask(model, FIELDS, parameters={"stream": False})),
    )
    await held.wait(come=1)
    assert model.statistics.count_pending() == 1
    error = await refusal(model, FIELDS)
    assert error.code is ErrorCode.OVERLOADED
    assert held.num_come == 1, "one at a time"
    second.cancel()
    await until(lambda: not model.statistics.count_pending())
    async with asyncio.timeout(PATIENCE_S):
        late = await refusal(model, FIELDS, queue_timeout_us=20_000)
    assert late.code is ErrorCode.DEADLINE and "waited" in late.message
    first.cancel()
    await held.wait(left=1)


async def test_unloading_ends_what_is_under_way(api: RemoteApi, load: Load) -> None:
    api.answer = held = HeldAnswer(replying(whole("x")))
    model = await load()
    answer = asyncio.create_task(refusal(model, FIELDS))
    await held.wait(come=1)
    await model.close()
    assert (await answer).code is ErrorCode.UNAVAILABLE
    await held.wait(left=1)
