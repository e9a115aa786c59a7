"""Statistics of one model version: the counts and times behind the v2 statistics and the nv_inference metrics.

They count as Triton does: a success counts everywhere, a failure only in `fail` and its reason, a response from the
cache only in `success`, `queue` and `cache_hit`. `execution_count` and the batch statistics count executions, failed
requests included; `inference_count` counts the rows of successful requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter_ns, time

from sluice.errors import ErrorCode
from sluice.serving.job import InferJob
from sluice.serving.latencies import LatencyRecorder
from sluice.serving.request import InferResponse

_REJECTIONS = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)


class FailureReason(StrEnum):
    """Reasons for failed requests, as the metrics name them."""

    REJECTED = "REJECTED"
    """The queue was full, or the request's timeout in it expired."""
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    """The model failed the request."""
    OTHER = "OTHER"


@dataclass(slots=True)
class Duration:
    """A count of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class BatchStatistics:
    """Durations of the executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, parts_ns: tuple[int, int, int]) -> None:
        self.compute_input.add(parts_ns[0])
        self.compute_infer.add(parts_ns[1])
        self.compute_output.add(parts_ns[2])


@dataclass(slots=True)
class InferStatistics(BatchStatistics):
    """Durations of requests: `success` and `fail` from submission to the end, the others parts of a success."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ResponseStatistics:
    """Durations of the responses at one position in the streams of a decoupled model."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class CacheUsage:
    """Size and counts of a response cache. `size_bytes` None: another process holds it and knows its size."""

    size_bytes: int | None
    used_bytes: int = 0
    num_entries: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0
    is_up: bool = True
    num_errors: int = 0
    num_bypassed: int = 0
    """Requests served without a look-up because the cache did not answer."""


class ModelStatistics:
    """Written by jobs and schedulers on the event loop, read by protocols and the metrics page."""

    def __init__(self) -> None:
        self.last_inference_ms = 0
        """Time at which the last execution ended, since the epoch; 0 is never."""
        self.inference_count = 0
        self.execution_count = 0
        self.infer = InferStatistics()
        self.batches: dict[int, BatchStatistics] = {}
        """Statistics by the number of rows."""
        self.responses: dict[int, ResponseStatistics] = {}
        """Statistics by position in the stream, from 0. Only decoupled models have any."""
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self.count_pending: Callable[[], int] = lambda: 0
        """Returns the number of requests that wait for an execution. Set by the scheduler that queues them."""
        self.cache: CacheUsage | None = None
        """Usage of the model's response cache; None where it has none."""
        self.latencies: LatencyRecorder | None = None
        """Records distributions; None where they are turned off."""

    def record_request(self, job: InferJob) -> None:
        """Count a request that has ended: in success (`job.outcome` None), in an error or cancelled.

        A request that ran in no batch was an execution of its own: one of an ensemble or an LLM.
        """
        now = perf_counter_ns()
        if job.outcome is not None or job.is_cancelled:
            self._record_failure(job, _failure_reason(job), now)
            return
        rows = job.request.batch_size
        self.inference_count += rows
        compute_started = job.compute_started_ns or job.started_ns
        infer = self.infer
        infer.success.add(now - job.started_ns)
        infer.queue.add(compute_started - job.started_ns)
        parts = _compute_parts(job, now)
        if self.latencies is not None:
            self.latencies.add_request(job, now, compute_started, parts)
        infer.add(parts)
        if job.executed_batch_size == 0:
            self._record_batch(rows, parts)

    def record_rejection(self, job: InferJob) -> None:
        """Count a request that was rejected before it started. As in Triton, an invalid request does not count."""
        if job.outcome is not None and job.outcome.code in _REJECTIONS:
            self._record_failure(job, FailureReason.REJECTED, perf_counter_ns())

    def record_response(self, job: InferJob, response: InferResponse) -> None:
        """Count a response of a decoupled model, after the job has counted it."""
        self.record_first_response(job, response)
        position = job.num_responses if response.is_empty else job.num_responses - 1
        found = self.responses.get(position)
        if found is None:
            found = self.responses[position] = ResponseStatistics()
        elapsed = perf_counter_ns() - (job.infer_started_ns or job.compute_started_ns or job.started_ns)
        found.compute_infer.add(elapsed)
        if response.is_empty:
            found.empty_response.add(elapsed)
        elif response.error is not None:
            found.fail.add(elapsed)
        else:
            found.compute_output.add(0)
            found.success.add(elapsed)

    def record_first_response(self, job: InferJob, response: InferResponse) -> None:
        """Measure a decoupled model's first response; all that a model without response statistics needs."""
        if self.latencies is not None and not response.is_empty and response.error is None:
            self.latencies.add_first_response(job)

    def record_execution(self, jobs: list[InferJob]) -> None:
        """Count a batch that has run. Its jobs hold the times."""
        first = jobs[0]
        self._record_batch(first.executed_batch_size, _compute_parts(first, perf_counter_ns()))

    def record_cache_hit(self, job: InferJob, lookup_started_ns: int, lookup_ended_ns: int) -> None:
        """Count a request that the cache answered, without an execution."""
        infer, now = self.infer, perf_counter_ns()
        infer.success.add(now - job.started_ns)
        infer.queue.add(lookup_started_ns - job.started_ns)
        infer.cache_hit.add(lookup_ended_ns - lookup_started_ns)
        if self.latencies is not None:
            self.latencies.add_hit(job, now, lookup_started_ns, lookup_ended_ns)

    def record_cache_miss(self, ns: int, *, delays_request: bool = True) -> None:
        """Count a response that was inserted into the cache; `ns` is the time of the look-up and the insertion."""
        self.infer.cache_miss.add(ns)
        if delays_request:
            self.infer.success.ns += ns
        if self.latencies is not None:
            self.latencies.add_miss(ns)

    def _record_failure(self, job: InferJob, reason: FailureReason, now: int) -> None:
        self.infer.fail.add(now - job.started_ns)
        self.failures[reason] += 1
        if self.latencies is not None:
            self.latencies.forget(job)
        if reason is FailureReason.CANCELED and job.num_responses and self.responses:
            found = self.responses.setdefault(job.num_responses, ResponseStatistics())
            found.cancel.add(now - (job.compute_started_ns or job.started_ns))

    def _record_batch(self, rows: int, parts: tuple[int, int, int]) -> None:
        self.last_inference_ms = int(time() * 1000)
        self.execution_count += 1
        found = self.batches.get(rows)
        if found is None:
            found = self.batches[rows] = BatchStatistics()
        found.add(parts)


def _compute_parts(job: InferJob, now: int) -> tuple[int, int, int]:
    """Return the nanoseconds of gathering inputs, of inference and of handing out outputs, up to `now`."""
    started = job.compute_started_ns or job.started_ns
    infer_started = job.infer_started_ns or started
    infer_ended = job.infer_ended_ns or now
    return infer_started - started, infer_ended - infer_started, now - infer_ended


def _failure_reason(job: InferJob) -> FailureReason:
    if job.is_cancelled or (job.outcome is not None and job.outcome.code is ErrorCode.CANCELLED):
        return FailureReason.CANCELED
    if job.executed_batch_size:
        return FailureReason.BACKEND
    is_rejection = job.outcome is not None and job.outcome.code in _REJECTIONS
    return FailureReason.REJECTED if is_rejection else FailureReason.OTHER
