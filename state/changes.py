"""Changes that are made of what was read, and leases: one holder has each name for as long as it renews its lease."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sluice.state.interface import ABSENT, Key, Put, Store

T = TypeVar("T")


async def change(store: Store, guard: Key, decide: Callable[[bytes | None], Awaitable[tuple[T, Sequence[Put]]]]) -> T:
    """Make the changes that `decide` returns for the body of a record, None where it is not there. Return its result.

    The changes replace that record, unless there are none. Where others have replaced it meanwhile, `decide` is called
    again: what it reads beside the record is in force where all who change it replace the record too.
    """
    while True:
        found = await store.get(guard)
        result, puts = await decide(None if found is None else found.body)
        version = ABSENT if found is None else found.version
        guarded = [each._replace(version=version) if each.key == guard else each for each in puts]
        if not puts or await store.put(*guarded):
            return result


class Leases:
    """The leases of one shelf. Every method raises UNAVAILABLE where the store cannot be used now."""

    def __init__(self, store: Store, shelf: str, ttl_s: float) -> None:
        """`ttl_s` is how long a holder that no longer renews its lease has it."""
        self._store = store
        self._shelf = shelf
        self._ttl_s = ttl_s
        self.close = store.close

    async def take(self, name: str, body: bytes, may_replace: Callable[[bytes], bool]) -> bytes | None:
        """Take or renew the lease of a name. Return None, or the body of the lease in force that stays.

        `may_replace` tells by the body of a lease in force whether this holder may replace it: it is its own, say.
        """
        key = Key(self._shelf, name)

        async def decide(found: bytes | None) -> tuple[bytes | None, Sequence[Put]]:
            stays = found is not None and not may_replace(found)
            return (found, ()) if stays else (None, (Put(key, body, ttl_s=self._ttl_s),))

        return await change(self._store, key, decide)

    async def find(self) -> dict[str, bytes]:
        """Return the bodies of all leases in force, by name."""
        return {name: record.body for name, record in (await self._store.scan(self._shelf)).items()}
