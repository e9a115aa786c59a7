import asyncio

import pytest

from sluice.engine.client.stream import EventRelay, GenerationStream
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


class Sink:
    """A consumer that a test opens and closes, and lets fail."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.is_open = True
        self.opened = asyncio.Event()
        self.error: Exception | None = None

    def take(self, event: TokenEvent) -> bool:
        if self.error is not None:
            raise self.error
        self.events.append(event)
        return self.is_open

    async def ready(self) -> None:
        await self.opened.wait()

    @property
    def taken(self) -> list[list[int]]:
        return [event.token_ids for event in self.events]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def pushing() -> tuple[GenerationStream, Sink, asyncio.Task[None], list[int]]:
    """A stream that pushes to a sink in a task, and the numbers of the requests that were cancelled."""
    cancelled: list[int] = []
    one, sink = GenerationStream(1, make_request([1]), cancelled.append, EventRelay()), Sink()
    task = asyncio.create_task(one.pass_to(sink))
    await turns()
    return one, sink, task, cancelled


async def test_frames_of_one_turn_are_pushed_as_one_event_at_its_end() -> None:
    one, sink, task, _ = await pushing()
    one.push(TokenEvent(1, [1]))
    one.push(TokenEvent(1, [2], None, CACHED))
    assert sink.events == []
    await turns()
    assert sink.events == [TokenEvent(1, [1, 2], None, CACHED)]
    one.push(TokenEvent(1, [3], FinishReason.LENGTH))
    await task
    assert sink.events[1:] == [TokenEvent(1, [3], FinishReason.LENGTH)]


async def test_what_came_before_there_was_a_consumer_comes_first() -> None:
    one, sink = stream(), Sink()
    one.push(TokenEvent(1, [1]))
    one.push(TokenEvent(1, [2], FinishReason.LENGTH))
    await one.pass_to(sink)
    assert sink.events == [TokenEvent(1, [1, 2], FinishReason.LENGTH)]


async def test_events_are_merged_while_the_consumer_is_not_ready() -> None:
    one, sink, task, _ = await pushing()
    sink.is_open = False
    for token_id in (1, 2, 3):
        one.push(TokenEvent(1, [token_id]))
        await turns()
    assert sink.taken == [[1]]
    sink.is_open = True
    sink.opened.set()
    await turns()
    assert sink.taken == [[1], [2, 3]]
    one.push(TokenEvent(1, [4], FinishReason.LENGTH))
    await task


async def test_an_error_is_raised_after_the_tokens_before_it_were_pushed() -> None:
    one, sink, task, _ = await pushing()
    one.push(TokenEvent(1, [7]))
    one.fail(SluiceError(ErrorCode.INTERNAL, "broken"))
    with pytest.raises(SluiceError, match="broken"):
        await task
    assert sink.taken == [[7]]


async def test_a_consumer_may_stop_the_stream() -> None:
    one, sink, task, cancelled = await pushing()
    one.push(TokenEvent(1, [1]))
    one.stop()
    await task
    assert (sink.events, cancelled) == ([], [1])


async def test_what_a_consumer_raises_ends_its_stream() -> None:
    one, sink, task, _ = await pushing()
    sink.error = ZeroDivisionError("a bug")
    one.push(TokenEvent(1, [1]))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await task


async def test_nothing_is_pushed_after_the_task_was_cancelled() -> None:
    one, sink, task, _ = await pushing()
    task.cancel()
    one.push(TokenEvent(1, [1]))  # due at the end of this turn
    await asyncio.wait((task,))
    await turns()
    assert sink.events == []
