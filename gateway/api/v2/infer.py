"""The one routine behind every infer request of the v2 protocol: version, sequence, trace, submission, one response.

A codec (JSON, protobuf) reads a V2Request, and its subclass of `Inference` encodes the response and sends it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import re2
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.shared_memory import LONG_COPY_BYTES
from sluice.gateway.api.v2.trace import Trace
from sluice.gateway.calls import current_identity
from sluice.gateway.front.long_work import LONG_ELEMENTS
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.model import Model
from sluice.serving.request import LATEST, InferRequest, InferResponse
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Array, Tensor

_CLASSIFIED = {"UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"}
_MAX_ELEMENTS = 1_000_000
"""Most elements of an output that is classified: each is sorted, and text is made of it."""
_RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Parameters with a meaning of their own, which no header may set."""
_KEYS = frozenset({"authorization", "x-api-key"})
"""Where the server itself asks for a key, models do not see it."""
_RESERVED_PREFIX = "triton_"


class OutputForm(Enum):
    """Where an output's data goes."""

    JSON = "json"
    BINARY = "binary"
    SHARED_MEMORY = "shared memory"


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """The form of one output. `num_classes` 0: no classification. `window` is the shared memory to write it to."""

    form: OutputForm
    num_classes: int = 0
    window: memoryview | None = None


AS_JSON, AS_BINARY = RequestedOutput(OutputForm.JSON), RequestedOutput(OutputForm.BINARY)


@dataclass(slots=True)
class OutputPlan:
    """The requested forms of a request's outputs by name, and the form of those that it does not name."""

    default: RequestedOutput = AS_JSON
    named: dict[str, RequestedOutput] = field(default_factory=dict)

    def find(self, output: str) -> RequestedOutput:
        return self.named.get(output, self.default)


@dataclass(slots=True)
class V2Request:
    """A request to `model`, and what its client says about the answer.

    `version` and `key` are those that the client named: where it named neither, a sequence chooses the version.
    """

    model: Model
    request: InferRequest
    plan: OutputPlan
    version: int = LATEST
    key: str = ""
    received: tuple[tuple[str, int], ...] = ()
    """Points of its trace from before its submission, in perf_counter_ns."""
    is_decoupled: bool = False
    """Whether it may get other than one response, where it came on a stream."""
    wants_empty_final: bool = False
    """Whether a stream gets a last, empty message for it where its last response did not end it."""
    trace: Trace | None = None
    """Set at its submission, where it is traced."""


def submit(server: V2Server, parsed: V2Request, receive: ReceiveResponse) -> InferJob:
    """Choose the version of the model, begin the trace, and submit the request. Raises like `Model.submit`."""
    request, model = parsed.request, parsed.model
    if model.is_retired:  # while the body came in
        model = server.models.route(model.name, parsed.version, parsed.key)
    if request.correlation_id:
        model = server.models.route_sequence(model, request, parsed.version, parsed.key)
    parsed.model = model
    trace = server.trace.begin(model, request)
    if trace is None:
        return model.submit(request, receive)
    parsed.trace = trace
    for name, at_ns in parsed.received:
        trace.capture(name, at_ns)
    with trace.following():
        return model.submit(request, receive)


class Inference(ABC):
    """One request that gets one response, from its submission to its answer. Event loop only.

    A protocol's subclass encodes and sends the answer: `respond` or `fail` is called, once, unless the request is
    cancelled. `respond` ends the trace, once the answer is sent. Neither raises.
    """

    __slots__ = ("_is_over", "_job", "parsed")

    def __init__(self, parsed: V2Request) -> None:
        self.parsed = parsed
        self._is_over = False
        """Whether it has the response."""
        self._job: InferJob | None = None

    @abstractmethod
    def respond(self, response: InferResponse, trace: Trace | None) -> None: ...

    @abstractmethod
    def fail(self, error: Exception) -> None: ...

    def start(self, server: V2Server, only_for_streams: str) -> bool:
        """Submit the request. Returns whether the answer is still to come, which `cancel` prevents.

        Raises SluiceError for a request that cannot begin, UNIMPLEMENTED with the protocol's text `only_for_streams`
        for one that may get other than one response.
        """
        model = self.parsed.model
        if model.spec.is_decoupled and model.is_decoupled_for(self.parsed.request):
            raise SluiceError(ErrorCode.UNIMPLEMENTED, only_for_streams)
        try:
            job = submit(server, self.parsed, self._receive)
        except BaseException:
            self._end_trace()
            raise
        if not self._is_over:
            self._job = job
        return not self._is_over

    def cancel(self) -> None:
        """Cancel the request: nobody waits for its answer. Idempotent, and harmless after it."""
        job, self._job = self._job, None
        if job is not None:
            job.cancel()
            self._end_trace()

    def _receive(self, response: InferResponse) -> None:
        if self.parsed.trace is None:
            self._job = None  # it holds this object
            self._pass_on(response)
        else:  # the job is known, and its spans have ended, once `submit` or the job itself has returned
            asyncio.get_running_loop().call_soon(self._note, response)

    def _note(self, response: InferResponse) -> None:
        job, self._job, trace = self._job, None, self.parsed.trace
        if job is None or trace is None:
            return
        trace.capture_job(job)
        if response.error is None:
            trace.capture("INFER_RESPONSE_COMPLETE")
            trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
        self._pass_on(response)

    def _pass_on(self, response: InferResponse) -> None:
        if self._is_over:  # what follows the one response
            return
        self._is_over = True
        if response.error is None:
            self.respond(response, self.parsed.trace)
        else:
            self._end_trace()
            self.fail(response.error)

    def _end_trace(self) -> None:
        if self.parsed.trace is not None:
            self.parsed.trace.finish()


