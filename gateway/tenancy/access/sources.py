"""Slows the sources of wrong keys down."""

import ipaddress
from collections.abc import Callable
from functools import lru_cache

_MAX_FAILURES = 10
_FORGIVEN_PER_S = 0.5
_MAX_SOURCES = 10_000
_MAX_KNOWN = 256
_IPV6_PREFIX = 64
"""Bits of an IPv6 address that one source has: its holder chooses the others freely."""


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
