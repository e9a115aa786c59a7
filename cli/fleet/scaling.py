"""Decides how many engines a fleet has, by the gateways' own signal. Pure: the controller reads clock and metric."""

import math
from dataclasses import dataclass, replace

METRIC = "sluice_scale_pressure"
"""A gateway's gauge: 1.0 is load at its target, above it engines are missing."""


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """Bounds of a fleet, and its hysteresis: how far from the target the pressure must be, and for how long.

    A fleet grows in one step to what the pressure asks for, at most to twice its size; it shrinks by one engine at a
    time, because an engine takes longer to load than to end. The last engine ends only where there is no pressure at
    all, and the first one is started at once.
    """

    min_replicas: int
    max_replicas: int
    grow_above: float = 1.1
    shrink_below: float = 0.6
    grow_after_s: float = 15.0
    shrink_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Since when, in seconds of a steady clock, the pressure has been too high or low enough; None while it is not."""

    high_since_s: float | None = None
    low_since_s: float | None = None


NO_STATE = ScaleState()


def decide(
    policy: ScalePolicy, state: ScaleState, replicas: int, pressure: float | None, now_s: float
) -> tuple[int, ScaleState]:
    """Return how many engines there shall be, and the state to decide with next time. `pressure` None is unknown, which
    changes nothing but the bounds. One engine fewer must not bring the pressure above the target, or the fleet would
    swing."""
    bounded = min(max(replicas, policy.min_replicas), policy.max_replicas)
    if bounded != replicas:
        return bounded, NO_STATE
    if pressure is None or not math.isfinite(pressure):
        return replicas, NO_STATE
    if replicas == 0:  # requests wait for the first engine
        return (1 if pressure > policy.grow_above else 0), NO_STATE
    is_high = pressure > policy.grow_above and replicas < policy.max_replicas
    after_shrink = pressure * replicas / (replicas - 1) if replicas > 1 else math.inf if pressure else 0.0
    is_low = pressure < policy.shrink_below and after_shrink < 1.0 and replicas > policy.min_replicas
    state = replace(
        state,
        high_since_s=_since(is_high, state.high_since_s, now_s),
        low_since_s=_since(is_low, state.low_since_s, now_s),
    )
    if state.high_since_s is not None and now_s - state.high_since_s >= policy.grow_after_s:
        wanted = min(math.ceil(replicas * pressure), 2 * replicas, policy.max_replicas)
        return max(wanted, replicas + 1), NO_STATE
    if state.low_since_s is not None and now_s - state.low_since_s >= policy.shrink_after_s:
        return replicas - 1, NO_STATE
    return replicas, state


def _since(is_so: bool, before: float | None, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if before is None else before


def read_pressure(metrics: str) -> float | None:
    """Return the highest pressure on a page of Prometheus metrics; None where it has none."""
    values = []
    for line in metrics.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name == METRIC:
            try:
                values.append(float(rest.rpartition("}")[2].split()[0]))
            except (IndexError, ValueError):
                continue
    return max(values, default=None)
