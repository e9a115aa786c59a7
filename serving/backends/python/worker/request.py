"""`pb_utils.InferenceRequest`: the requests that `execute` gets, and those that a model makes to other models."""

import json
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

import msgspec

from sluice.serving.backends.python.frames import WireRequest
from sluice.serving.backends.python.worker.calls import BlsCalls, ResponseIterator
from sluice.serving.backends.python.worker.channel import PendingCall
from sluice.serving.backends.python.worker.errors import (
    INT64,
    UINT32,
    TritonModelException,
    check_int,
    check_parameters,
    check_str,
)
from sluice.serving.backends.python.worker.response import InferenceResponseSender, Responder
from sluice.serving.backends.python.worker.tensor import PbTensor, check_tensors

_REQUIRED: Any = object()
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceTrace:
    """Trace of a request, which a model may pass on with its own requests, so that they belong to it. Without it they
    belong to the request that the worker has, where that is the only one."""

    def __init__(self, number: int = 0, traceparent: str = "") -> None:
        self.number = number
        self._traceparent = traceparent

    def get_context(self) -> str | None:
        """Return OpenTelemetry's context as JSON, as Triton does; None where the request is not traced."""
        return json.dumps({"traceparent": self._traceparent}) if self._traceparent else None


class InferenceRequest:
    """A request of a batch, or one that the model makes. It may be kept after `execute` has returned."""

    __slots__ = ("_inputs", "_model_name", "_model_version", "_preferred_memory", "_responder", "_trace", "_wire")

    _responder: Responder
    _inputs: list[PbTensor]
    _model_name: str
    _model_version: int
    _wire: WireRequest

    _calls: ClassVar[BlsCalls | None] = None
    """Calls of other models. The worker sets it once."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[PbTensor] = _REQUIRED,
        requested_output_names: Sequence[str | bytes] = _REQUIRED,
        model_name: str | bytes = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: InferenceTrace | None = None,
        parameters: str | dict[str, bool | int | float | str] | None = None,
    ) -> None:
        """Make a request to another model, for `exec`. `preferred_memory` changes nothing.

        Raises TypeError for arguments of wrong types, TritonModelException where Triton does.
        """
        _check_given(inputs=inputs, requested_output_names=requested_output_names, model_name=model_name)
        if isinstance(parameters, str):
            parameters = msgspec.json.decode(parameters) if parameters else None
        self._wire = WireRequest(
            0,
            [],
            check_str(request_id, "request_id"),
            _correlation_id(correlation_id),
            check_int(flags, "flags", UINT32),
            check_int(timeout, "timeout"),
            tuple(check_str(name, "a name of requested_output_names") for name in requested_output_names),
            (check_parameters(parameters) if parameters is not None else None) or None,
        )
        self._inputs = check_tensors(inputs, "inputs")
        self._model_name = check_str(model_name, "model_name")
        if not self._model_name:
            raise TritonModelException("InferenceRequest takes a model_name that is not empty")
        self._model_version = check_int(model_version, "model_version", INT64, -1)
        self._preferred_memory = preferred_memory
        self._trace = trace

    def exec(self, decoupled: bool = False) -> Any:
        """Call the model and return its response, or with `decoupled` an iterator. Responses have the errors."""
        calls, call = self._begin_call(decoupled)
        return ResponseIterator(calls, call) if decoupled else calls.wait(call)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Call from a coroutine; sent when this returns, awaited or not. `decoupled` awaits the first response."""
        calls, call = self._begin_call(decoupled)
        return calls.stream_async(call) if decoupled else calls.wait_async(call)

    def _begin_call(self, is_decoupled: bool) -> tuple[BlsCalls, PendingCall]:
        if self._calls is None:
            raise RuntimeError("models can be asked in a worker process only")
        works_for = 0 if self._trace is None else self._trace.number
        call = self._calls.begin(
            self._model_name, self._model_version, self._wire, self._inputs, is_decoupled, works_for
        )
        return self._calls, call

    @classmethod
    def from_wire(
        cls, wire: WireRequest, inputs: list[PbTensor], responder: Responder, model_name: str, model_version: int
    ) -> "InferenceRequest":
        self = cls.__new__(cls)
        self._wire = wire
        self._inputs = inputs
        self._responder = responder
        self._model_name = model_name
        self._model_version = model_version
        self._preferred_memory = self._trace = None
        return self

    def inputs(self) -> list[PbTensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._wire.id

    def correlation_id(self) -> int | str:
        return self._wire.correlation_id

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs, all of the model's where the request names none."""
        return set(self._wire.outputs)

    def parameters(self) -> str:
        """Return the parameters as a JSON object, in which NaN and infinities are bare words, as in Triton."""
        return json.dumps(self._wire.parameters or {}, ensure_ascii=False, separators=(",", ":"))

    def flags(self) -> int:
        """Return the position in the sequence: 1 starts it, 2 ends it."""
        return self._wire.flags

    def set_flags(self, flags: int) -> None:
        self._wire.flags = check_int(flags, "flags", UINT32)

    def timeout(self) -> int:
        """Return the timeout in microseconds; 0 is none."""
        return self._wire.timeout_us

    def preferred_memory(self) -> object:
        """Return where the model that made the request prefers the outputs; None where it did not say."""
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace(self._wire.number, self._wire.traceparent)

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self._responder)

    def set_release_flags(self, flags: int) -> None:
        """With RESCHEDULE, have the request come again in a later batch. To be called within `execute`."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException("Unsupported release flag provided.")
        self._responder.is_rescheduled = flags == RELEASE_RESCHEDULE


def _check_given(**required: object) -> None:
    """Check that the required arguments are given. They follow optional ones, so Python does not check them."""
    missing = [name for name, value in required.items() if value is _REQUIRED]
    if missing:
        raise TypeError(f"InferenceRequest takes {', '.join(missing)}, too")


def _correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return check_str(value, "correlation_id")
    if isinstance(value, float):
        raise TritonModelException("Correlation ID must be integer or string")
    return check_int(value, "correlation_id")
