"""The one routine behind every infer request of the v2 protocol: version, sequence, trace, submission, one response.

A codec (JSON, protobuf) reads a V2Request and brings an `InferAnswer`, which encodes the response and sends it.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.classification import classify
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.shared_memory import LONG_COPY_BYTES
from sluice.gateway.api.v2.trace import Trace
from sluice.gateway.front.long_work import LONG_ELEMENTS
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.model import Model
from sluice.serving.request import LATEST, InferRequest, InferResponse
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Tensor


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


class InferAnswer(Protocol):
    """Encodes and sends the answer to one request. Either method is called, once, unless the request is cancelled.

    `respond` ends the trace, once the answer is sent. Neither raises.
    """

    def respond(self, response: InferResponse, trace: Trace | None) -> None: ...

    def fail(self, error: Exception) -> None: ...


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


class Inference:
    """One request that gets one response, from its submission to its answer. Event loop only."""

    __slots__ = ("_answer", "_job", "_parsed")

    def __init__(self, parsed: V2Request, answer: InferAnswer) -> None:
        self._parsed = parsed
        self._answer: InferAnswer | None = answer
        """None once it has the response."""
        self._job: InferJob | None = None

    def start(self, server: V2Server) -> bool:
        """Submit the request. Returns whether the answer is still to come. Raises like `submit`."""
        try:
            job = submit(server, self._parsed, self._receive)
        except BaseException:
            self._end_trace()
            raise
        if self._answer is not None:
            self._job = job
        return self._answer is not None

    def cancel(self) -> None:
        """Cancel the request: nobody waits for its answer. Idempotent, and harmless after it."""
        job, self._job = self._job, None
        if job is not None:
            job.cancel()
            self._end_trace()

    def _receive(self, response: InferResponse) -> None:
        if self._parsed.trace is None:
            self._job = None  # it holds this object
            self._pass_on(response)
        else:  # the job is known, and its spans have ended, once `submit` or the job itself has returned
            asyncio.get_running_loop().call_soon(self._note, response)

    def _note(self, response: InferResponse) -> None:
        job, self._job, trace = self._job, None, self._parsed.trace
        if job is None or trace is None:
            return
        trace.capture_job(job)
        if response.error is None:
            trace.capture("INFER_RESPONSE_COMPLETE")
            trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
        self._pass_on(response)

    def _pass_on(self, response: InferResponse) -> None:
        answer, self._answer = self._answer, None
        if answer is None:  # what follows the one response
            return
        if response.error is None:
            answer.respond(response, self._parsed.trace)
        else:
            self._end_trace()
            answer.fail(response.error)

    def _end_trace(self) -> None:
        if self._parsed.trace is not None:
            self._parsed.trace.finish()


def infer(server: V2Server, parsed: V2Request, answer: InferAnswer, only_for_streams: str) -> Inference | None:
    """Run one request, whose answer follows or has been sent. Returns what cancels it, None where it has been sent.

    Raises SluiceError for a request that cannot begin, UNIMPLEMENTED with the protocol's text `only_for_streams` for
    one that may get other than one response.
    """
    model = parsed.model
    if model.spec.is_decoupled and model.is_decoupled_for(parsed.request):
        raise SluiceError(ErrorCode.UNIMPLEMENTED, only_for_streams)
    inference = Inference(parsed, answer)
    return inference if inference.start(server) else None


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
