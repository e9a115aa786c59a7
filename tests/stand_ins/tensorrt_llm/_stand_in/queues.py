"""A queue that a thread fills and that a thread or an event loop empties."""

import asyncio
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class ResponseQueue(Generic[T]):
    """The event loop is the one that runs where the queue is made; without one it cannot be awaited."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._filled = asyncio.Event()

    @property
    def has_loop(self) -> bool:
        return self._loop is not None

    def put(self, item: T) -> None:
        self._items.put(item)
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:  # it was closed just now: nobody waits
                self._loop = None

    def get(self, timeout: float | None = None) -> T:
        """Raises queue.Empty."""
        return self._items.get(timeout=timeout)

    async def aget(self, timeout_s: float | None = None) -> T:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                self._filled.clear()
                try:
                    return self._items.get_nowait()
                except queue.Empty:
                    await self._filled.wait()
