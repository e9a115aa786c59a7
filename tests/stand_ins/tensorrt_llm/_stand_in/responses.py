"""The responses of iterations, and the queue in which they reach the results."""

import asyncio
import queue
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Likeliest = list[tuple[int, float, int]]
"""(token id, log probability, rank), best first."""


@dataclass(frozen=True, slots=True)
class SequenceResponse:
    """The part of one sequence of a request that is new since the last response."""

    new_token_ids: list[int]
    all_token_ids: list[int]
    logprobs: list[Likeliest]
    """One entry for each of the new tokens, where they are asked for."""
    cumulative_logprob: float | None
    finish_reason: Any
    """A `bindings.executor.FinishReason`, None while it goes on."""


@dataclass(frozen=True, slots=True)
class Response:
    """The result of one iteration for one request."""

    sequences: list[SequenceResponse] = field(default_factory=list)
    is_final: bool = False
    error: str | None = None
    is_only_this_request: bool = True
    """Whether an error is this request's own; else the executor is gone."""
    iteration: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Likeliest] | None = None
    perf_metrics: Any = None
    disaggregated_params: Any = None
    """Set in the answer of a context server."""


T = TypeVar("T")


class ResponseQueue(Generic[T]):
    """A queue that a thread fills, and a thread or an event loop empties.

    The event loop is the one that runs where the queue is made; without one it cannot be awaited.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._filled = asyncio.Event()

    @property
    def has_loop(self) -> bool:
        return self._loop is not None

    def put(self, item: T) -> None:
        self._items.put(item)
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:  # it was closed just now: nobody waits
                self._loop = None

    def get(self, timeout: float | None = None) -> T:
        """Return the next item. Raises queue.Empty."""
        return self._items.get(timeout=timeout)

    async def aget(self, timeout_s: float | None = None) -> T:
        """Return the next item. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                self._filled.clear()
                try:
                    return self._items.get_nowait()
                except queue.Empty:
                    await self._filled.wait()
