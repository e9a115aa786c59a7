"""The one thread for work that takes long in Python, whatever the protocol.

Several such threads would take turns with the interpreter's lock, and the event loop would wait for all of them. Work
must not hold the lock for long in a single call either: functions in C do, however long they take.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sluice.heap import trim_heap
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.request_check import prepare_strings
from sluice.serving.tensors.datatypes import BYTES

T = TypeVar("T")

LONG_ELEMENTS = 8192
"""Number of elements from which Python takes a few milliseconds over a tensor."""
PIECE_ELEMENTS = 16 << 10
"""Elements of a tensor that are converted in a single call."""
_PAUSE_S = 0.001
"""A third to a half of what a piece takes. Without it the event loop would wait the 5 ms for each turn after which
Python takes the lock from a thread, and the engine would have one core less."""
LONG_BYTES = 1 << 20
"""Size from which a request is worth a trim of the heap."""
_TRIM_DELAY_S = 1.0
"""Time after which what a work left is freed, and the heap can be given back."""
_worker = ThreadPoolExecutor(1, thread_name_prefix="long-work")
_trimming: set[asyncio.AbstractEventLoop] = set()
"""Loops on which a trim is due: one for all work until then."""


async def run_aside(work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise what it raises, from the thread that does one such work at a time."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_worker, work)
    finally:
        trim_later()


def breathe() -> None:
    """Leave the interpreter's lock and the processor to the others for a moment: call it between two pieces of work."""
    time.sleep(_PAUSE_S)


async def prepare_inputs(request: InferRequest, model: Model) -> None:
    """Prepare long BYTES inputs aside. Raises like `prepare_strings`."""
    if not has_short_inputs(request):
        await run_aside(lambda: prepare_strings(request, model.spec))


def has_short_inputs(request: InferRequest) -> bool:
    """Whether a request has no long BYTES input, which `prepare_inputs` would prepare aside."""
    for each in request.inputs.values():
        if each.datatype == BYTES.name and each.num_elements > LONG_ELEMENTS:
            return False
    return True


def trim_later() -> None:
    """Give the heap back soon: a long request is about to be freed."""
    loop = asyncio.get_running_loop()
    if loop not in _trimming:
        _trimming.add(loop)
        loop.call_later(_TRIM_DELAY_S, _begin_trim, loop)


def _begin_trim(loop: asyncio.AbstractEventLoop) -> None:
    _trimming.discard(loop)
    _worker.submit(trim_heap)
