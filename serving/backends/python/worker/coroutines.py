"""Models whose `execute` is a coroutine: an event loop on a thread of its own. Imported only for those."""

import asyncio
import threading
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="model-coroutines", daemon=True).start()
    return loop


def result(coroutine: Any) -> Any:
    """Run it to its end. Raises what it raises."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def start(coroutine: Any, end: Callable[[BaseException | None], None]) -> None:
    """Run it beside; `end` gets its error or None, on the loop's thread."""

    async def run() -> None:
        try:
            await coroutine
        except BaseException as error:
            end(error)
            raise
        end(None)

    asyncio.run_coroutine_threadsafe(run(), _loop())
