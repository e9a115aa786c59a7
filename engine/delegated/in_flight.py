"""The requests that the runtime has: a task each, which reads its responses from the hand-over to the last one."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from sluice.engine.delegated.interface import (
    DelegatedRuntime,
    RequestHandle,
    ResponseDelta,
    RuntimeFailure,
    internal_error,
)
from sluice.engine.delegated.sequence import DelegatedSequence
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import about

log = logging.getLogger(__name__)

HEALTH_CHECK_DELAY_S = 0.25
"""Time from a request's error to the check of the engine's health. When the engine is lost, errors come first, and
requests that were answered with one could not go on in the next engine."""
ABORT_GRACE_S = 10.0
"""How long the last response to an aborted request is awaited."""


class InFlightListener(ABC):
    """Receives the outcome of each request in flight. `on_removed` comes last; before it, unless the request was
    aborted, `on_failure` or a delta with a finish reason."""

    @abstractmethod
    def on_response(self) -> None:
        """The runtime has sent something."""

    @abstractmethod
    def on_delta(self, sequence: DelegatedSequence, delta: ResponseDelta) -> None: ...

    @abstractmethod
    def on_failure(self, sequence: DelegatedSequence, error: SluiceError) -> None: ...

    @abstractmethod
    def on_removed(self, sequence: DelegatedSequence) -> None:
        """The runtime holds nothing for the request any more."""

    @abstractmethod
    def on_lost(self, error: Exception) -> None:
        """The runtime will bring nothing any more."""


class InFlightTable:
    """Requests that the runtime has, in order of arrival. An aborted one stays until its last response, because only
    then are its blocks free."""

    def __init__(self, runtime: DelegatedRuntime, listener: InFlightListener, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._listener = listener
        self._clock = clock
        self._sequences: dict[int, DelegatedSequence] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, stream_id: int) -> DelegatedSequence | None:
        return self._sequences.get(stream_id)

    @property
    def sequences(self) -> Collection[DelegatedSequence]:
        return self._sequences.values()

    def submit(self, sequence: DelegatedSequence) -> None:
        """Hand a request to the runtime. The listener receives what that raises."""
        prepared, sequence.prepared = sequence.prepared, None
        try:
            sequence.handle = self._runtime.submit(prepared)
        except Exception as error:
            work = self._handle_failure(sequence, error, self._runtime.classify(error, at_submit=True))
        else:
            work = self._read(sequence, sequence.handle)
        task = asyncio.create_task(work, name=f"request-{sequence.request.request_id}")
        self._sequences[sequence.stream_id], self._tasks[sequence.stream_id] = sequence, task
        task.add_done_callback(lambda done: self._on_done(sequence, done))

    def abort(self, sequence: DelegatedSequence) -> None:
        """End a request in the runtime. Responses that still come are dropped."""
        if sequence.handle is None or sequence.handle.is_finished:
            return
        sequence.aborted_at = self._clock()
        try:
            sequence.handle.abort()
        except Exception as error:
            id_ = sequence.request.request_id
            log.warning("request %s could not be aborted: %s", id_, error, extra=about(id_))

    def drop_unended(self, now: float) -> bool:
        """Drop aborted requests whose last response does not come, so that they keep no blocks from others. Returns
        whether there was one: then perhaps nothing comes any more, and no request is left to notice."""
        overdue = [
            each
            for each in self._sequences.values()
            if each.aborted_at is not None and now - each.aborted_at > ABORT_GRACE_S
        ]
        for sequence in overdue:
            id_ = sequence.request.request_id
            log.warning("%s did not end the aborted request %s", self._runtime.title, id_, extra=about(id_))
            self._tasks[sequence.stream_id].cancel()
        return bool(overdue)

    async def close(self) -> None:
        """Read no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, sequence: DelegatedSequence, handle: RequestHandle) -> None:
        try:
            async for response in handle:
                self._listener.on_response()
                if not sequence.is_answered:
                    self._take(sequence, handle, response)
            if not sequence.is_answered:
                raise RuntimeError("its responses ended without a finish reason")
        except Exception as error:
            sequence.handle = None
            await self._handle_failure(sequence, error, self._runtime.classify(error, at_submit=False))

    def _take(self, sequence: DelegatedSequence, handle: RequestHandle, response: Any) -> None:
        try:
            delta = handle.read(response)
            if sequence.replay is not None:
                delta = sequence.replay.trim(delta)
        except SluiceError as error:
            self._listener.on_failure(sequence, error)
            return
        except Exception:  # it would go on in the runtime unless it were aborted
            id_ = sequence.request.request_id
            log.exception("a response to request %s cannot be read", id_, extra=about(id_))
            self._listener.on_failure(sequence, internal_error())
            return
        if delta.finish_reason is FinishReason.CANCELLED:
            raise RuntimeError(f"{self._runtime.title} cancelled the request of its own accord")
        if not delta.is_empty:
            self._listener.on_delta(sequence, delta)
        if handle.is_finished:  # its place is free in the statistics that go out with its last event
            self._remove(sequence)

    async def _handle_failure(self, sequence: DelegatedSequence, error: Exception, failure: RuntimeFailure) -> None:
        """Tell the listener whether the engine or the request has failed."""
        if failure.is_fatal:
            self._listener.on_lost(error)
            return
        if sequence.is_answered:
            return
        if failure.error.code is ErrorCode.INTERNAL:
            id_, cause = sequence.request.request_id, None if failure.is_response else error
            text = "request %s failed in %s: %s"
            log.error(text, id_, self._runtime.title, error, exc_info=cause, extra=about(id_))
            await asyncio.sleep(HEALTH_CHECK_DELAY_S)
            if not await self._runtime.is_healthy():
                self._listener.on_lost(error)
                return
        self._listener.on_failure(sequence, failure.error)

    def _on_done(self, sequence: DelegatedSequence, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            id_ = sequence.request.request_id
            log.error("reading request %s failed", id_, exc_info=error, extra=about(id_))
            self._listener.on_failure(sequence, internal_error())
        self._remove(sequence)

    def _remove(self, sequence: DelegatedSequence) -> None:
        if self._sequences.pop(sequence.stream_id, None) is not None:
            del self._tasks[sequence.stream_id]
            self._listener.on_removed(sequence)
