"""Work that goes on by itself: kept until it is done, its failures told, and ended together."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Whoever awaits the task gets its error; an error that nobody awaits is logged by asyncio."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def begin_alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody will await it: its error goes to the log."""
        self.begin(work).add_done_callback(_log_failure)

    async def end(self, timeout_s: float) -> None:
        """Let what runs end for up to `timeout_s`, then cancel the rest and wait for that."""
        running = list(self._running)
        if running:
            await asyncio.wait(running, timeout=max(0.0, timeout_s))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("work in the background failed", exc_info=task.exception())
