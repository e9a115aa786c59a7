"""A model's callbacks as awaitables: one response, or a stream of them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from serving.job import Job
from serving.model import Model
from serving.request import InferRequest, InferResponse
from sluice.errors import ErrorCode, SluiceError

MAX_UNREAD = 16_384
"""Responses that a stream's reader may be behind; one further behind is cancelled, as it would only fill the memory."""


async def infer_one(model: Model, request: InferRequest) -> InferResponse:
    """The one response of a model that is not decoupled. Raises its error. Cancelling the task cancels the request."""
    future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferResponse) -> None:
        if not future.done():
            future.set_result(response)

    job = model.submit(request, receive)
    try:
        response = await future
    except asyncio.CancelledError:
        job.cancel()
        raise
    if response.error is not None:
        raise response.error
    return response


class ResponseStream:
    """The responses of one request, as they come. The last one is final and may be empty."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        """Submits; raises what `Model.submit` raises."""
        self._unread: deque[InferResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._job: Job | None = None
        self._is_too_slow = False
        self._job = model.submit(request, self._receive)

    def _receive(self, response: InferResponse) -> None:
        self._unread.append(response)
        if len(self._unread) > MAX_UNREAD and self._job is not None:
            self._is_too_slow = True
            self._job.cancel()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> list[InferResponse]:
        """Everything that has come and was not taken yet; does not wait."""
        taken = list(self._unread)
        self._unread.clear()
        return taken

    async def wait(self) -> list[InferResponse]:
        """At least one response. Not to be called after the final one was taken."""
        if not self._unread:
            if self._is_too_slow:
                raise SluiceError(ErrorCode.OVERLOADED, f"the client fell {MAX_UNREAD} responses behind")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def cancel(self) -> None:
        """Want no more of it. Idempotent, and harmless after the end."""
        if self._job is not None:
            self._job.cancel()


async def infer_stream(model: Model, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    """Each response of any model, the last one final. Closing the generator cancels the request."""
    stream = ResponseStream(model, request)
    try:
        while True:
            for response in await stream.wait():
                yield response
                if response.is_final:
                    return
    finally:
        stream.cancel()
