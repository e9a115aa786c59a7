"""Costs of a replica under load, from a measured run: a calibration sends its requests in groups, while clients that
come at random keep a gateway busy, which shares the engine's cores where there is no GPU."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sluice.engine.simulation.fleet import FleetConfig, simulate
from sluice.engine.simulation.profile import ReplicaProfile, StepCosts
from sluice.engine.simulation.traces import TracedRequest
from sluice.errors import invalid

LEAST, MOST = 0.1, 10.0
MOST_SLOWDOWN = 4.0
NUM_HALVINGS = 12
"""A search ends when the ratio of its bounds is about a thousandth from 1."""


def measured_tpot_s(path: Path) -> float:
    """Return the mean TPOT of a run that `sluice load --json` has written: unlike ITL it is the same where a gateway
    that is late merges tokens into one event. Raises INVALID, also for a run whose prompts shared a beginning: its
    requests are read as prompts of which no cache knows any."""
    try:
        report = json.loads(path.read_text())
        tpot_ms = float(report["summary"]["tpot_ms"]["mean"])
    except OSError as error:
        raise invalid("measured", f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError):
        message = f"{path} is no report of `sluice load --json` whose answers have two tokens: it has no mean TPOT"
        raise invalid("measured", message) from None
    if (report.get("config") or {}).get("workload", {}).get("prefix_tokens"):
        raise invalid("measured", f"{path} is of a run with --prefix-tokens: measure one whose prompts share nothing")
    return tpot_ms / 1e3


def scale_costs(
    requests: Sequence[TracedRequest], fleet: FleetConfig, tpot_s: float, concurrency: int | None = None
) -> tuple[float, ReplicaProfile]:
    """Return the factor, and the profile with all costs times it, by which `fleet` serves `requests` at a mean TPOT of
    `tpot_s`; with a `concurrency`, so many clients send them. Raises INVALID where none from LEAST to MOST does."""

    def is_too_fast(factor: float) -> bool:
        return _tpot_s(requests, fleet, scaled_profile(fleet.profile, factor), concurrency) < tpot_s

    low, high = _enclose(is_too_fast, LEAST, MOST, lambda low, high: (low * high) ** 0.5)
    if low == LEAST or high == MOST:
        message = (
            f"the measured mean TPOT, {1e3 * tpot_s:.2f} ms, is out of reach: costs times {low:.2g} do not give it"
        )
        raise invalid("measured", message)
    return low, scaled_profile(fleet.profile, low)


def fit_slowdown(requests: list[TracedRequest], fleet: FleetConfig, tpot_s: float) -> ReplicaProfile:
    """Return the profile with the slowdown at which replicas that share cores serve `requests` at a mean TPOT of
    `tpot_s`; 0 where they are that slow without. The costs are those of a replica alone. Raises INVALID where no
    slowdown up to MOST_SLOWDOWN does."""

    def is_too_fast(slowdown: float) -> bool:
        return _tpot_s(requests, fleet, _slowed(fleet, slowdown)) < tpot_s

    low, high = _enclose(is_too_fast, 0.0, MOST_SLOWDOWN, lambda low, high: (low + high) / 2)
    if high == MOST_SLOWDOWN:
        message = (
            f"the measured mean TPOT, {1e3 * tpot_s:.2f} ms, is out of reach: replicas that slow each other down by "
            f"{MOST_SLOWDOWN:g} times a step do not have it"
        )
        raise invalid("measured_together", message)
    return _slowed(fleet, low)


def _enclose(
    is_below: Callable[[float], bool], low: float, high: float, between: Callable[[float, float], float]
) -> tuple[float, float]:
    """Return close bounds of where `is_below` becomes false; one that is still as given was never passed."""
    for _ in range(NUM_HALVINGS):
        middle = between(low, high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def _slowed(fleet: FleetConfig, slowdown: float) -> ReplicaProfile:
    return msgspec.structs.replace(fleet.profile, slowdown=slowdown)


def _tpot_s(
    requests: Sequence[TracedRequest], fleet: FleetConfig, profile: ReplicaProfile, concurrency: int | None = None
) -> float:
    run = simulate(requests, fleet._replace(profile=profile), concurrency=concurrency)
    tpot_s = run.tpot_s
    return float(tpot_s.mean()) if tpot_s.size else 0.0


def scaled_profile(profile: ReplicaProfile, factor: float) -> ReplicaProfile:
    """Return a profile with all costs times a factor."""
    costs = {name: factor * getattr(profile.costs, name) for name in profile.costs.__struct_fields__}
    return msgspec.structs.replace(profile, costs=StepCosts(**costs), request_s=factor * profile.request_s)
