"""What one model version has done: the counts and times behind statistics, and behind the nv_inference metrics.

What moves when is as in Triton: a success moves everything, a failure only `fail` and its reason, a response out of
the cache only `success`, `queue` and `cache_hit`. `execution_count` and the batch statistics go by executions, which
failed requests take part in, and `inference_count` by the rows of successful requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter_ns, time

from serving.job import InferJob
from serving.latencies import LatencyRecorder
from serving.request import InferResponse
from sluice.errors import ErrorCode

_REFUSALS = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)


class FailureReason(StrEnum):
    """Why requests fail, in the metrics' words."""

    REJECTED = "REJECTED"
    """The queue was full, or the request's time in it was up."""
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    """The model failed it."""
    OTHER = "OTHER"


class Duration:
    """How often something happened, and how long it took in all."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


class InferStatistics:
    """Of requests. `success` and `fail` are from submission to the end, the others parts of successful ones."""

    __slots__ = (
        "cache_hit",
        "cache_miss",
        "compute_infer",
        "compute_input",
        "compute_output",
        "fail",
        "queue",
        "success",
    )

    def __init__(self) -> None:
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()


class BatchStatistics:
    """Of the executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class ResponseStatistics:
    """Of the responses at one place in the streams of a decoupled model."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


@dataclass(slots=True)
class CacheUsage:
    """What a response cache holds and has done. `size_bytes` None: it lies in another process, which knows its size."""

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
    """Requests that were served without a look-up, as the cache did not answer."""


def _no_request() -> int:
    return 0


class ModelStatistics:
    """Written by jobs and schedulers on the event loop, read by protocols and the metrics page."""

    def __init__(self) -> None:
        self.last_inference_ms = 0
        """When an execution last ended, since the epoch; 0 is never."""
        self.inference_count = 0
        self.execution_count = 0
        self.infer = InferStatistics()
        self.batches: dict[int, BatchStatistics] = {}
        """By rows."""
        self.responses: dict[int, ResponseStatistics] = {}
        """By place in the stream, from 0. Only of decoupled models."""
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self.count_pending: Callable[[], int] = _no_request
        """How many requests wait for an execution now. Set by who queues them."""
        self.cache: CacheUsage | None = None
        """Of the cache that responses may come out of; None where the model has none."""
        self.latencies: LatencyRecorder | None = None
        """How times are distributed; None where nobody wants to know."""

    def record_request(self, job: InferJob) -> None:
        """A request has ended, well (`job.outcome` None), in an error or cancelled.

        One that ran in no batch was an execution of its own: that of an ensemble or of an LLM.
        """
        now = perf_counter_ns()
        if job.outcome is not None or job.is_cancelled:
            self._record_failure(job, _reason(job), now)
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
        infer.compute_input.add(parts[0])
        infer.compute_infer.add(parts[1])
        infer.compute_output.add(parts[2])
        if job.executed_batch_size == 0:
            self._record_batch(rows, parts)

    def record_refused(self, job: InferJob) -> None:
        """A request was refused before it began. Faults of the request itself do not count, as in Triton."""
        if job.outcome is not None and job.outcome.code in _REFUSALS:
            self._record_failure(job, FailureReason.REJECTED, perf_counter_ns())

    def record_response(self, job: InferJob, response: InferResponse) -> None:
        """One of a decoupled model's responses; to be called after it was counted in the job."""
        self.record_first_response(job, response)
        place = job.num_responses if response.is_empty else job.num_responses - 1
        found = self.responses.get(place)
        if found is None:
            found = self.responses[place] = ResponseStatistics()
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
        """The same for a decoupled model that keeps no statistics of single responses."""
        if self.latencies is not None and not response.is_empty and response.error is None:
            self.latencies.add_first_response(job)

    def record_execution(self, jobs: list[InferJob]) -> None:
        """A batch has run: its times are in its jobs."""
        first = jobs[0]
        self._record_batch(first.executed_batch_size, _compute_parts(first, perf_counter_ns()))

    def record_cache_hit(self, job: InferJob, lookup_started_ns: int, lookup_ended_ns: int) -> None:
        """A request was answered out of the cache, without an execution."""
        infer, now = self.infer, perf_counter_ns()
        infer.success.add(now - job.started_ns)
        infer.queue.add(lookup_started_ns - job.started_ns)
        infer.cache_hit.add(lookup_ended_ns - lookup_started_ns)
        if self.latencies is not None:
            self.latencies.add_hit(job, now, lookup_started_ns, lookup_ended_ns)

    def record_cache_miss(self, ns: int, *, delays_request: bool = True) -> None:
        """An answer was put into the cache; `ns` is what looking for it and putting it there took."""
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
            self._record_cancelled_response(job, now)

    def _record_cancelled_response(self, job: InferJob, now: int) -> None:
        found = self.responses.setdefault(job.num_responses, ResponseStatistics())
        found.cancel.add(now - (job.compute_started_ns or job.started_ns))

    def _record_batch(self, rows: int, parts: tuple[int, int, int]) -> None:
        self.last_inference_ms = int(time() * 1000)
        self.execution_count += 1
        found = self.batches.get(rows)
        if found is None:
            found = self.batches[rows] = BatchStatistics()
        found.compute_input.add(parts[0])
        found.compute_infer.add(parts[1])
        found.compute_output.add(parts[2])


def _compute_parts(job: InferJob, now: int) -> tuple[int, int, int]:
    """Nanoseconds of gathering inputs, of inference and of handing out outputs, up to `now`."""
    started = job.compute_started_ns or job.started_ns
    infer_started = job.infer_started_ns or started
    infer_ended = job.infer_ended_ns or now
    return infer_started - started, infer_ended - infer_started, now - infer_ended


def _reason(job: InferJob) -> FailureReason:
    if job.is_cancelled:
        return FailureReason.CANCELED
    if job.executed_batch_size:
        return FailureReason.BACKEND
    is_refusal = job.outcome is not None and job.outcome.code in _REFUSALS
    return FailureReason.REJECTED if is_refusal else FailureReason.OTHER
