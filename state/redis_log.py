"""Logs in Redis: one process at a time appends to a log, its writer, and any number of others read it.

A writer has a lease. Where that is over, whoever takes the log first is its writer, and the one before can append no
more: each of these steps is one that no other process comes between.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from hashlib import sha1
from typing import Any, NamedTuple, TypeVar, cast

from sluice.state.redis import RedisClient

_SCRIPT = """
local prefix, command, id = ARGV[1], ARGV[2], ARGV[3]
local head, items = prefix .. id .. ':head', prefix .. id .. ':items'

local function expire(head, items, ms)
    local key = redis.call('HGET', head, 'key')
    if key and key ~= '' then redis.call('PEXPIRE', key, ms) end
    redis.call('PEXPIRE', head, ms)
    redis.call('PEXPIRE', items, ms)
end

local function forget_key(head)
    local key = redis.call('HGET', head, 'key')
    if key and key ~= '' then redis.call('DEL', key) end
end

local function append(name, id, ms, ending, batch)
    local head, items = prefix .. id .. ':head', prefix .. id .. ':items'
    local runner, cancelled = unpack(redis.call('HMGET', head, 'runner', 'cancelled'))
    if not runner then return -2 end
    if cancelled then return -1 end
    if runner ~= name then return 0 end
    if batch ~= '' then redis.call('RPUSH', items, batch) end
    if ending ~= '' then redis.call('HSET', head, 'ended', ending) end
    if ending == 'broken' then forget_key(head) end
    expire(head, items, ms)
    return 1
end

-- begin ID ORIGIN WRITER MS KEY: the id of the log that has the key already, or nothing
if command == 'begin' then
    local key = ARGV[7]
    if key ~= '' then
        local earlier = redis.call('GET', key)
        if earlier and redis.call('EXISTS', prefix .. earlier .. ':head') == 1 then return earlier end
        redis.call('SET', key, id)
    end
    redis.call('HSET', head, 'origin', ARGV[4], 'runner', ARGV[5], 'key', key)
    expire(head, items, ARGV[6])
    return ''

