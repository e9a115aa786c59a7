"""`pb_utils.InferenceRequest`: what `execute` gets, and what models ask other models with."""

import json
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

import msgspec

from serving.backends.python.frames import WireRequest
from serving.backends.python.worker.calls import BlsCalls
from serving.backends.python.worker.errors import (
    INT64,
    UINT32,
    TritonModelException,
    check_int,
    check_parameters,
    check_str,
)
from serving.backends.python.worker.response import InferenceResponseSender, Responder
from serving.backends.python.worker.tensor import Tensor, check_tensors

_REQUIRED: Any = object()
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceTrace:
    """The trace that a request belongs to; one that a model makes itself hands it on. No request is traced here."""

    def get_context(self) -> str | None:
        return None


class InferenceRequest:
    """One request of a batch, or one that the model makes. It and its tensors may be kept after `execute` returned."""

    __slots__ = ("_answer", "_inputs", "_model_name", "_model_version", "_preferred_memory", "_trace", "_wire")

    _answer: Responder
    _inputs: list[Tensor]
    _model_name: str
    _model_version: int
    _wire: WireRequest

    _calls: ClassVar[BlsCalls | None] = None
    """Set once, by the worker."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Sequence[str | bytes] = _REQUIRED,
        model_name: str | bytes = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: InferenceTrace | None = None,
        parameters: str | dict[str, bool | int | float | str] | None = None,
    ) -> None:
        """A request to another model, for `exec`. `preferred_memory` and `trace` change nothing here.

        Raises TypeError for arguments of other types, TritonModelException where the real server does.
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
        """Ask the model: its response, with an error where it failed, or with `decoupled` an iterator of them."""
        calls = self._required_calls()
        ask = calls.open_stream if decoupled else calls.ask
        return ask(self._model_name, self._model_version, self._wire, self._inputs)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """`exec` for a coroutine. The request is on its way when this returns, whether it is awaited or not.

        With `decoupled` what it awaits is the first response, and it gets an iterator of all of them.
        """
        calls = self._required_calls()
        ask = calls.open_stream_later if decoupled else calls.ask_later
        return ask(self._model_name, self._model_version, self._wire, self._inputs)

    def _required_calls(self) -> BlsCalls:
        if self._calls is None:
            raise RuntimeError("models can be asked in a worker process only")
        return self._calls

    @classmethod
    def received(
        cls, wire: WireRequest, inputs: list[Tensor], answer: Responder, model_name: str, model_version: int
    ) -> "InferenceRequest":
        self = cls.__new__(cls)
        self._wire = wire
        self._inputs = inputs
        self._answer = answer
        self._model_name = model_name
        self._model_version = model_version
        self._preferred_memory = self._trace = None
        return self

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._wire.id

    def correlation_id(self) -> int | str:
        return self._wire.correlation_id

    def requested_output_names(self) -> set[str]:
        """All of the model's where the request names none."""
        return set(self._wire.outputs)

    def parameters(self) -> str:
        """The request's own parameters as a JSON object, in which NaN and infinities are bare words, as in Triton."""
        return json.dumps(self._wire.parameters or {}, ensure_ascii=False, separators=(",", ":"))

    def flags(self) -> int:
        """Where it stands in its sequence: 1 starts it, 2 ends it."""
        return self._wire.flags

    def set_flags(self, flags: int) -> None:
        self._wire.flags = check_int(flags, "flags", UINT32)

    def timeout(self) -> int:
        """In microseconds; 0 is none."""
        return self._wire.timeout_us

    def preferred_memory(self) -> object:
        """Where the model that made it would like the outputs; None where it did not say."""
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def is_cancelled(self) -> bool:
        """Whether the client wants no more of it."""
        return self._answer.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self._answer)

    def set_release_flags(self, flags: int) -> None:
        """With RESCHEDULE the request comes again in a later batch, in place of a final response now.

        To be called within `execute`.
        """
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException("Unsupported release flag provided.")
        self._answer.is_wanted_again = flags == RELEASE_RESCHEDULE


def _check_given(**required: object) -> None:
    """They stand among others that may be left out, so that Python does not ask for them itself."""
    missing = [name for name, value in required.items() if value is _REQUIRED]
    if missing:
        raise TypeError(f"InferenceRequest takes {', '.join(missing)}, too")


def _correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        raise TritonModelException("Correlation ID must be integer or string")
    return check_int(value, "correlation_id")
