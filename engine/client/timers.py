"""Timers for the deadlines of a client's streams."""

import asyncio
from collections.abc import Callable

from sluice.engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

GRACE_S = 0.25
"""How long after a deadline the client waits for the engine's own answer."""

HasStarted = Callable[[int, float], bool | None]
Clock = Callable[[], float]
Expire = Callable[[int, SluiceError], None]


class RequestTimers:
    """Timers for the deadlines of one client's streams, on one event loop.

    The engine enforces the deadlines itself. The timers are for an engine that hangs, that is being replaced, or that
    has not been sent the request yet. `has_started(stream_id, deadline)` tells whether the engine began the request
    before `deadline` of `clock`, None if that is not known yet. `expire` ends a stream with an error.
    """

    def __init__(self, has_started: HasStarted, expire: Expire, clock: Clock) -> None:
        self._has_started = has_started
        self._expire = expire
        self._clock = clock
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    def watch(self, stream_id: int, request: GenerateRequest, elapsed_s: float = 0.0) -> None:
        """Start the timers of a request that was submitted `elapsed_s` ago."""
        if request.timeout_s is None and request.queue_timeout_s is None:
            return
        self._timers[stream_id] = []
        if request.timeout_s is not None:
            error = _deadline_error(f"was not complete within its {request.timeout_s:g} s")
            self._call_later(request.timeout_s - elapsed_s + GRACE_S, self._expire, stream_id, error)
        if request.queue_timeout_s is not None:
            error = _deadline_error(f"waited for longer than its {request.queue_timeout_s:g} s")
            left_s = request.queue_timeout_s - elapsed_s
            deadline = self._clock() + left_s
            self._call_later(left_s + GRACE_S, self._check_start, stream_id, error, deadline)

    def remove(self, stream_id: int) -> None:
        """Cancel the timers of a stream that has ended."""
        for timer in self._timers.pop(stream_id, ()):
            timer.cancel()

    def _check_start(self, stream_id: int, error: SluiceError, deadline: float) -> None:
        has_started = self._has_started(stream_id, deadline)
        if has_started is None:
            self._call_later(GRACE_S, self._check_start, stream_id, error, deadline)
        elif not has_started:
            self._expire(stream_id, error)

    def _call_later(self, delay_s: float, action: Callable[..., None], stream_id: int, *arguments: object) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, action, stream_id, *arguments)
        self._timers[stream_id].append(timer)


def _deadline_error(problem: str) -> SluiceError:
    return SluiceError(ErrorCode.DEADLINE, f"the request {problem}")
