"""Distributions of a model's latencies, which an operator turns on (`--metrics-config`)."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf, log, nan
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.record.histogram import Histogram
from sluice.serving.job import InferJob

_log = logging.getLogger(__name__)

FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's default."""
_NS_PER_US, _NS_PER_MS = 1000, 1_000_000
_SLOT_NS = 10_000_000_000
_NUM_SLOTS = 6
"""Quantiles are of the last minute, as Triton's are; the window moves in steps of ten seconds."""
_PER_E_FOLD = 1 / log(1.02)
"""Each bucket of a sketch is 2 % wider than the one below: its middle is within 1 % of every value in it."""


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """Latencies that are measured of every model. Summaries cost a request about 2 microseconds, histograms 1."""

    has_summaries: bool = False
    has_histograms: bool = False


class SlidingSketch:
    """Counts values by logarithmic bucket over the last minute. Quantiles are exact in rank, within 1 % in value."""

    __slots__ = ("_current", "_slot", "_slots")

    def __init__(self) -> None:
        self._slot = -1
        self._current: dict[int, int] = {}
        self._slots: dict[int, dict[int, int]] = {}

    def add(self, us: float, now_ns: int) -> None:
        slot = now_ns // _SLOT_NS
        if slot != self._slot:
            self._start_slot(slot)
        bucket = int(log(us) * _PER_E_FOLD) if us >= 1.0 else -1
        self._current[bucket] = self._current.get(bucket, 0) + 1

    def _start_slot(self, slot: int) -> None:
        self._slot, self._current = slot, {}
        self._slots = {kept: counts for kept, counts in self._slots.items() if kept > slot - _NUM_SLOTS}
        self._slots[slot] = self._current

    def quantiles(self, ranks: Sequence[float], now_ns: int) -> list[float]:
        """Return the quantiles of those ranks (0 to 1) in microseconds; NaN where the last minute has no values."""
        oldest = now_ns // _SLOT_NS - _NUM_SLOTS
        merged: dict[int, int] = {}
        for slot, counts in self._slots.items():
            if slot > oldest:
                for bucket, count in counts.items():
                    merged[bucket] = merged.get(bucket, 0) + count
        if not merged:
            return [nan for _ in ranks]
        buckets = sorted(merged)
        totals = list(accumulate(merged[bucket] for bucket in buckets))
        found = (buckets[bisect_left(totals, rank * totals[-1])] for rank in ranks)
        return [exp((bucket + 0.5) / _PER_E_FOLD) if bucket >= 0 else 0.0 for bucket in found]


class LatencyRecorder:
    """Latencies of one model version, written by its statistics and read by the metrics page."""

    def __init__(self, options: LatencyOptions, buckets_ms: Sequence[float] = FIRST_RESPONSE_BUCKETS_MS) -> None:
        self.summaries = LatencySummaries() if options.has_summaries else None
        self.first_response_ms = Histogram(buckets_ms) if options.has_histograms else None
        self._answered: set[InferJob] = set()
        """Decoupled requests in flight whose first response is counted."""

    def add_request(self, job: InferJob, now_ns: int, compute_started_ns: int, parts_ns: tuple[int, int, int]) -> None:
        """Add a request that succeeded. `parts_ns`: time of gathering inputs, of inference, of handing out outputs."""
        self._add_only_response(job, now_ns)
        if self.summaries is not None:
            self.summaries.add_served(job.started_ns, compute_started_ns, now_ns)
            self.summaries.add_computed(parts_ns, now_ns)

    def add_first_response(self, job: InferJob) -> None:
        """Note a response of a decoupled model; only a request's first one is measured."""
        if self.first_response_ms is not None and job not in self._answered:
            self._answered.add(job)
            self.first_response_ms.add((perf_counter_ns() - job.started_ns) / _NS_PER_MS)

    def add_hit(self, job: InferJob, now_ns: int, lookup_started_ns: int, lookup_ended_ns: int) -> None:
        self._add_only_response(job, now_ns)
        if self.summaries is not None:
            self.summaries.add_served(job.started_ns, lookup_started_ns, now_ns)
            self.summaries.cache_hit.add((lookup_ended_ns - lookup_started_ns) / _NS_PER_US, now_ns)

    def add_miss(self, ns: int) -> None:
        if self.summaries is not None:
            self.summaries.cache_miss.add(ns / _NS_PER_US, perf_counter_ns())

    def forget(self, job: InferJob) -> None:
        """Drop a request that failed."""
        self._answered.discard(job)

    def _add_only_response(self, job: InferJob, now_ns: int) -> None:
        if job in self._answered:
            self._answered.remove(job)
        elif self.first_response_ms is not None:
            self.first_response_ms.add((now_ns - job.started_ns) / _NS_PER_MS)


@dataclass(slots=True)
class LatencySummaries:
    """Quantiles of one model version. Their counts and sums are in the statistics."""

    request: SlidingSketch = field(default_factory=SlidingSketch)
    queue: SlidingSketch = field(default_factory=SlidingSketch)
    compute_input: SlidingSketch = field(default_factory=SlidingSketch)
    compute_infer: SlidingSketch = field(default_factory=SlidingSketch)
    compute_output: SlidingSketch = field(default_factory=SlidingSketch)
    cache_hit: SlidingSketch = field(default_factory=SlidingSketch)
    cache_miss: SlidingSketch = field(default_factory=SlidingSketch)

    def add_served(self, started_ns: int, queue_ended_ns: int, now_ns: int) -> None:
        self.request.add((now_ns - started_ns) / _NS_PER_US, now_ns)
        self.queue.add((queue_ended_ns - started_ns) / _NS_PER_US, now_ns)

    def add_computed(self, parts_ns: tuple[int, int, int], now_ns: int) -> None:
        sketches = (self.compute_input, self.compute_infer, self.compute_output)
        for sketch, ns in zip(sketches, parts_ns, strict=True):
            sketch.add(ns / _NS_PER_US, now_ns)


def build_latency_recorder(config: ModelConfig, options: LatencyOptions) -> LatencyRecorder | None:
    """Return a recorder of what `options` turn on, None for nothing. Raises INVALID for buckets that do not ascend."""
    buckets_ms = read_first_response_buckets(config)
    return LatencyRecorder(options, buckets_ms) if options.has_summaries or options.has_histograms else None


def read_first_response_buckets(config: ModelConfig) -> tuple[float, ...]:
    """Return upper bounds in milliseconds from a configuration whose structure is valid."""
    buckets = FIRST_RESPONSE_BUCKETS_MS
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family
        given = tuple(control.histogram_options.buckets)
        if not all(low < high for low, high in zip((-inf, *given), (*given, inf), strict=True)):
            message = f"the buckets of '{family}' in model_metrics must be finite and ascend, got {list(given)}"
            raise SluiceError(ErrorCode.INVALID, message, param="model_metrics")
        if family == FIRST_RESPONSE_FAMILY:
            buckets = given
        else:
            _log.warning(
                "model '%s': metric family '%s' of model_metrics is not one whose buckets can be set; %s is",
                config.name,
                family,
                FIRST_RESPONSE_FAMILY,
            )
    return buckets