def refuse_streams(model: Model, only_for_streams: str) -> None:
    """Raise UNIMPLEMENTED for a model whose every request may get other than one response."""
    if model.spec.is_decoupled and model.streams_unasked:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, only_for_streams)


def note(trace: Trace | None, name: str) -> None:
    """Note that `name` happened, where the request is traced."""
    if trace is not None:
        trace.capture(name)


def is_short(response: InferResponse, plan: OutputPlan) -> bool:
    """Whether the answer is encoded faster than a thread would begin to."""
    num_elements = 0
    for tensor in response.outputs:
        requested = plan.find(tensor.name)
        if requested.form is OutputForm.JSON or requested.num_classes > 0 or tensor.datatype == BYTES.name:
            num_elements += tensor.num_elements  # its time grows with its elements
        elif requested.window is not None and tensor.size_bytes >= LONG_COPY_BYTES:
            return False
    return num_elements < LONG_ELEMENTS


def classified(model: Model, tensor: Tensor, requested: RequestedOutput) -> Tensor:
    """Return an output of `model`, as the classes that were requested of it or as it is. Raises as `classify`."""
    if not requested.num_classes:
        return tensor
    labels = model.labels.get(tensor.name, ())
    return classify(tensor, requested.num_classes, labels, is_batched=model.spec.max_batch_size > 0)


def classify(tensor: Tensor, count: int, labels: Sequence[str], is_batched: bool) -> Tensor:
    """Return the `count` highest values of each row, or all of fewer, as BYTES `value:index[:label]`.

    A row is one item of the batch, flattened; without a batch the whole tensor is one. Equal values come in the order
    of their indices, NaN comes last. Raises INVALID for a type without order in the protocol, and for a tensor that is
    too large.
    """
    if tensor.datatype not in _CLASSIFIED:
        message = f"class result not available for output due to unsupported type '{tensor.datatype}'"
        raise SluiceError(ErrorCode.INVALID, message)
    if tensor.num_elements > _MAX_ELEMENTS:
        raise SluiceError(ErrorCode.INVALID, "classification output tensor too large")
    has_rows = is_batched and bool(tensor.shape)
    values = tensor.array
    rows = values.reshape(tensor.shape[0], -1) if has_rows and values.size else values.reshape(1, -1)
    num_classes = min(count, rows.shape[1])
    if len(rows) * num_classes > byte_strings.MAX_ELEMENTS:
        message = f"at most {byte_strings.MAX_ELEMENTS} classes are returned, got a request for {count} of each row"
        raise SluiceError(ErrorCode.INVALID, message)
    classes = np.empty((rows.shape[0], num_classes), np.object_)
    for row, found in zip(rows, classes, strict=True):
        found[:] = [_class(row[index], index, labels) for index in _highest(row)[:num_classes].tolist()]
    shape = (tensor.shape[0], num_classes) if has_rows else (num_classes,)
    return Tensor(tensor.name, "BYTES", shape, array=classes.reshape(shape))


def _highest(row: Array) -> NDArray[np.intp]:
    if row.dtype.kind == "f":
        return np.argsort(-row, kind="stable")
    # Integers cannot be negated without overflow; the reversed order is sorted instead, so that ties stay in order.
    return len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]


def _class(value: "np.number[Any]", index: int, labels: Sequence[str]) -> bytes:
    text = f"{value:f}" if isinstance(value, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{text}:{index}{label}".encode()


class ForwardedHeaders:
    """Chooses the headers of HTTP requests and the metadata of gRPC calls that go along as a request's parameters, by
    `pattern`: a regular expression of RE2 that may match anywhere in a name, in any case. None forwards none.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = re2.compile("(?i)" + pattern) if pattern else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def choose(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the headers that are forwarded. Raises INVALID for the name of a parameter with its own meaning."""
        if self._pattern is None:
            return {}
        secret = _KEYS if current_identity() is not None else frozenset()
        chosen = {name: value for name, value in headers if self._pattern.search(name) and name.lower() not in secret}
        for name in chosen:
            if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                message = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
                raise SluiceError(ErrorCode.INVALID, message)
        return chosen
