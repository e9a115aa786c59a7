"""A store in this process's memory."""

import time
from collections.abc import Callable
from math import inf

from sluice.state.interface import ABSENT, Key, Put, Record


class StoreInMemory:
    """Records that end with the process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[Key, tuple[Record, float]] = {}
        """Each record, and the time at which it expires."""

    async def get(self, key: Key) -> Record | None:
        record, expires_s = self._records.get(key, (None, inf))
        return record if self._clock() < expires_s else None

    async def scan(self, shelf: str) -> dict[str, Record]:
        now = self._clock()
        self._records = {key: found for key, found in self._records.items() if now < found[1]}
        return {key.name: record for key, (record, _) in self._records.items() if key.shelf == shelf}

    async def put(self, *puts: Put) -> bool:
        versions = [ABSENT if (found := await self.get(each.key)) is None else found.version for each in puts]
        if any(each.version not in (None, version) for each, version in zip(puts, versions, strict=True)):
            return False
        for each, version in zip(puts, versions, strict=True):
            if each.body is None:
                self._records.pop(each.key, None)
            else:
                expires_s = inf if each.ttl_s is None else self._clock() + each.ttl_s
                self._records[each.key] = Record(each.body, version + 1), expires_s
        return True

    async def delete(self, key: Key) -> bool:
        was_there = await self.get(key) is not None
        self._records.pop(key, None)
        return was_there

    def problem(self) -> str:
        return ""

    async def close(self) -> None: ...
