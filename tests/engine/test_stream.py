import asyncio

import pytest

from engine.errors import ErrorCode, SluiceError
from engine.stream import GenerationStream
from engine.types import FinishReason, TokenEvent


def stream() -> GenerationStream:
    return GenerationStream(1, lambda stream_id: None)


async def test_events_that_wait_come_as_one() -> None:
    one = stream()
    for token_id in (1, 2, 3):
        one.push(TokenEvent(1, [token_id]))
    assert (await anext(one)).token_ids == [1, 2, 3]
    one.push(TokenEvent(1, [4], FinishReason.LENGTH))
    assert await anext(one) == TokenEvent(1, [4], FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(one)


async def test_a_reader_that_waits_is_woken() -> None:
    one = stream()
    reader = asyncio.ensure_future(anext(one))
    await asyncio.sleep(0)
    one.push(TokenEvent(1, [7]))
    assert (await reader).token_ids == [7]


async def test_an_error_comes_after_the_tokens_that_wait() -> None:
    one = stream()
    one.push(TokenEvent(1, [7]))
    one.fail(SluiceError(ErrorCode.INTERNAL, "broken"))
    assert (await anext(one)).token_ids == [7]
    with pytest.raises(SluiceError, match="broken"):
        await anext(one)
    with pytest.raises(StopAsyncIteration):
        await anext(one)


async def test_a_cancelled_reader_leaves_the_stream_usable() -> None:
    one = stream()
    reader = asyncio.ensure_future(anext(one))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    one.push(TokenEvent(1, [7]))
    assert (await anext(one)).token_ids == [7]
