"""Asks again where the server cannot answer now."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from cli.rag.failures import Broken, Refused, Unreachable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits after failures in seconds, where the server does not say how long; how many they are is how often."""

    waits_s: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)
    longest_wait_s: float = 60.0
    """Of what the server may ask for."""


async def patiently(ask: Callable[[], Awaitable[T]], patience: RetryPolicy) -> T:
    """What `ask` answers, at the latest when the patience ends. Raises what it raised last, and Broken at once."""
    for wait_s in patience.waits_s:
        try:
            return await ask()
        except Broken:
            raise
        except Unreachable:
            await asyncio.sleep(wait_s)
        except Refused as refused:
            if not refused.is_passing:
                raise
            asked_s = wait_s if refused.retry_after_s is None else refused.retry_after_s
            await asyncio.sleep(min(asked_s, patience.longest_wait_s))
    return await ask()
