"""A route's targets: what is known of each, and one attempt to have one answer."""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections import Counter

from sluice.engine.client.stream import Consumer
from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError
from sluice.pipelines.routes.breaker import BreakerState, CircuitBreaker, Pass
from sluice.pipelines.routes.settings import BreakerSettings, TargetSettings
from sluice.pipelines.text.consumers import Generate, give
from sluice.pipelines.text.types import TextEvent

log = logging.getLogger(__name__)

_ILL = CANNOT_SERVE | {ErrorCode.INTERNAL, ErrorCode.NOT_FOUND}
"""Codes of failures that speak against the target."""
OK, CACHED, CANCELLED = "ok", "cached", "cancelled"
"""Outcomes of attempts besides the codes of errors: it answered, a cache had its answer, and nobody waited any more."""


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
