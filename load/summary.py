"""Computes the figures of a run from its results, and how far they could be off. Docstrings of fields define them.

Intervals of confidence: requests are drawn anew, with all their samples (a bootstrap over clusters). The gaps of one
stream depend on each other, so that to draw gaps by themselves would give intervals that are too narrow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.load.config import Slo
from sluice.load.stream import RequestResult


@dataclass(frozen=True, slots=True)
class Distribution:
    """Size, mean and percentiles (linear interpolation) of a sample in milliseconds; None for an empty one."""

    num_samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_9: float | None
    max: float | None

    @classmethod
    def of_seconds(cls, samples: Iterable[float]) -> "Distribution":
        values = np.fromiter(samples, dtype=np.float64) * 1e3
        if not values.size:
            return cls(0, None, None, None, None, None, None, None)
        p50, p90, p95, p99, p99_9 = np.percentile(values, (50, 90, 95, 99, 99.9)).tolist()
        return cls(int(values.size), float(values.mean()), p50, p90, p95, p99, p99_9, float(values.max()))


NO_SAMPLES = Distribution.of_seconds(())


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The number of requests that failed in one way, and the detail of the first."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The figures of one turn of all sessions: the first, the second and so on."""

    turn: int
    num_served: int
    num_failed: int
    prompt_tokens: float | None
    """Mean number of the prompt's tokens, those of the turns before included; None where the server sent no count."""
    ttft_ms: Distribution
    e2e_ms: Distribution


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Latencies and token rates count served requests only."""

    num_requests: int
    num_served: int
    num_failed: int
    num_left: int
    """Requests that this client broke off, as planned."""
    failures: dict[str, FailureCount]
    wall_s: float
    """Seconds from the first intended send to the end of the last stream."""
    requests_per_s: float
    prompt_tokens: int
    """The server's count; the requested number where the server sent none."""
    output_tokens: int
    output_tokens_per_s: float
    tokens_per_event: float | None
    """Tokens per token event: above 1 where the server merges tokens into one event. ITL then has fewer samples."""
    num_counted_by_events: int
    """Requests whose server sent no token count, so that each token event counts as one token."""
    ttft_ms: Distribution
    """Time from the intended send to the first token event."""
    itl_ms: Distribution
    """Gaps between successive token events of a request: one sample a gap, however many tokens an event has."""
    tpot_ms: Distribution
    """(E2E - TTFT) / (tokens - 1): one sample for each request of at least two tokens."""
    e2e_ms: Distribution
    """Time from the intended send to the end of the stream."""
    client_wait_ms: Distribution
    """Time from the intended send until this client began to send, no fault of the server. Includes failed requests."""
    goodput_per_s: float | None
    """Served requests per second that met every target; None without targets."""
    retrieval_ms: Distribution = NO_SAMPLES
    """Time from the intended send to what a retrieval found."""
    num_tool_calls: int = 0
    """Tool calls of the served requests."""
    turns: tuple[TurnFigures, ...] = ()
    """Figures by the number of the turn, where a session has several."""


def summarize(results: Sequence[RequestResult], slo: Slo | None) -> Summary:
    """Compute the figures of `results`, which may be in any order."""
    served = [result for result in results if result.is_ok]
    wall_s = max(r.ended_s for r in results) - min(r.intended_s for r in results) if results else 0.0
    per_second = 1.0 / wall_s if wall_s > 0 else 0.0
    output_tokens = sum(r.output_tokens for r in served)
    num_events = sum(len(r.event_times_s) for r in served)
    return Summary(
        num_requests=len(results),
        num_served=len(served),
        num_failed=sum(result.failure is not None for result in results),
        num_left=sum(result.has_left for result in results),
        failures=_count_failures(results),
        wall_s=wall_s,
        requests_per_s=len(served) * per_second,
        prompt_tokens=sum(r.planned.prompt_tokens if r.prompt_tokens is None else r.prompt_tokens for r in served),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens * per_second,
        tokens_per_event=output_tokens / num_events if num_events else None,
        num_counted_by_events=sum(r.output_tokens_counted_by == "events" for r in served),
        ttft_ms=Distribution.of_seconds(r.ttft_s for r in served if r.ttft_s is not None),
        itl_ms=Distribution.of_seconds(gap for r in served for gap in gaps_s(r)),
        tpot_ms=Distribution.of_seconds(r.tpot_s for r in served if r.tpot_s is not None),
        e2e_ms=Distribution.of_seconds(r.e2e_s for r in served),
        client_wait_ms=Distribution.of_seconds(r.client_wait_s for r in results),
        goodput_per_s=None if slo is None else sum(meets_slo(r, slo) for r in served) * per_second,
        retrieval_ms=Distribution.of_seconds(r.retrieval_s for r in served if r.retrieval_s is not None),
        num_tool_calls=sum(r.num_tool_calls for r in served),
        turns=_by_turn(results),
    )


def _by_turn(results: Sequence[RequestResult]) -> tuple[TurnFigures, ...]:
    last = max((r.planned.turn for r in results), default=1)
    if last == 1:
        return ()
    return tuple(_turn_figures(turn, [r for r in results if r.planned.turn == turn]) for turn in range(1, last + 1))


