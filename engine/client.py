"""The async side of the engine: what the gateway holds. Here asyncio and the engine meet.

Two clients, one behaviour: `engine/process_client.py` has the executor in a process of its own,
`engine/thread_client.py` on a thread of this one.
"""

import itertools
import secrets
from abc import ABC, abstractmethod
from time import perf_counter

from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.frames import Cancel, Command, StepFrame, Submit
from engine.stream import GenerationStream
from engine.types import EngineInfo, EngineStats, GenerateRequest
from engine.validation import check_request

_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)


class EngineClient(ABC):
    """Submits requests and hands each stream its events. All methods run on one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = _NO_STATS
        self.failure: str | None = None
        """Why the engine is dead; None while it is not."""
        self._info: EngineInfo | None = None
        self._streams: dict[int, GenerationStream] = {}
        # The first number is random, so that several clients of one engine do not meet.
        self._stream_ids = itertools.count(secrets.randbits(62))
        self._last_report = perf_counter()

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises UNAVAILABLE before `start` returned."""
        if self._info is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine is still loading")
        return self._info

    @abstractmethod
    async def start(self) -> None:
        """Load the model; returns when the engine can be asked. Raises SluiceError where it cannot."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; streams under way end in an error. Idempotent."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue `request`. Raises INVALID for what can never be served, UNAVAILABLE without an engine.

        A full queue is told by the stream: its first event raises OVERLOADED.
        """
        if self.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure)
        check_request(request, self.info)
        stream = GenerationStream(next(self._stream_ids), self._cancel)
        self._streams[stream.stream_id] = stream
        self._send(Submit(stream.stream_id, request))
        return stream

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error` and free what it holds in the engine."""
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.fail(error)

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last said anything. It speaks at every step, and when idle twice a second."""
        return perf_counter() - self._last_report

    def _cancel(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None and self.failure is None:
            self._send(Cancel(stream_id))

    def _on_frame(self, frame: StepFrame) -> None:
        self.stats = frame.stats
        self._last_report = perf_counter()
        streams = self._streams
        for event in frame.events:
            # A stream that was cancelled here may still have events on the way.
            is_last = event.finish_reason is not None
            stream = streams.pop(event.stream_id, None) if is_last else streams.get(event.stream_id)
            if stream is not None:
                stream.push(event)
        for failure in frame.failures:
            stream = streams.pop(failure.stream_id, None)
            if stream is not None:
                error = SluiceError(failure.code, failure.message, param=failure.param)
                error.retry_after_s = failure.retry_after_s
                stream.fail(error)

    def _die(self, reason: str) -> None:
        """The engine is gone: every waiter hears of it."""
        if self.failure is not None:
            return
        self.failure = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, reason))
