"""Leases in a store: one holder has each name for as long as it renews its lease."""

from collections.abc import Callable

from sluice.state.interface import ABSENT, Key, Put, Store


class Leases:
    """The leases of one shelf. Every method raises UNAVAILABLE where the store cannot be used now."""

    def __init__(self, store: Store, shelf: str, ttl_s: float) -> None:
        """`ttl_s` is how long a holder that no longer renews its lease has it."""
        self._store = store
        self._shelf = shelf
        self._ttl_s = ttl_s

    async def take(self, name: str, body: bytes, may_replace: Callable[[bytes], bool]) -> bytes | None:
        """Take or renew the lease of a name. Return None, or the body of the lease in force that stays.

        `may_replace` tells by the body of a lease in force whether this holder may replace it: it is its own, say.
        """
        key = Key(self._shelf, name)
        while True:
            found = await self._store.get(key)
            if found is not None and not may_replace(found.body):
                return found.body
            version = ABSENT if found is None else found.version
            if await self._store.put(Put(key, body, version, self._ttl_s)):
                return None

    async def find(self) -> dict[str, bytes]:
        """Return the bodies of all leases in force, by name."""
        return {name: record.body for name, record in (await self._store.scan(self._shelf)).items()}

    async def close(self) -> None:
        await self._store.close()
