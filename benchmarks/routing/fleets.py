"""A simulated fleet of eight under each router: the tokens a second that it serves at an equal 99th percentile of TTFT.

Prompts begin with one of 64 prefixes of 4,096 tokens. A replica's cache has room for 32 of them, the fleet's for 256.
"""

import math
from collections.abc import Callable

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from sluice.engine.fleet.router import RouterSettings, RoutingPolicy
from sluice.engine.simulation.fleet import FleetConfig, FleetRun, simulate
from sluice.engine.simulation.profile import ReplicaProfile, StepCosts
from sluice.engine.simulation.summary import FleetSummary, summarize
from sluice.engine.simulation.traces import SharedPrefixes, TracedRequest, scaled, shared_prefix_trace

PROFILE = ReplicaProfile(
    costs=StepCosts(step_s=0.008, prefill_token_s=6e-5, decode_seq_s=4e-4, context_token_s=1e-7),
    num_blocks=4096,
    max_num_seqs=64,
)
"""A replica such as a model of 8 billion parameters has on one GPU."""
NUM_REPLICAS, TTFT_P99_S = 8, 1.0
WARM_UP = 500
"""First requests that do not count for TTFT: all caches are empty, and each router computes each prefix."""
SHAPES = {"64 prefixes": SharedPrefixes(num_requests=3000, rate=1.0), "skewed": SharedPrefixes(3000, 1.0, skew=1.0)}
"""The popularity of prefixes is equal, or falls with their rank."""
LEAST_RATE, MOST_RATE = 16.0, 128.0
NUM_TRIES = 6
"""Halvings of the ratio between the rates: what is found is within a thirtieth."""
TARGET_GAIN, TARGET_HITS = Target(1.9, is_ceiling=False), Target(95.0, is_ceiling=False)


Serve = Callable[[list[TracedRequest]], FleetRun]


def measure(report: ReportProgress) -> list[Figure]:
    """Find the highest rate of each router by halving. The simulation is exact, so that there are no repeats."""
    figures: list[Figure] = []
    for name, shape in SHAPES.items():
        trace = shared_prefix_trace(shape)
        served = {}
        for policy in RoutingPolicy:
            summary = served[policy] = fastest(trace, ours(policy))
            report(f"{name}, {policy}: {summary.requests_per_s:.1f} requests/s")
            hits = TARGET_HITS if policy is RoutingPolicy.PREFIX else None
            figures += figures_of(summary, f"{policy}, {name}", hits)
        gain = served[RoutingPolicy.PREFIX].output_tokens_per_s / served[RoutingPolicy.ROUND_ROBIN].output_tokens_per_s
        figures.append(Figure("output, prefix / round-robin", name, "x", (gain,), TARGET_GAIN))
    return figures


def figures_of(summary: FleetSummary, subject: str, hits: Target | None = None) -> list[Figure]:
    """Return what counts of a run at the highest rate."""
    return [
        Figure("output", subject, "tokens/s", (summary.output_tokens_per_s,)),
        Figure("TTFT p50", subject, "ms", ((summary.ttft_s.p50 or 0.0) * 1e3,)),
        Figure("cache hits, of an infinite cache's", subject, "%", (_hits(summary),), hits),
    ]


def _hits(summary: FleetSummary) -> float:
    return 100 * summary.hit_rate / summary.infinite_hit_rate


def ours(policy: RoutingPolicy) -> Serve:
    """Return a fleet that serves with one of our routers."""
    config = FleetConfig(PROFILE, NUM_REPLICAS, RouterSettings(policy=policy))
    return lambda requests: simulate(requests, config)


def fastest(trace: list[TracedRequest], serve: Serve) -> FleetSummary:
    """Return the figures at the highest rate whose TTFT p99 keeps the limit. `trace` comes at one request a second."""
    low, high, best = LEAST_RATE, MOST_RATE, None
    for _ in range(NUM_TRIES):
        rate = math.sqrt(low * high)
        run = serve(scaled(trace, rate))
        if np.quantile(run.ttft_s[WARM_UP:], 0.99) <= TTFT_P99_S:
            low, best = rate, run
        else:
            high = rate
    if best is None:
        raise BenchmarkError(f"TTFT p99 is over {TTFT_P99_S:g} s at {LEAST_RATE:g} requests a second already")
    return summarize(best)
