"""Events that the product pushes, as a test reads them: one after the other, or all at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from sluice.pipelines.text.stream import Called


class _Held(asyncio.Queue[Any]):
    """A consumer that is ready once its event was read, and the next one is wanted."""

    wanted: asyncio.Event

    def take(self, event: Any) -> bool:
        self.put_nowait(event)
        return False

    async def ready(self) -> None:
        await self.wanted.wait()
        self.wanted.clear()


async def pulled(generate: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> AsyncGenerator[Any, None]:
    """Yield what `generate` pushes to the consumer behind its `arguments`. Closing the generator cancels it."""
    held, end = _Held(), object()
    held.wanted = asyncio.Event()
    work = asyncio.ensure_future(generate(*arguments, held))
    work.add_done_callback(lambda _: held.take(end))
    try:
        while (event := await held.get()) is not end:
            yield event
            held.wanted.set()
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def collected(generate: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> list[Any]:
    """Return all that `generate` pushes."""
    events: list[Any] = []
    await generate(*arguments, Called(events.append))
    return events
