"""`pb_utils.InferenceResponse` and the sender of responses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.serving.backends.python.frames import WireResponse
from sluice.serving.backends.python.worker.errors import (
    TritonError,
    TritonErrorCode,
    TritonModelException,
    check_parameters,
)
from sluice.serving.backends.python.worker.tensor import PbTensor, check_tensors

if TYPE_CHECKING:
    from sluice.serving.backends.python.worker.channel import Channel

RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse:
    """Outputs, or an error instead. `parameters` is a dict of str, bool, int and float values."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[PbTensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._output_tensors = check_tensors(output_tensors, "output_tensors")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse takes a TritonError as error, not {type(error).__name__}")
        self._error = error
        self._parameters = check_parameters(parameters) if parameters is not None else None

    def output_tensors(self) -> list[PbTensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON; "" where there are none."""
        return msgspec.json.encode(self._parameters).decode() if self._parameters else ""


class Responder:
    """Responds to one request, from any thread. The request and all its senders share it.

    If all of them are gone before the final response, nobody can send it any more, and the request fails.
    """

    __slots__ = (
        "_channel",
        "_has_responded",
        "_is_closed",
        "_is_decoupled",
        "_label",
        "_outputs",
        "is_rescheduled",
        "number",
    )

    def __init__(
        self, channel: "Channel", number: int, outputs: tuple[str, ...], is_decoupled: bool, label: str
    ) -> None:
        self._channel = channel
        self._outputs = outputs
        self._is_decoupled = is_decoupled
        self._label = label
        self._has_responded = False
        self._is_closed = False
        self.is_rescheduled = False
        """Whether the request comes again, instead of a final response."""
        self.number = number

    def is_cancelled(self) -> bool:
        return self._channel.is_cancelled(self.number)

    def post(self, response: InferenceResponse | None, flags: int) -> None:
        """Post one response; its tensors may be changed afterwards. The channel sends it when flushed."""
        self._check(response, flags)
        is_final = flags == RESPONSE_COMPLETE_FINAL
        if self._is_decoupled:
            self._post(response, is_final)
        elif response is not None:
            self._post(response, True)
        self._is_closed = is_final

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, not {type(response).__name__}")
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if self._is_decoupled:
            return
        if response is not None and self._has_responded:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._has_responded:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )

    def _post(self, response: InferenceResponse | None, is_final: bool) -> None:
        wire = self._wire_response(response, is_final)
        self._has_responded = is_final
        self._channel.post_response(wire)

    def _wire_response(self, response: InferenceResponse | None, is_final: bool) -> WireResponse:
        if response is None:
            return WireResponse(self.number, is_final)
        error = response.error()
        if error is not None:
            return WireResponse(self.number, is_final, error=(error.code(), error.message()))
        requested = self._outputs
        outputs = [self._channel.wire_tensor(each) for each in response.output_tensors() if each.name() in requested]
        return WireResponse(self.number, is_final, outputs, None, response._parameters)

    def reschedule(self) -> None:
        """Give the request back, unless it has ended. Does not flush."""
        if self._has_responded:
            return
        self._has_responded = self._is_closed = True
        self._channel.post_response(WireResponse(self.number, True, is_rescheduled=True))

    def fail(self, message: str) -> None:
        """End the request with an internal error, unless it has ended. Does not flush."""
        if self._has_responded:
            return
        self._has_responded = self._is_closed = True
        self._channel.post_response(WireResponse(self.number, True, error=(TritonErrorCode.INTERNAL, message)))

    def flush(self) -> None:
        self._channel.flush()

    def __del__(self) -> None:
        if self._has_responded:
            return
        self.fail(f"{self._label}, message: the request was let go without a final response")
        self._channel.flush()


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, also after `execute` has returned."""

    __slots__ = ("_responder",)

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. Raises TritonModelException after the final flag was sent, and for unknown flags."""
        self._responder.post(response, flags)
        self._responder.flush()

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled()
