"""Members that register themselves in a Redis: each engine leases its place and renews the lease, and gateways look.

A lease only tells gateways where an engine is. One that has ended takes nothing from an engine that a gateway is
connected to and that serves: an engine may be cut off from Redis, and Redis may have lost what it had. An engine that
ends by itself says so, and gets no new requests from then on.

In Redis `sluice:members:{NAME}` is the set of the engines' names, and `sluice:members:{NAME}:ENGINE` the lease of one,
whose body is a JSON object. The braces keep both on one node of a cluster.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import msgspec

from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.membership.members import Member, check_members, never
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.state.changes import Leases
from sluice.state.interface import RedisLayout
from sluice.state.outage import Outage, heed_cancellation, keep_trying
from sluice.state.redis_store import StoreInRedis

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long an engine that no longer renews its lease has it."""
RENEWALS = 3
"""Renewals within a lease, so that one that is lost or late does not end it."""
LOOK_S = 1.0
"""How often gateways look."""
_TIMEOUT_S = 2.0


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of an engine, which is the body of its lease."""

    name: str
    address: str
    """Where gateways reach it: tcp://HOST:PORT."""
    version: str = ""
    weight: float = 1.0
    is_leaving: bool = False
    """It takes no new requests and is about to end."""

    def member(self, server_key: str | None, client_key: str | None) -> Member:
        """Return it as a gateway with these keys sees it."""
        return Member(
            name=self.name,
            address=self.address,
            version=self.version,
            weight=self.weight,
            server_key=server_key,
            client_key=client_key,
        )


class Registration:
    """One engine's lease, renewed until the engine leaves. Belongs to one event loop.

    While Redis is away the engine serves on, and is registered again as soon as Redis answers.
    """

    def __init__(self, url: FleetUrl, lease: Lease) -> None:
        """Raises INVALID for a lease that no gateway could use, and for a URL that is none of Redis."""
        lease.member(None, None).check()
        self._lease = lease
        self._leases = _open_leases(url)
        away = f"{url.place} does not take the lease of this engine; gateways that know it keep it"
        self._outage = Outage(away, f"registered at {url.place} again")
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to renew."""
        pause_s = LEASE_S / RENEWALS
        renewing = keep_trying(self._outage, self._hold, (SluiceError,), retry_s=pause_s, beat_s=pause_s)
        self._renewing = asyncio.create_task(renewing, name="lease")

    async def end(self) -> None:
        """Tell gateways that the engine leaves. Harmless where it has left, and where Redis is away."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait((self._renewing,))
        self._renewing = None
        with suppress(SluiceError):
            await self._renew(msgspec.structs.replace(self._lease, is_leaving=True))
        await self._leases.close()

    async def _hold(self) -> None:
        """Renew the lease. Raises UNAVAILABLE where Redis is away, ALREADY_EXISTS where another engine has the name."""
        if holder := await self._renew(self._lease):
            message = f"the name {self._lease.name} is that of the engine at {holder}; give another --register-name"
            raise SluiceError(ErrorCode.ALREADY_EXISTS, message)

    async def _renew(self, lease: Lease) -> str:
        """Return "", or the address of another engine that has the name."""

        def may_replace(body: bytes) -> bool:
            found = _read_lease(body)
            return found is None or found.is_leaving or found.address == lease.address

        held = await self._leases.take(lease.name, msgspec.json.encode(lease), may_replace)
        holder = held and _read_lease(held)
        return holder.address if holder else ""


class RedisMembership:
    """The engines that have a lease in a fleet of a Redis."""

    def __init__(self, url: FleetUrl, *, server_key: str | None = None, client_key: str | None = None) -> None:
        """Raises INVALID for a URL that is none of Redis."""
        self._url = url
        self._leases = _open_leases(url)
        self._server_key, self._client_key = server_key, client_key
        self._outage = Outage(f"{url.place} names no engines now, those known stay", f"{url.place} names engines again")
        self._unreadable: dict[str, bytes] = {}
        """Bodies that were logged as unreadable, by the engine's name."""

    async def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] = ()
        try:
            while True:
                try:
                    found = await self._leases.find()
                except SluiceError as error:
                    self._outage.failed(error)
                else:
                    self._outage.end()
                    if (members := self._choose(found, last, is_serving)) != last:
                        last = members
                        yield last
                heed_cancellation()
                await asyncio.sleep(LOOK_S)
        finally:
            await self._leases.close()

    def _choose(
        self, found: Mapping[str, bytes], last: tuple[Member, ...], is_serving: Callable[[Member], bool]
    ) -> tuple[Member, ...]:
        """Return the engines with a lease, and those without one that were there and serve."""
        leases = {name: self._decode(name, text) for name, text in found.items()}
        members = {
            name: lease.member(self._server_key, self._client_key)
            for name, lease in leases.items()
            if lease is not None and not lease.is_leaving
        }
        addresses = {each.address for each in members.values()}
        for member in last:
            if member.name not in leases and member.address not in addresses and is_serving(member):
                members[member.name] = member
        chosen = tuple(members[name] for name in sorted(members))
        try:
            check_members(chosen)
        except SluiceError as error:
            log.error("engines of %s: %s; the %d that were there stay", self._url.place, error.message, len(last))
            return last
        return chosen

    def _decode(self, name: str, text: bytes) -> Lease | None:
        try:
            lease = msgspec.json.decode(text, type=Lease)
            lease.member(self._server_key, self._client_key).check()
        except (ValueError, RecursionError, SluiceError) as error:
            if self._unreadable.get(name) != text:
                log.error("the lease of %r in %s cannot be used: %s", name, self._url.place, error)
            self._unreadable[name] = text
            return None
        self._unreadable.pop(name, None)
        return lease


def _read_lease(body: bytes) -> Lease | None:
    try:
        return msgspec.json.decode(body, type=Lease)
    except (ValueError, RecursionError):
        return None


def _open_leases(url: FleetUrl) -> Leases:
    layout = RedisLayout("sluice:members:", "Redis", is_listed=True, timeout_s=_TIMEOUT_S, is_logged=False)
    try:
        store = StoreInRedis(url.redis, layout)
    except ValueError as error:
        raise invalid("engines", f"the Redis of the fleet at {url.place} cannot be used: {error}") from None
    return Leases(store, f"{{{url.name}}}", LEASE_S)
