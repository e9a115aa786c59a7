"""One request under way in one model: where it stands, what it took, how it is cancelled."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

from serving.request import InferRequest, InferResponse
from sluice.errors import ErrorCode, SluiceError

ReceiveResponse = Callable[[InferResponse], None]
"""Takes a job's responses, on the event loop; the last one is final. Must not raise and must not block."""


class JobOwner(Protocol):
    """The model that a job belongs to, which keeps its statistics and knows what is under way."""

    def responded(self, job: "InferJob", response: InferResponse) -> None:
        """Called with each response that the job passes on."""

    def finished(self, job: "InferJob") -> None:
        """Called once, when the job is over."""


class InferJob:
    """Made by `Model.submit`, and driven by whoever holds it: the queue, then an instance. Event loop's thread only.

    Times are perf_counter_ns; 0 is not yet. Whoever passes a point sets its time: `compute_started_ns` when the batch
    is formed and handed to the instance, `infer_started_ns` when inputs are gathered, `infer_ended_ns` when the
    library or worker has answered. Where only the first is set, all until the end counts as infer.
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
        "started_ns",
    )

    def __init__(self, model: JobOwner, request: InferRequest, receive: ReceiveResponse) -> None:
        self._model = model
        self._receive = receive
        self.request = request
        self.started_ns = perf_counter_ns()
        self.compute_started_ns = 0
        self.infer_started_ns = 0
        self.infer_ended_ns = 0
        self.executed_batch_size = 0
        """Rows of the batch that it ran in; 0 while it has not run."""
        self.num_responses = 0
        self.is_cancelled = False
        self.is_finished = False
        self.outcome: SluiceError | None = None
        """The error of its last failed response; None where none failed."""
        self.on_cancel: Callable[[], None] | None = None
        """What its present holder does about a cancellation. Called at most once."""

        self.on_reschedule: Callable[[], None] | None = None
        """Who runs it again where the model asks for that; None where nobody does."""

    def reschedule(self) -> None:
        """The model has not finished with it and wants it again, instead of a final response (iterative sequences)."""
        if self.on_reschedule is None:
            reason = (
                "the model asked to run the request again, which takes sequence_batching { iterative_sequence: true }"
            )
            self.fail(SluiceError(ErrorCode.UNIMPLEMENTED, reason))
        elif self.is_cancelled:
            self.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
        else:
            self.on_reschedule()

    def respond(self, response: InferResponse) -> None:
        """Pass a response on. After the final one, and to who has cancelled, nothing is passed any more."""
        if self.is_finished:
            return
        if response.error is not None:
            self.outcome = response.error
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
        """End it with `error`."""
        self.respond(InferResponse(error=error))

    def cancel(self) -> None:
        """Its client wants no more of it. Idempotent, legal in every state; its holder frees what it holds."""
        if self.is_cancelled or self.is_finished:
            return
        self.is_cancelled = True
        self.outcome = SluiceError(ErrorCode.CANCELLED, "the request was cancelled")
        holder, self.on_cancel = self.on_cancel, None
        if holder is not None:
            holder()
