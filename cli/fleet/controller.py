"""The actors of a fleet on Ray: one for each engine, and a detached one that owns the set. Only this module and those
that call it import Ray."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from sluice.addresses import is_loopback
from sluice.cli.fleet.host import EngineHost, EngineStatus, HostedEngineState
from sluice.cli.fleet.plan import NO_STATE, FleetState, ScalePolicy, choose_members, decide, plan_fleet, read_pressure
from sluice.engine.fleet.membership.file import EngineEntry, EnginesFile, read_members, write_members

log = logging.getLogger(__name__)

NAMESPACE = "sluice"
LOOK_S = 1.0
"""Seconds between two looks at the engines and at the pressure."""
ASK_TIMEOUT_S = 5.0
"""Seconds that an actor may take to answer. One that starts on another node takes longer, and is asked again."""
SCRAPE_TIMEOUT_S = 5.0
ENDLESS = -1
"""Restarts of an actor."""


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a fleet. `command` is that of one engine; `members_file` lies on the controller's node."""

    name: str
    command: tuple[str, ...]
    replicas: int
    gpus_per_replica: float = 0.0
    cpus_per_replica: float = 1.0
    members_file: str
    client_key: str | None = None
    server_key: str | None = None
    scale_from: str = ""
    min_replicas: int = 1
    max_replicas: int = 1


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as its controller sees it."""

    replicas: int
    members_file: str
    engines: dict[str, EngineStatus | None]
    leaving: tuple[str, ...] = ()
    pressure: float | None = None
    problem: str = ""


@ray.remote
class EngineActor:
    """Runs one engine on the node that Ray has chosen. Its methods run on the process's main thread, one at a time, so
    that the engine ends with this process and not with a thread of it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._host = EngineHost(command, ray.util.get_node_ip_address())

    def status(self) -> EngineStatus:
        return self._host.status()

    def drain(self) -> None:
        self._host.drain()

    def kill(self) -> None:
        self._host.kill()


