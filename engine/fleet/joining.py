"""Keeps the replicas of a fleet as a source of members names them."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any

from sluice.engine.client.base import EngineClient
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.replica import Replica
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

_LOOK_S = 0.1

MakeClient = Callable[[Member], EngineClient]
"""Makes the client of a member's engine, which has not started. Raises SluiceError for keys that cannot be read."""


class MemberJoiner:
    """Connects to each new member, and lets it join when it has answered. One that is named no more gets no new
    requests, and leaves when its streams have ended or were moved."""

    def __init__(
        self,
        membership: Membership,
        make_client: MakeClient,
        join: Callable[[Replica], Coroutine[Any, Any, None]],
        leave: Callable[[Replica], Coroutine[Any, Any, None]],
        drain_s: float,
    ) -> None:
        """`join` raises SluiceError for a replica that does not fit the others. `leave` moves what streams are left,
        and ends the replica's client, `drain_s` after the member is named no more."""
        self._membership = membership
        self._make_client = make_client
        self._join = join
        self._leave = leave
        self._drain_s = drain_s
        self.members: tuple[Member, ...] = ()
        """The members that are named now."""
        self._connecting: dict[Member, asyncio.Task[None]] = {}
        self._joined: dict[Member, Replica] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._has_joined = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def start(self, patience_s: float | None = None) -> None:
        """Return when the first member has joined, or after `patience_s`. Raises SluiceError where the source cannot be
        read."""
        self._watching = asyncio.create_task(self._watch(), name="members", context=contextvars.Context())
        joined = asyncio.create_task(self._has_joined.wait())
        try:
            await asyncio.wait((self._watching, joined), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if self._watching.done():
                self._watching.result()
        finally:
            joined.cancel()

    async def stop(self) -> None:
        """Stop watching and connecting. The replicas stay."""
        tasks = [*self._connecting.values(), *self._leaving]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self) -> None:
        async for members in self._membership.watch(self._is_serving):
            self._apply(members)

    def _is_serving(self, member: Member) -> bool:
        replica = self._joined.get(member)
        return replica is not None and replica.engine.is_serving

    def _apply(self, members: tuple[Member, ...]) -> None:
        self.members = members
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
            await self._join(replica)
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
        await self._leave(replica)
        log.info("replica %s has left", replica.name)
