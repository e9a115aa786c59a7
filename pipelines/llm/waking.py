"""Requests to a model whose fleet has no engine at the moment."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter

import msgspec

from sluice.engine.fleet.client import Engine
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.types import TextRequest

_LEAST_S = 0.001
held_listener: ContextVar[Callable[[], None] | None] = ContextVar("held_listener", default=None)
"""Hears that the current request waits for an engine, which may take minutes."""


async def wait_for_engine(engine: Engine, request: TextRequest) -> TextRequest:
    """Wait until the engine is awake, and return the request with the time that it has left. Raises as
    `Engine.wait_awake`, and DEADLINE where the request's time is over before."""
    limits = [each for each in (request.timeout_s, request.queue_timeout_s) if each is not None]
    began = perf_counter()
    if (note_held := held_listener.get()) is not None:
        note_held()
    try:
        async with asyncio.timeout(min(limits, default=None)):
            await engine.wait_awake()
    except TimeoutError:
        message = f"the request waited {min(limits):g} s for an engine to start, all the time that it has"
        raise SluiceError(ErrorCode.DEADLINE, message) from None
    waited_s = perf_counter() - began
    return msgspec.structs.replace(
        request,
        timeout_s=_left(request.timeout_s, waited_s),
        queue_timeout_s=_left(request.queue_timeout_s, waited_s),
    )


def _left(limit_s: float | None, waited_s: float) -> float | None:
    return None if limit_s is None else max(limit_s - waited_s, _LEAST_S)
