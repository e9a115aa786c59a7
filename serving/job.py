"""A job: one request in flight in one model, with its times, its outcome and its cancellation."""

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns
from typing import Protocol

from sluice.errors import ErrorCode, SluiceError
from sluice.record.spans import Attributes, Span
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec

ReceiveResponse = Callable[[InferResponse], None]
"""Receives a job's responses, on the event loop; the last one is final. Must not raise and must not block."""
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
"""Spans between the times of a job."""


class JobOwner(Protocol):
    """The model that a job belongs to. It keeps the statistics and counts what is in flight."""

    calls_models: bool
    """Whether it has asked other models by itself: only the code of a Python model knows which."""

    def responded(self, job: "InferJob", response: InferResponse) -> None:
        """Note a response that the job passes on."""

    def finished(self, job: "InferJob") -> None:
        """Note the end of the job. Called once."""


class InferJob:
    """A request that `Model.submit` accepted, driven by its holder: the queue, then an instance. Event loop only.

    Times are perf_counter_ns; 0 is not yet. The holder sets them: `compute_started_ns` when the batch is formed and
    handed to the instance, `infer_started_ns` when the inputs are gathered, `infer_ended_ns` when the library or worker
    has answered. Where only the first is set, all time until the end counts as inference.
    """

    __slots__ = (
        "_model",
        "_receive",
        "compute_started_ns",
        "executed_batch_size",
        "infer_ended_ns",
        "infer_started_ns",
        "is_cancelled",
        "is_finished",
        "num_responses",
        "on_cancel",
        "on_reschedule",
        "outcome",
        "request",
        "span",
        "started_ns",
    )

    def __init__(self, model: JobOwner, request: InferRequest, receive: ReceiveResponse) -> None:
        self._model = model
        self._receive = receive
        self.request = request
        self.started_ns = perf_counter_ns()
        self.span: Span | None = None
        """Where its time is noted; None where nobody records."""
        self.compute_started_ns = 0
        self.infer_started_ns = 0
        self.infer_ended_ns = 0
        self.executed_batch_size = 0
        """Rows of the batch that it ran in; 0 until it runs."""
        self.num_responses = 0
        self.is_cancelled = False
        self.is_finished = False
        self.outcome: SluiceError | None = None
        """The error of the last failed response; None where none failed."""
        self.on_cancel: Callable[[], None] | None = None
        """The present holder's reaction to a cancellation. Called at most once."""
        self.on_reschedule: Callable[[], None] | None = None
        """Runs the job again where the model asks for that; None where the scheduler cannot."""

    def reschedule(self) -> None:
        """Run the request again in place of a final response, as the model asks (iterative sequences)."""
        if self.on_reschedule is None:
            reason = (
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured "
                "to handle such a flag: that takes sequence_batching { iterative_sequence: true }"
            )
            self.fail(SluiceError(ErrorCode.INVALID, reason))
        elif self.is_cancelled:
            self.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
        else:
            self.on_reschedule()

    def respond(self, response: InferResponse) -> None:
        """Pass a response to the client, unless the job has ended or was cancelled."""
        if self.is_finished:
            return
        if response.error is not None:
            self.outcome = response.error
        if response.is_final:
            self.end_span()  # before whoever gets it begins to work with it
        if not self.is_cancelled:
            if not response.is_empty:
                self.num_responses += 1
            response.id = self.request.id
            self._model.responded(self, response)
            self._receive(response)
        if response.is_final:
            self.is_finished = True
            self.on_cancel = self.on_reschedule = None
            self._model.finished(self)

    def fail(self, error: SluiceError) -> None:
        self.respond(InferResponse(error=error))

    def calls_model(self) -> None:
        """Note that its model asks another one for it."""
        self._model.calls_models = True

    def cancel(self) -> None:
        """Cancel the job for its client; the holder frees its resources. Idempotent, legal in every state."""
        if self.is_cancelled or self.is_finished:
            return
        self.is_cancelled = True
        self.outcome = SluiceError(ErrorCode.CANCELLED, "the request was cancelled")
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def begin_span(self, above: Span, spec: ModelSpec) -> Span:
        """Begin to note its time within the span of whoever submits it."""
        attributes: Attributes = {"sluice.model": spec.name, "sluice.model_version": spec.version}
        attributes["sluice.platform"] = spec.platform
        self.span = above.child(f"infer {spec.name}", attributes, self.started_ns)
        return self.span

    def end_span(self) -> None:
        """Note the parts of its time that are known. Idempotent; nothing where nobody records."""
        span = self.span
        if span is None or span.ended_ns:
            return
        if self.outcome is not None:
            span.error = self.outcome.message
        has_parts = any(each.parent is span for each in span.recording.spans)  # an ensemble's steps, or a generation
        if self.compute_started_ns and self.infer_started_ns and self.infer_ended_ns and not has_parts:
            span.attributes["sluice.batch_size"] = self.executed_batch_size
            self._add_parts(span)
        span.end_all()

    def _add_parts(self, span: Span) -> None:
        times = (
            self.started_ns,
            self.compute_started_ns,
            self.infer_started_ns,
            self.infer_ended_ns,
            perf_counter_ns(),
        )
        for name, (began_ns, ended_ns) in zip(_PARTS, pairwise(times), strict=True):
            if ended_ns > began_ns:
                span.child(name, started_ns=began_ns).end(ended_ns)