def _turn_figures(turn: int, results: Sequence[RequestResult]) -> TurnFigures:
    served = [result for result in results if result.is_ok]
    counts = [r.prompt_tokens for r in served if r.prompt_tokens is not None]
    return TurnFigures(
        turn,
        len(served),
        sum(result.failure is not None for result in results),
        sum(counts) / len(counts) if counts else None,
        Distribution.of_seconds(r.ttft_s for r in served if r.ttft_s is not None),
        Distribution.of_seconds(r.e2e_s for r in served),
    )


def gaps_s(result: RequestResult) -> list[float]:
    """Return the seconds between successive token events."""
    gaps: list[float] = np.diff(np.asarray(result.event_times_s)).tolist()
    return gaps


def meets_slo(result: RequestResult, slo: Slo) -> bool:
    """Return whether a served request met every target.

    A figure that cannot be measured misses its target, except ITL and TPOT, which a single token does not have.
    """
    gaps = gaps_s(result)
    itl_s = float(np.percentile(gaps, 99)) if gaps else 0.0
    measured = (
        (slo.ttft_ms, result.ttft_s),
        (slo.itl_ms, itl_s),
        (slo.tpot_ms, result.tpot_s or 0.0),
        (slo.e2e_ms, result.e2e_s),
    )
    return all(target is None or (s is not None and s * 1e3 <= target) for target, s in measured)


def _count_failures(results: Sequence[RequestResult]) -> dict[str, FailureCount]:
    failures = [result.failure for result in results if result.failure is not None]
    examples = {failure.label: failure.detail for failure in reversed(failures)}
    counts = Counter(failure.label for failure in failures)
    return {label: FailureCount(count, examples[label]) for label, count in counts.most_common()}


CONFIDENCE = 0.95
MOST_DRAWS, LEAST_DRAWS = 1000, 100
_MOST_WORK = 40_000_000
"""RequestSamples to go through over all draws; more samples get fewer draws."""

Floats = NDArray[np.float64]


class ConfidenceInterval(NamedTuple):
    """The bounds between which a figure lies with a probability of 95 %."""

    low: float
    high: float


class RequestSamples:
    """RequestSamples of a figure, with the request that each belongs to.

    `values` are the samples, `owners` the numbers of their requests, from 0 to below `num_requests`.
    """

    def __init__(self, values: Sequence[float] | Floats, owners: Sequence[int], num_requests: int) -> None:
        unsorted = np.asarray(values, np.float64)
        order = np.argsort(unsorted, kind="stable")
        self.values = unsorted[order]
        self._owners = np.asarray(owners, np.intp)[order]
        self._num_requests = num_requests

    def percentile(self, percent: float) -> float:
        """Return a percentile, without drawing."""
        return float(np.percentile(self.values, percent))

    def draw_percentiles(self, percents: Sequence[float], seed: int) -> Floats:
        """Return the percentiles of each draw: [draws, percents]. The same seed draws the same requests."""
        rng = np.random.default_rng(seed)
        num_draws = int(np.clip(_MOST_WORK // max(len(self.values), 1), LEAST_DRAWS, MOST_DRAWS))
        parts = np.asarray(percents) / 100.0
        drawn = np.empty((num_draws, len(parts)))
        for number in range(num_draws):
            times = np.bincount(rng.integers(0, self._num_requests, self._num_requests), minlength=self._num_requests)
            cumulated = np.cumsum(times[self._owners])
            if not cumulated[-1]:  # only requests without a sample were drawn
                drawn[number] = np.nan
                continue
            places = np.searchsorted(cumulated, parts * cumulated[-1], side="left")
            drawn[number] = self.values[np.minimum(places, len(self.values) - 1)]
        return drawn

    def intervals(self, percents: Sequence[float], seed: int = 0) -> list[ConfidenceInterval]:
        """Return the interval of each percentile."""
        return [bounds(column) for column in self.draw_percentiles(percents, seed).T]


def bounds(drawn: Floats) -> ConfidenceInterval:
    """Return the interval that holds the middle 95 % of what was drawn."""
    tail = (1.0 - CONFIDENCE) / 2 * 100.0
    low, high = np.nanpercentile(drawn, (tail, 100.0 - tail)).tolist()
    return ConfidenceInterval(low, high)


def latency_samples(results: Sequence[RequestResult]) -> dict[str, RequestSamples]:
    """Return the samples of each latency, in milliseconds, of the served requests; only latencies that have any."""
    served = [result for result in results if result.is_ok]
    of_request: dict[str, Callable[[RequestResult], Sequence[float | None]]] = {
        "TTFT": lambda result: (result.ttft_s,),
        "ITL": gaps_s,
        "TPOT": lambda result: (result.tpot_s,),
        "E2E": lambda result: (result.e2e_s,),
    }
    found = {}
    for name, measure in of_request.items():
        pairs = [
            (value * 1e3, number)
            for number, result in enumerate(served)
            for value in measure(result)
            if value is not None
        ]
        if pairs:
            values, owners = zip(*pairs, strict=True)
            found[name] = RequestSamples(values, owners, len(served))
    return found
