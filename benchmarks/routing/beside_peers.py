"""The simulated fleet of `fleets` under the routers of NVIDIA Dynamo and smg, beside ours, at the same rates."""

from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.routing.fleets import NUM_REPLICAS, PROFILE, TTFT_P99_S, WARM_UP, figures_of, ours
from benchmarks.routing.peers import PEERS, running_peer
from sluice.engine.fleet.router import RoutingPolicy
from sluice.engine.simulation.fleet import FleetConfig, FleetRun, simulate
from sluice.engine.simulation.summary import summarize
from sluice.engine.simulation.traces import SharedPrefixes, TracedRequest, scaled, shared_prefix_trace

OURS = "Sluice"
NUM_REQUESTS = 1500
SHAPES = {"64 prefixes": SharedPrefixes(NUM_REQUESTS, 1.0), "skewed": SharedPrefixes(NUM_REQUESTS, 1.0, skew=1.0)}
RATES = (70.0, 55.0)
"""Requests a second: about what the fleet can serve at most, and three quarters of it."""


def measure(folder: Path, report: ReportProgress) -> list[Figure]:
    """Serve the same traces under each router. A peer begins anew for each."""
    figures: list[Figure] = []
    for rate in RATES:
        for name, shape in SHAPES.items():
            requests = scaled(shared_prefix_trace(shape), rate)
            for router in (OURS, *PEERS):
                run = _serve(router, requests, folder, report)
                p99_s = float(np.quantile(run.ttft_s[WARM_UP:], 0.99))
                subject = f"{router}, {name}, {rate:g} requests/s"
                summary = summarize(run)
                hits = 100 * summary.hit_rate / summary.infinite_hit_rate
                report(f"{subject}: TTFT p99 {1e3 * p99_s:.0f} ms, hits {hits:.1f} %")
                target = Target(1e3 * TTFT_P99_S) if router == OURS else None
                figures.append(Figure("TTFT p99", subject, "ms", (1e3 * p99_s,), target))
                figures += figures_of(summary, subject)
    return figures


def _serve(router: str, requests: list[TracedRequest], folder: Path, report: ReportProgress) -> FleetRun:
    if router == OURS:
        return ours(RoutingPolicy.PREFIX)(requests)
    config = FleetConfig(PROFILE, NUM_REPLICAS)
    with running_peer(router, NUM_REPLICAS, PROFILE.block_size, PROFILE.num_blocks, folder, report) as peer:
        return simulate(requests, config, router=peer)
