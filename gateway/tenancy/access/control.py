"""Access: who sends a request, and whether it may reach a group of routes at all."""

import ipaddress
from collections.abc import Callable
from functools import lru_cache
from time import monotonic, time
from typing import NamedTuple, Protocol

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.tenancy.access.identity import ANY_TENANT, Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import MAX_NAME_CHARS
from sluice.gateway.tenancy.access.rights import check_group, check_source, is_within
from sluice.gateway.tenancy.access.ring import KeyRing

TENANT_HEADER = "x-sluice-tenant"
_MAX_HOPS = 32
_MAX_ADDRESS_CHARS = 64
_DOTS_IN_TOKEN = 2
_MAX_FAILURES = 10
_FORGIVEN_PER_S = 0.5
_MAX_SOURCES = 10_000
_MAX_KNOWN = 256
_IPV6_PREFIX = 64
"""Bits of an IPv6 address that one source has: its holder chooses the others freely."""


class Credentials(NamedTuple):
    """The credentials of a request. `place` names where the protocol has its keys, for messages."""

    authorization: bytes | None
    peer: str
    forwarded_for: str = ""
    tenant: str = ""
    subject: str = ""
    """The name in the client's verified certificate."""
    place: tuple[str, str] = ("Authorization", "header")


class Sender(NamedTuple):
    """The sender of a request; without an identity where the server asks nobody for a key."""

    identity: Identity | None
    tenant: str
    source: str


class TokenVerifier(Protocol):
    """Finds the identity behind a token of another issuer."""

    def find(self, token: bytes) -> Identity | None:
        """Return the identity of a token that was verified a moment ago."""

    async def verify(self, token: bytes) -> Identity:
        """Raises UNAUTHENTICATED for a token that is not valid, UNAVAILABLE where that cannot be known now."""

    async def close(self) -> None: ...


class _Source:
    __slots__ = ("at", "known", "num_failures")

    def __init__(self, now: float) -> None:
        self.num_failures = 0.0
        self.at = now
        self.known: set[str] = set()
        """Ids of keys that came from here while it was not slowed down: they go on when it is."""


