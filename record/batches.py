"""Writes what exporters make on a thread of its own, in batches: no request waits for a pipe, a disk or a collector."""

import asyncio
import threading
from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
_Batch = tuple[list[T], int]


class BatchWriter(ABC, Generic[T]):
    """Gathers items for a short time and writes them together. All but `write` belongs to the event loop."""

    def __init__(self, name: str, most: int, full: int, delay_s: float, last_write_s: float) -> None:
        """`name` is the thread's; at most `most` units wait. A batch is written once it has `full` of them or its first
        is `delay_s` old, and for `last_write_s` at the end."""
        self._name = name
        self._most = most
        self._full = full
        self._delay_s = delay_s
        self._last_write_s = last_write_s
        self._items: list[T] = []
        self._size = self._num_put = self._num_done = 0
        self._timer: asyncio.TimerHandle | None = None
        self._batches: SimpleQueue[_Batch[T] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def write(self, items: list[T]) -> None:
        """Write a batch. Called by the thread alone; must not raise."""

    def offer(self, item: T, size: int = 1) -> bool:
        """Queue an item of so many units to be written soon. Returns whether there was room for it."""
        if self._num_put - self._num_done + size > self._most:
            return False
        self._num_put += size
        self._size += size
        self._items.append(item)
        if self._size >= self._full:
            self._hand_over()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._hand_over)
        return True

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._batches.put((self._items, self._size))
        self._items, self._size = [], 0

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            items, size = batch
            self.write(items)
            self._num_done += size

    async def close(self) -> None:
        """Flush the queue, for a short time, and end the thread."""
        self._hand_over()
        self._batches.put(None)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join, self._last_write_s)
