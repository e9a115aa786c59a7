"""The parts of the benchmark that need no server."""

from benchmarks.routing.fleets import PROFILE
from sluice.engine.fleet.router import RouterSettings, RoutingPolicy
from sluice.engine.simulation.fleet import FleetConfig, simulate
from sluice.engine.simulation.summary import summarize
from sluice.engine.simulation.traces import SharedPrefixes, shared_prefix_trace


def test_prefixes_stay_where_they_are_cached() -> None:
    """A cache has room for half of the prefixes: only a router that knows them finds most."""
    trace = shared_prefix_trace(SharedPrefixes(num_requests=300, rate=20.0, num_prefixes=32))
    found = {}
    for policy in (RoutingPolicy.PREFIX, RoutingPolicy.ROUND_ROBIN):
        summary = summarize(simulate(trace, FleetConfig(PROFILE, 8, RouterSettings(policy=policy))))
        found[policy] = summary.hit_rate / summary.infinite_hit_rate
        assert summary.num_requests == sum(summary.requests_of_replicas)
    assert found[RoutingPolicy.PREFIX] > 0.9
    assert found[RoutingPolicy.ROUND_ROBIN] < 0.5
