"""Requests from one model to another (business logic scripting), as the worker sees them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from serving.backends.python.frames import CallModel, WireRequest, WireResponse
from serving.backends.python.worker.channel import Channel, PendingCall
from serving.backends.python.worker.errors import TritonError, TritonErrorCode
from serving.backends.python.worker.response import InferenceResponse
from serving.backends.python.worker.tensor import Tensor

MAX_WAITING = 1024
"""Threads that wait for the answers of coroutines; they are started as they are needed."""


class BlsCalls:
    """Asks through the gateway. Any thread; each waits for its own answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor]) -> InferenceResponse:
        """The one response of a model that is not decoupled. Errors are in it."""
        return self._answer(self._begin(model_name, version, request, inputs, is_decoupled=False))

    def open_stream(
        self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor]
    ) -> "ResponseIterator":
        """Any number of responses. Errors are in them."""
        return ResponseIterator(self, self._begin(model_name, version, request, inputs, is_decoupled=True))

    def ask_later(
        self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor]
    ) -> "asyncio.Future[InferenceResponse]":
        """`ask` for a coroutine: the request is on its way when this returns, and cancelled with what is returned."""
        call = self._begin(model_name, version, request, inputs, is_decoupled=False)
        future = self.in_background(lambda: self._answer(call))
        future.add_done_callback(lambda future: self._channel.end_call(call) if future.cancelled() else None)
        return future

    def open_stream_later(
        self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor]
    ) -> "asyncio.Future[ResponseIterator]":
        """`open_stream` for a coroutine, which waits for the first response and then has it without waiting."""
        responses = self.open_stream(model_name, version, request, inputs)

        def wait() -> ResponseIterator:
            responses.wait()
            return responses

        future = self.in_background(wait)
        future.add_done_callback(lambda future: responses.cancel() if future.cancelled() else None)
        return future

    def in_background(self, wait: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Have a thread wait for the running event loop."""
        return asyncio.get_running_loop().run_in_executor(self._threads, wait)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # The loop's own executor has few threads: calls beyond those would not even be waited for.
        return ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="model-calls")

    def _begin(
        self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor], is_decoupled: bool
    ) -> PendingCall:
        wire = WireRequest(
            0,
            [self._channel.wire_tensor(tensor) for tensor in inputs],
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.outputs,
            request.parameters,
        )
        return self._channel.begin_call(CallModel(model_name, version, is_decoupled, wire))

    def _answer(self, call: PendingCall) -> InferenceResponse:
        return self.response_of(self.next_reply(call))

    def next_reply(self, call: PendingCall) -> WireResponse:
        return self._channel.next_reply(call)

    def wait(self, call: PendingCall) -> None:
        self._channel.wait_reply(call)

    def response_of(self, reply: WireResponse) -> InferenceResponse:
        if reply.error is not None:
            code, message = reply.error
            return InferenceResponse(error=TritonError(message, TritonErrorCode(code)))
        open_ = self._channel.open
        tensors = [Tensor.received(each.name, each.datatype, each.shape, open_(each.raw)) for each in reply.outputs]
        return InferenceResponse(tensors, parameters=reply.parameters)

    def end(self, call: PendingCall) -> None:
        self._channel.end_call(call)


class ResponseIterator:
    """The responses of a decoupled model, as they come. The request is cancelled with the last reference to this.

    It keeps them: who iterates again after the end gets them again, as with the real server. Coroutines may iterate
    with `async for`, which leaves the event loop to others.
    """

    def __init__(self, calls: BlsCalls, call: PendingCall) -> None:
        self._calls = calls
        self._call = call
        self._is_over = False
        self._responses: list[InferenceResponse] = []
        self._place = 0

    def __iter__(self) -> "ResponseIterator":
        if self._is_over and self._place == len(self._responses):
            self._place = 0
        return self

    def __next__(self) -> InferenceResponse:
        response = self._next()
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> "ResponseIterator":
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        response = await self._calls.in_background(self._next)
        if response is None:
            raise StopAsyncIteration
        assert isinstance(response, InferenceResponse)
        return response

    def _next(self) -> InferenceResponse | None:
        """None at the end. A model may end a stream with a response that is empty, which is given like any other."""
        if self._place == len(self._responses) and not self._take():
            return None
        self._place += 1
        return self._responses[self._place - 1]

    def _take(self) -> bool:
        """Wait for one more; False where none comes."""
        if self._is_over:
            return False
        reply = self._calls.next_reply(self._call)
        if self._is_over:  # cancelled while it was waited for
            return False
        self._is_over = reply.is_final
        self._responses.append(self._calls.response_of(reply))
        return True

    def wait(self) -> None:
        """Until `next` would return at once."""
        if not self._is_over:
            self._calls.wait(self._call)

    def cancel(self) -> None:
        """Want no more of them. From any thread; who waits for the next one learns of the end."""
        self._is_over = True
        self._calls.end(self._call)

    def __del__(self) -> None:
        self.cancel()
