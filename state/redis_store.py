"""A store in Redis, which servers of several machines share.

The record NAME of a shelf is the hash PREFIX:SHELF:NAME, with the fields `version` and `body`. Where shelves are
listed, PREFIX:SHELF is the set of their names.
"""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from sluice.state.interface import ABSENT, Key, Put, Record, RedisLayout
from sluice.state.outage import StoreUse
from sluice.state.redis import FAILURES, connect, translated_errors

_TRIAL_S = 0.001
_PUT = """
local num = #ARGV / 4
for i = 1, num do
    local version = ARGV[4 * i - 2]
    if version ~= '' and (redis.call('HGET', KEYS[i], 'version') or '0') ~= version then return 0 end
end
for i = 1, num do
    local name, ttl_ms, body = ARGV[4 * i - 3], ARGV[4 * i - 1], ARGV[4 * i]
    if ttl_ms == 'gone' then
        redis.call('DEL', KEYS[i])
        if KEYS[num + i] then redis.call('SREM', KEYS[num + i], name) end
    else
        redis.call('HINCRBY', KEYS[i], 'version', 1)
        redis.call('HSET', KEYS[i], 'body', body)
        if ttl_ms == '' then redis.call('PERSIST', KEYS[i]) else redis.call('PEXPIRE', KEYS[i], ttl_ms) end
        if KEYS[num + i] then redis.call('SADD', KEYS[num + i], name) end
    end
end
return 1
"""
"""Puts records, each with four arguments: its name, the version that it must have or "", its time to live in ms, "" or
"gone", and its body. The keys are those of the records, and then of their shelves where these are listed."""
_SCAN = """
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local record = redis.call('HMGET', KEYS[1] .. ':' .. name, 'body', 'version')
    if record[1] then
        found[#found + 1] = {name, record[1], record[2]}
    else
        redis.call('SREM', KEYS[1], name)
    end
end
return found
"""
"""Returns the records of a shelf, each with its name, and takes those that have expired out of its list."""


class StoreInRedis:
    """Records in Redis. What bounds them all is Redis' own `maxmemory`."""

    def __init__(self, url: str, layout: RedisLayout) -> None:
        """Connects at the first use. Raises ValueError for a URL that is none of Redis."""
        self._layout = layout
        self._upgrade = layout.upgrade
        self._client = connect(url, layout.timeout_s)
        self._use = StoreUse(self._attempt, is_logged=layout.is_logged)
        self.problem = self._use.problem
        self._put = self._client.register_script(_PUT)
        self._scan = self._client.register_script(_SCAN)

    async def get(self, key: Key) -> Record | None:
        async with self._using("read"):
            body, version = await self._client.hmget(self._record(key), ["body", "version"])
        return None if body is None or version is None else Record(cast(bytes, body), int(version))

    async def scan(self, shelf: str) -> dict[str, Record]:
        assert self._layout.is_listed, "shelves are listed only where the store was opened to"
        async with self._using("read"):
            found = await self._scan(keys=[self._shelf(shelf)])
        return {name.decode(errors="replace"): Record(body, int(version)) for name, body, version in found}

    async def put(self, *puts: Put) -> bool:
        keys, arguments = [self._record(each.key) for each in puts], list[Any]()
        if self._layout.is_listed:
            keys += [self._shelf(each.key.shelf) for each in puts]
        for each in puts:
            version = "" if each.version is None else each.version
            ttl_ms = "" if each.ttl_s is None else max(1, int(each.ttl_s * 1000))
            arguments += (each.key.name, version, "gone" if each.body is None else ttl_ms, each.body or b"")
        async with self._using("write"):
            return bool(await self._put(keys=keys, args=arguments))

    async def delete(self, key: Key) -> bool:
        async with self._using("write"):
            return await self._delete(key) > 0

    async def close(self) -> None:
        self._use.close()
        with suppress(*FAILURES):
            await self._client.aclose()

    @asynccontextmanager
    async def _using(self, way: str) -> AsyncIterator[None]:
        """Note whether the store can be used in a way, and turn failures into UNAVAILABLE."""
        with self._use.note(way), translated_errors(self._layout.name):
            if self._upgrade:
                await cast("Awaitable[object]", self._client.eval(self._upgrade, 0))
                self._upgrade = ""
            yield

    async def _delete(self, key: Key) -> int:
        pipeline = self._client.pipeline()
        pipeline.delete(self._record(key))
        if self._layout.is_listed:
            pipeline.srem(self._shelf(key.shelf), key.name)
        return int((await pipeline.execute())[0])

    async def _attempt(self) -> None:
        """Read and write what expires at once."""
        key = Key("", "trial")
        await self.get(key)
        await self.put(Put(key, b"", ABSENT, _TRIAL_S))

    def _shelf(self, shelf: str) -> str:
        return f"{self._layout.prefix}{shelf}"

    def _record(self, key: Key) -> str:
        return f"{self._layout.prefix}{key.shelf}:{key.name}"
