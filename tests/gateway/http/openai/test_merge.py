import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from sluice.gateway.http.openai.reply import ReplyOptions
from sluice.gateway.http.openai.routes import _STARTS_PER_TURN, MergedStreams, whole_choices
from sluice.pipelines.text.types import TextEvent


def event(text: str) -> TextEvent:
    return TextEvent(text, 1, 1, 1)


class Source:
    """A stream of the events that the test puts in. It records that it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[TextEvent | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[TextEvent, None]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


@pytest.mark.parametrize("num_streams", [1, 3])
def test_gives_every_event_with_its_index_in_order(num_streams: int) -> None:
    async def scenario() -> list[tuple[int, str]]:
        sources = [Source() for _ in range(num_streams)]
        for index, source in enumerate(sources):
            for item in (event(f"{index}a"), event(f"{index}b"), None):
                source.items.put_nowait(item)
        return [(index, each.text) async for index, each in MergedStreams([source.stream() for source in sources])]

    got = asyncio.run(scenario())
    for number in range(num_streams):
        assert [text for index, text in got if index == number] == [f"{number}a", f"{number}b"]
    assert len(got) == 2 * num_streams


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_first_failure_ends_all(num_streams: int) -> None:
    async def scenario() -> list[Source]:
        sources = [Source() for _ in range(num_streams)]
        sources[0].items.put_nowait(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            async for _ in MergedStreams([source.stream() for source in sources]):
                pass
        return sources

    assert all(source.is_closed for source in asyncio.run(scenario()))


@pytest.mark.parametrize("num_streams", [1, 3])
def test_closing_closes_all(num_streams: int) -> None:
    async def scenario() -> list[Source]:
        sources = [Source() for _ in range(num_streams)]
        for source in sources:
            source.items.put_nowait(event("a"))
        stream = MergedStreams([source.stream() for source in sources])
        await anext(stream)
        await stream.aclose()
        return sources

    assert all(source.is_closed for source in asyncio.run(scenario()))


def test_a_slow_reader_holds_the_streams_back() -> None:
    async def scenario() -> int:
        sources = [Source() for _ in range(2)]
        for source in sources:
            for _ in range(100):
                source.items.put_nowait(event("a"))
        stream = MergedStreams([source.stream() for source in sources])
        await anext(stream)
        for _ in range(500):
            await asyncio.sleep(0)
        taken = 200 - sum(source.items.qsize() for source in sources)
        await stream.aclose()
        return taken

    assert asyncio.run(scenario()) <= 6


@pytest.mark.parametrize("is_streamed", [True, False])
def test_many_sequences_of_a_request_start_over_several_turns_of_the_loop(is_streamed: bool) -> None:
    turns, started = 0, []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def stream() -> AsyncGenerator[TextEvent, None]:
        started.append(turns)
        yield event("a")

    async def scenario() -> None:
        counting = asyncio.create_task(count_turns())
        streams = [stream() for _ in range(512)]
        if is_streamed:
            async for _ in MergedStreams(streams):
                pass
        else:
            await whole_choices(streams, ReplyOptions(512, 1, 1, include_usage=False))
        counting.cancel()

    asyncio.run(scenario())
    assert max(Counter(started).values()) <= 2 * _STARTS_PER_TURN
