"""Decides how many engines a fleet has, and what its controller does next. Pure: no clock, no start of an engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from sluice.cli.fleet.host import EngineStatus, HostedEngineState
from sluice.engine.fleet.membership.file import EngineEntry

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
    """The times, in seconds of a steady clock, since which the pressure is above or below its bound; None if it is
    not."""

    high_since_s: float | None = None
    low_since_s: float | None = None


NO_STATE = ScaleState()


def decide(
    policy: ScalePolicy, state: ScaleState, replicas: int, pressure: float | None, now_s: float
) -> tuple[int, ScaleState]:
    """Return the wanted number of engines, and the state for the next decision. `pressure` None is unknown, which
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


class FleetState(msgspec.Struct, frozen=True):
    """The state that outlives the controller: the wanted number of engines, the names of the engines, the names of
    those that leave, and the number of the next name."""

    replicas: int
    names: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    next_number: int = 0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The next state, and what leads there: engines to place, to drain and to remove."""

    state: FleetState
    started: tuple[str, ...]
    drained: tuple[str, ...]
    removed: tuple[str, ...]


def plan_fleet(state: FleetState, statuses: Mapping[str, EngineStatus | None], prefix: str) -> FleetPlan:
    """Plan the next changes. `statuses` has the known engines' statuses; None for an engine that does not answer.
    Engines that are not ready leave first, then the youngest. An engine leaves the list of members before it drains,
    which the controller does in this order; it is removed once it has ended."""
    staying = [name for name in state.names if name not in state.leaving]
    surplus = max(len(staying) - state.replicas, 0)
    by_worth = sorted(range(len(staying)), key=lambda index: (_is_ready(statuses.get(staying[index])), -index))
    leaving = {staying[index] for index in by_worth[:surplus]}
    missing = max(state.replicas - len(staying), 0)
    numbers = range(state.next_number, state.next_number + missing)
    started = tuple(f"{prefix}-{number}" for number in numbers)
    removed = tuple(name for name in state.leaving if _has_ended(statuses.get(name)))
    after = FleetState(
        replicas=state.replicas,
        names=tuple(name for name in (*state.names, *started) if name not in removed),
        leaving=tuple(name for name in (*state.leaving, *sorted(leaving)) if name not in removed),
        next_number=state.next_number + missing,
    )
    drained = tuple(name for name in after.leaving)
    return FleetPlan(after, started, drained, removed)


def choose_members(
    known: Mapping[str, EngineEntry], state: FleetState, statuses: Mapping[str, EngineStatus | None]
) -> dict[str, EngineEntry]:
    """Return the members by name. `known` are the last ones: an engine that cannot be asked stays what it was, because
    gateways see by themselves whether it lives."""
    members: dict[str, EngineEntry] = {}
    for name in state.names:
        status = statuses.get(name)
        if name in state.leaving:
            continue
        if status is None:
            if name in known:
                members[name] = known[name]
        elif status.state is HostedEngineState.READY:
            members[name] = EngineEntry(name, status.address)
    return members


def _is_ready(status: EngineStatus | None) -> bool:
    return status is not None and status.state is HostedEngineState.READY


def _has_ended(status: EngineStatus | None) -> bool:
    return status is not None and status.state is HostedEngineState.ENDED
