import asyncio

import pytest

from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import EventDetail, FinishReason, TokenEvent, TokenLogprob
from sluice.errors import ErrorCode, SluiceError
from tests.engine.parts import make_request


def stream() -> GenerationStream:
    return GenerationStream(1, make_request([1]), lambda stream_id: None)


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


CACHED = EventDetail(3, [TokenLogprob(1, -0.1)], [None, TokenLogprob(9, -2.0)])


async def test_what_comes_with_tokens_is_merged_with_them() -> None:
    one = stream()
    one.push(TokenEvent(1, [1], None, CACHED))
    one.push(TokenEvent(1, [2, 3], None, EventDetail(logprobs=[TokenLogprob(2, -0.2), TokenLogprob(3, -0.3)])))
    one.push(TokenEvent(1, [4], FinishReason.LENGTH, EventDetail(logprobs=[TokenLogprob(4, -0.4)])))
    event = await anext(one)
    assert (event.token_ids, event.finish_reason) == ([1, 2, 3, 4], FinishReason.LENGTH)
    assert event.detail is not None and event.detail.logprobs is not None
    assert [entry.token_id for entry in event.detail.logprobs] == event.token_ids
    assert (event.detail.num_cached_tokens, event.detail.prompt_logprobs) == (3, CACHED.prompt_logprobs)


async def test_what_came_once_does_not_come_again_from_an_engine_that_took_over() -> None:
    one = stream()
    one.push(TokenEvent(1, [1], None, CACHED))
    assert (await anext(one)).detail == CACHED
    one.push(TokenEvent(1, [2], None, EventDetail(99, [TokenLogprob(2, -0.2)], [None])))
    assert (await anext(one)).detail == EventDetail(None, [TokenLogprob(2, -0.2)], None)
    one.push(TokenEvent(1, [3]))
    assert (await anext(one)).detail is None
    assert one.output_token_ids == [1, 2, 3]


async def test_a_fetched_event_is_not_changed_by_what_follows() -> None:
    one = stream()
    one.push(TokenEvent(1, [1], None, EventDetail(logprobs=[TokenLogprob(1, -0.1)])))
    event = await anext(one)
    one.push(TokenEvent(1, [2], None, EventDetail(logprobs=[TokenLogprob(2, -0.2)])))
    assert event == TokenEvent(1, [1], None, EventDetail(logprobs=[TokenLogprob(1, -0.1)]))


async def test_cached_tokens_may_come_with_a_later_event_but_once() -> None:
    one = stream()
    one.push(TokenEvent(1, [1]))
    assert (await anext(one)).detail is None
    one.push(TokenEvent(1, [2], FinishReason.LENGTH, EventDetail(7)))
    assert (await anext(one)).detail == EventDetail(7)
    two = stream()
    two.push(TokenEvent(1, [1], None, EventDetail(0)))
    two.push(TokenEvent(1, [2], FinishReason.LENGTH, EventDetail(7)))
    assert (await anext(two)).detail == EventDetail(0)
