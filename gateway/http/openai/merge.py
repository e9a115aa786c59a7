"""Several streams of one request as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pipelines.text.types import TextEvent

IndexedEvents = AsyncGenerator[tuple[int, TextEvent], None]


async def merged(streams: Sequence[AsyncGenerator[TextEvent, None]]) -> IndexedEvents:
    """The events of `streams`, run concurrently, each with the index of its stream.

    The first failure is raised and ends them all; so does closing this stream.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    arrivals: asyncio.Queue[tuple[int, TextEvent] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, arrivals)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    index: int,
    stream: AsyncGenerator[TextEvent, None],
    arrivals: "asyncio.Queue[tuple[int, TextEvent] | Exception | None]",
) -> None:
    """Put every event of `stream`, then how it ended: None or what it raised."""
    end: Exception | None = None
    async with aclosing(stream) as events:
        try:
            async for event in events:
                await arrivals.put((index, event))
        except Exception as error:
            end = error
    await arrivals.put(end)
