"""Runs work for a client only as long as the client is there."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects.

    The request's body must have been read. Raises what `work` raises, and ClientDisconnect
    where the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        await _end(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel `task` and let its clean-up run, so that the engine has its blocks back when this returns."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
