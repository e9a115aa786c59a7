"""Ends the wait for an answer, and the work on it, when its client leaves."""

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from serving.job import InferJob
from serving.request import InferResponse

_UNWATCHED_S = 0.02
"""Shorter answers are not worth a look whether their client is still there."""


class DisconnectWatches:
    """Watches the clients of answers that take long. One timer for all: one each would cost as much as the answer."""

    def __init__(self) -> None:
        self._waiting: dict[DisconnectWatch, float] = {}
        self._is_looking = False

    def begin(self, receive: Receive, job: InferJob, answered: "asyncio.Future[InferResponse]") -> "DisconnectWatch":
        """Watch from soon on. The request's body must have been read. `end` the watch when there is an answer."""
        loop = answered.get_loop()
        watch = DisconnectWatch(receive, job, answered, self._waiting)
        self._waiting[watch] = loop.time()
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(_UNWATCHED_S, self._look, loop)
        return watch

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() - _UNWATCHED_S
        for watch in [watch for watch, since in self._waiting.items() if since <= due]:
            del self._waiting[watch]
            watch.begin()
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            loop.call_later(_UNWATCHED_S, self._look, loop)


class DisconnectWatch:
    """Of one answer."""

    __slots__ = ("_answered", "_job", "_receive", "_task", "_waiting")

    def __init__(
        self,
        receive: Receive,
        job: InferJob,
        answered: "asyncio.Future[InferResponse]",
        waiting: "dict[DisconnectWatch, float]",
    ) -> None:
        self._receive = receive
        self._job = job
        self._answered = answered
        self._waiting = waiting
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look for the client's leaving from now on."""
        self._task = asyncio.create_task(self._watch(), name="disconnect-watch")

    def end(self) -> None:
        """There is an answer, or nobody waits for one."""
        self._waiting.pop(self, None)
        task, self._task = self._task, None  # the task holds the watch: two that hold each other wait for the collector
        if task is not None:
            task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._job.cancel()
        if not self._answered.done():
            self._answered.set_exception(ClientDisconnect())
