"""The figures of a simulated run, and the search for the least number of replicas that meets targets."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from sluice.engine.simulation.fleet import FleetConfig, FleetRun, Floats, simulate
from sluice.engine.simulation.traces import TracedRequest
from sluice.errors import invalid

PERCENTS = (50, 90, 95, 99)


class LatencyTargets(NamedTuple):
    """The latencies that a request must keep to count towards goodput; None for no target."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """For the 99th percentile of the request's own gaps."""

    @property
    def is_given(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None


class SimulatedPercentiles(msgspec.Struct, frozen=True):
    """Seconds; None where there are no samples."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    max: float | None


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run. Rates are per second from the first request to the last token."""

    num_replicas: int
    router: str
    policy: str
    num_requests: int
    num_rejected: int
    """Requests that no replica can ever hold. All other figures leave them out."""
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    wait_s: SimulatedPercentiles
    ttft_s: SimulatedPercentiles
    itl_s: SimulatedPercentiles
    e2e_s: SimulatedPercentiles
    cached_tokens: int
    hit_rate: float
    """Part of the prompts' tokens that were found in caches."""
    infinite_hit_rate: float
    """The same for one cache that forgets nothing."""
    utilization: float
    """Part of the time in which the replicas ran steps, on average."""
    requests_of_replicas: tuple[int, ...]
    goodput_per_s: float | None
    """Requests a second that met every target; None without targets."""
    share_in_target: float | None
    """Their part of all."""


NO_TARGETS = LatencyTargets()


def summarize(run: FleetRun, targets: LatencyTargets = NO_TARGETS) -> FleetSummary:
    """Compute the figures of a run."""
    served = run.replica >= 0
    requests = [request for request, is_served in zip(run.requests, served, strict=True) if is_served]
    prompt, output = sum(r.num_prompt for r in requests), sum(r.num_output for r in requests)
    seconds = max(run.end_s, 1e-9)
    gaps = run.gaps
    itl_s = SimulatedPercentiles(None, None, None, None, None, None)
    if gaps.num_gaps:
        p50, p90, p95, p99 = (gaps.quantile(percent / 100) for percent in PERCENTS)
        itl_s = SimulatedPercentiles(p50, p90, p95, p99, gaps.mean_s, gaps.longest_s)
    num_met = count_in_target(run, targets)
    return FleetSummary(
        num_replicas=run.config.num_replicas,
        router=run.router,
        policy=run.config.policy,
        num_requests=len(run.requests),
        num_rejected=len(run.requests) - len(requests),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=output / seconds,
        requests_per_s=len(requests) / seconds,
        wait_s=_percentiles(run.wait_s[served]),
        ttft_s=_percentiles(run.ttft_s[served]),
        itl_s=itl_s,
        e2e_s=_percentiles(run.e2e_s[served]),
        cached_tokens=int(run.num_cached.sum()),
        hit_rate=int(run.num_cached.sum()) / max(prompt, 1),
        infinite_hit_rate=run.num_shareable / max(prompt, 1),
        utilization=sum(each.busy_s for each in run.totals) / (len(run.totals) * seconds),
        requests_of_replicas=tuple(each.num_requests for each in run.totals),
        goodput_per_s=num_met / seconds if targets.is_given else None,
        share_in_target=num_met / max(len(run.requests), 1) if targets.is_given else None,
    )


def count_in_target(run: FleetRun, targets: LatencyTargets) -> int:
    """Return how many requests met every target."""
    met = run.replica >= 0
    if targets.ttft_s is not None:
        met = met & (run.ttft_s <= targets.ttft_s)
    if targets.itl_s is not None:
        met = met & (run.itl_p99_s <= targets.itl_s)
    return int(met.sum())


def _percentiles(values: Floats) -> SimulatedPercentiles:
    if not values.size:
        return SimulatedPercentiles(None, None, None, None, None, None)
    p50, p90, p95, p99 = np.percentile(values, PERCENTS).tolist()
    return SimulatedPercentiles(p50, p90, p95, p99, float(values.mean()), float(values.max()))


def find_replicas(
    requests: Sequence[TracedRequest],
    config: FleetConfig,
    targets: LatencyTargets,
    share: float,
    most: int,
    report: Callable[[FleetSummary], None] | None = None,
) -> FleetRun:
    """Return the run with the least number of replicas in which a `share` (0 to 1) of all requests meets the targets.
    `report` is told of each run. Raises SluiceError INVALID where `most` replicas do not meet them either."""
    runs: dict[int, tuple[FleetRun, bool]] = {}

    def meets(num_replicas: int) -> bool:
        if num_replicas not in runs:
            run = simulate(requests, config._replace(num_replicas=num_replicas))
            summary = summarize(run, targets)
            assert summary.share_in_target is not None, "there are targets"
            runs[num_replicas] = run, summary.share_in_target >= share
            if report is not None:
                report(summary)
        return runs[num_replicas][1]

    high = 1
    while not meets(high):
        if high == most:
            part = count_in_target(runs[high][0], targets) / len(requests)
            raise invalid(
                "find_replicas",
                f"with {most} replicas {part:.1%} of the requests meet the targets; expected {share:.1%}: allow more "
                "replicas, or more time",
            )
        high = min(2 * high, most)
    low = high // 2  # too few
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return runs[high][0]