@ray.remote
class FleetController:
    """Owns the engines of a fleet. It may be restarted: what there shall be is in a file beside that of the members."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._members_file = Path(spec.members_file)
        self._state_file = state_file(spec)
        self._state = self._read_state()
        known = read_members(self._members_file) if self._members_file.is_file() else ()
        self._members = {each.name: EngineEntry(each.name, each.address) for each in known}
        self._actors: dict[str, Any] = {}
        self._statuses: dict[str, EngineStatus | None] = {}
        self._scaling = NO_STATE
        self._pressure: float | None = None
        self._problem = ""
        self._is_ending = False
        self._looking = asyncio.get_running_loop().create_task(self._look_forever())

    async def report(self) -> FleetReport:
        """Return the fleet's state."""
        return FleetReport(
            replicas=self._state.replicas,
            members_file=str(self._members_file),
            engines={name: self._statuses.get(name) for name in self._state.names},
            leaving=self._state.leaving,
            pressure=self._pressure,
            problem=self._problem,
        )

    async def scale(self, replicas: int) -> None:
        """Set the number of engines."""
        self._scaling = NO_STATE
        self._change(msgspec.structs.replace(self._state, replicas=replicas))

    async def end(self) -> None:
        """Drain all engines. They are gone once the report has none."""
        self._is_ending = True
        await self.scale(0)

    async def kill(self) -> None:
        """End all engines at once."""
        self._is_ending = True
        self._looking.cancel()
        self._write_members({})
        for name in self._state.names:
            self._remove(name)
        self._state = FleetState(replicas=0)
        self._state_file.unlink(missing_ok=True)

    # -- the loop

    async def _look_forever(self) -> None:
        while True:
            try:
                await self._look()
                self._problem = ""
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
                log.exception("the fleet could not be looked after; it is tried again")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        if self._spec.scale_from and not self._is_ending:
            await self._follow_pressure()
        names = self._state.names
        found = await asyncio.gather(*(self._ask(name) for name in names))
        self._statuses = dict(zip(names, found, strict=True))
        plan = plan_fleet(self._state, self._statuses, self._spec.name)
        # Kept before anything is started, so that a controller that is restarted knows all actors.
        self._change(plan.state)
        self._write_members(choose_members(self._members, plan.state, self._statuses))
        for name in plan.started:
            self._place(name)
        for name in plan.drained:
            self._actor(name).drain.remote()
        for name in plan.removed:
            self._remove(name)

    async def _follow_pressure(self) -> None:
        url = self._spec.scale_from
        try:
            async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=not is_loopback(url)) as client:
                response = await client.get(url)
            self._pressure = read_pressure(response.text) if response.is_success else None
        except httpx.HTTPError:
            self._pressure = None
        policy = ScalePolicy(self._spec.min_replicas, self._spec.max_replicas)
        now_s = asyncio.get_running_loop().time()
        replicas, self._scaling = decide(policy, self._scaling, self._state.replicas, self._pressure, now_s)
        if replicas != self._state.replicas:
            log.warning("pressure %s: %d engines in place of %d", self._pressure, replicas, self._state.replicas)
            self._change(msgspec.structs.replace(self._state, replicas=replicas))

    async def _ask(self, name: str) -> EngineStatus | None:
        try:
            status: EngineStatus = await asyncio.wait_for(self._actor(name).status.remote(), ASK_TIMEOUT_S)
            return status
        except ActorDiedError:
            self._actors.pop(name, None)  # for good: Ray restarts it otherwise
            return EngineStatus(HostedEngineState.ENDED) if name in self._state.leaving else None
        except (RayError, GetTimeoutError, TimeoutError):
            return None

    # -- actors

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._place(name)
        return self._actors[name]

    def _place(self, name: str) -> None:
        """Place an engine's actor, or find the one that there is."""
        cpus, gpus = self._spec.cpus_per_replica, self._spec.gpus_per_replica
        group = self._group(name, {"CPU": cpus, **({"GPU": gpus} if gpus else {})})
        self._actors[name] = EngineActor.options(  # type: ignore[attr-defined]
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=ENDLESS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        ).remote(self._spec.command)

    def _group(self, name: str, bundle: dict[str, float]) -> PlacementGroup:
        """Return the engine's placement group: one bundle, on one node. Groups cannot grow, so each engine has one."""
        try:
            return get_placement_group(name)
        except ValueError:
            return placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")

    def _remove(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            ray.kill(actor)
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:
            log.info("the placement group of %s is gone already", name)

    # -- files

    def _change(self, state: FleetState) -> None:
        if state != self._state or not self._state_file.is_file():
            fresh = self._state_file.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(state))
            fresh.replace(self._state_file)
            self._state = state

    def _read_state(self) -> FleetState:
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=FleetState)
        except FileNotFoundError:
            return FleetState(replicas=self._spec.replicas)

    def _write_members(self, members: dict[str, EngineEntry]) -> None:
        self._members = members
        listed = tuple(sorted(members.values(), key=lambda each: each.name))
        content = EnginesFile(listed, client_key=self._spec.client_key, server_key=self._spec.server_key)
        if write_members(self._members_file, content):
            log.warning("%s: %s", self._members_file, ", ".join(members) or "no engine")


def state_file(spec: FleetSpec) -> Path:
    """Return the file of the fleet's state, which a restarted controller reads."""
    members_file = Path(spec.members_file)
    return members_file.with_name(f".{members_file.name}.fleet")


def start_controller(spec: FleetSpec) -> Any:
    """Start the controller on this node, where its files lie. Raises ValueError where the fleet is there already."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return FleetController.options(  # type: ignore[attr-defined]
        name=controller_name(spec.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=ENDLESS,
        scheduling_strategy=here,
    ).remote(spec)


def find_controller(name: str) -> Any:
    """Return the controller of a fleet. Raises ValueError where there is none."""
    return ray.get_actor(controller_name(name), namespace=NAMESPACE)


def controller_name(name: str) -> str:
    return f"{name}-controller"
