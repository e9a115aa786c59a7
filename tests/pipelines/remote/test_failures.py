"""A remote that misbehaves, and who hears of it."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pipelines.remote.failures import Failures
from serving.model import infer_stream
from sluice.errors import ErrorCode, SluiceError
from tests.pipelines.llm.asking import Record
from tests.pipelines.remote.models import USER, Load, ask, plain, refusal, request
from tests.pipelines.remote.remote_api import (
    PATIENCE_S,
    Exchange,
    Held,
    RemoteApi,
    replying,
    said,
    streaming,
    usage,
    whole,
)

KEY = "sk-very-secret"
ASKED = {"messages": USER}


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
    error = await refusal(await load(model="gpt-x", api_key_file="key", max_retries=0), ASKED)
    assert error.code is code
    assert "gpt-x" in error.message and "127.0.0.1" in error.message
    assert KEY not in error.message
    assert ("no, not with" in error.message) == (status not in (401, 403)), "a refusal of our key may quote it"
    assert api.asked[0].headers["authorization"] == f"Bearer {KEY}"


async def test_too_many_requests_says_when_to_come_again(api: RemoteApi, load: Load) -> None:
    api.answer = replying(failing("slow down"), 429, {"retry-after": "7"})
    async with asyncio.timeout(PATIENCE_S):
        error = await refusal(await load(max_retries=50), ASKED)
    assert error.retry_after_s == 7
    assert len(api.asked) == 1, "it is for the client to wait as long as that"


async def test_it_tries_again(api: RemoteApi, load: Load) -> None:
    async def answer(exchange: Exchange) -> None:
        if len(api.asked) == 1:
            await exchange.reply(failing("busy"), 503, {"retry-after-ms": "1"})
        else:
            await exchange.reply(whole("x"))

    api.answer = answer
    assert (await ask(await load(max_retries=1), ASKED))["text_output"] == "x"
    assert len(api.asked) == 2


async def test_nobody_is_there(load: Load) -> None:
    error = await refusal(await load(base_url="http://127.0.0.1:9/v1", max_retries=0), ASKED)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "127.0.0.1:9" in error.message


async def _dies(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(said("good "))


async def _ends_early(exchange: Exchange) -> None:
    await _dies(exchange)
    await exchange.end()


async def _says_so(exchange: Exchange) -> None:
    await exchange.stream(said("good "), failing("out of memory"))


async def _babbles(exchange: Exchange) -> None:
    await exchange.stream(said("good "), b"{not json")


async def _counts_wrong(exchange: Exchange) -> None:
    await exchange.stream(said("good "), {"choices": [], "usage": {"prompt_tokens": "many"}})


async def _ends_oddly(exchange: Exchange) -> None:
    await exchange.stream(said("good "), said(None, "tool_calls"))


@pytest.mark.parametrize("answer", [_dies, _ends_early, _says_so, _babbles, _counts_wrong, _ends_oddly])
async def test_a_stream_that_breaks(
    api: RemoteApi, load: Load, records: list[Record], answer: Callable[[Exchange], Any]
) -> None:
    api.answer = answer
    model = await load(model="gpt-x")
    responses = [each async for each in infer_stream(model, request(model, ASKED, streams_by_default=True))]
    assert plain(responses[0]) == {"text_output": "good "}
    error = responses[-1].error
    assert error is not None and error.code is ErrorCode.UNAVAILABLE
    assert "gpt-x" in error.message and "127.0.0.1" in error.message
    assert responses[-1].is_final and len(responses) == 2
    assert isinstance(records[0].error, SluiceError) and records[0].is_closed


async def test_a_filter(api: RemoteApi, load: Load) -> None:
    api.answer = streaming(said("good "), said(None, "content_filter"))
    model = await load()
    responses = [each async for each in infer_stream(model, request(model, ASKED, streams_by_default=True))]
    assert responses[-1].error is not None and responses[-1].error.code is ErrorCode.INVALID


@pytest.mark.parametrize("payload", [b"<html>", b"[1]", {"choices": 5}, {}, {"choices": [{"message": 1}]}])
async def test_an_answer_that_is_none(api: RemoteApi, load: Load, payload: Any) -> None:
    api.answer = replying(payload)
    error = await refusal(await load(), ASKED)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "127.0.0.1" in error.message


def test_no_part_of_the_key_is_shown() -> None:
    """Not even of one that stands where a long message is cut."""
    key = "sk-0123456789"
    for num_before in range(480, 500):
        message = Failures("m", "host", key).unreadable(ValueError("x" * num_before + key)).message
        assert "sk-" not in message


async def test_leaving_closes_the_connection(api: RemoteApi, load: Load) -> None:
    gone = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(said("good "))
        await exchange.disconnected()
        gone.set()

    api.answer = answer
    model = await load()
    asked = request(model, ASKED, streams_by_default=True)
    async with asyncio.timeout(PATIENCE_S):
        async with aclosing(infer_stream(model, asked)) as responses:
            assert plain(await anext(responses)) == {"text_output": "good "}
        await gone.wait()
        await model.wait_idle()


async def test_leaving_before_the_first_byte(api: RemoteApi, load: Load) -> None:
    api.answer = held = Held(replying(whole("x")))
    model = await load()
    asking = asyncio.create_task(ask(model, ASKED))
    await held.wait(come=1)
    asking.cancel()
    await held.wait(left=1)
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()
    assert model.statistics.infer.fail.count == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_clients_time_limit(api: RemoteApi, load: Load, streams: bool) -> None:
    api.answer = Held(replying(whole("x")))
    error = await refusal(await load(), ASKED, timeout_us=50_000, parameters={"stream": streams})
    assert error.code is ErrorCode.DEADLINE


async def test_a_time_limit_in_mid_stream(api: RemoteApi, load: Load, records: list[Record]) -> None:
    gone = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(said("good "))
        await exchange.disconnected()
        gone.set()

    api.answer = answer
    model = await load()
    asked = request(model, ASKED, streams_by_default=True, timeout_us=1_000_000)
    responses = [each async for each in infer_stream(model, asked)]
    assert responses[-1].error is not None and responses[-1].error.code is ErrorCode.DEADLINE
    assert isinstance(records[-1].error, SluiceError) and records[-1].error.code is ErrorCode.DEADLINE
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()


async def test_the_models_time_limit(api: RemoteApi, load: Load) -> None:
    api.answer = Held(replying(whole("x")))
    assert (await refusal(await load(timeout_s=0.05), ASKED)).code is ErrorCode.DEADLINE


async def test_a_bounded_line(api: RemoteApi, load: Load) -> None:
    api.answer = held = Held(streaming(said("x", "stop"), usage(1, 1)))
    model = await load(max_concurrency=1, max_queue_size=1)
    first, second = (
        asyncio.create_task(ask(model, ASKED, parameters={"stream": False}, queue_timeout_us=60_000_000)),
        asyncio.create_task(ask(model, ASKED, parameters={"stream": False})),
    )
    await held.wait(come=1)
    assert model.statistics.count_pending() == 1
    error = await refusal(model, ASKED)
    assert error.code is ErrorCode.OVERLOADED
    assert held.num_come == 1, "one at a time"
    second.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while model.statistics.count_pending():
            await asyncio.sleep(0)
        late = await refusal(model, ASKED, queue_timeout_us=20_000)
    assert late.code is ErrorCode.DEADLINE and "waited" in late.message
    first.cancel()
    await held.wait(left=1)


async def test_unloading_ends_what_is_under_way(api: RemoteApi, load: Load) -> None:
    api.answer = held = Held(replying(whole("x")))
    model = await load()
    asking = asyncio.create_task(refusal(model, ASKED))
    await held.wait(come=1)
    await model.close()
    assert (await asking).code is ErrorCode.UNAVAILABLE
    await held.wait(left=1)
