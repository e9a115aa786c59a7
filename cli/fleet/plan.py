"""Decides what the controller of a fleet does next. Pure: it starts nothing and reads no clock."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from sluice.cli.fleet.host import EngineStatus, HostedEngineState
from sluice.engine.fleet.membership.file import EngineEntry


class FleetState(msgspec.Struct, frozen=True):
    """Holds what outlives the controller: how many engines there shall be, the names of those there are, of those that
    leave, and the number of the next name."""

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
    """Return what to do. `statuses` are those of the known engines; None where one cannot be asked now. Engines that
    are not ready leave first, then the youngest. An engine leaves the list of members before it drains, which the
    controller does in this order; it is removed once it has ended."""
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