class SourceGuard:
    """Counts wrong keys by source. Ten at once are free, then one every two seconds.

    Memory is bounded: the sources that came first are forgotten. A key that is right and came from the source before
    is never slowed down, because others may share its address, such as a proxy's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sources: dict[str, _Source] = {}

    def note(self, address: str, key_id: str | None) -> float:
        """Note a right key, or a wrong one (None). Returns the seconds to wait where the request is refused, else 0."""
        source = self._sources.get(address) or self._find(address)
        if key_id in source.known:
            return 0.0
        wait_s = self.wait_s(address)
        if wait_s:
            return wait_s
        if key_id is None:
            source.num_failures += 1
        elif len(source.known) < _MAX_KNOWN:
            source.known.add(key_id)
        return 0.0

    def wait_s(self, address: str) -> float:
        """Return the seconds until the source may send another unknown key; 0 where it may now."""
        source, now = self._find(address), self._clock()
        source.num_failures = max(0.0, source.num_failures - (now - source.at) * _FORGIVEN_PER_S)
        source.at = now
        return max(0.0, (source.num_failures - _MAX_FAILURES + 1) / _FORGIVEN_PER_S)

    def _find(self, address: str) -> _Source:
        name = _network_of(address) if ":" in address else address
        source = self._sources.get(name)
        if source is None:
            if len(self._sources) >= _MAX_SOURCES:
                del self._sources[next(iter(self._sources))]
            source = self._sources[name] = _Source(self._clock())
        return source


@lru_cache(_MAX_SOURCES)
def _network_of(address: str) -> str:
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], _IPV6_PREFIX), strict=False))
    except ValueError:
        return address


class AccessControl:
    """Decides who may send requests. Belongs to the event loop."""

    def __init__(
        self,
        ring: KeyRing,
        trusted_proxies: tuple[str, ...] = (),
        verifier: TokenVerifier | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.ring = ring
        self._proxies = trusted_proxies
        self._verifier = verifier
        self._sources = SourceGuard(clock)

    @property
    def is_enforced(self) -> bool:
        """Whether requests need an identity."""
        ring = self.ring
        return ring.has_keys or ring.is_required or self._verifier is not None or not ring.is_known

    @property
    def takes_tokens(self) -> bool:
        """Whether tokens of another issuer stand for keys."""
        return self._verifier is not None

    @property
    def is_active(self) -> bool:
        """Whether there is anything to find out about a request."""
        return self.is_enforced or bool(self._proxies)

    async def identify(self, sent: Credentials, group: RouteGroup | None) -> Sender:
        """Return who sends a request to a group of routes; None is open to every key.

        Raises UNAUTHENTICATED, FORBIDDEN where the sender lacks the right, OVERLOADED for a source that has sent too
        many wrong keys, INVALID for a tenant that is no name.
        """
        is_proxied = is_within(sent.peer, self._proxies) if self._proxies else False
        source = self._find_source(sent) if is_proxied else sent.peer
        if not self.is_enforced:
            return Sender(None, check_tenant(sent.tenant) if is_proxied or not self._proxies else "", source)
        key = self._read_key(sent)
        identity = self.ring.find_subject(sent.subject) if key is None else await self._open(key, source)
        assert identity is not None, "without a key there is a known subject"
        if has_expired(identity):
            raise SluiceError(ErrorCode.UNAUTHENTICATED, f"key {identity.name!r} has expired")
        check_source(identity, source)
        check_group(identity, group)
        names_tenant = (is_proxied and bool(sent.tenant)) or identity.tenant == ANY_TENANT
        return Sender(identity, check_tenant(sent.tenant) if names_tenant else identity.tenant or identity.name, source)

    def resume(self, identity: Identity | None, group: RouteGroup | None) -> Identity | None:
        """Return the sender of work that goes on after its request, with the rights that he has now; None for nobody.

        Raises UNAUTHENTICATED where the key is revoked or has expired meanwhile, FORBIDDEN as `identify`.
        """
        if identity is None or not self.is_enforced:
            return None
        current = identity if identity.is_foreign else self.ring.find_by_id(identity.key_id)
        if current is None or (not identity.is_foreign and has_expired(current)):
            message = f"key {identity.name!r}, with which this was begun, is revoked or has expired"
            raise SluiceError(ErrorCode.UNAUTHENTICATED, message)
        check_group(current, group)
        return current

    def _read_key(self, sent: Credentials) -> bytes | None:
        """Return the key in a request; None where a certificate stands for one. Raises UNAUTHENTICATED without both."""
        name, kind = sent.place
        if sent.authorization is None:
            if sent.subject and self.ring.find_subject(sent.subject) is not None:
                return None
            message = f"this server asks for an API key: send the {kind} '{name}: Bearer KEY'"
            raise SluiceError(ErrorCode.UNAUTHENTICATED, message)
        scheme, _, key = sent.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise SluiceError(ErrorCode.UNAUTHENTICATED, f"the {name} {kind} must read 'Bearer KEY'")
        return key.strip()

    def _note(self, source: str, identity: Identity | None) -> None:
        """Note a right key or a wrong one. Raises OVERLOADED for a source that is slowed down."""
        wait_s = self._sources.note(source, None if identity is None else identity.key_id)
        if wait_s > 0:
            message = f"too many wrong keys came from {source or 'here'}"
            raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=wait_s)

    async def _open(self, key: bytes, source: str) -> Identity:
        if not self.ring.is_known:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server's keys cannot be read now", retry_after_s=1.0)
        identity, refusal = self.ring.find(key), None
        if identity is None and self._verifier is not None and key.count(b".") == _DOTS_IN_TOKEN:
            identity = self._verifier.find(key)
            if identity is None and self._sources.wait_s(source) == 0:
                try:
                    identity = await self._verifier.verify(key)
                except SluiceError as error:
                    if error.code is not ErrorCode.UNAUTHENTICATED:
                        raise
                    refusal = error
        self._note(source, identity)
        if identity is None:
            raise refusal or SluiceError(ErrorCode.UNAUTHENTICATED, "the API key is wrong")
        return identity

    def _find_source(self, sent: Credentials) -> str:
        """Return the last address that no trusted proxy has: each proxy adds whom it was asked by."""
        source = sent.peer
        for hop in reversed(sent.forwarded_for.split(",")[-_MAX_HOPS:]):
            if not hop.strip() or not is_within(source, self._proxies):
                break
            source = hop.strip()[:_MAX_ADDRESS_CHARS]
        return source

    async def close(self) -> None:
        await self.ring.close()
        if self._verifier is not None:
            await self._verifier.close()


def check_tenant(tenant: str) -> str:
    """Return a tenant that a request names. Raises INVALID for what is no name."""
    if len(tenant) > MAX_NAME_CHARS or not tenant.isprintable():
        raise invalid(TENANT_HEADER, f"{TENANT_HEADER} must have at most {MAX_NAME_CHARS} printable characters")
    return tenant


def has_expired(identity: Identity) -> bool:
    return identity.expires_at is not None and time() >= identity.expires_at
