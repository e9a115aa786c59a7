"""Reading what TensorRT-LLM tells of itself beside its answers: statistics and events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 0.25
"""Until more is asked for after a silence. While no request is submitted the source may be at its end each time."""
RETRY_S = 10.0
"""Until it is asked again after it raised."""


async def follow(
    source: Callable[[], AsyncIterator[dict[str, Any]]],
    take: Callable[[Mapping[str, Any]], None],
    is_busy: asyncio.Event,
    what: str,
) -> None:
    """`take` each that comes, while something runs. A version that has none, and one that fails, are lived with."""
    has_failed = False
    while True:
        await is_busy.wait()
        try:
            async for told in source():
                take(told)
        except Exception as error:
            if not has_failed:
                log.warning("TensorRT-LLM tells no %s: %s: %s", what, type(error).__name__, error)
            has_failed = True
            await asyncio.sleep(RETRY_S)
        await asyncio.sleep(AGAIN_S)


async def first_of(source: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    """None where there is none."""
    async for told in source:
        return told
    return None
