"""Outages of a store: what is logged, how long the store counts as away, and when it is tried again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

_RETRIAL_S = 2.0
"""Least time between trials of a store that could not be used."""


def reason_of(error: BaseException | str) -> str:
    """Return an error as the end of a sentence, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def unavailable(name: str, error: BaseException | str) -> SluiceError:
    """Return the error for a store that cannot be used now."""
    return SluiceError(ErrorCode.UNAVAILABLE, f"{name} cannot be used: {reason_of(error)}")


class Outage:
    """Whether a store answers that is used all the time and must not stop what it is used for.

    It is away until its first answer. Its absence and its return are logged once each. Belongs to the event loop.
    """

    def __init__(self, away: str, back: str, *, tolerance: int = 1, num_quiet: int = 0) -> None:
        """`tolerance` failures in a row begin an outage. Before the first answer `num_quiet` failures are not logged.

        `away` and `back` are the two lines of the log. The first goes on with the reason.
        """
        self.away = away
        self._back = back
        self._tolerance = tolerance
        self._num_quiet = num_quiet
        self._num_failures = 0
        self._is_reported = False
        self._has_begun = asyncio.Event()
        self._has_begun.set()

    @property
    def is_up(self) -> bool:
        return not self._has_begun.is_set()

    async def begin(self) -> None:
        """Wait until the store is away."""
        await self._has_begun.wait()

    def succeeded(self) -> None:
        """Note a success, which ends no outage: that takes the answer to a trial."""
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        """Count a failure."""
        self._num_failures += 1
        begins = self.is_up and self._num_failures >= self._tolerance
        if begins:
            self._has_begun.set()
        if not self._is_reported and not self.is_up and (begins or self._num_failures > self._num_quiet):
            self._is_reported = True
            log.warning("%s: %s", self.away, reason_of(error))

    def end(self) -> None:
        """Record that the store has answered a trial."""
        if self._is_reported:
            log.warning("%s", self._back)
        self._num_failures, self._is_reported = 0, False
        self._has_begun.clear()

    def close(self) -> None:
        """Send nothing more: the store counts as away."""
        self._has_begun.set()


def heed_cancellation() -> None:
    """End this task if it is to end: Redis' client may take a cancellation that comes with an answer for the answer."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def keep_trying(
    outage: Outage,
    attempt: Callable[[], Awaitable[object]],
    failures: tuple[type[Exception], ...],
    *,
    retry_s: float,
    beat_s: float | None = None,
) -> None:
    """Attempt to use a store for ever: every `retry_s` while it is away, and every `beat_s` while it answers; None: not
    at all then."""
    while True:
        try:
            await attempt()
        except failures as error:
            outage.failed(error)
        else:
            outage.end()
        heed_cancellation()
        if outage.is_up and beat_s is None:
            await outage.begin()
        await asyncio.sleep(beat_s if beat_s is not None and outage.is_up else retry_s)


class StoreUse:
    """Records the outcome of the last uses of a store, for the probes of a server. Event loop only.

    A store that could not be used is tried again when somebody asks for its problem: without requests nobody else would
    find that it is back.
    """

    def __init__(self, attempt: Callable[[], Awaitable[object]], *, is_logged: bool = True) -> None:
        """`attempt` uses the store in each of the ways that are noted, and changes nothing."""
        self._attempt = attempt
        self._level = logging.WARNING if is_logged else logging.DEBUG
        self._problems: dict[str, str] = {}
        self._trial: asyncio.Task[None] | None = None
        self._tried_at = 0.0

    @contextmanager
    def note(self, way: str) -> Iterator[None]:
        """Note whether the store can be used in a way, such as `write`, by the UNAVAILABLE that the context raises."""
        try:
            yield
        except SluiceError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                if way not in self._problems:
                    log.log(self._level, "%s", error.message)
                self._problems[way] = error.message
            raise
        if self._problems.pop(way, None) is not None:
            log.log(min(self._level, logging.INFO), "a store can be used again: it was not, since %s", way)

    def problem(self) -> str:
        """Return the error of the store's last use; "" if there was none."""
        is_due = monotonic() >= self._tried_at + _RETRIAL_S
        if self._problems and is_due and (self._trial is None or self._trial.done()):
            self._trial = asyncio.create_task(self._try(), name="store-trial")
        return next(iter(self._problems.values()), "")

    async def _try(self) -> None:
        with suppress(SluiceError):
            await self._attempt()
        self._tried_at = monotonic()

    def close(self) -> None:
        """Try no more."""
        if self._trial is not None:
            self._trial.cancel()
