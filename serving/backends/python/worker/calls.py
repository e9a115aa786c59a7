"""Business logic scripting (BLS): requests from one model to another, on the worker's side."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sluice.serving.backends.python.frames import CallModel, WireRequest, WireResponse
from sluice.serving.backends.python.worker.channel import Channel, PendingCall
from sluice.serving.backends.python.worker.errors import TritonError, TritonErrorCode
from sluice.serving.backends.python.worker.response import InferenceResponse
from sluice.serving.backends.python.worker.tensor import PbTensor

if TYPE_CHECKING:
    import asyncio

MAX_WAITING = 1024
"""Most threads that wait for the responses of coroutines. They are started as needed."""


class BlsCalls:
    """Calls other models through the server. Thread-safe; each thread waits for its own response."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def wait_async(self, call: PendingCall) -> "asyncio.Future[InferenceResponse]":
        """Return the one response of a call for a coroutine. The call is cancelled with the future."""
        future = self.run_in_thread(lambda: self.wait(call))
        future.add_done_callback(lambda future: self.channel.cancel_call(call) if future.cancelled() else None)
        return future

    def stream_async(self, call: PendingCall) -> "asyncio.Future[ResponseIterator]":
        """Return a call's stream for a coroutine, once it has the first response, which can then be read at once."""
        responses = ResponseIterator(self, call)

        def wait() -> ResponseIterator:
            responses.wait()
            return responses

        future = self.run_in_thread(wait)
        future.add_done_callback(lambda future: responses.cancel() if future.cancelled() else None)
        return future

    def run_in_thread(self, wait: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Wait for a result in a thread, for the running event loop."""
        import asyncio  # see Executor

        return asyncio.get_running_loop().run_in_executor(self._threads, wait)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # The event loop's own executor has too few threads for models with many concurrent calls.
        return ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="model-calls")

    def begin(
        self,
        model_name: str,
        version: int,
        request: WireRequest,
        inputs: list[PbTensor],
        is_decoupled: bool,
        works_for: int = 0,
    ) -> PendingCall:
        """Send a request to a model, for the server's request `works_for`. Without `is_decoupled` it gets one
        response."""
        wire = WireRequest(
            0,
            [self.channel.wire_tensor(tensor) for tensor in inputs],
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.outputs,
            request.parameters,
        )
        return self.channel.begin_call(CallModel(model_name, version, is_decoupled, wire, works_for))

    def wait(self, call: PendingCall) -> InferenceResponse:
        """Return the one response of a model that is not decoupled. It has the error, if there is one."""
        return self.to_response(self.channel.next_response(call))

    def to_response(self, response: WireResponse) -> InferenceResponse:
        if response.error is not None:
            code, message = response.error
            return InferenceResponse(error=TritonError(message, TritonErrorCode(code)))
        open_ = self.channel.open
        tensors = [
            PbTensor.from_wire(each.name, each.datatype, each.shape, open_(each.raw)) for each in response.outputs
        ]
        return InferenceResponse(tensors, parameters=response.parameters)


class ResponseIterator:
    """Responses of a decoupled model, as they arrive.

    The request is cancelled with the last reference to the iterator. It keeps the responses: iterating again after the
    end gives them again, as in Triton. Coroutines may iterate with `async for`, which does not block the event loop.
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
        response = await self._calls.run_in_thread(self._next)
        if response is None:
            raise StopAsyncIteration
        assert isinstance(response, InferenceResponse)
        return response

    def _next(self) -> InferenceResponse | None:
        """Return the next response, also an empty one that ends a stream, or None at the end."""
        if self._place == len(self._responses) and not self._receive():
            return None
        self._place += 1
        return self._responses[self._place - 1]

    def _receive(self) -> bool:
        """Wait for one more response. Return False at the end."""
        if self._is_over:
            return False
        response = self._calls.channel.next_response(self._call)
        if self._is_over:  # cancelled while waiting
            return False
        self._is_over = response.is_final
        self._responses.append(self._calls.to_response(response))
        return True

    def wait(self) -> None:
        """Wait until `next` would return at once."""
        if not self._is_over:
            self._calls.channel.wait_response(self._call)

    def cancel(self) -> None:
        """Cancel the request. Callable from any thread; a thread that waits for the next response gets the end."""
        self._is_over = True
        self._calls.channel.cancel_call(self._call)

    def __del__(self) -> None:
        self.cancel()
