"""Whether a cache in another process answers: so that one that is gone costs requests nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from serving.statistics import CacheUsage

_log = logging.getLogger(__name__)

FAILURES = (RedisError, OSError, TimeoutError)
"""What commands raise where Redis is gone, slow or unwilling."""
_MAX_FAILURES = 3
"""In a row: a single slow answer is no outage."""


class Availability:
    """Counts failures, and while Redis is away asks every `retry_s` whether it is back. To be made on the loop.

    Nobody has asked yet at first, so it is down until the first answer.
    """

    def __init__(self, ping: Callable[[], Awaitable[object]], name: str, usage: CacheUsage, retry_s: float) -> None:
        self._ping = ping
        self._name = name
        self._usage = usage
        self._retry_s = retry_s
        self._num_failures = 0
        usage.is_up = False
        self._watch: asyncio.Task[None] | None = asyncio.create_task(self._wait_for_it(), name="cache-availability")

    @property
    def is_up(self) -> bool:
        return self._usage.is_up

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        """A command failed. The last of too many in a row makes it down."""
        self._usage.num_errors += 1
        self._num_failures += 1
        if self.is_up and self._num_failures >= _MAX_FAILURES:
            self._usage.is_up = False
            self._warn(error)
            self._watch = asyncio.create_task(self._wait_for_it(self._retry_s), name="cache-availability")

    async def _wait_for_it(self, delay_s: float = 0.0) -> None:
        is_told = delay_s > 0
        while True:
            await asyncio.sleep(delay_s)
            delay_s = self._retry_s
            try:
                await self._ping()
            except FAILURES as error:
                self._usage.num_errors += 1
                if not is_told:
                    self._warn(error)
                is_told = True
            else:
                self._came_up(is_told)
                return

    def _came_up(self, was_missed: bool) -> None:
        self._num_failures = 0
        self._usage.is_up = True
        if was_missed:
            _log.warning("the response cache at %s answers again", self._name)

    def _warn(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        _log.warning(
            "the response cache at %s is not available, requests are served without it: %s", self._name, reason
        )

    async def close(self) -> None:
        self._usage.is_up = False
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait((watch,))
