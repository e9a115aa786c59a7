"""A route's targets: the circuit breaker and counts of each, and one attempt to have one answer."""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from time import monotonic
from typing import NamedTuple

from sluice.engine.client.stream import Consumer
from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError
from sluice.pipelines.routes.settings import BreakerSettings, TargetSettings
from sluice.pipelines.text.stream import Generate, give
from sluice.pipelines.text.types import TextEvent

log = logging.getLogger(__name__)

_ILL = CANNOT_SERVE | {ErrorCode.INTERNAL, ErrorCode.NOT_FOUND}
"""Codes of failures that speak against the target."""
OK, CACHED, CANCELLED = "ok", "cached", "cancelled"
"""Outcomes of attempts besides the codes of errors: it answered, a cache had its answer, and nobody waited any more."""


class BreakerState(IntEnum):
    """States in the order of how ill the target is. The numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Pass(NamedTuple):
    """The leave to ask a target once. `era` counts the changes of the breaker's state; what an attempt of an earlier
    era found out changes nothing."""

    era: int
    is_probe: bool = False


class CircuitBreaker:
    """Judges one target by how its attempts end. Each pass is given back once, by `succeed`, `fail` or `abandon`.

    Closed, every request may pass. A failure opens it that is one of `failures` in a row, or with which at least
    `failure_rate` of the last `window` results are failures. It opens for `open_s`, and for twice as long each time
    that the probe after it fails, up to `max_open_s`. Then it is half open: one request at a time may pass, and closes
    it where it succeeds.
    """

    def __init__(self, settings: BreakerSettings, clock: Callable[[], float] = monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._era = 0
        self._num_in_row = 0
        self._results: deque[bool] = deque(maxlen=settings.window)
        """The last results: whether each was a failure."""
        self._is_closed = True
        self._num_openings = 0
        """How often it opened since it was closed."""
        self._opens_until = 0.0
        self._has_probe = False

    @property
    def state(self) -> BreakerState:
        if self._is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._opens_until else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may pass."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_probe)

    @property
    def closes_in_s(self) -> float:
        """Seconds until it is half open; 0 where it is not open."""
        return max(0.0, self._opens_until - self._clock()) if not self._is_closed else 0.0

    def enter(self) -> Pass:
        """Give a pass. Where the breaker does not admit the request, the caller has nothing better to ask: then its
        success closes the breaker, and its failure does not keep it open for longer."""
        is_probe = self.state is BreakerState.HALF_OPEN and not self._has_probe
        self._has_probe |= is_probe
        return Pass(self._era, is_probe)

    def succeed(self, given: Pass) -> None:
        """Note that the target has answered."""
        if given.era != self._era:
            return
        if self._is_closed:
            self._num_in_row = 0
            self._results.append(False)
        else:
            self._close()

    def fail(self, given: Pass, retry_after_s: float | None = None) -> None:
        """Note that the target could not answer. Where this opens it, it stays open for `retry_after_s` at least."""
        if given.era != self._era:
            return
        if self._is_closed:
            self._num_in_row += 1
            self._results.append(True)
            if self._is_too_much():
                self._open(retry_after_s)
        elif given.is_probe:
            self._open(retry_after_s)

    def abandon(self, given: Pass) -> None:
        """Note that nobody waits for the target's answer any more, which says nothing of the target."""
        if given.era == self._era and given.is_probe:
            self._has_probe = False

    def _is_too_much(self) -> bool:
        settings, results = self._settings, self._results
        is_whole = len(results) == settings.window
        return self._num_in_row >= settings.failures or (
            is_whole and sum(results) >= settings.failure_rate * settings.window
        )

    def _open(self, retry_after_s: float | None) -> None:
        settings = self._settings
        # The exponent has a bound: 2.0 to the power of 1024 is none.
        open_s = min(settings.open_s * 2.0 ** min(self._num_openings, 32), settings.max_open_s)
        self._opens_until = self._clock() + max(open_s, min(retry_after_s or 0.0, settings.max_open_s))
        self._num_openings += 1
        self._change(is_closed=False)

    def _close(self) -> None:
        self._num_openings = 0
        self._change(is_closed=True)

    def _change(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed
        self._era += 1
        self._has_probe = False
        self._num_in_row = 0
        self._results.clear()


class Target:
    """One model of one route, with its breaker and counts. Belongs to the event loop."""

    def __init__(self, route: str, settings: TargetSettings, breaker: BreakerSettings) -> None:
        self.name = settings.model
        self.settings = settings
        self.breaker = CircuitBreaker(breaker)
        self.outcomes: Counter[str] = Counter()
        """Numbers of attempts by how they ended."""
        self._route = route

    def note_cached(self, given: Pass | None = None) -> None:
        """Note that a cache had the target's answer, which says nothing of the target."""
        self.outcomes[CACHED] += 1
        if given is not None:
            self.breaker.abandon(given)

    def note_end(self, given: Pass, error: BaseException | None) -> None:
        """Note how an attempt ended: with an `error`, or by answering."""
        if error is None:
            self.outcomes[OK] += 1
            self.breaker.succeed(given)
        elif not isinstance(error, Exception):  # cancelled, or closed by its reader
            self.outcomes[CANCELLED] += 1
            self.breaker.abandon(given)
        else:
            self._note_error(given, error if isinstance(error, SluiceError) else None)

    def _note_error(self, given: Pass, error: SluiceError | None) -> None:
        """Note an error, None for one that nobody expected."""
        self.outcomes[ErrorCode.INTERNAL if error is None else error.code] += 1
        if error is not None and error.is_senders_limit:
            self.breaker.abandon(given)
        elif error is not None and error.code not in _ILL:
            self.breaker.succeed(given)  # it was the request's own fault, so the target is there
        else:
            was_closed = self.breaker.state is BreakerState.CLOSED
            self.breaker.fail(given, None if error is None else error.retry_after_s)
            if was_closed and self.breaker.state is not BreakerState.CLOSED:
                reason = "an unexpected error" if error is None else error.message
                log.warning("route %r leaves target %r alone: %s", self._route, self.name, reason)


class Attempt:
    """One request to one target, from its start to its end, and the consumer of its events.

    `begin` awaits the first event, and the others wait for `pass_to`. An attempt that fails or is cancelled in `begin`
    has ended.
    """

    def __init__(self, target: Target, generate: Generate) -> None:
        """`generate` generates the target's answer."""
        self.target = target
        self._generate = generate
        self._first: asyncio.Future[TextEvent] = asyncio.get_running_loop().create_future()
        self._opened: asyncio.Future[Consumer[TextEvent]] = asyncio.get_running_loop().create_future()

    def take(self, event: TextEvent) -> bool:
        if self._opened.done():
            return self._opened.result().take(event)
        self._first.set_result(event)
        return False

    async def ready(self) -> None:
        consumer = await self._opened
        await consumer.ready()

    async def begin(self) -> TextEvent:
        """Ask the target and return its first event. Raises its error, and DEADLINE where it takes too long."""
        self._pass = self.target.breaker.enter()
        self._work = asyncio.ensure_future(self._generate(self))
        timeout_s = self.target.settings.timeout_s
        try:
            done, _ = await asyncio.wait((self._first, self._work), timeout=timeout_s, return_when=FIRST_COMPLETED)
            if not done:
                message = f"model '{self.target.name}' gave no token within {timeout_s:g} s"
                raise SluiceError(ErrorCode.DEADLINE, message)
            if not self._first.done():
                await self._work  # it failed
            first = self._first.result()
        except BaseException as error:
            await self._end(error)
            raise
        if self._pass.is_probe:  # a long answer shall not keep others from the target
            self.target.breaker.succeed(self._pass)
            self._pass = self.target.breaker.enter()
        return first

    async def pass_to(self, consumer: Consumer[TextEvent], first: TextEvent) -> None:
        """Push the `first` event of an attempt that has begun, and what follows it. Raises as `TextModel.generate`."""
        try:
            await give(consumer, first)
            self._opened.set_result(consumer)
            await self._work
        except BaseException as error:
            await self._end(error)
            raise
        self.target.note_end(self._pass, None)

    async def discard(self) -> None:
        """End an attempt that has begun, and whose answer nobody wants."""
        await self._end(asyncio.CancelledError())

    async def _end(self, error: BaseException) -> None:
        self.target.note_end(self._pass, error)
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
