"""Members that register themselves in a Redis: each engine leases its place and renews the lease, and gateways look.

A lease only tells gateways where an engine is. One that has ended takes nothing from an engine that a gateway is
connected to and that serves: an engine may be cut off from Redis, and Redis may have lost what it had. An engine that
ends by itself says so, and gets no new requests from then on.

In Redis `sluice:fleet:{NAME}` is the set of the engines' names, and `sluice:fleet:{NAME}:ENGINE` the lease of one, a
JSON object. The braces keep both on one node of a cluster.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.membership.members import Member, check_members, never
from sluice.errors import SluiceError, invalid

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long an engine that no longer renews its lease has it."""
RENEWALS = 3
"""Renewals within a lease, so that one that is lost or late does not end it."""
LOOK_S = 1.0
"""How often gateways look."""
_TIMEOUT_S = 2.0
_NAMES_S = 3600.0
"""How long the set of names stays where nobody renews anything."""
_FAILURES = (RedisError, OSError, TimeoutError)
_RENEW = """
local found = redis.call('GET', KEYS[1])
if found then
    local lease = cjson.decode(found)
    if lease.address ~= ARGV[2] and not lease.is_leaving then return lease.address end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return ''
"""
"""Renews a lease, unless an engine at another address has the name: then its address comes back."""


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine says of itself."""

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
        self._url = url
        self._lease = lease
        self._client = _connect(url)
        self._problem = ""
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to renew."""
        self._renewing = asyncio.create_task(self._renew_forever(), name="lease")

    async def end(self) -> None:
        """Tell gateways that the engine leaves. Harmless where it has left, and where Redis is away."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait((self._renewing,))
        self._renewing = None
        leaving = msgspec.structs.replace(self._lease, is_leaving=True)
        with suppress(*_FAILURES):
            await self._renew(leaving)
        with suppress(*_FAILURES):
            await self._client.aclose()

    async def _renew_forever(self) -> None:
        while True:
            try:
                holder = await self._renew(self._lease)
            except _FAILURES as error:
                self._note(f"Redis does not take the lease ({_reason(error)}); gateways that know this engine keep it")
            else:
                taken = f"the name {self._lease.name} is that of the engine at {holder}; give another --register-name"
                self._note(taken if holder else "")
            _heed_cancellation()
            await asyncio.sleep(LEASE_S / RENEWALS)

    async def _renew(self, lease: Lease) -> str:
        """Return "", or the address of another engine that has the name."""
        names = _names_key(self._url.name)
        arguments = (msgspec.json.encode(lease), lease.address, _ms(LEASE_S), lease.name, _ms(_NAMES_S))
        answer = self._client.eval(_RENEW, 2, _lease_key(self._url.name, lease.name), names, *arguments)
        return (await cast("Awaitable[bytes]", answer)).decode()

    def _note(self, problem: str) -> None:
        """Log a problem when it begins, and its end."""
        if problem == self._problem:
            return
        if problem:
            log.error("registering at %s: %s", self._url.place, problem)
        else:
            log.warning("registered at %s again", self._url.place)
        self._problem = problem


class RedisMembership:
    """The engines that have a lease in a fleet of a Redis."""

    def __init__(self, url: FleetUrl, *, server_key: str | None = None, client_key: str | None = None) -> None:
        """Raises INVALID for a URL that is none of Redis."""
        self._url = url
        self._client = _connect(url)
        self._server_key, self._client_key = server_key, client_key
        self._is_away = False
        self._unreadable: dict[str, bytes] = {}
        """What was logged as unreadable, by the engine's name."""

    async def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] = ()
        try:
            while True:
                found = await self._read(len(last))
                if found is not None and (members := self._choose(found, last, is_serving)) != last:
                    last = members
                    yield last
                if found is not None:
                    await self._forget([name for name, lease in found.items() if lease is None], last)
                _heed_cancellation()
                await asyncio.sleep(LOOK_S)
        finally:
            with suppress(*_FAILURES):
                await self._client.aclose()

    async def _read(self, num_members: int) -> dict[str, bytes | None] | None:
        """Return the leases by name, None for a name whose lease has ended; None while Redis is away."""
        fleet = self._url.name
        try:
            names = sorted(
                each.decode() for each in await cast("Awaitable[set[bytes]]", self._client.smembers(_names_key(fleet)))
            )
            keys = [_lease_key(fleet, name) for name in names]
            leases = cast("list[bytes | None]", await self._client.mget(keys) if keys else [])
        except (*_FAILURES, UnicodeDecodeError) as error:
            if not self._is_away:
                log.warning("%s names no engines now: %s; the %d stay", self._url.place, _reason(error), num_members)
            self._is_away = True
            return None
        if self._is_away:
            log.warning("%s names engines again", self._url.place)
        self._is_away = False
        return dict(zip(names, leases, strict=True))

    def _choose(
        self, found: Mapping[str, bytes | None], last: tuple[Member, ...], is_serving: Callable[[Member], bool]
    ) -> tuple[Member, ...]:
        """Return the engines with a lease, and those without one that were there and serve."""
        leases = {name: self._decode(name, text) for name, text in found.items() if text is not None}
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

    async def _forget(self, names: list[str], members: tuple[Member, ...]) -> None:
        """Take names without a lease out of the set. An engine that is only late comes back by its next renewal."""
        kept = {each.name for each in members}
        gone = [name for name in names if name not in kept]
        if gone:
            with suppress(*_FAILURES):
                await self._client.srem(_names_key(self._url.name), *gone)


def _connect(url: FleetUrl) -> Redis:
    try:
        return Redis.from_url(
            url.redis, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise invalid("engines", f"the Redis of the fleet at {url.place} cannot be used: {error}") from None


def _heed_cancellation() -> None:
    """End this task if it is to end: Redis' client may take a cancellation that comes with an answer for the answer."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _names_key(fleet: str) -> str:
    return f"sluice:fleet:{{{fleet}}}"


def _lease_key(fleet: str, name: str) -> str:
    return f"{_names_key(fleet)}:{name}"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
