"""The client of engines that other processes have started, here or on other machines, as a source of members names them
(`sluice.engine.fleet.membership`)."""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from time import perf_counter

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.client.supervision import Clock
from sluice.engine.config import EngineConfig, Task
from sluice.engine.fleet.client import NO_ENGINE, RETRY_S, FleetClient, check_agreement
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.router import DEFAULT_ROUTING, MIN_SPLIT_TOKENS, RouterSettings
from sluice.engine.fleet.waking import WakeSettings, WakingRoom, presume_info
from sluice.engine.model_folder import served_task
from sluice.engine.statistics import add_counters, without_gauges
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_FIRST_JOIN_S = 2.0
"""How long the start waits for an engine that need not be there."""

MakeClient = Callable[[Member], EngineClient]
"""Makes the client of a member's engine, which has not started. Raises SluiceError for keys that cannot be read."""


class MemberFleetClient(FleetClient):
    """Serves with the engines that are members now. It connects to each new one, which joins when it has answered. One
    that is named no more gets no new requests, and leaves when its streams have ended or were moved."""

    can_restart = True

    def __init__(
        self,
        config: EngineConfig,
        membership: Membership,
        make_client: MakeClient,
        routing: RouterSettings = DEFAULT_ROUTING,
        *,
        drain_s: float = 30.0,
        wake: WakeSettings | None = None,
        min_split_tokens: int = MIN_SPLIT_TOKENS,
        clock: Clock = perf_counter,
    ) -> None:
        """The streams of an engine that leaves have `drain_s` to end there. With `wake` requests are held while the
        membership names no engine, also at the start. The rest is as in `FleetClient`."""
        room = None if wake is None else WakingRoom(wake, clock)
        super().__init__(config, (), routing, room=room, min_split_tokens=min_split_tokens, clock=clock)
        self._membership = membership
        self._make_client = make_client
        self._drain_s = drain_s
        self._has_begun = False
        """Whether a replica has ever joined."""
        self._named: tuple[Member, ...] = ()
        """The members that are named now."""
        self._connecting: dict[Member, asyncio.Task[None]] = {}
        self._joined: dict[Member, Replica] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._has_joined = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def members(self) -> tuple[Member, ...] | None:
        """The engines that are named now, none while no replica stays; None until the first has joined. From then on
        whoever has streams of the fleet goes on with them."""
        if not self._has_begun:
            return None
        return self._named if self._staying() else ()

    @property
    def failure(self) -> str | None:
        """Why there is no engine any more; None while one may still join."""
        return self._failure

    async def start(self) -> None:
        """Return when the first member has joined. Where requests can wait for it, this waits for a moment only, and
        the checkpoint says what is known. Raises SluiceError where the source of members cannot be read."""
        may_sleep = self._room is not None and served_task(self.config) is Task.GENERATE
        if may_sleep:
            self._merged = [], await asyncio.to_thread(presume_info, self.config)
        self._watching = asyncio.create_task(self._watch(), name="members", context=contextvars.Context())
        joined = asyncio.create_task(self._has_joined.wait())
        limit_s = _FIRST_JOIN_S if may_sleep else None
        try:
            await asyncio.wait((self._watching, joined), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if self._watching.done():
                self._watching.result()
        finally:
            joined.cancel()

    async def stop(self) -> None:
        self._give_up()
        tasks = [*self._connecting.values(), *self._leaving]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await super().stop()

    async def _watch(self) -> None:
        async for members in self._membership.watch(self._is_serving):
            self._apply(members)

    def _is_serving(self, member: Member) -> bool:
        replica = self._joined.get(member)
        return replica is not None and replica.engine.is_serving

    def _apply(self, members: tuple[Member, ...]) -> None:
        self._named = members
        for member in [each for each in self._connecting if each not in members]:
            connecting = self._connecting.pop(member)
            connecting.cancel()
            self._await_at_stop(connecting)
        for member in [each for each in self._joined if each not in members]:
            replica = self._joined.pop(member)
            replica.is_draining = True
            log.info("replica %s is named no more: it gets no new requests", replica.name)
            leaving = asyncio.create_task(self._drain(replica), name=f"drain {replica.name}")
            self._await_at_stop(leaving)
        for member in members:
            if member not in self._connecting and member not in self._joined:
                self._connecting[member] = asyncio.create_task(self._connect(member), name=f"join {member.name}")

    def _await_at_stop(self, task: asyncio.Task[None]) -> None:
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _connect(self, member: Member) -> None:
        client: EngineClient | None = None
        try:
            client = self._make_client(member)
            await client.start()
            replica = Replica(member.name, client, version=member.version, weight=member.weight)
            await self.join(replica)
            client = None  # the fleet's from now on
        except SluiceError as error:
            log.error("replica %s at %s cannot join: %s", member.name, member.address, error.message)
            return  # a corrected entry is another member
        except Exception:
            log.exception("replica %s at %s cannot join", member.name, member.address)
            return
        finally:
            if client is not None:
                await client.stop()
        del self._connecting[member]
        self._joined[member] = replica
        log.info("replica %s at %s has joined", member.name, member.address)
        self._has_joined.set()

    async def _drain(self, replica: Replica) -> None:
        for _ in range(ceil(self._drain_s / _LOOK_S)):
            if not replica.engine.open_streams:
                break
            await asyncio.sleep(_LOOK_S)
        else:
            log.warning("replica %s still has %d streams", replica.name, len(replica.engine.open_streams))
        await self.remove(replica)
        log.info("replica %s has left", replica.name)

    async def join(self, replica: Replica) -> None:
        """Take a replica that serves, and load the adapters there that were loaded in the others from here. Raises
        INVALID where it does not agree with the others."""
        alive = self._alive()
        if alive:
            check_agreement(alive[0], replica)
        await self._share_adapters(replica)
        self._has_begun = True
        self._append(replica)
        assert self.info is not None  # known from now on, also while there is no replica
        self._follow(replica)
        self._mover.on_back(replica)

    async def _share_adapters(self, newcomer: Replica) -> None:
        """Load in a replica that is about to join what was loaded in the others from here. One that it does not take is
        left to the others."""
        async with self._changing:
            folders = {name: path for each in self._alive() for name, path in each.engine.adapters.items()}
            for name, path in sorted(folders.items()):
                if newcomer.has_adapter(name):
                    continue
                try:
                    await newcomer.engine.load_adapter(name, path)
                except SluiceError as error:
                    log.warning(
                        "replica %s joins without the LoRA adapter %s, whose requests go to others: %s",
                        *(newcomer.name, name, error.message),
                    )

    async def remove(self, replica: Replica) -> None:
        """Let a replica leave: its streams go on in others, or are held until there is one, and its client is
        stopped. Where it was the last and none is waited for, they end in an error."""
        replica.is_draining = True
        self._mover.on_leaving(replica)
        engine = replica.engine
        engine.keeper = engine.on_prefixes = None
        self.replicas.remove(replica)
        self._past_stats = add_counters(self._past_stats, without_gauges(engine.stats))
        self._past_recoveries += replace(engine.recoveries, last_s=0.0)
        self._chooser.forget(replica)
        if not self.replicas:
            self._holder.give_up(NO_ENGINE, RETRY_S)
        await engine.stop()


def make_fleet(
    config: EngineConfig,
    membership: Membership,
    *,
    routing: RouterSettings = DEFAULT_ROUTING,
    heartbeat_timeout_s: float = 10.0,
    drain_s: float = 30.0,
    wake: WakeSettings | None = None,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
) -> MemberFleetClient:
    """Make the client of the engines that `membership` names, now and later. `config` is this server's own: limits of
    the queue while no engine can be reached, and the tokenizer. The rest is as in `MemberFleetClient`."""

    def make_client(member: Member) -> AttachedEngineClient:
        return AttachedEngineClient(
            config, member.address, curve=member.curve(), heartbeat_timeout_s=heartbeat_timeout_s
        )

    return MemberFleetClient(
        config,
        membership,
        make_client,
        routing,
        drain_s=drain_s,
        wake=wake,
        min_split_tokens=min_split_tokens,
    )