-- append WRITER, and of each log ID MS END ITEMS: of each a value of `Append`
elseif command == 'append' then
    local answers = {}
    for i = 4, #ARGV, 4 do
        answers[#answers + 1] = append(id, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    end
    return answers

-- look ID: nothing where the log is not there
elseif command == 'look' then
    local runner, ended, cancelled = unpack(redis.call('HMGET', head, 'runner', 'ended', 'cancelled'))
    if not runner then return {} end
    return {runner, redis.call('EXISTS', prefix .. 'gateway:' .. runner), ended and 1 or 0, cancelled and 1 or 0}

-- take ID WRITER MS: the items, where the log is the writer's from here on: the one before has gone
elseif command == 'take' then
    local runner = redis.call('HGET', head, 'runner')
    if not runner or redis.call('HEXISTS', head, 'ended') == 1 then return false end
    if redis.call('HEXISTS', head, 'cancelled') == 1 then return false end
    if runner ~= ARGV[4] and redis.call('EXISTS', prefix .. 'gateway:' .. runner) == 1 then return false end
    redis.call('HSET', head, 'runner', ARGV[4])
    expire(head, items, ARGV[5])
    return redis.call('LRANGE', items, 0, -1)

-- drop ID WRITER: delete the log, where it is the writer's
elseif command == 'drop' then
    if redis.call('HGET', head, 'runner') ~= ARGV[4] then return 0 end
    forget_key(head)
    return redis.call('DEL', head, items)

-- cancel ID: delete the log, and tell its writer
elseif command == 'cancel' and redis.call('EXISTS', head) == 1 then
    forget_key(head)
    redis.call('DEL', items)
    redis.call('HDEL', head, 'origin')
    redis.call('HSET', head, 'cancelled', 1)
end
"""
_DIGEST = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
MAX_LOGS = 512
"""Most logs that a message to Redis is about."""
T = TypeVar("T")


class Append(IntEnum):
    """The outcome of an append."""

    DONE = 1
    ANOTHERS = 0
    """The log has another writer."""
    CANCELLED = -1
    LOST = -2
    """The log is not there."""


class LogBatch(NamedTuple):
    """Items to append to a log, one value of bytes, b"" for none. `end` is `whole` or `broken` where they are its last,
    and "" elsewhere. The log is forgotten `lifetime_ms` later."""

    log_id: str
    lifetime_ms: int
    end: str
    items: bytes


class LogState(NamedTuple):
    """The state of a log: its writer, whether the writer is alive, and whether the log has ended or was cancelled."""

    writer: str
    is_alive: bool
    has_ended: bool
    was_cancelled: bool


class RedisLogs:
    """The logs under one prefix, for one process. Each method raises one of `FAILURES` where Redis is away."""

    def __init__(self, client: RedisClient, prefix: str, name: str) -> None:
        """`name` is this process's as a writer."""
        self._client = client
        self._prefix = prefix
        self._name = name

    async def load(self) -> None:
        """Load the script, which Redis forgets when it ends, over a new connection."""
        # Those from before an outage are closed at the other end, and each would seem to be another outage.
        await self._client.connection_pool.disconnect(inuse_connections=False)
        await self._client.script_load(_SCRIPT)

    # --- writers ---

    async def renew(self, lease_ms: int) -> None:
        """Renew this process's lease: until it expires nobody takes over its logs."""
        await self._client.set(f"{self._prefix}gateway:{self._name}", 1, px=lease_ms)

    async def leave(self) -> None:
        """End the lease: others take the logs of this process."""
        await self._client.delete(f"{self._prefix}gateway:{self._name}")

    async def begin(self, log_id: str, origin: bytes, lifetime_ms: int, key: str = "") -> str:
        """Begin a log. Return the id of the one that has the key already, where one has it; "" else."""
        name = f"{self._prefix}key:{key}" if key else ""
        found: bytes = await self._run("begin", log_id, origin, self._name, lifetime_ms, name)
        return found.decode()

    async def append(self, batches: Sequence[LogBatch]) -> list[Append]:
        """Append to logs of this process, at most `MAX_LOGS`."""
        parts = [part for each in batches for part in each]
        return [Append(each) for each in await self._run("append", self._name, *parts)]

    async def take(self, log_id: str, lifetime_ms: int) -> list[bytes] | None:
        """Make a log this process's, whose writer is gone, and return its items; None where another one has it."""
        return cast(list[bytes] | None, await self._run("take", log_id, self._name, lifetime_ms))

    async def drop(self, log_id: str) -> None:
        """Delete a log that this process wrote."""
        await self._run("drop", log_id, self._name)

    async def cancel(self, log_id: str) -> None:
        """Delete a log, whoever writes it, and will learn of it."""
        await self._run("cancel", log_id)

    # --- readers ---

    async def origin(self, log_id: str) -> bytes | None:
        """Return the head of a log; None if there is no log."""
        return cast(bytes | None, await self._client.hget(f"{self._prefix}{log_id}:head", "origin"))

    async def read(self, starts: Sequence[tuple[str, int]]) -> list[list[bytes]]:
        """Return the items of logs, of each from a number on."""
        found: list[list[bytes]] = []
        for some in _in_parts(starts):
            pipeline = self._client.pipeline(transaction=False)
            for log_id, start in some:
                pipeline.lrange(f"{self._prefix}{log_id}:items", start, -1)
            found += await pipeline.execute()
        return found

    async def look(self, log_ids: Sequence[str], mark_ms: int) -> list[LogState | None]:
        """Return the states of logs, and mark them as read for a time; None for one that is not there."""
        found = []
        for some in _in_parts(log_ids):
            pipeline = self._client.pipeline(transaction=False)
            for log_id in some:
                pipeline.set(f"{self._prefix}{log_id}:reader", 1, px=mark_ms)
                pipeline.evalsha(_DIGEST, 0, self._prefix, "look", log_id)
            found += (await pipeline.execute())[1::2]
        return [LogState(each[0].decode(), *map(bool, each[1:])) if each else None for each in found]

    async def are_read(self, log_ids: Sequence[str]) -> list[bool]:
        """Return the logs that are marked as read."""
        found = []
        for some in _in_parts(log_ids):
            found += await self._client.mget([f"{self._prefix}{each}:reader" for each in some])
        return [each is not None for each in found]

    async def _run(self, *command: Any) -> Any:
        return await self._client.evalsha(_DIGEST, 0, self._prefix, *command)


def _in_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[first : first + MAX_LOGS] for first in range(0, len(items), MAX_LOGS))
