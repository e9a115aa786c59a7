"""Streams for which a fleet has no engine left: they are held until there is one again."""

import asyncio
import contextvars

from sluice.engine.client.base import EngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.client.supervision import Standing
from sluice.engine.client.timers import Clock
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.replica import Replica
from sluice.engine.fleet.waking import WakingRoom
from sluice.engine.frames import Command
from sluice.errors import ErrorCode, SluiceError


class StreamHolder(EngineClient):
    """Holds the streams of engines that have left while no other serves.

    To whoever moves streams it is the client of one more replica, which never serves: what it adopts waits there, with
    the deadlines of its request, until it is released to another client."""

    def __init__(self, config: EngineConfig, room: WakingRoom | None, clock: Clock) -> None:
        """With a `room` each stream is held for as long as a request is that waits there, and counts as one; without,
        until the request's own time is over, or `abort_all`."""
        super().__init__(config, clock)
        self.is_restarting = True
        self.replica = Replica("held", self)
        self._queue.close()
        self._room = room
        self._waits: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Do nothing: there is no engine to load."""

    async def stop(self) -> None:
        self._die("the engine was stopped")

    def _send(self, command: Command) -> None:
        raise AssertionError(f"{command} has no engine to go to")

    def may_hold(self, stream: GenerationStream) -> bool:
        """Return whether to hold a stream rather than to end it. One without a token is a request like any other, which
        is held where requests are."""
        return bool(stream.output_token_ids) or self._room is not None

    def adopt(self, stream: GenerationStream, standing: Standing) -> None:
        """Hold a stream that another client has released."""
        stream.refusals.clear()
        stream.most_wait_s = None
        super().adopt(stream, standing)
        if self._room is not None:
            waiting = self._wait(stream, self._room)
            task = asyncio.create_task(waiting, name="held stream", context=contextvars.Context())
            self._waits[stream.stream_id] = task

    async def _wait(self, stream: GenerationStream, room: WakingRoom) -> None:
        """Wait until the stream is released, and end it where that takes too long. An engine that cannot take it wakes
        the others."""
        stream_id = stream.stream_id
        try:
            while stream_id in self._streams:
                await room.wait(has_begun=bool(stream.output_token_ids))
        except SluiceError as error:
            del self._waits[stream_id]  # this task
            self._fail(stream_id, error)

    def _forget(self, stream_id: int) -> GenerationStream | None:
        if (waiting := self._waits.pop(stream_id, None)) is not None:
            waiting.cancel()
        return super()._forget(stream_id)

    def give_up(self, reason: str, retry_after_s: float) -> None:
        """End all streams, because no engine is named any more that could come back, and none is waited for."""
        if self._room is None:
            self.abort_all(SluiceError(ErrorCode.UNAVAILABLE, reason, retry_after_s=retry_after_s))

    def wake(self) -> None:
        """Let the requests of the room go on, since there is an engine."""
        if self._room is not None:
            self._room.wake()
