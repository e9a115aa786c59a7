"""Reads the counts of all processes of the server, and keeps the latencies of the last minute."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from prometheus_client.core import Metric

from sluice.gateway.watch.live.sample import LatencyPart, Percentiles
from sluice.gateway.watch.live.scrape import bucket_quantile

WINDOW_S = 60.0
_SHARES = (0.5, 0.9, 0.99)
_GOOD = ("ok", "cancelled")
"""Outcomes of requests that are no errors."""

Buckets = dict[float, float]
"""Cumulative counts of a histogram by upper bound in seconds."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all models and processes since the start."""

    ttft: Buckets = field(default_factory=lambda: defaultdict(float))
    itl: Buckets = field(default_factory=lambda: defaultdict(float))
    num_requests: float = 0.0
    num_errors: float = 0.0
    num_open: float = 0.0


def read_totals(families: Iterable[Metric]) -> Totals:
    """Sum what the families of the gateway say."""
    ttft: Buckets = defaultdict(float)
    itl: Buckets = defaultdict(float)
    ended, failed, still_open = 0.0, 0.0, 0.0
    for family in families:
        match family.name:
            case "sluice_time_to_first_token_seconds":
                _add_buckets(ttft, family)
            case "sluice_inter_token_latency_seconds":
                _add_buckets(itl, family)
            case "sluice_requests":
                counted = [each for each in family.samples if each.name.endswith("_total")]
                ended += sum(each.value for each in counted)
                failed += sum(each.value for each in counted if each.labels["outcome"] not in _GOOD)
            case "sluice_open_requests":
                still_open += sum(each.value for each in family.samples)
    return Totals(ttft, itl, ended, failed, still_open)


def _add_buckets(buckets: Buckets, family: Metric) -> None:
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            buckets[inf if bound == "+Inf" else float(bound)] += sample.value


class LatencyWindow:
    """Percentiles of what has come within the last minute, or since the first call."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, Totals]] = deque()
        self._waits: deque[tuple[float, float]] = deque()

    def update(self, now: float, totals: Totals, waits_s: Iterable[float]) -> LatencyPart:
        """Take the counts until now, and the waits in seconds that ended since the last call."""
        self._waits.extend((now, wait_s) for wait_s in waits_s)
        self._totals.append((now, totals))
        while len(self._totals) > 2 and self._totals[1][0] <= now - WINDOW_S:
            self._totals.popleft()
        while self._waits and self._waits[0][0] < now - WINDOW_S:
            self._waits.popleft()
        began, first = self._totals[0]
        return LatencyPart(
            window_s=round(now - began, 3),
            ttft_ms=_bucket_percentiles(first.ttft, totals.ttft),
            itl_ms=_bucket_percentiles(first.itl, totals.itl),
            queue_ms=_percentiles(sorted(wait_s for _, wait_s in self._waits)),
        )


def _bucket_percentiles(before: Buckets, after: Buckets) -> Percentiles:
    grown = sorted((bound, max(0.0, count - before.get(bound, 0.0))) for bound, count in after.items())
    p50, p90, p99 = (_in_ms(bucket_quantile(share, grown)) for share in _SHARES)
    return Percentiles(p50, p90, p99, int(grown[-1][1]) if grown else 0)


def _percentiles(values_s: Sequence[float]) -> Percentiles:
    count = len(values_s)
    p50, p90, p99 = (_in_ms(values_s[min(count - 1, int(share * count))] if count else None) for share in _SHARES)
    return Percentiles(p50, p90, p99, count)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
