"""One submitted request as its client sees it: an async iterator of token events."""

import asyncio
from collections.abc import Callable
from typing import Self

from engine.errors import SluiceError
from engine.types import FinishReason, TokenEvent


class GenerationStream:
    """Events of one stream, for one consumer on one event loop.

    Events that nobody has fetched yet are merged into one, so a slow reader costs neither memory per
    event nor a step's time. Its size is bounded by the request's max_tokens.
    """

    __slots__ = ("_cancel", "_error", "_finish_reason", "_is_over", "_token_ids", "_waiter", "stream_id")

    def __init__(self, stream_id: int, cancel: Callable[[int], None]) -> None:
        self.stream_id = stream_id
        self._cancel = cancel
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: SluiceError | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises SluiceError where the engine refused or failed the request."""
        while not (self._token_ids or self._finish_reason or self._error):
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def _take(self) -> TokenEvent:
        if not self._token_ids and self._error is not None:
            error, self._error, self._is_over = self._error, None, True
            raise error
        event = TokenEvent(self.stream_id, self._token_ids, self._finish_reason)
        self._token_ids = []
        if self._finish_reason is not None:
            self._finish_reason, self._is_over = None, True
        return event

    def cancel(self) -> None:
        """The client wants no more. Idempotent and legal in every state, also after the end."""
        self._cancel(self.stream_id)

    def push(self, event: TokenEvent) -> None:
        """Called by the client when a frame brings news; on the consumer's event loop."""
        if self._token_ids:
            self._token_ids.extend(event.token_ids)
        else:
            self._token_ids = event.token_ids
        self._finish_reason = event.finish_reason
        self._wake()

    def fail(self, error: SluiceError) -> None:
        """End the stream with `error`, after the tokens that are still waiting."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
