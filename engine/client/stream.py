"""One submitted request as its client sees it: an async iterator of token events."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Self

from engine.types import EventDetail, FinishReason, GenerateRequest, TokenEvent, TokenLogprob
from sluice.errors import SluiceError


class GenerationStream:
    """Events of one stream, for one consumer on one event loop.

    Events that nobody has fetched yet are merged into one, so a slow reader costs neither memory per
    event nor a step's time. Its size is bounded by the request's max_tokens. All tokens stay here until the end,
    since an engine that takes over from a lost one must know them.
    """

    __slots__ = (
        "_cancel",
        "_error",
        "_finish_reason",
        "_is_cache_told",
        "_is_over",
        "_is_prompt_told",
        "_logprobs",
        "_num_cached_tokens",
        "_num_fetched",
        "_prompt_logprobs",
        "_waiter",
        "has_started",
        "output_token_ids",
        "request",
        "stream_id",
        "submitted_at",
        "was_late",
        "was_sent",
    )

    def __init__(self, stream_id: int, request: GenerateRequest, cancel: Callable[[int], None]) -> None:
        self.stream_id = stream_id
        self.request = request
        self.output_token_ids: list[int] = []
        """Every token so far, fetched or not."""
        self.submitted_at = perf_counter()
        self.was_sent = False
        """To an engine, this one or one that is gone."""
        self.was_late = False
        """Whether it may have waited here, so that an engine gets what is left of its time."""
        self.has_started = False
        """Whether an engine is known to have begun it, so that it cannot wait for too long any more."""
        self._cancel = cancel
        self._num_fetched = 0
        self._is_cache_told = self._is_prompt_told = False
        """What an engine says once, an engine that takes over does not say again."""
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._logprobs: list[TokenLogprob] | None = None
        self._finish_reason: FinishReason | None = None
        self._error: SluiceError | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises SluiceError where the engine refused or failed the request."""
        while not (self._has_tokens or self._finish_reason or self._error):
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    @property
    def _has_tokens(self) -> bool:
        return self._num_fetched < len(self.output_token_ids)

    def _take(self) -> TokenEvent:
        if not self._has_tokens and self._error is not None:
            error, self._error, self._is_over = self._error, None, True
            raise error
        token_ids = self.output_token_ids[self._num_fetched :]
        self._num_fetched += len(token_ids)
        event = TokenEvent(self.stream_id, token_ids, self._finish_reason, self._take_detail())
        if self._finish_reason is not None:
            self._finish_reason, self._is_over = None, True
        return event

    def _take_detail(self) -> EventDetail | None:
        if self._num_cached_tokens is None and self._prompt_logprobs is None and self._logprobs is None:
            return None
        detail = EventDetail(self._num_cached_tokens, self._logprobs, self._prompt_logprobs)
        self._num_cached_tokens = self._prompt_logprobs = self._logprobs = None
        return detail

    def cancel(self) -> None:
        """The client wants no more. Idempotent and legal in every state, also after the end."""
        self._cancel(self.stream_id)

    def push(self, event: TokenEvent) -> None:
        """Called by the client when a frame brings news; on the consumer's event loop."""
        if event.detail is not None:
            self._keep(event.detail)
        self.output_token_ids += event.token_ids
        self._finish_reason = event.finish_reason
        self._wake()

    def _keep(self, detail: EventDetail) -> None:
        if detail.num_cached_tokens is not None and not self._is_cache_told:
            self._num_cached_tokens, self._is_cache_told = detail.num_cached_tokens, True
        if detail.prompt_logprobs is not None and not self._is_prompt_told:
            self._prompt_logprobs, self._is_prompt_told = detail.prompt_logprobs, True
        if detail.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += detail.logprobs

    def fail(self, error: SluiceError) -> None:
        """End the stream with `error`, after the tokens that are still waiting."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
