"""Records the gateway's event loop for a profile: the steps of its tasks, and how late it is."""

import asyncio
from collections.abc import Coroutine, Generator
from time import perf_counter
from typing import Any, NamedTuple

_TICK_S = 0.005
MAX_SLICES = 200_000
"""Most steps of tasks in a profile. Those after them are left out, and counted."""


class TaskSlice(NamedTuple):
    """A step of a task: from one wait to the next."""

    task: str
    started: float
    seconds: float


class LoopProfile:
    """Records tasks that begin while it is open. Older tasks and callbacks show in how late the loop is."""

    def __init__(self) -> None:
        self.slices: list[TaskSlice] = []
        self.lags: list[tuple[float, float]] = []
        """When the loop was looked at, and how late it was, in seconds."""
        self.num_dropped = 0
        self._before: Any = None
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        self._ticking = loop.create_task(self._tick(), name="profile")
        loop.set_task_factory(self._make_task)

    def stop(self) -> None:
        """End. Tasks that were begun meanwhile go on, and are no longer recorded."""
        asyncio.get_running_loop().set_task_factory(self._before)
        if self._ticking is not None:
            self._ticking.cancel()

    def add(self, task: str, started: float) -> None:
        """Add a step that has just ended."""
        if len(self.slices) < MAX_SLICES:
            self.slices.append(TaskSlice(task, started, perf_counter() - started))
        else:
            self.num_dropped += 1

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **settings: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(_TimedCoroutine(coro, self), loop=loop, **settings)

    async def _tick(self) -> None:
        while True:
            due = perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = perf_counter()
            self.lags.append((now, max(0.0, now - due)))


class _TimedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are recorded."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], profile: LoopProfile) -> None:
        self._coroutine = coroutine
        self._profile = profile
        self._name = getattr(coroutine, "__qualname__", type(coroutine).__name__)

    def send(self, value: Any) -> Any:
        started = perf_counter()
        try:
            return self._coroutine.send(value)
        finally:
            self._profile.add(self._name, started)

    def throw(self, *error: Any) -> Any:
        started = perf_counter()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._profile.add(self._name, started)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()
