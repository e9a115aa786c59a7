"""`pb_utils.InferenceRequest`: what `execute` gets, and what models ask other models with."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from pipelines.backends.python.frames import WireRequest
from pipelines.backends.python.worker.calls import Calls
from pipelines.backends.python.worker.errors import TritonModelException
from pipelines.backends.python.worker.response import Answer, InferenceResponseSender
from pipelines.backends.python.worker.tensor import Tensor

RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceRequest:
    """One request of a batch, or one that the model makes. It and its tensors may be kept after `execute` returned."""

    __slots__ = ("_answer", "_inputs", "_model_name", "_model_version", "_wire")

    _answer: Answer
    _inputs: list[Tensor]
    _model_name: str
    _model_version: int
    _wire: WireRequest

    _calls: ClassVar[Calls | None] = None
    """Set once, by the worker."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: object = None,
        parameters: str | dict[str, bool | int | float | str] | None = None,
    ) -> None:
        """A request to another model, for `exec`. `preferred_memory` and `trace` change nothing here."""
        if not model_name:
            raise TritonModelException("InferenceRequest takes a model_name")
        given = msgspec.json.decode(parameters) if isinstance(parameters, str) and parameters else parameters
        self._wire = WireRequest(
            0, [], request_id, correlation_id, flags, timeout, tuple(requested_output_names), given or None
        )
        self._inputs = list(inputs)
        self._model_name = model_name
        self._model_version = model_version

    def exec(self, decoupled: bool = False) -> Any:
        """Ask the model: its response, with an error where it failed, or with `decoupled` an iterator of them."""
        if self._calls is None:
            raise RuntimeError("models can be asked in a worker process only")
        return self._calls.ask(self._model_name, self._model_version, self._wire, self._inputs, decoupled)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """`exec`, without keeping the event loop."""
        import asyncio

        return await asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)

    @classmethod
    def received(
        cls, wire: WireRequest, inputs: list[Tensor], answer: Answer, model_name: str, model_version: int
    ) -> "InferenceRequest":
        self = cls.__new__(cls)
        self._wire = wire
        self._inputs = inputs
        self._answer = answer
        self._model_name = model_name
        self._model_version = model_version
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
        self._wire.flags = flags

    def timeout(self) -> int:
        """In microseconds; 0 is none."""
        return self._wire.timeout_us

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
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException("Unsupported release flag provided.")
        if flags == RELEASE_RESCHEDULE:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, "
                "while the model is not configured to handle such a flag."
            )
