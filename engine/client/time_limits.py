"""Requests are answered on time, whatever state the engine is in.

The engine watches the deadlines itself and knows best. Here stands a second watch, in the client, for an engine that
hangs, that is being replaced, or that has not been sent the request yet.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

from engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

GRACE_S = 0.25
"""How long after a deadline the engine's own answer is awaited."""

HasStarted = Callable[[int, float], bool | None]
Expire = Callable[[int, SluiceError], None]


class TimeLimits:
    """Timers of one client's streams, by stream id; on one event loop.

    `has_started(stream_id, deadline)` says whether the engine began the request before `deadline` (by
    perf_counter), None where that cannot be told yet. `expire` ends a stream with an error.
    """

    def __init__(self, has_started: HasStarted, expire: Expire) -> None:
        self._has_started = has_started
        self._expire = expire
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    def watch(self, stream_id: int, request: GenerateRequest) -> None:
        """The request was submitted now."""
        if request.timeout_s is None and request.queue_timeout_s is None:
            return
        self._timers[stream_id] = []
        if request.timeout_s is not None:
            late = _too_late(f"was not complete within its {request.timeout_s:g} s")
            self._call_later(request.timeout_s + GRACE_S, self._expire, stream_id, late)
        if request.queue_timeout_s is not None:
            late = _too_late(f"waited for longer than its {request.queue_timeout_s:g} s")
            deadline = perf_counter() + request.queue_timeout_s
            self._call_later(request.queue_timeout_s + GRACE_S, self._check_start, stream_id, late, deadline)

    def drop(self, stream_id: int) -> None:
        """The stream has ended, however."""
        for timer in self._timers.pop(stream_id, ()):
            timer.cancel()

    def _check_start(self, stream_id: int, late: SluiceError, deadline: float) -> None:
        has_started = self._has_started(stream_id, deadline)
        if has_started is None:
            self._call_later(GRACE_S, self._check_start, stream_id, late, deadline)
        elif not has_started:
            self._expire(stream_id, late)

    def _call_later(self, delay_s: float, action: Callable[..., None], stream_id: int, *arguments: object) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, action, stream_id, *arguments)
        self._timers[stream_id].append(timer)


def _too_late(what: str) -> SluiceError:
    return SluiceError(ErrorCode.DEADLINE, f"the request {what}")
