"""Requests from one model to another (business logic scripting), as the worker sees them."""

from typing import Any

from pipelines.backends.python.frames import Call, Reply, WireRequest
from pipelines.backends.python.worker.channel import Channel
from pipelines.backends.python.worker.errors import TritonError, TritonErrorCode
from pipelines.backends.python.worker.response import InferenceResponse
from pipelines.backends.python.worker.tensor import Tensor


class Calls:
    """Asks through the gateway. Any thread; each waits for its own answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(
        self, model_name: str, version: int, request: WireRequest, inputs: list[Tensor], is_decoupled: bool
    ) -> "InferenceResponse | ResponseIterator":
        """One response, or with `is_decoupled` an iterator of any number. Errors are in the responses."""
        channel = self._channel
        wire = WireRequest(
            0,
            [channel.wire_tensor(tensor) for tensor in inputs],
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.outputs,
            request.parameters,
        )
        number = channel.begin_call(Call(model_name, version, is_decoupled, wire))
        if is_decoupled:
            return ResponseIterator(channel, number)
        return _response(channel.next_reply(number), channel)


class ResponseIterator:
    """The responses of a decoupled model, as they come. The request is cancelled with the last reference to this."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._is_over = False

    def __iter__(self) -> "ResponseIterator":
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        reply = self._channel.next_reply(self._number)
        self._is_over = reply.is_final
        if reply.is_final and not reply.outputs and reply.error is None:
            raise StopIteration
        return _response(reply, self._channel)

    def cancel(self) -> None:
        """Want no more of them."""
        self._is_over = True
        self._channel.end_call(self._number)

    def __del__(self) -> None:
        self.cancel()


def _response(reply: Reply, channel: Channel) -> InferenceResponse:
    if reply.error is not None:
        code, message = reply.error
        return InferenceResponse(error=TritonError(message, TritonErrorCode(code)))
    tensors: list[Any] = [
        Tensor.received(each.name, each.datatype, each.shape, channel.open(each.raw)) for each in reply.outputs
    ]
    return InferenceResponse(tensors, parameters=reply.parameters)
